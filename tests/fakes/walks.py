# SPDX-License-Identifier: Apache-2.0
"""Ranks that walk through a script side by side, each at its own pace: how they end is what their real boxes tell.

A script is made of phases and collective calls. Ranks are moved one by one, in an order that a seed gives; one that is
in a call waits there until all of its group have called as often. One rank may leave a call out, some may make one too
many: nothing fits together in that group any more, and the walk goes on until the first process would die of it.
"""

import os
import random
from bisect import bisect
from collections.abc import Sequence
from itertools import accumulate
from pathlib import Path
from typing import NamedTuple

from megascale_ops.blackbox.calls import of_ring
from megascale_ops.blackbox.reader import BoxReader
from megascale_ops.blackbox.records import BoxIdentity
from megascale_ops.blackbox.writer import BoxWriter
from megascale_ops.schema.messages import RankExit
from megascale_ops.schema.progress import CollectivePosition

WORLD, THREAD = "0", "thread"
_NS = 1_000_000


class Call(NamedTuple):
    """A call in the world, or in the group of all ranks that are even or odd as its caller is."""

    is_world: bool = True
    is_named: bool = True  # False: started from C++, so that no box shows it
    is_async: bool = False  # its caller does not wait
    by_thread: bool = False  # another thread of the script makes it at some later time, in a group of its own

    def group(self, rank: int) -> str:
        """Return the name of its group."""
        if self.by_thread:
            return THREAD
        return WORLD if self.is_world else f"half{rank % 2}"


class Sometimes(NamedTuple):
    """What is done before piece ``at`` of each step whose number can be divided by ``period``; by ``ranks``, () all."""

    period: int
    at: int
    pieces: tuple["str | Call", ...]
    ranks: tuple[int, ...] = ()


class Script(NamedTuple):
    """A training script: ``pieces`` are one step of it, phases and calls."""

    pieces: tuple[str | Call, ...]
    sometimes: tuple[Sometimes, ...] = ()
    turned: tuple[int, ...] = ()  # ranks that go through the phases of a step in the opposite order

    def step(self, number: int, rank: int) -> list[str | Call]:
        """Return what a rank does in a step."""
        pieces = list(self.pieces)
        if rank in self.turned:
            phases = [piece for piece in pieces if isinstance(piece, str)]
            pieces = [phases.pop() if isinstance(piece, str) else piece for piece in pieces]
        for at in range(len(pieces), -1, -1):
            for one in self.sometimes:
                if min(one.at, len(pieces)) == at and number % one.period == 0 and rank in (one.ranks or (rank,)):
                    pieces[at:at] = one.pieces
        return pieces


class Bug(NamedTuple):
    """In step ``step`` these ranks leave the ``nth`` call of the step out, or make one more before it."""

    ranks: tuple[int, ...]
    step: int
    nth: int
    is_extra: bool = False


