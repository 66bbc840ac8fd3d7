# SPDX-License-Identifier: Apache-2.0
"""What a step takes: each rank's own work with its noise, and all of them wait for the slowest.

Own work is divided as MegaScale's traces show it, roughly: data 2 %, forward 30 %, backward 62 %, optimizer 6 %. What
the network takes beyond what is overlapped is a fifth of the step. The last pipeline stage has a little more to do (the
loss), as in every such job, and machines are not quite alike: neither is a fault.
"""

from collections.abc import Mapping
from typing import NamedTuple

import numpy as np

from megascale_ops.schema.progress import StepWork
from megascale_ops.sim.mesh import Layout
from megascale_ops.sim.settings import Settings

NETWORK = 0.2
PARTS = (0.02, 0.30, 0.62, 0.06)
LAST_STAGE = 1.03


class Made(NamedTuple):
    """One finished step: its number, what it took, and by rank where its time went."""

    step: int
    wall_s: float
    checkpoint_s: float
    works: list[StepWork]


class StepModel:
    """Draws steps. The same seed draws the same ones."""

    def __init__(self, settings: Settings, layout: Layout, chance: np.random.Generator) -> None:
        self._settings = settings
        self._chance = chance
        self._uneven = 1.0 + settings.uneven * chance.standard_normal(settings.nodes + settings.spares)
        stages = np.array([mesh.pp for mesh in layout.meshes])
        self._stage = np.where((stages == layout.pp - 1) & (layout.pp > 1), LAST_STAGE, 1.0)
        self._base = self._stage.copy()

    def place(self, machines: list[int]) -> None:
        """Note on which machine each node of the round is."""
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
        wall_s = round(float(own_s.max()) + NETWORK * settings.step_s + checkpoint_s, 6)
        waiting = np.round(wall_s - checkpoint_s - own_s, 6).tolist()
        data, forward, backward, optimizer = (np.round(part * own_s, 6).tolist() for part in PARTS)
        # A host launches all through its own work and looks now and then whether a collective is over.
        cpu = np.round(own_s + 0.2 * (wall_s - own_s), 6).tolist()
        is_finite = loss is not None
        works = [
            StepWork(step, wall_s, waits, reads, ahead, back, updates, checkpoint_s, 0.0, cpu_s, loss, is_finite)
            for waits, reads, ahead, back, updates, cpu_s in zip(
                waiting, data, forward, backward, optimizer, cpu, strict=True
            )
        ]
        return Made(step, wall_s, checkpoint_s, works)
