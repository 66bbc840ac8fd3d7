# SPDX-License-Identifier: Apache-2.0
"""The tuned serial opponent: no wait of the host, each token sent once, permutes and reduction as kernels of their own.

NCCL all-gather of tokens and routing, a sort, one Triton kernel that gathers rows, `torch._grouped_mm`, one that takes
SwiGLU, `torch._grouped_mm`, one that adds a token's rows in fp32, NCCL reduce-scatter. On two ranks an all-gather sends
what the best all-to-all does.
"""

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from megascale_kernels import reference
from megascale_kernels.bench.moe.tuned_kernels import add_rows, take_rows, take_swiglu

COLS = 1024


class Tuned:
    """The tuned serial path for one layer; memory is taken once."""

    def __init__(self, x: Tensor, ids: Tensor, gates: Tensor, w_in: Tensor, w_out: Tensor, group: Any) -> None:  # noqa: ANN401 - a group
        self.x, self.ids, self.gates, self.group = x, ids, gates, group
        self.experts, _, self.inner, self.hidden = w_in.shape
        self.w_in = w_in.view(self.experts, 2 * self.inner, self.hidden).transpose(1, 2)
        self.w_out = w_out.transpose(1, 2)
        self.ranks, self.rank = dist.get_world_size(group), dist.get_rank(group)
        self.top_k = ids.shape[1]
        self.pairs = self.ranks * ids.numel()
        self.tokens = self.ranks * x.shape[0]
        self.rows = x.new_empty(self.pairs, self.hidden)
        self.h = x.new_empty(self.pairs, self.inner)
        self.summed = x.new_empty(self.tokens, self.hidden)
        # What a backward reads of the last call: the order of pairs, and gate and up of its rows.
        self.order = self.place = self.starts = self.ours = self.all_gates = self.both = x

    def __call__(self) -> Tensor:
        """Run the layer: [T, H]."""
        everything = reference.all_gather(self.x, self.group)
        ids = reference.all_gather(self.ids, self.group).view(-1)
        gates = reference.all_gather(self.gates, self.group)
        local = ids - self.rank * self.experts
        ours = (local >= 0) & (local < self.experts)
        key = torch.where(ours, local, self.experts).to(torch.int16)
        order = key.sort(stable=True).indices
        starts = torch.searchsorted(
            key[order], torch.arange(1, self.experts + 1, device=key.device, dtype=torch.int16)
        ).to(torch.int32)
        place = torch.empty_like(order)
        place[order] = torch.arange(self.pairs, device=order.device)
        count = starts[-1:]
        take_rows[(self.pairs,)](everything, order // self.top_k, self.rows, count, self.hidden, COLS=COLS, num_warps=4)
        both = torch._grouped_mm(self.rows, self.w_in, offs=starts)  # noqa: SLF001 - torch's only name for it
        take_swiglu[(self.pairs,)](both, self.h, count, self.inner, COLS=COLS, num_warps=4)
        y = torch._grouped_mm(self.h, self.w_out, offs=starts)  # noqa: SLF001 - as above
        add_rows[(self.tokens,)](
            y, place, gates, ours, self.summed, self.hidden, TOP_K=self.top_k, COLS=COLS, num_warps=4
        )
        self.order, self.place, self.starts, self.ours = order, place, starts, ours
        self.all_gates, self.both = gates.view(-1), both
        return reference.reduce_scatter(self.summed, self.group)
