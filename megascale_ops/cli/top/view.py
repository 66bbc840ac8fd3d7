# SPDX-License-Identifier: Apache-2.0
"""One screen of ``megascale-ops top``: the verdict first, how far the job is, which ranks are late, what happened.

Pure: a frame of the live feed and the terminal's size in, exactly as many lines out as there are rows (without a
height: as many as it takes). Every line is cut to the width, so nothing scrolls and nothing flickers.

Texts come from ranks and may hold anything: they are never read as markup, and control characters are shown.
"""

from collections.abc import Iterable
from statistics import median

from rich.text import Text

from megascale_ops.cli.terminal.cards import STATE_STYLES
from megascale_ops.cli.terminal.tables import JOB_STYLES
from megascale_ops.cli.top import heat as top_heat
from megascale_ops.cli.top import rank_map, ranks
from megascale_ops.cli.top.verdict import LEVELS, Look, age, headline, moment
from megascale_ops.schema.live import Frame, IncidentLine, Pace, Slot, Times, numbers
from megascale_ops.schema.wording import duration, printable

BARS, ASCII_BARS = "▁▂▃▄▅▆▇█", "_.-=+*#@"
_PLAIN = str.maketrans("·…─│╭╮╰╯", "-~-|++++")
# 3 s: agents and controller speak once a second; two missed ones are no news yet.
QUIET_S = 3.0
# Lines of a whole screen that ranks and incidents get at least and at most.
MOST_SLOW, MOST_INCIDENTS, LEAST_MAP = 8, 6, 2
# Of 20 rows and more the second line of figures is worth one; of fewer the map of ranks is worth more.
ROWS_FOR_MORE = 20
# The usual step fills half a bar or less, a step of four times that a whole one.
LEAST_OVER_MEDIAN, MOST_OVER_MEDIAN = 2, 4
# 16 lines of a map in a pipe, where no window sets a height.
PIPE_MAP = 16
# Before the strip's first bar and each line of the heat map: "step time ".
_LABEL = 10


def screen(frame: Frame, look: Look) -> list[Text]:
    """Return the screen's lines."""
    lines = [_title(frame, look)]
    if frame.headline is not None:
        lines += [*headline(frame.headline, look), Text()]
    if frame.pace is not None and frame.job:
        lines += [*_progress(frame.pace, look), *_strip(frame.times, look)]
    last = _footer(frame, look)
    if frame.pace is not None and frame.job:
        lines += [*_heat(frame.times, look, look.height - len(lines) - len(last)), Text()]
    room = look.height - len(lines) - len(last) if look.height else 10_000
    lines += _body(frame, look, room)
    if look.height:
        lines = lines[: max(0, look.height - len(last))]
        lines += [Text()] * (look.height - len(last) - len(lines))
    return cut([*lines, *last], look)


def incident_rows(incidents: Iterable[IncidentLine], look: Look, now_wall_s: float, chosen: str = "") -> list[Text]:
    """Return one line for each incident; the chosen one is marked."""
    lines = []
    for one in incidents:
        nodes = [printable(node) for node in one.nodes if node not in one.what]
        mark = ">" if one.id == chosen else " "
        took = f"back after {duration(one.recovered_s)}" if one.recovered_s >= 0 else ""
        lost = f"{one.steps_lost:,} steps lost" if one.steps_lost > 0 else ""
        line = Text.assemble(
            (f"{mark} ", "bold cyan"),
            (moment(one.began_wall_s, look.zone, now_wall_s) if one.began_wall_s else " " * 8, "dim"),
            "  ",
            (f"{one.state:<9}", STATE_STYLES.get(one.state, "")),
            f"  {printable(one.id)}  {printable(one.what)}",
            f" on {', '.join(nodes)}" if nodes else "",
            ("".join(f" · {part}" for part in (took, lost) if part), "dim"),
        )
        if one.id == chosen:
            line.stylize("bold")
        lines.append(line)
    return lines


def cut(lines: Iterable[Text], look: Look) -> list[Text]:
    """Cut every line to the width, so that a terminal never wraps one, and spell it so that it can be shown."""
    found = []
    for line in lines:
        shown = line.copy()
        shown.truncate(look.width, overflow="ellipsis")
        if look.ascii_only:
            shown.plain = shown.plain.translate(_PLAIN).encode("ascii", "replace").decode()
        found.append(shown)
    return found


