# SPDX-License-Identifier: Apache-2.0
"""Examine what a job left: its files in, verdicts out.

A rank that died of something of its own explains that the others hang, so where logs name one, that comes first; else
what stacks and dumps show of the hang, and then what the logs say of those that waited.
"""

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec
from megascale_agents.evidence import flight_recorder

from megascale_ops.errors import UsageError
from megascale_ops.foreign import UNREADABLE
from megascale_ops.postmortem import exits, hangs, pieces
from megascale_ops.schema.fault_classes import FAULTS, Hang
from megascale_ops.schema.health import Verdict

if TYPE_CHECKING:
    from megascale_ops.diagnosis.hangs.stack_groups import Stood


class Examined(msgspec.Struct, frozen=True):
    """What was found: verdicts, the likeliest cause first; what was read of how many ranks; what was not."""

    verdicts: tuple[Verdict, ...]
    dumps: int = 0
    stacks: int = 0
    logs: int = 0
    notes: tuple[str, ...] = ()


def examine(paths: Sequence[Path]) -> Examined:
    """Judge a job by its logs, stacks and flight recorder dumps, in any mixture.

    Args:
        paths: files, and folders that are searched to any depth.

    Raises:
        UsageError: there is no such path, or nothing in it that can be judged.
    """
    gathered = pieces.gather(pieces.find(paths))
    if not gathered.pieces:
        why = f": {gathered.notes[0]}" if gathered.notes else ""
        raise UsageError(f"there is no black box, log, stack or dump in {', '.join(map(str, paths))}{why}")
    left = _Left(gathered)
    found = [one for one in (left.of_hang(), left.of_logs()) if one is not None]
    if not found:
        one = "the stack or dump of one rank" if left.dumps or left.stands else "nothing that tells a rank"
        raise UsageError(f"{', '.join(map(str, paths))} holds {one}: who is elsewhere shows only beside other ranks")
    found.sort(key=lambda verdict: _order(verdict, left))
    return Examined(tuple(found), len(left.dumps), len(left.stands), len(left.logs), tuple(left.notes))


def _order(verdict: Verdict, left: "_Left") -> tuple[bool, bool, float]:
    """An own death of a rank comes first, then a hang in which ranks are named; what names no rank comes last.

    That all ranks were ended, by Ctrl-C or a launcher, says nothing of why: it comes last, too.
    """
    is_hang = FAULTS[verdict.fault].hang is not Hang.NO or verdict.fault == "unknown"
    is_end = verdict.fault == "killed" and 1 < len(verdict.culprits) == len(left.logs)
    return (not verdict.culprits or is_end, is_hang, -verdict.confidence)


class _Left:
    """What files hold, by rank."""

    def __init__(self, gathered: pieces.Gathered) -> None:
        self.notes = list(gathered.notes)
        self.dumps: dict[int, flight_recorder.Summary] = {}
        self.stands: dict[int, Stood] = {}
        self.logs: dict[int, str] = {}
        self.launchers = ""
        self.names: dict[int, str] | None = None
        kept = list(gathered.pieces)
        if all(piece.rank < 0 for piece in kept):
            self.names = {number: piece.path.name for number, piece in enumerate(kept)}
            kept = [piece._replace(rank=number) for number, piece in enumerate(kept)]
            if len(kept) > 1:
                self.notes.append("nothing tells the ranks of these files, so they are named by their files")
        texts: dict[int, list[str]] = {}
        for piece in kept:
            if not self._take_dump(piece):
                texts.setdefault(piece.rank, []).append(piece.text)
        for rank, told in texts.items():
            self._take_text(rank, "\n".join(told))

    def _take_dump(self, piece: pieces.Piece) -> bool:
        """Take in a flight recorder's dump, and say whether it is one."""
        begin = piece.data.lstrip()[:1]
        if begin not in (b"\x80", b"{"):
            return False
        try:
            summary = flight_recorder.parse(piece.data)
        except (ValueError, *UNREADABLE) as error:
            if begin == b"\x80":
                self.notes.append(f"{piece.path} can't be read: {error}")
            return begin == b"\x80"
        if piece.rank < 0:
            self.notes.append(f"{piece.path}: nothing tells whose dump it is")
        else:
            self.dumps[piece.rank] = summary
        return True

    def _take_text(self, rank: int, text: str) -> None:
        plain = pieces.without_prefix(text)
        stood = hangs.stand_of(plain)
        lost = hangs.unread(plain) if stood is None else None
        if rank < 0:
            self.launchers += text
        elif lost is not None:
            self.stands[rank] = lost
        else:
            if stood is not None:
                self.stands[rank] = stood
            if stood is None or _is_log_too(plain):
                self.logs[rank] = text

    def of_hang(self) -> Verdict | None:
        """Return the verdict by dumps and stacks, None where there is too little."""
        if len({*self.dumps, *self.stands}) < 2:
            return None
        return hangs.judge_hang(self.dumps, self.stands, self.names)

    def of_logs(self) -> Verdict | None:
        """Return the verdict by logs, None where there is none."""
        if not self.logs:
            return None
        verdict = exits.judge_logs(self.logs, self.launchers)
        if self.names is None:
            return verdict
        who = ", ".join(self.names[rank] for rank in verdict.culprits if rank in self.names)
        reason = f"{who}: {verdict.reason}" if who and len(self.names) > 1 else verdict.reason
        culprits = verdict.culprits if len(self.names) == 1 else ()
        return msgspec.structs.replace(verdict, culprits=culprits, reason=reason)


# Words that a stack alone never holds.
_OF_AN_END = (
    "Watchdog caught",
    "Traceback (most recent call last)",
    "Fatal Python error",
    "terminate called",
    "Error: ",
)


def _is_log_too(text: str) -> bool:
    """Return whether a text with a stack in it also tells of an end."""
    return any(words in text for words in _OF_AN_END)
