# SPDX-License-Identifier: Apache-2.0
"""The tuned serial opponent: no wait of the host, each token sent once, permutes and reduction as kernels of their own.

NCCL all-gather of tokens and routing, a sort, one Triton kernel that gathers rows, `torch._grouped_mm`, one that takes
SwiGLU, `torch._grouped_mm`, one that adds a token's rows in fp32, NCCL reduce-scatter. On two ranks an all-gather sends
what the best all-to-all does.
"""

from typing import Any

import torch
import torch.distributed as dist
import triton
import triton.language as tl
from torch import Tensor

from megascale_kernels import reference

COLS = 1024


@triton.jit
def take_rows(x_ptr, row_ptr, out_ptr, count_ptr, columns, COLS: tl.constexpr):
    """out[i] = x[row[i]], as long as i is below the count."""
    index = tl.program_id(0)
    if index < tl.load(count_ptr):
        row = tl.load(row_ptr + index).to(tl.int64)
        for at in range(0, columns, COLS):
            cols = at + tl.arange(0, COLS)
            value = tl.load(x_ptr + row * columns + cols, mask=cols < columns)
            tl.store(out_ptr + index.to(tl.int64) * columns + cols, value, mask=cols < columns)


@triton.jit
def take_swiglu(both_ptr, out_ptr, count_ptr, inner, COLS: tl.constexpr):
    """out = silu(both[:, :inner]) * both[:, inner:]."""
    index = tl.program_id(0).to(tl.int64)
    if index < tl.load(count_ptr):
        for at in range(0, inner, COLS):
            cols = at + tl.arange(0, COLS)
            gate = tl.load(both_ptr + index * 2 * inner + cols, mask=cols < inner).to(tl.float32)
            up = tl.load(both_ptr + index * 2 * inner + inner + cols, mask=cols < inner).to(tl.float32)
            value = gate / (1.0 + tl.exp(-gate)) * up
            tl.store(out_ptr + index * inner + cols, value.to(out_ptr.dtype.element_ty), mask=cols < inner)


@triton.jit
def add_rows(y_ptr, place_ptr, gate_ptr, ours_ptr, out_ptr, columns, TOP_K: tl.constexpr, COLS: tl.constexpr):
    """out[t] = sum over the pairs of t that are ours of gate * y[place], in fp32."""
    token = tl.program_id(0).to(tl.int64)
    for at in range(0, columns, COLS):
        cols = at + tl.arange(0, COLS)
        total = tl.zeros((COLS,), dtype=tl.float32)
        for index in tl.static_range(TOP_K):
            pair = token * TOP_K + index
            ours = tl.load(ours_ptr + pair) != 0
            place = tl.load(place_ptr + pair).to(tl.int64)
            value = tl.load(y_ptr + place * columns + cols, mask=(cols < columns) & ours, other=0.0)
            total += tl.load(gate_ptr + pair) * value.to(tl.float32)
        tl.store(out_ptr + token * columns + cols, total.to(out_ptr.dtype.element_ty), mask=cols < columns)


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
        return reference.reduce_scatter(self.summed, self.group)
