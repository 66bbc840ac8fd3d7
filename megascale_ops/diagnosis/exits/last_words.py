# SPDX-License-Identifier: Apache-2.0
"""Which of a rank's words are evidence of its end: matched with the one table, and not too old for it.

Words age. What a script has caught, what a library prints and goes on, what it prints while it tries again: all of it
reads as it would at an end. So a line counts no more when it is marked as caught itself, when the next line says that
the program goes on, when a hundred lines or two lines of progress came after it, or when the rank has made two steps
since. What a logger calls a warning ended nothing.

Pure: lines, exits and reports in, rows of the table out.
"""

import re
from collections.abc import Callable, Iterable, Iterator
from functools import cache, lru_cache
from typing import NamedTuple

from megascale_ops.diagnosis.exits.prefixes import LOGURUS, TRACEBACK_BEGINS, Prefixes, strip_prefix, unfolded
from megascale_ops.diagnosis.exits.quick_look import may_speak
from megascale_ops.diagnosis.exits.word_rows import CAUSE, HARMLESS, PEER_LOST, Row
from megascale_ops.diagnosis.exits.word_table import BY_NAME, PATTERNS
from megascale_ops.schema.messages import RankExit
from megascale_ops.schema.progress import LastWords, RankReport

# 100 lines: what a tracker prints when a run ends has some 50; stacks and NCCL's own notes are not counted.
STALE_LINES = 100
# 2 steps: the one during which the words were written may still have ended.
STALE_STEPS = 2
_PROGRESS_LINES = STALE_LINES // STALE_STEPS + 1  # a line about a step weighs as many others
# The line itself shows that the program goes on. What torch's watchdog and UCX "caught" has an end, and torch's loader
# and its pools raise again what they "caught in" a worker.
_CAUGHT = re.compile(
    r"\b(?:(?<!Watchdog )caught"
    r"(?! collective| signal| [^\n]{0,60}\(signal \d| \w{1,80} in (?:DataLoader|pin memory|replica|process \d|rank \d))"
    r"|retry(?:ing)?\b(?! count)|ignor(?:ed|ing)|(?:will try|trying) again|falling back"
    r"|(?<!syncing pod, )skipp(?:ed|ing)"
    r"|(?:attempt|retry) \d+ ?(?:/|of) ?\d+|recovered)\b",
    re.IGNORECASE,
)
# It ends all the same: no try is left.
_GIVES_UP = re.compile(
    r"\b(?:giv(?:e|es|ing) up|gave up|exhausted|no (?:more|further) (?:tries|retries|attempts)"
    r"|(?:attempt|retry|try) (\d{1,6}) ?(?:/|of) ?\1)\b|\btoo many\b",
    re.IGNORECASE,
)
# A logger's own level of a line into which it has folded a traceback; shippers call all of stdout "info".
_A_WARNING = re.compile(r"[\"']?\b(?:level|levelname|severity|lvl)[\"']? ?[:=] ?[\"']?warn(?:ing)?\b", re.IGNORECASE)
# A full GPU that ends a rank is raised, and no logger's warning of it is its end.
_RAISED_ELSE = ("cuda_out_of_memory", "raised_out_of_memory")
_IS_MILD = re.compile(r"(?:\S{1,40} ){0,3}?\[?(?:WARN(?:ING)?|INFO|DEBUG)\b|W tensorflow/")
# Frames of C++ and NCCL's notes: neither has the reason.
_MERE_NOTE = re.compile(r"^frame #|^\S{0,200} ?NCCL INFO |^\S{0,120}:\d+:\d+ \[\d+\] NCCL INFO ")
# Python reports it and goes on: of a destructor, and of a coroutine that no task waits for.
_IGNORED = re.compile(r"^Exception ignored in|\b(?:Task|Future) exception was never retrieved")
# Frames of C++ and Python, NCCL's notes, what a tracker prints of a run that ends: they make nothing before them older.
_NO_LINE = re.compile(r"^(?:\s|#\d|frame #|wandb: |\S{0,200} ?NCCL INFO|\[[IWE]\d{3,4} |$)|^\S{0,60}:\d+:\d+ \[\d+\] ")
_PROGRESS = re.compile(
    r"\b(?:step|steps|iter|iters|iteration|epoch|loss|global_step)\b\W{0,3}.{0,12}?\d|it/s\b|s/it\b", re.IGNORECASE
)


