# SPDX-License-Identifier: Apache-2.0
"""How far a job is, how long its steps were of late, and which ranks were slow when: the lines below the verdict.

Pure: parts of a frame and the terminal's size in, lines out.
"""

from statistics import median

from rich.text import Text

from megascale_ops.cli.top import heat
from megascale_ops.cli.top.verdict import Look, age
from megascale_ops.schema.events import OVER
from megascale_ops.schema.live import Pace, Slot, Times
from megascale_ops.schema.wording import duration, percent

BARS, ASCII_BARS = "▁▂▃▄▅▆▇█", "_.-=+*#@"
# With 20 rows and more the second line of figures has one; with fewer the map of ranks takes it.
ROWS_FOR_MORE = 20
# The usual step fills half a bar or less, a step of four times that a whole one.
LEAST_OVER_MEDIAN, MOST_OVER_MEDIAN = 2, 4
# Before the strip's first bar and each line of the heat map: "step time ".
_LABEL = 10


def progress(pace: Pace, look: Look) -> list[Text]:
    """Return how far the job is; on a second line what a narrow terminal has no room for on the first."""
    facts = []
    if pace.step >= 0:
        facts.append(f"step {pace.step:,}")
    if pace.stepped_age_s >= 0 and pace.state not in OVER:
        facts.append(f"last {age(pace.stepped_age_s + look.heard_s)} ago")
    if pace.step_s > 0:
        facts.append(f"{duration(pace.step_s)} a step")
    facts.append(count(pace.restarts, "restart"))
    # The last five minutes, which the page shows in full.
    shares = [(pace.goodput_now, "now"), (pace.goodput_hour, "last hour"), (pace.goodput, "job")]
    told = [f"{percent(share)} {of}" for share, of in shares if share >= 0]
    if told:
        facts.append(f"goodput {', '.join(told)}")
    if pace.alive_s >= 0:
        facts.append(f"{age(pace.alive_s)} old")
    most_lines = 2 if not look.height or look.height >= ROWS_FOR_MORE else 1
    lines = [""]
    for fact in facts:
        longer = f"{lines[-1]} · {fact}" if lines[-1] else fact
        if lines[-1] and len(longer) > look.width and len(lines) < most_lines:
            lines.append(fact)
        else:
            lines[-1] = longer
    return [Text(line) for line in lines]


def _columns(times: Times | None, look: Look) -> list[Slot]:
    """Return the stretches of time that there is room for, the newest at the right."""
    slots = [slot for slot in times.slots if slot.median_s > 0] if times is not None else []
    return slots[-max(1, look.width - 34) :]


def strip(times: Times | None, look: Look) -> list[Text]:
    """Return step times as bars: the median rank's of each stretch of time, the newest at the right."""
    slots = _columns(times, look)
    if len(slots) < 2:
        return []
    bars = ASCII_BARS if look.ascii_only else BARS
    least, most = min(slot.median_s for slot in slots), max(slot.median_s for slot in slots)
    text = Text().append(f"{'step time ':>{_LABEL}}", style="dim")
    # Bars begin at 0, since a ripple of 2 % is no mountain range; and one long pause must not flatten all others.
    usual = median(slot.median_s for slot in slots)
    top = min(max(most, LEAST_OVER_MEDIAN * usual), MOST_OVER_MEDIAN * usual)
    for slot in slots:
        text.append(bars[min(len(bars) - 1, int(slot.median_s / top * len(bars)))], style="cyan")
    return [text.append(f" {duration(least)} to {duration(most)}", style="dim")]


def heat_map(times: Times | None, look: Look, most: int) -> list[Text]:
    """Return which ranks were late when, below the strip and in its columns, on at most so many lines of a window."""
    slots = _columns(times, look)
    if times is None or len(slots) < 2:
        return []
    most = most if look.height else heat.MOST_LINES
    drawn = heat.draw(times, slots, _LABEL, most, ascii_only=look.ascii_only)
    if not drawn.lines:
        return []
    return [*drawn.lines, heat.legend(drawn.fold, ascii_only=look.ascii_only)]


def count(number: int, noun: str) -> str:
    """Return a number of things in words."""
    return f"{number:,} {noun if number == 1 else noun + 's'}"
