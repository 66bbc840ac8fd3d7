# SPDX-License-Identifier: Apache-2.0
"""The exception of a rank that had no black box yet, read from the end of what it printed.

A script that fails before it imports torch (a module that is missing, an argument that is wrong, a syntax error) has
written nothing down, and Python's traceback is all there is. It counts where Python printed it last and ended with 1,
the status of an uncaught exception: what a script prints and survives has something after it, or another status.

Pure: how a rank ended in, the same with the error, where there is one to read, out.
"""

import re
from itertools import takewhile

import msgspec

from megascale_ops.diagnosis.exits.last_words import (
    CARRIED,
    RAISED_ALIKE,
    STALE_LINES,
    goes_on,
    is_a_warning,
    is_ignored,
    weight_of,
)
from megascale_ops.diagnosis.exits.prefixes import TRACEBACK_BEGINS, without_prefixes
from megascale_ops.diagnosis.exits.translated_errors import is_of_a_shell
from megascale_ops.schema.messages import RankExit
from megascale_ops.schema.progress import RankError

_FRAME = re.compile(r' {2,4}File "(?P<file>.+)", line (?P<line>\d+)(?:, in (?P<function>.+))?')
_RAISED = re.compile(r"(?P<type>[A-Za-z_][\w.]*)(?:: (?P<message>.*))?")
_LIBRARY = re.compile(r"/(?:site|dist)-packages/|/lib/python3\.\d+/|^<frozen ")
# Raised by launchers over what another process did: of that, the exit of the launcher shows nothing new.
_OF_ANOTHER = re.compile(r"(?:CalledProcessError|ChildFailedError|Process(?:Raised|Exited)Exception)$")
_CHAINED = re.compile(
    r"\n[^\n]{0,200}(?:The above exception was the direct cause of|During handling of the above exception, another)"
    r"[^\n]*"
)
_UNCAUGHT = 1  # Python's exit status after an uncaught exception
# 5 more lines of a message after its first; what stands further down was printed by a program that went on.
_MOST_AFTER = 5
# Of an observer of Lightning's, a shell, a launcher: they stand right behind what a rank has raised.
_OF_ANOTHERS = re.compile(
    r"\[rank: \d+\] Child process|\S{1,200}: line \d{1,6}: +\d+ [A-Z]|(?:srun|slurmstepd|mpirun|prterun|mpiexec)\b"
    r"|[WE]\d{4} [\d:.]{8,15} |\S{1,80} exited with code \d"
)
# 2 lines between Python's report and the traceback: asyncio prints the task.
_MOST_ABOVE = 2
_MOST_CHARACTERS = 440  # as much as a black box holds of a message


def with_error(exit_: RankExit) -> RankExit:
    """Return how a rank ended with the exception that ended it, where only its last output has one."""
    has_box = bool(exit_.phase)
    if has_box or exit_.error is not None or exit_.by_us or exit_.code != _UNCAUGHT:
        return exit_
    error = read(exit_.stderr_tail)
    return exit_ if error is None else msgspec.structs.replace(exit_, error=error)


def read(tail: str) -> RankError | None:
    """Return the exception with whose traceback ``tail`` ends, or None."""
    lines = without_prefixes(line for line in tail.rstrip().splitlines() if "\\n" not in line or not is_a_warning(line))
    at, after = len(lines), 0
    while at > 1 and after <= _MOST_AFTER:
        at -= 1
        after += not lines[at].startswith("\t")  # a list in a message, as load_state_dict writes it
        raised = _RAISED.fullmatch(lines[at])
        frames = _frames_above(lines, at) if raised is not None else []
        was_raised = bool(frames) or (lines[at - 1].startswith("    raise ") and bool(RAISED_ALIKE.match(lines[at])))
        carried = CARRIED.match(lines[at - 1])
        was_raised |= raised is not None and carried is not None and raised["type"].endswith(carried["type"])
        if raised is not None and was_raised and not _OF_ANOTHER.search(raised["type"]):
            went_on = at + 1 < len(lines) and goes_on(lines[at + 1])
            if went_on or _is_reported_only(lines, at) or sum(map(weight_of, lines[at + 1 :])) > STALE_LINES:
                return None
            behind = list(takewhile(_is_of_the_message, lines[at + 1 :]))
            message = "\n".join([raised["message"] or "", *behind])
            own = [frame for frame in frames if not _LIBRARY.search(frame["file"])]
            where = _where((own or frames)[-1]) if frames else ""
            return RankError(raised["type"], message[:_MOST_CHARACTERS].strip(), where, -1)
    return None


def before_it(tail: str) -> list[RankError]:
    """Return the exceptions from which the last one of ``tail`` was raised, the first of the chain first."""
    blocks = _CHAINED.split(tail)
    begins = len(blocks) - 1  # where the chain begins: a block with two tracebacks ends an older one
    while begins > 0 and blocks[begins].count(TRACEBACK_BEGINS) == 1:
        begins -= 1
    return [error for block in blocks[begins:-1] if (error := read(block)) is not None]


def _frames_above(lines: list[str], at: int) -> list[re.Match[str]]:
    """Return the frames of the indented block that ends just above a line, outermost first."""
    found: list[re.Match[str]] = []
    while at > 0 and (lines[at - 1].startswith("  ") or (at > 1 and not lines[at - 1] and lines[at - 2][:2] == "  ")):
        at -= 1
        if (frame := _FRAME.fullmatch(lines[at])) is not None:
            found.append(frame)
    return found[::-1]


def _is_reported_only(lines: list[str], at: int) -> bool:
    """Return whether the traceback that ends at a line is one that Python reported and went on behind."""
    while at > 0 and lines[at - 1].startswith("  "):
        at -= 1
    above = (
        lines[max(0, at - 1 - _MOST_ABOVE) : at - 1] if at > 0 and lines[at - 1].startswith(TRACEBACK_BEGINS) else []
    )
    return any(map(is_ignored, above))


def _is_of_the_message(line: str) -> bool:
    """Return whether a line may belong to what was raised above it, and is none of a shell's or a launcher's own."""
    return _OF_ANOTHERS.match(line) is None and not is_of_a_shell(line)


def _where(frame: re.Match[str]) -> str:
    return f"{frame['file']}:{frame['line']} {frame['function'] or ''}".strip()
