# SPDX-License-Identifier: Apache-2.0
"""A MoE layer on emulated ranks: what went in, what came out, and how far it is from what it should have been."""

from typing import Any, NamedTuple

import torch
from megascale_kernels.moe import launch as moe_launch
from torch import Tensor

from tests.fakes.emulated_ranks import EmulatedRanks
from tests.fakes.moe_cases import Given, Layer, exact, given


class Ran(NamedTuple):
    """What happened."""

    layer: Layer
    ranks: EmulatedRanks
    given: list[list[Given]]
    outs: list[list[Tensor]]
    launches: list[list[Any]]

    @property
    def worst(self) -> float:
        """The largest error, in units of what the roundings of a layer of this type allow."""
        unit = 2 * torch.finfo(self.layer.dtype).eps
        worst = 0.0
        for operands, outs in zip(self.given, self.outs, strict=True):
            for out, wanted in zip(outs, exact(operands, self.layer.experts), strict=True):
                if out.numel():
                    assert bool(torch.isfinite(out).all())
                    allowed = unit * (1 + float(wanted.abs().max()))
                    worst = max(worst, float((out.double() - wanted).abs().max()) / allowed)
        return worst


def ran(layer: Layer, *, launches: int = 2, data_bytes: int = 1 << 14, **options: Any) -> Ran:  # noqa: ANN401 (those of `EmulatedRanks`)
    """Run layers on all ranks, without a pause in between, over poisoned memory."""
    ranks = EmulatedRanks(len(layer.tokens), layer.dtype, data_bytes=data_bytes, channels=64, **options)
    made, outs, kept = [], [], []
    for seed in range(launches):
        operands = given(layer, seed)
        out = [torch.full(mine.x.shape, float("nan"), dtype=layer.dtype) for mine in operands]

        def host(workspace: Any, operands: list[Given] = operands, out: list[Tensor] = out) -> Any:  # noqa: ANN401 (an emulated workspace)
            mine = operands[workspace.rank]
            plan = moe_launch.planned(*mine, out[workspace.rank], layer.sizes, workspace, layer.config)
            plan.run(*mine, out[workspace.rank])
            return plan

        kept.append(ranks.call(host))
        made.append(operands)
        outs.append(out)
    ranks.run()
    return Ran(layer, ranks, made, outs, kept)
