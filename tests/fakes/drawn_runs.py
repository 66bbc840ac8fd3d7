# SPDX-License-Identifier: Apache-2.0
"""Runs a job of ``drawn_layouts`` until nothing moves any more, as hosts, GPUs and NCCL do it.

A host calls one thing after another and runs ahead of its GPU, unless the script reads a value or the queue is full. A
call begins on the GPU when what came before it in its group's stream, and what its kernels wait for, has ended. A
collective ends when all members have begun the same; of a send and a receive each begins by itself, and in a batch all
begin together. Over Gloo the host waits. Nothing here has a time: a job hangs when nothing can go on.
"""

from collections import Counter, defaultdict
from collections.abc import Sequence
from typing import NamedTuple

from tests.fakes.drawn_layouts import Act, Away, Call, Ended, Program, ReadLoss, StuckKernel, Wait


class Entry:
    """One call as it was given to a group."""

    def __init__(self, rank: int, call: Call, before: list["Entry"], number: int) -> None:
        """Take a call that waits for others of its rank; ``number`` counts within the group, pairs by themselves."""
        self.rank, self.call, self.number = rank, call, number
        self.before = before
        self.begun = self.over = False
        self.left = max(1, len(call.pieces))  # pieces that have not ended


class Run:
    """A job that runs; ``cut`` are groups over which no data arrives any more from call N on."""

    def __init__(self, programs: Sequence[Program], groups: dict[str, tuple[int, ...]], ahead: int) -> None:
        """Begin; ``ahead`` is how many calls a host may be ahead of its GPU."""
        self.programs, self.groups, self.ahead = programs, groups, ahead
        self.at = [0] * len(programs)
        self.entries: list[list[Entry]] = [[] for _ in programs]
        self.kernels: list[list[Entry]] = [[] for _ in programs]  # what the next kernel waits for
        self.called: list[list[Entry]] = [[] for _ in programs]  # since the last wait, in the background
        self.stuck = [False] * len(programs)
        self.streams: dict[tuple[int, str], Entry] = {}
        self.counts: Counter[tuple[int, str, bool]] = Counter()
        self.meets: dict[object, dict[int, tuple[Entry, Call]]] = defaultdict(dict)
        self.pairs: Counter[tuple[int, str, int, int]] = Counter()
        self.gloo: set[str] = set()
        self.cut: dict[str, int] = {}
        self.stops: set[int] = set()  # ranks that are halted from outside

    def go(self, most: int = 1 << 60) -> None:
        """Let it run until nothing moves, or so many acts have been done."""
        moved = True
        while moved and most > 0:
            moved = False
            for rank in range(len(self.programs)):
                while most > 0 and self._host(rank):
                    moved, most = True, most - 1
                moved = self._gpu(rank) or moved

    def now(self, rank: int) -> Act:
        """Return what the rank's host does."""
        return self.programs[rank][self.at[rank]] if self.at[rank] < len(self.programs[rank]) else Ended()

    def is_inside(self, rank: int) -> bool:
        """Return whether the host waits in its last call: over Gloo always, over NCCL where it may not run ahead."""
        last = self.entries[rank][-1] if self.entries[rank] else None
        return last is not None and not last.over and (last.call.group in self.gloo or not self.ahead)

    def _host(self, rank: int) -> bool:
        """Do the next act of a host, if it can."""
        act = self.now(rank)
        if isinstance(act, Ended | Away) or rank in self.stops or self.is_inside(rank):
            return False
        if isinstance(act, ReadLoss):
            if self.stuck[rank] or any(not one.over for one in self.kernels[rank]):
                return False
        elif isinstance(act, StuckKernel):
            self.stuck[rank] = True
        elif isinstance(act, Wait):
            self.kernels[rank] = [*self.kernels[rank], *self.called[rank]]
            self.called[rank] = []
        else:
            if sum(not one.over for one in self.entries[rank][-self.ahead - 1 :]) > self.ahead:
                return False
            self._call(rank, act)
        self.at[rank] += 1
        return True

    def _call(self, rank: int, call: Call) -> None:
        self.counts[rank, call.group, call.is_pair] += 1
        alone = f"{call.group} {min(call.source, call.target)} {max(call.source, call.target)}"
        stream = (rank, alone if call.source >= 0 else call.group)
        before = [*self.kernels[rank]] if call.group not in self.gloo else []
        before += [self.streams[stream]] if stream in self.streams else []
        entry = Entry(rank, call, before, self.counts[rank, call.group, call.is_pair])
        entry.before = [one for one in before if not one.over]
        if self.stuck[rank] and call.group not in self.gloo:
            entry.before.append(entry)  # its kernel comes no more
        self.streams[stream] = entry
        self.entries[rank].append(entry)
        if call.waits:
            self.kernels[rank] = [entry]
        else:
            self.called[rank].append(entry)

    def _gpu(self, rank: int) -> bool:
        """Begin what can begin."""
        moved = False
        for entry in reversed(self.entries[rank]):
            if entry.over:
                if len(self.entries[rank]) > 64 and entry is self.entries[rank][-64]:
                    break
                continue
            if not entry.begun and all(one.over for one in entry.before):
                entry.begun = moved = True
                self._meet(entry)
        return moved

    def _meet(self, entry: Entry) -> None:
        """Let a call that has begun meet those of the others."""
        call, group = entry.call, entry.call.group
        if not call.is_pair:
            there = self.meets[group, entry.number]
            there[entry.rank] = entry, call
            is_cut = entry.number >= self.cut.get(group, 1 << 60)
            if len(there) == len(self.groups[group]) and len({one for _, one in there.values()}) == 1 and not is_cut:
                for one, _ in there.values():
                    one.over = True
            return
        for piece in call.pieces or (call,):
            key = (entry.rank, group, piece.source, piece.target)
            self.pairs[key] += 1
            there = self.meets[group, piece.source, piece.target, self.pairs[key]]
            there[entry.rank] = entry, piece
            if len(there) == 2:
                (one, mine), (other, theirs) = there.values()
                if (mine.size, mine.dtype) == (theirs.size, theirs.dtype) and mine.function != theirs.function:
                    for met in (one, other):
                        met.left -= 1
                        met.over = met.left == 0


class Stood(NamedTuple):
    """Where a host stands when nothing moves: ``place`` as a stack shows it."""

    place: str
    call: str = ""


def stood(run: Run, rank: int) -> Stood:
    """Return where a rank's host stands."""
    act = run.now(rank)
    if run.is_inside(rank):
        call = run.entries[rank][-1].call
        return Stood("collective", (call.pieces[:1] or (call,))[0].function)
    if isinstance(act, Away):
        return Stood(act.place)
    if isinstance(act, ReadLoss):
        return Stood("gpu")
    if isinstance(act, Call):
        return Stood("launch", (act.pieces[:1] or (act,))[0].function)
    return Stood("ended")
