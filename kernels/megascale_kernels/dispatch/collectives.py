# SPDX-License-Identifier: Apache-2.0
"""Collectives of one group that ask nothing anew at each call.

torch's functions look up the group, check their tensors and make options each time, for some three microseconds of the
host; what a planned call hands over has been checked. Where torch's function has been replaced, as a recorder of
collectives does to see them, the call goes through what is in its place.
"""

from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor
from torch._C._distributed_c10d import AllgatherOptions, ReduceScatterOptions

from megascale_kernels.reference import GATHER

_TORCH = str(Path(torch.__file__).parent / "distributed")


class Collective:
    """A collective from one tensor into another, waited for by the stream as torch's own functions have it.

    Args:
        group: the ranks.
        name: `reference.GATHER` or `reference.SCATTER`; torch 2.13 renamed the group's methods behind them as well.
    """

    def __init__(self, group: dist.ProcessGroup, name: str) -> None:
        self.group, self.name = group, name
        self.options = AllgatherOptions() if name == GATHER else ReduceScatterOptions()
        self.options.asyncOp = False
        earlier = "_allgather_base" if name == GATHER else "_reduce_scatter_base"
        self.direct = getattr(group, name, None) or getattr(group, earlier)
        public = getattr(dist, name)
        self.own = public if _is_torchs(public) else None

    def __call__(self, out: Tensor, x: Tensor) -> None:
        """Queue it on the current stream; both tensors are contiguous, and the larger is W times the smaller."""
        public = getattr(dist, self.name)
        if public is not self.own:
            public(out, x, group=self.group)
            return
        work = self.direct(out, x, self.options)
        if work is not None:  # as torch's functions do, for backends that do not wait by themselves
            work.wait()


def _is_torchs(function: object) -> bool:
    """Whether a function is torch's own, and not one that was put in its place."""
    code = getattr(function, "__code__", None)
    return code is not None and code.co_filename.startswith(_TORCH)