# A traceback whose beginning was cut away or is mixed with another rank's: a frame, or the line that raises. Programs
# print stacks without an exception too, so the line that ends it must be named like one.
_HEADLESS = re.compile(r' +File ".{1,300}", line \d{1,7}(?:, in |$)| {4}raise \w')
RAISED_ALIKE = re.compile(
    r"(?:[A-Za-z_]\w{0,60}\.){0,12}(?=[A-Z])"
    r"\w{0,60}(?:Error|Exception|Failure|Fault|Interrupt|Exit|Timeout|Expired)\w{0,30}(?:: |:?$)"
)
# Ray's error of another process, whose own traceback, or only what it raised, follows.
CARRIED = re.compile(r"(?:[\w.]{1,80}\.)?RayTaskError\((?P<type>\w{1,80})\): ray::")


class Heard(NamedTuple):
    """One line that is evidence of the end of a rank."""

    row: Row
    line: str  # "" where only the name of the row is known


class _Traceback(NamedTuple):
    """What the lines so far tell of the traceback that they may be in."""

    is_open: bool = False
    is_ignored: bool = False  # Python has reported it as ignored
    is_headless: bool = False


class LineReader:
    """Judges a log line by line; knows where a traceback ends."""

    def __init__(self) -> None:
        self._traceback = _Traceback()
        self._prefixes = Prefixes()

    def read(self, line: str) -> Row | None:
        """Return the row that a line matches; None for an ordinary line, and for what was caught."""
        if "\\n" not in line:
            return self._read(line)
        if is_a_warning(line):
            return None
        rows = [row for piece in unfolded(line) if (row := self._read(piece)) is not None]
        return rows[-1] if rows else None

    def _read(self, line: str) -> Row | None:
        bare = self._prefixes.bare(line)
        if _IGNORED.search(bare):
            self._traceback = self._traceback._replace(is_ignored=True)
            return None
        if bare.startswith(TRACEBACK_BEGINS):
            self._traceback = self._traceback._replace(is_open=True, is_headless=False)
            return None
        if not self._traceback.is_open and bare[:2] == "  " and _HEADLESS.match(bare) is not None:
            self._traceback = self._traceback._replace(is_open=True, is_headless=True)
            return None
        ends = self._traceback.is_open and bool(bare) and not bare[0].isspace() and not bare.startswith(LOGURUS)
        if ends:
            ended, self._traceback = self._traceback, _Traceback()
            if ended.is_ignored:
                return None
            if CARRIED.match(bare):
                self._traceback = ended
                return None
            ends = not ended.is_headless or RAISED_ALIKE.match(bare) is not None
        row = match(bare, ends_traceback=ends)
        was_survived = row is not None and (
            row.role == HARMLESS or _CAUGHT.search(bare) or (row.name in _RAISED_ELSE and _IS_MILD.match(bare))
        )
        return None if was_survived else row


def is_a_warning(line: str) -> bool:
    """Return whether a logger has written a line of fields as a warning: what it carries ended nothing."""
    return _A_WARNING.search(line) is not None


def is_ignored(line: str) -> bool:
    """Return whether Python says by a line that the traceback below it ended nothing."""
    return _IGNORED.search(line) is not None


def goes_on(line: str) -> bool:
    """Return whether the line behind an error says that the program goes on: it skips, tries again or falls back."""
    bare = strip_prefix(line)
    return _CAUGHT.search(bare) is not None and _GIVES_UP.search(bare) is None


def match(line: str, *, ends_traceback: bool = False) -> Row | None:
    """Return the first row that ``line`` (without prefix) matches.

    Args:
        line: One line, without its end.
        ends_traceback: Whether it is the line that ends a Python traceback.
    """
    if not ends_traceback and not may_speak(line):
        return None
    for row, search in _searches():
        if row.in_traceback and not ends_traceback:
            continue
        if search(line) is not None:
            return row
    return None


