# SPDX-License-Identifier: Apache-2.0
"""Forward and backward of a MoE layer on emulated ranks, and how far gradients are from what they should have been."""

from typing import Any, NamedTuple

import torch
from megascale_kernels.moe import gradient_launch
from megascale_kernels.moe import launch as moe_launch
from torch import Tensor

from tests.fakes.emulated_ranks import EmulatedRanks
from tests.fakes.moe_cases import Given, Layer, exact_gradients, given

NAMES = ("x", "gates", "w_in", "w_out")


class RanBackward(NamedTuple):
    """What happened.

    Attributes:
        layer: the case.
        ranks: emulated.
        given: operands, by launch and rank.
        grads: of outputs.
        found: gradients, by launch, rank and name.
    """

    layer: Layer
    ranks: EmulatedRanks
    given: list[list[Given]]
    grads: list[list[Tensor]]
    found: list[list[dict[str, Tensor]]]

    @property
    def worst(self) -> dict[str, float]:
        """The largest error of each gradient, in units of what the roundings of a layer of this type allow."""
        unit = 4 * torch.finfo(self.layer.dtype).eps
        worst = dict.fromkeys(NAMES, 0.0)
        for operands, grads, found in zip(self.given, self.grads, self.found, strict=True):
            for wanted, mine in zip(exact_gradients(operands, grads, self.layer.experts), found, strict=True):
                for name in NAMES:
                    right = getattr(wanted, name)
                    if not right.numel():
                        continue
                    assert bool(torch.isfinite(mine[name]).all()), name
                    allowed = unit * (1 + float(right.abs().max()))
                    worst[name] = max(worst[name], float((mine[name].double() - right).abs().max()) / allowed)
        return worst


def ran_backward(layer: Layer, *, launches: int = 2, data_bytes: int = 1 << 15, **options: Any) -> RanBackward:  # noqa: ANN401 (those of `EmulatedRanks`)
    """Run layers and their backwards on all ranks, without a pause in between, over poisoned memory."""
    ranks = EmulatedRanks(len(layer.tokens), layer.dtype, data_bytes=data_bytes, channels=64, **options)
    made, grads_of, kept = [], [], []
    for seed in range(launches):
        operands = given(layer, seed)
        generator = torch.Generator().manual_seed(100 + seed)
        grads = [torch.randn(mine.x.shape, generator=generator).to(layer.dtype) for mine in operands]

        def host(workspace: Any, operands: list[Given] = operands, grads: list[Tensor] = grads) -> dict[str, Tensor]:  # noqa: ANN401 (an emulated workspace)
            mine, sizes = operands[workspace.rank], layer.sizes
            out = torch.full(mine.x.shape, float("nan"), dtype=layer.dtype)
            saved = None
            if layer.config.keep:
                saved = torch.full((sizes.rows, 2 * sizes.inner), float("nan"), dtype=layer.dtype)
            plan = moe_launch.planned(*mine, out, sizes, workspace, layer.config, saved)
            tables = torch.full_like(plan.buffers.tables, 1 << 20)
            plan.run(*mine, out, saved, tables)
            dx, dgates = torch.full_like(mine.x, float("nan")), torch.full_like(mine.gates, float("nan"))
            start = gradient_launch.Given(*mine, grad=grads[workspace.rank])
            back = gradient_launch.planned_backward(start, dx, dgates, sizes, workspace, layer.config)
            return {"x": dx, "gates": dgates, **back.run(start, tables, saved, dx, dgates)}

        kept.append(ranks.call(host))
        made.append(operands)
        grads_of.append(grads)
    ranks.run()
    return RanBackward(layer, ranks, made, grads_of, kept)
