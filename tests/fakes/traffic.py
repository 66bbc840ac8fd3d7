# SPDX-License-Identifier: Apache-2.0
"""A training job's collectives, made up: ranks in a mesh (pipeline, data, tensor) work, meet, wait and go on.

One step is, for each microbatch and stage, a meeting of neighbouring stages and then ``layers`` tensor-parallel
all-reduces, forward and backward alike, and at its end a data-parallel all-reduce. A meeting begins when its last rank
has arrived, takes its transfer time, and ends for all of them at once. All of it is told as a black box would: each
rank's own clock (which begins somewhere else on each), start and end of each collective.

Noise is lognormal: ``noise`` of each piece of work by itself, ``step_noise`` of all of a rank's work in one step, which
may remember the step before (``memory``). Faults are functions of the step: extra seconds of own work by rank and step.
"""

from collections.abc import Callable
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from tests.fakes.skew_columns import Columns

# (step) -> seconds of own work that each rank has more, before its first collective of the step or spread over all.
Fault = Callable[[int], npt.NDArray[np.float64]]
TP, PP, DP = 0, 1, 2


class Shape(NamedTuple):
    """How large the job is."""

    tp: int = 1
    pp: int = 1
    dp: int = 4
    layers: int = 4
    microbatches: int = 1

    @property
    def ranks(self) -> int:
        """How many there are; rank = (stage * dp + replica) * tp + tensor."""
        return self.tp * self.pp * self.dp


class Met(NamedTuple):
    """All meetings of one group kind at one point of the program: arrays of groups x ranks of a group."""

    kind: int
    communicator: npt.NDArray[np.int32]  # groups
    ranks: npt.NDArray[np.int64]
    seq: int
    start_s: npt.NDArray[np.float64]
    end_s: npt.NDArray[np.float64]