class Walker:
    """One rank on its way."""

    def __init__(self, folder: Path, script: Script, rank: int, world: int, bug: Bug | None, first: int) -> None:
        identity = BoxIdentity(
            job="walk", node="n", rank=rank, local_rank=rank, world_size=world, pid=os.getpid(), start_ticks=0, round=1
        )
        self.rank = rank
        self.path = folder / f"{rank}.box"
        self.box = BoxWriter.create(folder, identity)
        self.counts: dict[str, int] = {}  # calls of each group
        self.fitting: dict[str, int] = {}  # those before the first wrong one
        self.step, self.first = first, first
        self.waits: tuple[str, int, int] | None = None  # group, number in it, number in the box's ring; -1: none there
        self.wrong = ""  # the group in which its calls do not fit any more
        self.has_met = False  # a call of it that does not fit has met those of others
        self._script, self._bug = script, bug
        self._pieces: list[str | Call] = []
        self._for_thread: list[Call] = []
        self._calls_of_step = 0
        self._phase = "startup"

    def move(self, now: int, counts: Sequence[int], *, thread_moves: bool) -> None:
        """Do the next piece, or wait.

        Args:
            now: the time, in pieces.
            counts: how often each member of the group that it waits in has called as it should.
            thread_moves: its other thread makes a call that it was given.
        """
        if self._for_thread and thread_moves:
            self._call(self._for_thread.pop(0), now)
        elif self.waits is not None:
            _, seq, number = self.waits
            if min(counts) >= seq:
                if number >= 0:
                    self.box.end_collective(number, now * _NS)
                self.waits = None
        elif self._pieces:
            piece = self._pieces.pop(0)
            if isinstance(piece, str):
                self._show(piece)
            elif not self._is_left_out(piece, now):
                if piece.by_thread:
                    self._for_thread.append(piece)
                else:
                    self._call(piece, now)
        else:
            if self._phase != "startup":
                self.box.end_step((self.step + 1, now * 1e-3, *[0.0] * 7), 0.0, 0.0, None)
                self.step += 1
            self._calls_of_step = 0
            self._pieces = self._script.step(self.step + 1, self.rank)
            self._show("other")

    def _show(self, phase: str) -> None:
        self._phase = phase
        self.box.set_now(self.step, phase, absolute=True)

    def _is_left_out(self, call: Call, now: int) -> bool:
        bug = self._bug
        nth = self._calls_of_step
        self._calls_of_step += 1
        if bug is None or self.rank not in bug.ranks or (bug.step, bug.nth) != (self.step + 1, nth):
            return False
        self.wrong = call.group(self.rank)
        if bug.is_extra:
            self._pieces.insert(0, call)
            self._call(call, now)
            self.has_met = False
        self._bug = None
        return True

    def _call(self, call: Call, now: int) -> None:
        group = call.group(self.rank)
        seq = self.counts[group] = self.counts.get(group, 0) + 1
        if group != self.wrong:
            self.fitting[group] = seq
        else:
            self.has_met = True
        number = -1
        if call.is_named:
            passage = 0 if call.by_thread else self.box.passages
            number = self.box.begin_collective(group.encode(), b"all_reduce", seq, 4, now * _NS, now * _NS, 0, passage)
        if not (call.is_async or call.by_thread):
            self.waits = group, seq, number

    def exit(self, beat: CollectivePosition | None) -> RankExit:
        """Return how it ends, as a runner that reads its box tells it."""
        with BoxReader(self.path) as box:
            progress = box.progress()
            return RankExit(
                self.rank, self.rank, 9, -15, 0.0, by_us=True, step=progress.step, phase=progress.phase,
                steps_seen=progress.steps_seen, calls=tuple(of_ring(box.collectives(), beat)[-8:]), trail=box.trail(),
            )  # fmt: skip


def walk(
    folder: Path, script: Script, world: int, steps: int, seed: int, bug: Bug | None = None, first: int = -1
) -> tuple[list[RankExit], list[int]]:
    """Let ranks walk until the bug has shown, or for some steps; return their ends, and which of them did wrong.

    Args:
        folder: of the boxes.
        script: what all do.
        world: how many ranks.
        steps: how many steps at most, where nothing goes wrong before.
        seed: of the order in which they move, and of when it ends.
        bug: what some do wrong.
        first: the last step of an earlier process.
    """
    chance = random.Random(seed)  # noqa: S311  a test's
    walkers = [Walker(folder, script, rank, world, bug, first) for rank in range(world)]
    # What is asked anew at each of some 5,000 moves: as `random.choices` does it, and of who has moved alone.
    paces = list(accumulate(chance.choice((1.0, 1.0, 0.3, 0.05)) for _ in walkers))
    left = chance.randrange(300)  # moves after the first wrong one
    dying = chance.randrange(30)  # moves until a process dies of data that did not fit
    beats: list[CollectivePosition | None] = [None] * world
    now, slowest = 0, first
    is_wrong = has_met = False
    while left and dying and slowest < first + steps and now < 100_000:
        now += 1
        walker = walkers[bisect(paces, chance.random() * paces[-1], 0, world - 1)]
        step, counts = walker.step, []
        if walker.waits is not None:
            group = walker.waits[0]
            counts = [each.fitting.get(group, 0) for each in walkers if group in (WORLD, f"half{each.rank % 2}")]
        walker.move(now, counts, thread_moves=chance.random() < 0.1)
        if walker.step != step:
            slowest = min(each.step for each in walkers)
        is_wrong, has_met = is_wrong or bool(walker.wrong), has_met or walker.has_met
        left -= is_wrong
        dying -= has_met
        if chance.random() < 0.05:
            count = walker.counts.get(WORLD, 0)
            beats[walker.rank] = (
                CollectivePosition(count, count - (walker.waits is not None), "pg 0") if count else None
            )
    exits = [walker.exit(beat) for walker, beat in zip(walkers, beats, strict=True)]
    for walker in walkers:
        walker.box.close()
    return exits, [walker.rank for walker in walkers if walker.wrong]