@cache
def _searches() -> tuple[tuple[Row, Callable[[str], re.Match[str] | None]], ...]:
    """Return all rows, compiled when the first line asks: 13 ms of CPU each for a runner, a controller and an agent."""
    return tuple((row, re.compile(row.regex).search) for row in PATTERNS)


@lru_cache(maxsize=256)  # where a script fails on all of 100,000 ranks, they say the same
def row_of_error(type_: str, message: str) -> Row:
    """Return the row that an exception matches: of all its lines the one that stands first in the table."""
    lines = f"{type_}: {message}".splitlines()
    for row, search in _searches():
        if any(search(line) is not None for line in lines):
            return row
    return BY_NAME["exception"]


def end_of(text: str, most_characters: int) -> str:
    """Return the end of an output without frames of C++ stacks and NCCL's notes: thirty fill 4,000 characters."""
    lines = [line for line in text.splitlines(keepends=True) if _MERE_NOTE.match(strip_prefix(line)) is None]
    return "".join(lines)[-most_characters:]


def weight_of(line: str) -> int:
    """Return by how many ordinary lines a line makes older what was said before it."""
    bare = strip_prefix(line)
    if _NO_LINE.search(bare) is not None:
        return 0
    return _PROGRESS_LINES if _PROGRESS.search(bare) is not None else 1


def heard_in(text: str) -> list[Heard]:
    """Return the lines of a text that are evidence of an end, oldest first."""
    reader = LineReader()
    found: list[tuple[Heard, int]] = []  # with the weight of the lines before it
    weight = 0
    is_next = False  # to a line that is evidence
    for line in _pieces(text):
        row = reader.read(line)
        if row is not None:
            found.append((Heard(row, strip_prefix(line).strip()), weight))
            is_next = row.role == CAUSE
            continue
        if is_next and goes_on(line):
            found.pop()
        is_next = is_next and not line.strip()
        weight += weight_of(line)
    return [one for one, before in found if weight - before <= STALE_LINES]


def _pieces(text: str) -> Iterator[str]:
    """Yield the lines of a text, those that a logger has folded into one apart; its warnings stay folded."""
    for folded in text.splitlines():
        if "\\n" in folded and not is_a_warning(folded):
            yield from unfolded(folded)
        else:
            yield folded


def heard(exit_: RankExit, report: RankReport | None) -> list[Heard]:
    """Return the words that are evidence of the end of a rank, oldest first.

    What its runner read at its end counts first; what its agent has reported is older, and may be too old.
    """
    told = report.last_words if report is not None else ()
    survived = [word.line for word in told if word.line and is_old(word, exit_)]
    recent = [one for one in heard_in(exit_.stderr_tail) if not _is_among(one.line, survived)]
    names = {one.row.name for one in recent}
    before = [
        Heard(BY_NAME[word.pattern], word.line)
        for word in told
        if word.pattern in BY_NAME and word.pattern not in names and not is_old(word, exit_)
        # Of a line that the runner has read as well, the lines after it are known.
        if not word.line or word.line not in exit_.stderr_tail
    ]
    names |= {one.row.name for one in before}
    named = [Heard(BY_NAME[name], "") for name in exit_.last_words if name in BY_NAME and name not in names]
    return [*named, *before, *recent]


def is_old(word: LastWords, exit_: RankExit) -> bool:
    """Return whether a rank has lived on for too long since it wrote a line."""
    steps = exit_.steps_seen - word.steps_seen if word.steps_seen >= 0 else 0
    return word.stale or steps >= STALE_STEPS


def fault_of(row: Row) -> str:
    """Return the class of a row; "peer" where it is another rank's."""
    return "peer" if row.fault == PEER_LOST else row.fault


def _is_among(line: str, lines: Iterable[str]) -> bool:
    """Return whether a line is one of those reported, cut and with a prefix as they may be."""
    return any(line.startswith(strip_prefix(one).strip()) for one in lines)
