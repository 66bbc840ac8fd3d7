# SPDX-License-Identifier: Apache-2.0
"""Examine what a job left: its files in, verdicts out.

A rank that died of something of its own explains that the others hang, so where logs name one, that comes first; else
what stacks and dumps show of the hang, and then what the logs say of those that waited.
"""

import re
from collections.abc import Mapping, Sequence
from pathlib import Path

import msgspec
from megascale_agents.evidence import flight_recorder

from megascale_ops.diagnosis.exits.last_words import heard_in
from megascale_ops.diagnosis.hangs.stack_groups import Stood
from megascale_ops.errors import UsageError
from megascale_ops.foreign import UNREADABLE
from megascale_ops.postmortem import exits, hangs, kernel, launched, pieces
from megascale_ops.postmortem.piece import Piece
from megascale_ops.schema.fault_classes import FAULTS, Hang
from megascale_ops.schema.health import Verdict

# Names of the kernel's log: a number in them is a node's.
_OF_KERNEL = re.compile(r"dmesg|kern|syslog|messages|journal", re.IGNORECASE)
# 64 KiB: a log's kind is told by its end.
_LOOKED_AT = 1 << 16


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
    return Examined(tuple(found), len(left.dumps), len(left.stands), len(left.logs) + left.unranked, tuple(left.notes))


def _order(verdict: Verdict, left: "_Left") -> tuple[bool, bool, float]:
    """An own death of a rank comes first, then a hang in which ranks are named; what names no rank comes last.

    That all ranks were ended, by Ctrl-C or a launcher, says nothing of why: it comes last, too.
    """
    is_hang = FAULTS[verdict.fault].hang is not Hang.NO or verdict.fault == "unknown"
    is_end = verdict.fault == "killed" and 1 < len(verdict.culprits) == len(left.logs)
    return (not verdict.culprits or is_end, is_hang, -verdict.confidence)


def _stem(path: Path) -> str:
    return path.name.partition(".")[0]


def _told_when(piece: Piece) -> tuple[int, bool]:
    """Order what one rank left: logs that were put by first, and what tells of an end behind what goes on.

    Its output and its errors are two files of one time, and words age by what stands behind them.
    """
    return -pieces.put_by(piece.path), bool(heard_in(piece.text[-_LOOKED_AT:]))


class _Left:
    """What files hold, by rank."""

    def __init__(self, gathered: pieces.Gathered) -> None:
        self.notes = list(gathered.notes)
        self.dumps: dict[int, flight_recorder.Summary] = {}
        self.stands: dict[int, Stood] = {}
        self.logs: dict[int, str] = {}
        self.launchers = ""
        self.faults: list[str] = []  # of the kernel's log
        self.of_hosts: dict[str, list[str]] = {}  # ranks' processes that it has seen killed, by the name of its file
        self.kernels = ""
        self.names: dict[int, str] | None = None
        kept = [piece for piece in gathered.pieces if not self._take_kernels(piece)]
        self.begins = [gathered.begins.get(path, "") for path in {piece.path for piece in kept}]
        if len(kept) > 1 and all(piece.rank < 0 and not launched.told_in(piece.text).first for piece in kept):
            self.names = {number: piece.path.name for number, piece in enumerate(kept)}
            kept = [piece._replace(rank=number) for number, piece in enumerate(kept)]
            self.notes.append("nothing tells the ranks of these files, so they are named by their files")
        texts: dict[int, list[Piece]] = {}
        for piece in kept:
            if not self._take_dump(piece):
                texts.setdefault(piece.rank, []).append(piece)
        self.is_merged = len({piece.path for told in texts.values() for piece in told}) == 1
        for rank, told in texts.items():
            self._take_text(rank, "\n".join(piece.text for piece in sorted(told, key=_told_when)))
        self._take_hosts(texts)
        self.unranked = len(texts.get(-1, ()))
        if len(kept) > 1:
            self._take_owned(texts.get(-1, ()))

    def _take_owned(self, told: Sequence[Piece]) -> None:
        """Take a file for the log of the rank that a launcher in it has seen fail first, where it is one of several."""
        for piece in told:
            first = launched.told_in(piece.text).first
            if len(first) == 1 and first[0] not in self.logs:
                self.logs[first[0]] = piece.text
                self.unranked -= 1

    def _take_kernels(self, piece: Piece) -> bool:
        """Take in the kernel's log, and say whether it is one."""
        is_named = _OF_KERNEL.search(piece.path.name) is not None
        end = piece.text[-_LOOKED_AT:]
        if not (is_named or piece.rank < 0) or not (kernel.is_kernels(end) or (is_named and kernel.is_journal(end))):
            return False
        found = kernel.faults_in(piece.text)
        self.faults += found
        self.of_hosts.setdefault(_stem(piece.path), []).extend(kernel.of_a_job(found))
        self.kernels += piece.text
        return True

    def _take_hosts(self, texts: Mapping[int, Sequence[Piece]]) -> None:
        """Give what the kernel of a host has killed to the one rank whose log has the same name as the kernel's."""
        stems: dict[str, set[int]] = {}
        for rank, told in texts.items():
            for piece in told:
                stems.setdefault(_stem(piece.path), set()).add(rank)
        for stem, lines in self.of_hosts.items():
            ranks = stems.get(stem, set())
            if lines and len(ranks) == 1 and (rank := min(ranks)) in self.logs:
                self.logs[rank] = "\n".join([self.logs[rank], *lines])
                self.faults = [line for line in self.faults if line not in lines]

    def _take_dump(self, piece: Piece) -> bool:
        """Take in a flight recorder's dump, and say whether it is one."""
        begin = piece.data.lstrip()[:1]
        is_json = begin == b"{" and any(key in piece.data for key in _OF_A_DUMP)
        if begin != b"\x80" and not is_json:
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
        stood = hangs.stand_of(text)
        lost = hangs.unread(text) if stood is None else None
        if rank < 0:
            self.launchers += f"{text}\n"
        elif lost is not None:
            self.stands[rank] = lost
        else:
            if stood is not None:
                self.stands[rank] = stood
            if stood is None or _is_log_too(text):
                self.logs[rank] = text

    def of_hang(self) -> Verdict | None:
        """Return the verdict by dumps and stacks, None where there is too little."""
        for rank in kernel.in_storage(self.kernels, self.logs) - {*self.stands}:
            self.stands[rank] = Stood("in_storage")
        if not self.dumps and not self.stands:
            return None
        stands = self.stands if self.dumps else {**hangs.waiting_by_words(self.logs), **self.stands}
        if len({*self.dumps, *stands}) < 2:
            return None
        return hangs.judge_hang(self.dumps, stands, self.names)

    def of_logs(self) -> Verdict | None:
        """Return the verdict by logs, None where there is none."""
        if not self.logs and not self.launchers and not self.faults:
            return None
        faults = kernel.since(self.faults, self.begins)
        verdict = exits.judge_logs(self.logs, self.launchers, faults, is_merged=self.is_merged)
        return verdict if self.names is None else exits.unnamed(verdict, self.names)


# Keys of a dump as JSON; a line of a structured log begins with a brace, too.
_OF_A_DUMP = (b'"entries"', b'"pg_config"', b'"pg_status"')
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
