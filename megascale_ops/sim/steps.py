# SPDX-License-Identifier: Apache-2.0
"""What a step takes: each rank's own work with its noise, and all of them wait for the slowest.

Own work is divided as MegaScale's traces show it, roughly: data 2 %, forward 30 %, backward 62 %, optimizer 6 %. What
the network takes beyond what is overlapped is a fifth of the step. The last pipeline stage has a little more to do (the
loss), as in every such job, and machines are not quite alike: neither is a fault.
"""

import math
from collections.abc import Mapping

import numpy as np
import numpy.typing as npt

from megascale_ops.schema.progress import StepWork
from megascale_ops.sim.mesh import Layout
from megascale_ops.sim.redundancy import read_code
from megascale_ops.sim.settings import Settings

Fields = npt.NDArray[np.float64]

NETWORK = 0.2
PARTS = (0.02, 0.30, 0.62, 0.06)
LAST_STAGE = 1.03
# 256 ranks: while all is well only a sample is asked by itself; to make Python's numbers of all takes 10 ms.
_FEW = 256


class Made:
    """One finished step: its number, what it took, and by rank where its time went.

    ``fields``: (ranks, 12), those of ``StepWork`` in order, a loss that is no number as NaN.
    """

    __slots__ = ("_asked", "_rows", "checkpoint_s", "fields", "loss", "step", "wall_s")

    def __init__(self, step: int, wall_s: float, checkpoint_s: float, loss: float | None, fields: Fields) -> None:
        self.step = step
        self.wall_s = wall_s
        self.checkpoint_s = checkpoint_s
        self.loss = loss
        self.fields = fields
        self._rows: list[list[float]] | None = None
        self._asked = 0

    def work(self, rank: int) -> StepWork:
        """Return what one rank tells of it."""
        if self._rows is None and self._asked >= _FEW:
            self._rows = self.fields[:, 2:10].tolist()
        self._asked += 1
        row: list[float] = self.fields[rank, 2:10].tolist() if self._rows is None else self._rows[rank]
        waits, reads, ahead, back, updates, saves, collects, cpu_s = row
        return StepWork(
            *(self.step, self.wall_s, waits, reads, ahead, back, updates, saves, collects, cpu_s),
            self.loss,
            self.loss is not None,
        )


class StepModel:
    """Draws steps. The same seed draws the same ones."""

    def __init__(self, settings: Settings, layout: Layout, chance: np.random.Generator) -> None:
        self._settings = settings
        self._chance = chance
        self._uneven = 1.0 + settings.uneven * chance.standard_normal(settings.nodes + settings.spares)
        stages = np.array([mesh.pp for mesh in layout.meshes])
        self._stage = np.where((stages == layout.pp - 1) & (layout.pp > 1), LAST_STAGE, 1.0)
        self._base = self._stage.copy()
        self._replica = np.array([mesh.dp for mesh in layout.meshes])
        self._code = read_code(settings.coded, int(self._replica.max()) + 1)
        self._busy_s = np.zeros(int(self._replica.max()) + 1)  # of replicas that were late

    def place(self, machines: list[int]) -> None:
        """Note on which machine each node of the round is."""
        self._busy_s[:] = 0.0
        self._base = self._stage * np.repeat(self._uneven[machines], self._settings.ranks_per_node)

    def make(
        self, step: int, slower: Mapping[int, float], checkpoint_s: float, extra_s: float, loss: float | None
    ) -> Made:
        """Return the next step of all ranks.

        Args:
            step: its number.
            slower: by rank, the share that its own work takes longer.
            checkpoint_s: what all wait for a checkpoint in it.
            extra_s: what the forward pass of all takes longer, as a compilation does.
            loss: None: it is no number.
        """
        settings = self._settings
        own_s = self._base * (1.0 + settings.noise * self._chance.standard_normal(settings.ranks))
        own_s *= (1.0 - NETWORK) * settings.step_s
        for rank, share in slower.items():
            own_s[rank] *= 1.0 + share
        own_s += extra_s
        end_s, own_s = self._end(own_s)
        wall_s = round(end_s + checkpoint_s, 6)
        fields = np.zeros((12, settings.ranks)).T  # each field together in memory, as it is written and read
        fields[:, 0] = step
        fields[:, 1] = wall_s
        fields[:, 2] = np.round(np.maximum(0.0, wall_s - checkpoint_s - own_s), 6)
        for column, part in enumerate(PARTS, 3):
            fields[:, column] = np.round(part * own_s, 6)
        fields[:, 7] = checkpoint_s
        # A host launches all through its own work and looks now and then whether a collective is over.
        fields[:, 9] = np.round(own_s + 0.2 * (wall_s - own_s), 6)
        fields[:, 10] = math.nan if loss is None else loss
        fields[:, 11] = loss is not None
        return Made(step, wall_s, checkpoint_s, loss, fields)

    def _end(self, own_s: Fields) -> tuple[float, Fields]:
        """Return when a step's work and network are over, and what each rank works in it: of a coded job more."""
        network_s = NETWORK * self._settings.step_s
        if self._code is None:
            return float(own_s.max()) + network_s, own_s
        slowest_s = np.zeros(len(self._busy_s))
        np.maximum.at(slowest_s, self._replica, own_s)
        end_s, self._busy_s = self._code.close(slowest_s, self._busy_s)
        # With several messages a rank works until the step ends; its first share is what it can be compared by.
        load = 1 if self._code.kind == "multi" else self._code.load
        return end_s + network_s / self._code.pieces, own_s * load
