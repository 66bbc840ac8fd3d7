# SPDX-License-Identifier: Apache-2.0
"""The verdict as the first lines of a screen: the sentence, where and since when, why, what was done, what is next.

Pure: a headline and the terminal's size in, lines out. Texts come from ranks: control characters are shown.
"""

import textwrap
from datetime import datetime, tzinfo
from typing import NamedTuple

from rich.text import Text

from megascale_ops.schema.live import Headline
from megascale_ops.schema.wording import PLACE, duration, printable

# How a level is called and coloured; the word stands there, so colour is never the only sign.
LEVELS = {
    "act": ("ACT", "bold white on red"),
    "watch": ("WATCH", "bold black on yellow"),
    "waiting": ("WAIT", "bold black on cyan"),
    "calm": ("OK", "bold black on green"),
    "over": ("OVER", "bold black on cyan"),
}
# A reason may be a paragraph; two lines show what it is, and `why` has all of it.
MOST_REASON_LINES = 2
_HALF_A_DAY_S = 43_200.0


class Look(NamedTuple):
    """How a screen is to look.

    Attributes:
        width: columns.
        height: rows; 0: as many as it takes.
        heard_s: since the frame came.
        away: why nothing is heard, "" while frames come.
        zone: in which wall clock times are shown; None is the machine's own.
        ascii_only: the terminal shows nothing else.
        last_line: stands below all others, "" for none.
        has_keys: ``i`` and ``r`` show what there is no room for.
    """

    width: int
    height: int = 0
    heard_s: float = 0.0
    away: str = ""
    zone: tzinfo | None = None
    ascii_only: bool = False
    last_line: str = ""
    has_keys: bool = False


def headline(said: Headline, look: Look) -> list[Text]:
    """Return the verdict: the sentence, where and since when, why, what was done, what to type next."""
    word, style = LEVELS.get(said.level, (said.level.upper(), "bold"))
    if look.away:  # what was seen last need not be true any more
        word, style = f"{word} {age(look.heard_s)} AGO", "reverse dim"
    badge = f" {word} "
    wrapped = textwrap.wrap(printable(said.sentence), max(20, look.width - len(badge) - 1)) or [""]
    lines = [Text.assemble((badge, style), " ", (wrapped[0], "bold"))]
    lines += [Text(" " * (len(badge) + 1) + more, style="bold") for more in wrapped[1:]]
    where = [_place(place.rank, place.node, place.gpu, place.local_rank) for place in said.places[:2] if place.node]
    if len(said.culprits) > len(where) and where:
        where.append(f"{len(said.culprits) - len(where):,} more")
    facts = [", ".join(where)] if where else []
    if said.since_wall_s:
        facts.append(f"since {moment(said.since_wall_s, look.zone)}")
    if said.confidence >= 0:
        facts.append(
            f"{said.confidence * 100:.0f} % sure" + (" where, not that it hangs" if said.sure_of == PLACE else "")
        )
    if said.also:
        facts.append(f"{said.also} more open")
    rows = [("", " · ".join(facts)), ("", said.reason), ("done", said.done), ("next", said.command)]
    for label, text in rows:
        if text:
            lead = " " * (len(badge) + 1) + (f"{label}: " if label else "")
            parts = textwrap.wrap(printable(text), max(20, look.width - len(lead)))
            if label != "next" and len(parts) > MOST_REASON_LINES:
                parts = [*parts[: MOST_REASON_LINES - 1], " ".join(parts[MOST_REASON_LINES - 1 :])]
            shown = "bold cyan" if label == "next" else ""
            lines += [
                Text.assemble((lead if not place else " " * len(lead), "dim"), (part, shown))
                for place, part in enumerate(parts)
            ]
    return lines


def age(seconds: float) -> str:
    """Return an age that is shown anew each second: in whole seconds."""
    return duration(round(seconds)) if seconds >= 60 else f"{max(0.0, seconds):.0f} s"


def moment(wall_s: float, zone: tzinfo | None, now_wall_s: float = 0.0) -> str:
    """Return the time of day of a wall clock time; its date when it is half a day or more before now."""
    when = datetime.fromtimestamp(wall_s, tz=zone).astimezone(zone)
    return f"{when:%b %d  }" if now_wall_s - wall_s > _HALF_A_DAY_S else f"{when:%H:%M:%S}"


def _place(rank: int, node: str, gpu: str, local_rank: int) -> str:
    seat = (
        f", GPU {printable(gpu).removeprefix('GPU-')}"
        if gpu
        else f", local rank {local_rank}"
        if local_rank >= 0
        else ""
    )
    return f"rank {rank} on {printable(node)}{seat}"
