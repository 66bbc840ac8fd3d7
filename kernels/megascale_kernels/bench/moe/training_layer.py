# SPDX-License-Identifier: Apache-2.0
"""Measure forward and backward of one layer: ours, our kernels, plain and tuned serial, its products alone, in turn."""

import math
from collections.abc import Callable

import torch
import torch.distributed as dist
from torch import Tensor

from megascale_kernels.autotune.contest import settle
from megascale_kernels.autotune.timing import Call, measure
from megascale_kernels.bench.moe.measure import (
    WRONG,
    MoeRow,
    Operands,
    Turns,
    by_shards,
    copies,
    local_share,
    operands,
    way_of,
)
from megascale_kernels.bench.moe.moe_shapes import MoeShape
from megascale_kernels.dispatch import moe_path
from megascale_kernels.memory.workspace import Workspace
from megascale_kernels.moe import all_to_all
from megascale_kernels.moe.expert_shards import choose_shards
from megascale_kernels.moe.experts import moe_experts
from megascale_kernels.moe.moe_config import MoeConfig

Layer = Callable[[Tensor, Tensor, Tensor, Tensor, Tensor], Tensor]


def all_products(given: Operands, counts: list[int]) -> Call:
    """The two grouped products and their four gradients: `torch._grouped_mm` on rows that lie as they should."""
    experts, _, inner, hidden = given.w_in.shape
    ends = torch.tensor(counts, device=given.x.device).cumsum(0).to(torch.int32)
    rows, back = (torch.randn(sum(counts), hidden, device=given.x.device, dtype=given.x.dtype) for _ in range(2))
    h = torch.randn(sum(counts), inner, device=given.x.device, dtype=given.x.dtype)
    both = torch.randn(sum(counts), 2 * inner, device=given.x.device, dtype=given.x.dtype)
    up = given.w_in.view(experts, 2 * inner, hidden)
    pairs = (
        (rows, up.transpose(1, 2)), (h, given.w_out.transpose(1, 2)), (back, given.w_out), (both, up), (back.t(), h),
        (both.t(), rows),
    )  # fmt: skip

    def call() -> None:
        for left, right in pairs:
            torch._grouped_mm(left, right, offs=ends)  # noqa: SLF001 - torch's only name for it

    return call


def differentiated(layer: Layer, given: Operands, grad: Tensor) -> Callable[[], tuple[Tensor, ...]]:
    """Forward and backward of a layer, as training makes them."""
    leaves = [tensor.detach().requires_grad_() for tensor in (given.x, given.gates, given.w_in, given.w_out)]

    def call() -> tuple[Tensor, ...]:
        x, gates, w_in, w_out = leaves
        out = layer(x, given.ids, gates, w_in, w_out)
        return torch.autograd.grad(out, leaves, grad)

    return call


def measure_training(
    shape: MoeShape, workspace: Workspace, config: MoeConfig, turns: Turns, seed: int, *, more: dict[str, MoeConfig]
) -> MoeRow:
    """One row, as `measure_layer` makes it of the forward alone. Collective."""
    given = operands(shape, workspace, seed)
    cut = by_shards(given, shape.shards)
    grad = torch.randn_like(given.x)

    def by(path: Callable[..., Tensor], **how: object) -> Callable[[], tuple[Tensor, ...]]:
        def layer(x: Tensor, ids: Tensor, gates: Tensor, w_in: Tensor, w_out: Tensor) -> Tensor:
            return path(x, ids, gates, w_in, w_out, workspace, tensor_parallel=shape.shards, **how)

        return differentiated(layer, given, grad)

    def serial(x: Tensor, ids: Tensor, gates: Tensor, w_in: Tensor, w_out: Tensor) -> Tensor:
        ids, gates = choose_shards(ids, gates, w_in.shape[0], shape.shards)
        return all_to_all.moe(x, ids, gates, w_in, w_out, workspace)

    plain = differentiated(serial, given, grad)
    words = " ".join(
        f"{name}={value}" for name, value in config._asdict().items() if value != MoeConfig._field_defaults[name]
    )
    kernels, tuned = by(moe_experts, config=config, fused=True), by(moe_experts, fused=False)
    ours = kernels if words else by(moe_path.moe_experts)
    try:
        expected = plain()
        distance = _distance(kernels(), expected, workspace)
        workspace.check()
        settle(ours, workspace)
        distance = max(distance, _distance(ours(), expected, workspace))
        workspace.check()
    except Exception as error:  # noqa: BLE001 - a layer that fails is a row that says so
        return MoeRow(shape, words, {}, math.nan, f"{type(error).__name__}: {str(error).splitlines()[0]}")
    way = way_of(workspace, asked=bool(words))
    if not distance < WRONG:
        return MoeRow(shape, words, {}, distance, "wrong", way)
    tokens = copies(given, workspace)
    tuned_distance = _distance(tuned(), expected, workspace)
    calls: dict[str, Call] = {
        "products": all_products(given, local_share(shape, cut.ids, workspace)),
        "bytes": lambda: (tokens(), tokens()),
        "plain": plain,
        "tuned": tuned,
        "kernels": kernels,
        "ours": ours,
        **{name: by(moe_experts, config=other, fused=True) for name, other in more.items()},
    }
    mine = ("kernels", "ours", *more)
    measured = measure(calls, **turns._asdict(), group=workspace.group, check=workspace.check, risky=mine)
    seconds = {name: value for name, value in measured.seconds.items() if math.isfinite(value)}
    notes = [f"{name}: {error}" for name, error in measured.errors.items()]
    if not tuned_distance < WRONG:
        notes.append(f"tuned is wrong: {tuned_distance:.1e}")
    return MoeRow(shape, words, seconds, distance, "; ".join(notes), way)


def _distance(ours: tuple[Tensor, ...], plain: tuple[Tensor, ...], workspace: Workspace) -> float:
    """The largest relative distance of a gradient, over ranks."""
    each = [
        (one.double() - other.double()).norm() / other.double().norm() for one, other in zip(ours, plain, strict=True)
    ]
    largest = torch.stack(each).max()
    dist.all_reduce(largest, op=dist.ReduceOp.MAX, group=workspace.group)
    return float(largest)
