# SPDX-License-Identifier: Apache-2.0
"""Last lines of a rank that no table knows, where all others only lost a peer: by elimination they are its end.

A line that raises, whose traceback was left out, and a complaint of any program: a shell that finds no command, a
loader of libraries, a parser of arguments, a runtime of containers, a check in C++. Nothing of that is sure, for a rank
may complain and go on, and be stopped by its launcher when another one ends: so it counts only behind the last step of
a rank that tells of no lost peer, beside others that do.

Pure: a text in, a line out.
"""

import re
from collections import Counter
from collections.abc import Mapping

from megascale_ops.diagnosis.exits.last_words import RAISED_ALIKE, goes_on, is_ignored, match, weight_of
from megascale_ops.diagnosis.exits.prefixes import TRACEBACK_BEGINS, strip_prefix
from megascale_ops.diagnosis.exits.word_rows import HARMLESS

# 8 lines: a usage, a short stack of another language.
_LAST = 8
_OF_A_STEP = 50  # more than any line weighs that is not about a step
_COMPLAINS = re.compile(
    r"\b(?:error|fatal|panic(?:ked)?|cannot|can't|could not|couldn't|unable to|failed|failure|not found|no such|denied"
    r"|exceeded|unrecogni[sz]ed|invalid|aborted|core dumped|unhandled|uncaught)\b|\b(?:ERROR|FATAL|SIG[A-Z]{3,5})\b"
    r"|\w(?:Error|Exception)\b|\bNo module named\b",
    re.IGNORECASE,
)
# 2 of 3 ranks are a crowd; 60 characters of what they say: names and numbers come later, or are left out.
_CROWD, _FEWEST_OF_A_CROWD, _SHAPE = 0.66, 3, 60
_VARIES = re.compile(r"0x[0-9a-f]+|\d+|'[^']{1,80}'|\"[^\"]{1,80}\"")
# A level below an error's: what it is about may sound as bad.
_MILD = re.compile(
    r"\b(?:WARN(?:ING)?|INFO|DEBUG|NOTICE|[Ww]arning|UserWarning)\b|^\[?[WI]\d{3,4}[ \]]|\b0 errors\b|\bno error"
)


def raising_line(text: str) -> str:
    """Return the last line of a text where it raises and its traceback was left out, "" else."""
    lines = _lines(text)
    has_own = len(lines) > 1 and lines[-2][:1].isspace()  # a traceback, which was read and is ignored
    return lines[-1] if lines and not has_own and RAISED_ALIKE.match(lines[-1]) else ""


def complaint(text: str) -> str:
    """Return the first complaint behind the last step of a text, "" without one."""
    lines = _without_ignored(_lines(text))[-_LAST:]
    last_step = max((at for at, line in enumerate(lines) if weight_of(line) > _OF_A_STEP), default=-1)
    behind = lines[last_step + 1 :]
    said = (
        line.strip()
        for at, line in enumerate(behind)
        if _COMPLAINS.search(line) and not _MILD.search(line[:200]) and not any(map(goes_on, behind[at : at + 2]))
    )
    return next((line for line in said if (row := match(line)) is None or row.role != HARMLESS), "")[:200]


def odd_ones(complaints: Mapping[int, str]) -> dict[int, str]:
    """Return the complaints of the few that end otherwise than the rest, {} where no such crowd is.

    The words of a lost peer are alike on all that lost it, but for numbers and names; so two thirds of the ranks at
    least must say the same, whatever it is.

    Args:
        complaints: by rank, "" of one without.
    """
    shapes = {rank: _VARIES.sub("#", said)[:_SHAPE] for rank, said in complaints.items() if said}
    if len(complaints) < _FEWEST_OF_A_CROWD or not shapes:
        return {}
    shape, count = Counter(shapes.values()).most_common(1)[0]
    odd = {rank: complaints[rank] for rank, own in shapes.items() if own != shape}
    return odd if odd and count >= _CROWD * len(complaints) else {}


def _without_ignored(lines: list[str]) -> list[str]:
    """Return lines without the tracebacks that Python only reported."""
    kept: list[str] = []
    is_inside = False
    for line in lines:
        if is_ignored(line):
            is_inside = True
        elif is_inside:
            is_inside = line.startswith((" ", TRACEBACK_BEGINS, "future: "))  # asyncio's own line of the task
        else:
            kept.append(line)
    return kept


def _lines(text: str) -> list[str]:
    return [bare for line in text.splitlines() if (bare := strip_prefix(line).rstrip())]