class Traffic:
    """The job. Each call of ``step`` makes one.

    Args:
        shape: how large it is.
        seed: of all that is random.
        step_s: own work of a rank in a step, in all.
        noise: of each piece of work.
        step_noise: of all of a rank's work in a step.
        memory: how much of the step noise is that of the step before.
        transfer_s: of a tensor-parallel, a pipeline and a data-parallel meeting.
    """

    def __init__(
        self,
        shape: Shape,
        seed: int = 1,
        *,
        step_s: float = 1.0,
        noise: float = 0.02,
        step_noise: float = 0.01,
        memory: float = 0.0,
        transfer_s: tuple[float, float, float] = (0.002, 0.003, 0.05),
    ) -> None:
        self.shape = shape
        self.order = np.random.default_rng(seed)
        self.step_s, self.noise, self.step_noise, self.memory = step_s, noise, step_noise, memory
        self.transfer_s = transfer_s
        self.number = 0
        self.ready_s = np.zeros(shape.ranks)
        self.clock_s = self.order.uniform(1.0, 1e6, shape.ranks)
        self.slow_links: dict[tuple[int, int], float] = {}  # (kind, communicator) -> factor of its transfers
        self._level = np.zeros(shape.ranks)
        self._seqs: dict[tuple[int, int], int] = {}
        mesh = np.arange(shape.ranks).reshape(shape.pp, shape.dp, shape.tp)
        self._tensor = mesh.reshape(shape.pp, shape.dp, shape.tp)
        self._data = mesh.transpose(0, 2, 1).reshape(-1, shape.dp)
        self._stages = mesh.reshape(shape.pp, -1)

    @property
    def classes(self) -> npt.NDArray[np.int32]:
        """Equal numbers for ranks of one stage."""
        return np.repeat(np.arange(self.shape.pp, dtype=np.int32), self.shape.dp * self.shape.tp)

    def step(self, first: Fault | None = None, spread: Fault | None = None) -> list[Met]:
        """Make one step; ``first`` is late work before the first collective, ``spread`` is in every piece of it."""
        shape, order = self.shape, self.order
        self._level = self.memory * self._level + self.step_noise * order.standard_normal(shape.ranks)
        pieces = 2 * shape.microbatches * shape.layers + 1
        self._piece_s = (self.step_s * np.exp(self._level) + (spread(self.number) if spread else 0.0)) / pieces
        if first:
            self.ready_s += first(self.number)
        met: list[Met] = []
        for stages in (range(shape.pp), range(shape.pp - 1, -1, -1)):
            for _ in range(shape.microbatches):
                for place, stage in enumerate(stages):
                    if place:
                        met.append(self._pipeline(min(stage, stages[place - 1])))
                    met += [self._layer(stage) for _ in range(shape.layers)]
        if shape.dp > 1:
            met.append(self._reduce())
        self.number += 1
        return met

    def _layer(self, stage: int) -> Met:
        groups = self._tensor[stage]
        if self.shape.tp == 1:
            self._work(groups.ravel())
            return Met(-1, np.zeros(0, np.int32), np.zeros((0, 1), np.int64), 0, np.zeros((0, 1)), np.zeros((0, 1)))
        first = stage * self.shape.dp
        return self._meet(
            TP, np.arange(first, first + self.shape.dp, dtype=np.int32), groups, self._next(TP, stage), work=True
        )

    def _pipeline(self, stage: int) -> Met:
        pairs = np.stack([self._stages[stage], self._stages[stage + 1]], axis=1)
        width = self.shape.dp * self.shape.tp
        groups = np.arange(stage * width, (stage + 1) * width, dtype=np.int32)
        return self._meet(PP, groups, pairs, self._next(PP, stage), work=False)

    def _reduce(self) -> Met:
        return self._meet(DP, np.arange(len(self._data), dtype=np.int32), self._data, self._next(DP, 0), work=True)

    def _next(self, kind: int, stage: int) -> int:
        """Return the next sequence number of the communicators of a stage: each counts its own."""
        self._seqs[kind, stage] = self._seqs.get((kind, stage), -1) + 1
        return self._seqs[kind, stage]

    def _work(self, ranks: npt.NDArray[np.int64]) -> None:
        self.ready_s[ranks] += self._piece_s[ranks] * np.exp(self.noise * self.order.standard_normal(ranks.shape))

    def _meet(
        self, kind: int, communicator: npt.NDArray[np.int32], ranks: npt.NDArray[np.int64], seq: int, *, work: bool
    ) -> Met:
        if work:
            self._work(ranks)
        else:
            self.ready_s[ranks] += 1e-4
        start_s = self.ready_s[ranks]
        transfer_s = self.transfer_s[kind] * np.exp(self.noise * self.order.standard_normal(len(ranks)))
        for (slow_kind, slow), factor in self.slow_links.items():
            if slow_kind == kind:
                transfer_s[communicator == slow] *= factor
        end_s = start_s.max(axis=1) + transfer_s
        self.ready_s[ranks] = end_s[:, None]
        return Met(kind, communicator, ranks, seq, start_s, np.broadcast_to(end_s[:, None], start_s.shape))

    def columns(self, met: list[Met]) -> Columns:
        """Return meetings as records of the ranks' own clocks tell them."""
        met = [one for one in met if one.kind >= 0]
        rank = np.concatenate([one.ranks.ravel() for one in met])
        kind = np.concatenate([np.full(one.ranks.size, one.kind, np.int32) for one in met])
        group = np.concatenate([np.repeat(one.communicator, one.ranks.shape[1]) for one in met])
        start_s = np.concatenate([one.start_s.ravel() for one in met]) + self.clock_s[rank]
        end_s = np.concatenate([one.end_s.ravel() for one in met]) + self.clock_s[rank]
        return Columns(
            rank=rank.astype(np.int32),
            communicator=(kind * 1_000_000 + group).astype(np.int32),
            function=kind,
            seq=np.concatenate([np.full(one.ranks.size, one.seq, np.int64) for one in met]),
            start_ns=(start_s * 1e9).astype(np.int64),
            end_ns=(end_s * 1e9).astype(np.int64),
            bytes_moved=np.full(len(rank), 1 << 20, np.int64),
        )


def slower(ranks: int, which: int, seconds: float, since: int = 0) -> Fault:
    """Return a fault: one rank works so much longer from a step on."""

    def fault(step: int) -> npt.NDArray[np.float64]:
        more = np.zeros(ranks)
        more[which] = seconds if step >= since else 0.0
        return more

    return fault
