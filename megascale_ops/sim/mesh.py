# SPDX-License-Identifier: Apache-2.0
"""Where ranks are in the mesh, and in which groups they wait for whom when one of them does not come.

Megatron's order: tensor parallel ranks are neighbours, then data parallel ones, then pipeline stages. A rank that does
not come is missed by its tensor parallel group at once; the other stages of its pipeline wait for activations or
gradients of their neighbour; the other pipelines have done theirs and wait in the data parallel group.
"""

from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from megascale_ops.schema.identity import Mesh
from megascale_ops.sim.settings import Settings


class Wait(NamedTuple):
    """The collective that a rank is in: its group's name, function, and for a receive the rank that it is from."""

    group: str
    function: str
    peer: int = -1


class Layout:
    """All ranks' places."""

    def __init__(self, settings: Settings) -> None:
        self.tp, self.pp = settings.tp, settings.pp
        self.dp = settings.ranks // (settings.tp * settings.pp)
        self.meshes = tuple(self._mesh(rank) for rank in range(settings.ranks))

    def _mesh(self, rank: int) -> Mesh:
        return Mesh(tp=rank % self.tp, dp=rank // self.tp % self.dp, pp=rank // (self.tp * self.dp))

    def rank(self, tp: int, dp: int, pp: int) -> int:
        """Return who is at these coordinates."""
        return tp + self.tp * (dp + self.dp * pp)

    def group(self, axis: str, rank: int) -> str:
        """Return the name of a rank's group along an axis."""
        mesh = self.meshes[rank]
        number = {
            "tp": mesh.dp + self.dp * mesh.pp,
            "dp": mesh.tp + self.tp * mesh.pp,
            "pp": mesh.tp + self.tp * mesh.dp,
        }[axis]
        return f"{axis}{number}"

    def in_reach(self, absent: int) -> npt.NDArray[np.bool_]:
        """Return by rank who waits for one before the end of the step, and that one."""
        if self.dp == 1:
            return np.ones(len(self.meshes), bool)
        found: npt.NDArray[np.bool_] = np.arange(len(self.meshes)) // self.tp % self.dp == absent // self.tp % self.dp
        return found

    def in_reach_of_cut_network(self, at: int) -> npt.NDArray[np.bool_]:
        """Return by rank who waits before the end of the step where the gradients of one's group are not added up."""
        ranks = np.arange(len(self.meshes))
        if self.dp == 1:
            return np.ones(len(self.meshes), bool)
        group_of = ranks // (self.tp * self.dp) * self.tp + ranks % self.tp
        found: npt.NDArray[np.bool_] = group_of != group_of[at]
        return found

    def wait_of_stuck_gpu(self, rank: int, stuck: int) -> Wait | None:
        """Return where a rank waits because the GPU of one ends nothing; its host waits with its nearest."""
        if rank != stuck:
            return self.wait_of(rank, stuck)
        if self.tp > 1:
            return Wait(self.group("tp", rank), "all_reduce")
        return Wait(self.group("dp", rank), "reduce_scatter") if self.dp > 1 else None

    def wait_of_cut_network(self, rank: int, at: int) -> Wait | None:
        """Return where a rank waits because the gradients of one's group are not added up: all of it have come."""
        axis = "dp" if self.dp > 1 else "tp"
        if self.group(axis, rank) == self.group(axis, at) and getattr(self, axis) > 1:
            return Wait(self.group(axis, rank), "reduce_scatter" if axis == "dp" else "all_reduce")
        here, there = self.meshes[rank], self.meshes[at]
        if here.pp != there.pp:
            nearer = here.pp + (1 if there.pp > here.pp else -1)
            return Wait(self.group("pp", rank), "recv", self.rank(here.tp, here.dp, nearer))
        return Wait(self.group("tp", rank), "all_reduce") if self.tp > 1 else None

    def wait_of(self, rank: int, absent: int) -> Wait | None:
        """Return where a rank waits because another does not come; None: it is that one."""
        if rank == absent:
            return None
        here, there = self.meshes[rank], self.meshes[absent]
        if here.dp == there.dp and here.pp == there.pp:
            return Wait(self.group("tp", rank), "all_reduce")
        if here.dp == there.dp and self.pp > 1:
            nearer = here.pp + (1 if there.pp > here.pp else -1)
            return Wait(self.group("pp", rank), "recv", self.rank(here.tp, here.dp, nearer))
        if self.dp > 1:
            return Wait(self.group("dp", rank), "reduce_scatter")
        return Wait(self.group("tp", rank), "all_reduce")