def _title(frame: Frame, look: Look) -> Text:
    pace = frame.pace
    left = Text("megascale-ops top", style="dim")
    if frame.job:
        left = Text.assemble(("job ", "dim"), (printable(frame.job), "bold"))
    if pace is not None and frame.job:
        left.append(" · ").append(pace.state.replace("_", " "), style=JOB_STYLES.get(pace.state, "yellow"))
        left.append(f" · round {pace.round}")
        left.append(f" · {_count(pace.world_size, 'rank')} on {_count(pace.nodes, 'node')}")
    if look.away or look.heard_s > QUIET_S:
        right = Text(f"controller not heard for {age(look.heard_s)}", style="bold red")
    else:
        right = Text(moment(frame.wall_s, look.zone), style="dim")
    space = look.width - left.cell_len - right.cell_len
    if space < 1:  # the name of a job may be long; that nothing is heard must be seen
        left.truncate(max(0, look.width - right.cell_len - 1), overflow="ellipsis")
        space = 1
    return Text.assemble(left, " " * space, right)


def _progress(pace: Pace, look: Look) -> list[Text]:
    """Return how far the job is; on a second line what a narrow terminal has no room for on the first."""
    facts = []
    if pace.step >= 0:
        facts.append(f"step {pace.step:,}")
    if pace.stepped_age_s >= 0 and pace.state not in ("finished", "failed"):
        facts.append(f"last {age(pace.stepped_age_s + look.heard_s)} ago")
    if pace.step_s > 0:
        facts.append(f"{duration(pace.step_s)} a step")
    facts.append(_count(pace.restarts, "restart"))
    # The last five minutes, which the page says in full.
    shares = [(pace.goodput_now, "now"), (pace.goodput_hour, "last hour"), (pace.goodput, "job")]
    told = [f"{share * 100:.0f} % {of}" for share, of in shares if share >= 0]
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


def _strip(times: Times | None, look: Look) -> list[Text]:
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


def _heat(times: Times | None, look: Look, room: int) -> list[Text]:
    """Return who was late when, below the strip and in its columns; of a window's room at most a quarter."""
    slots = _columns(times, look)
    if times is None or len(slots) < 2:
        return []
    most = room // 4 if look.height else top_heat.MOST_LINES
    heat = top_heat.draw(times, slots, _LABEL, most, ascii_only=look.ascii_only)
    if not heat.lines:
        return []
    return [*heat.lines, top_heat.legend(heat.fold, ascii_only=look.ascii_only)]


def _body(frame: Frame, look: Look, room: int) -> list[Text]:
    """Share what room there is: the map needs most, then ranks that stand out, then incidents."""
    columns, layout = frame.columns, frame.layout
    judged = numbers("judged", columns.judged) if columns is not None else ()
    lines: list[Text] = []
    incidents = incident_rows((frame.incidents or ())[:MOST_INCIDENTS], look, frame.wall_s)
    if judged and room >= LEAST_MAP + 1:
        cluster = rank_map.Cluster(
            judged, numbers("node", layout.node if layout is not None else b""), layout.nodes if layout else ()
        )
        # Of what is left after the headings: at most half for ranks and incidents, the rest for the map.
        slow = ranks.standing_out(frame, min(MOST_SLOW, max(0, room // 4)))
        below = min(len(incidents), max(0, room // 6))
        used = 2 + (len(slow) + 2 if slow else 0) + (below + 2 if below else 0)
        drawn = rank_map.draw(
            cluster, look.width, PIPE_MAP if not look.height else max(LEAST_MAP, room - used),
            ascii_only=look.ascii_only,
        )  # fmt: skip
        lines += [*drawn.lines, rank_map.legend(cluster, drawn.fold, ascii_only=look.ascii_only)]
        if slow:
            lines += [Text(), ranks.heading(), *(ranks.row(one) for one in slow)]
    if incidents and room - len(lines) >= 3:
        left = room - len(lines) - 2
        lines += [Text(), Text("incidents", style="dim"), *incidents[: max(1, left)]]
    return lines


def _footer(frame: Frame, look: Look) -> list[Text]:
    lines = []
    if look.away:
        lines.append(Text(f"trying again: {printable(look.away)}", style="bold red"))
    if frame.lag_s > 0.5:
        lines.append(Text(f"the controller lags {duration(frame.lag_s)} behind", style="yellow"))
    if look.keys:
        line = Text(look.keys, style="dim")
        others = [one for one in frame.jobs or () if one.job != frame.job]
        if others:
            line.append(f"   other jobs: {', '.join(_other(one.job, one.level) for one in others[:6])}")
            line.append(f" and {len(others) - 6} more" if len(others) > 6 else "")
        lines.append(line)
    return lines


def _other(job: str, level: str) -> str:
    word = LEVELS.get(level, ("", ""))[0]
    return printable(job) if level in ("calm", "over") else f"{printable(job)} ({word})"


def _count(number: int, noun: str) -> str:
    return f"{number:,} {noun if number == 1 else noun + 's'}"
