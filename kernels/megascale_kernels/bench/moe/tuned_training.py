# SPDX-License-Identifier: Apache-2.0
"""Forward and backward of the tuned serial opponent, with the algebra that ours has: no row of an output is kept.

Behind `Tuned`: all-gather of gradients, a kernel that gathers their rows, `torch._grouped_mm`, one kernel for SwiGLU's
gradient and the gates', `torch._grouped_mm` for both weights and for the tokens, one kernel that adds a token's rows,
two reduce-scatters. Nothing overlaps.
"""

from typing import Any

import torch
from torch import Tensor

from megascale_kernels import reference
from megascale_kernels.bench.moe.tuned import COLS, Tuned
from megascale_kernels.bench.moe.tuned_kernels import add_rows, swiglu_gradient, take_rows


class TunedTraining:
    """One layer's forward and backward; memory is taken once."""

    def __init__(
        self, x: Tensor, ids: Tensor, gates: Tensor, w_in: Tensor, w_out: Tensor, grad: Tensor, group: Any  # noqa: ANN401 - a group
    ) -> None:  # fmt: skip
        self.forward, self.grad = Tuned(x, ids, gates, w_in, w_out, group), grad
        layer = self.forward
        self.shape = w_in.shape
        self.back = torch.empty_like(layer.rows)
        self.dpre = x.new_empty(layer.pairs, 2 * layer.inner)
        self.ones = torch.ones(layer.pairs, device=x.device)

    def __call__(self) -> tuple[Tensor, ...]:
        """Gradients of tokens, gates and both weights."""
        layer = self.forward
        layer()
        group, ends = layer.group, layer.starts
        everything = reference.all_gather(self.grad, group)
        take_rows[(layer.pairs,)](
            everything, layer.order // layer.top_k, self.back, ends[-1:], layer.hidden, COLS=COLS, num_warps=4
        )
        u = torch._grouped_mm(self.back, layer.w_out.transpose(1, 2), offs=ends)  # noqa: SLF001 - torch's only name for it
        dgates = torch.zeros(layer.pairs, device=u.device)
        swiglu_gradient[(layer.pairs,)](
            u, layer.both, self.dpre, layer.order, layer.all_gates, dgates, ends[-1:], layer.inner, COLS=COLS,
            num_warps=4,
        )  # fmt: skip
        dw_out = torch._grouped_mm(self.back.t(), u, offs=ends)  # noqa: SLF001 - as above
        dw_in = torch._grouped_mm(self.dpre.t(), layer.rows, offs=ends)  # noqa: SLF001 - as above
        dx_rows = torch._grouped_mm(self.dpre, layer.w_in.transpose(1, 2), offs=ends)  # noqa: SLF001 - as above
        add_rows[(layer.tokens,)](
            dx_rows, layer.place, self.ones, layer.ours, layer.summed, layer.hidden, TOP_K=layer.top_k, COLS=COLS,
            num_warps=4,
        )  # fmt: skip
        dx = reference.reduce_scatter(layer.summed, group)
        return dx, reference.reduce_scatter(dgates.view(-1, layer.top_k), group), dw_in.view(self.shape), dw_out
