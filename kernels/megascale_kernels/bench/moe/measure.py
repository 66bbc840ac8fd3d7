# SPDX-License-Identifier: Apache-2.0
"""Measure one layer: ours, our kernels, plain serial, tuned serial, its products and its bytes alone, in turn."""

import math
import time
from collections.abc import Callable
from itertools import pairwise
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from megascale_kernels.autotune.contest import settle
from megascale_kernels.autotune.timing import Call, measure
from megascale_kernels.bench.moe.moe_shapes import MoeShape, routing
from megascale_kernels.dispatch import moe_path
from megascale_kernels.memory.workspace import Workspace
from megascale_kernels.moe import all_to_all
from megascale_kernels.moe.expert_shards import choose_shards
from megascale_kernels.moe.experts import moe_experts
from megascale_kernels.moe.launch import MoeLaunch, planned
from megascale_kernels.moe.moe_config import MoeConfig
from megascale_kernels.moe.tables import Sizes

WRONG = 0.02  # relative distance from the serial path; bf16 results differ by 0.003
HOST_CALLS = 8
STEPS = ("route", "dispatch", "combine")


class Turns(NamedTuple):
    """How a contender is timed: in how many rounds, and by how many calls in a row in each."""

    rounds: int
    in_a_row: int


class MoeRow(NamedTuple):
    """What was measured; seconds, NaN where there is none.

    Attributes:
        shape: the layer.
        config: how our kernels ran, where it differs from the default.
        seconds: by contender.
        error: relative distance of ours from the plain serial path, the largest of our ways.
        note: why there is no number.
        way: how ours ran, as its first calls found out: "series", or our kernels with what differs from the default.
    """

    shape: MoeShape
    config: str
    seconds: dict[str, float]
    error: float
    note: str = ""
    way: str = ""

    def of(self, name: str) -> float:
        """Seconds of a contender."""
        return self.seconds.get(name, math.nan)

    @property
    def bound(self) -> float:
        """What could be had: the products alone, or the bytes at the copy engine's rate."""
        return max(self.of("products"), self.of("bytes"))


class Operands(NamedTuple):
    """A layer's operands on this rank; where experts are cut, `ids` and `gates` are those of whole ones."""

    x: Tensor
    ids: Tensor
    gates: Tensor
    w_in: Tensor
    w_out: Tensor


def operands(shape: MoeShape, workspace: Workspace, seed: int) -> Operands:
    """Random ones."""
    device, dtype = workspace.memory.device, workspace.dtype
    generator = torch.Generator(device).manual_seed(seed + 104729 * (workspace.rank + 1))
    experts, inner = shape.experts * shape.shards // workspace.world_size, shape.inner // shape.shards
    tokens = shape.tokens // workspace.world_size

    def values(*size: int, scale: float) -> Tensor:
        return torch.randn(size, generator=generator, device=device, dtype=dtype).mul_(scale)

    ids, gates = routing(shape, tokens, seed, workspace.rank, device)
    return Operands(
        values(tokens, shape.hidden, scale=1.0), ids, gates,
        values(experts, 2, inner, shape.hidden, scale=shape.hidden**-0.5),
        values(experts, shape.hidden, inner, scale=shape.inner**-0.5),
    )  # fmt: skip


def by_shards(given: Operands, shards: int) -> Operands:
    """The same with the shards that tokens chose with their experts, as paths take it that know whole experts alone."""
    ids, gates = choose_shards(given.ids, given.gates, given.w_in.shape[0], shards)
    return given._replace(ids=ids, gates=gates.contiguous())


def products(given: Operands, counts: list[int]) -> dict[str, Call]:
    """The two grouped products alone, on rows that lie as they should: `torch._grouped_mm`; together, and each."""
    experts, _, inner, hidden = given.w_in.shape
    ends = torch.tensor(counts, device=given.x.device).cumsum(0).to(torch.int32)
    rows = torch.randn(sum(counts), hidden, device=given.x.device, dtype=given.x.dtype)
    h = torch.randn(sum(counts), inner, device=given.x.device, dtype=given.x.dtype)
    up, down = given.w_in.view(experts, 2 * inner, hidden).transpose(1, 2), given.w_out.transpose(1, 2)

    def into_h() -> None:
        torch._grouped_mm(rows, up, offs=ends)  # noqa: SLF001 - torch's only name for it

    def out_of_h() -> None:
        torch._grouped_mm(h, down, offs=ends)  # noqa: SLF001 - as above

    def both() -> None:
        into_h()
        out_of_h()

    return {"products": both, "up": into_h, "down": out_of_h}


def copies(given: Operands, workspace: Workspace) -> Call:
    """The tokens to each peer and their results back, by copy engine: what must cross the links at two ranks."""
    shape = given.x.shape
    peers = [rank for rank in range(workspace.world_size) if rank != workspace.rank]
    targets = [workspace.peer(peer, slot, shape, workspace.rank * given.x.numel()) for slot in (0, 1) for peer in peers]

    def call() -> None:
        for target in targets:
            target.copy_(given.x, non_blocking=True)

    return call


def local_share(shape: MoeShape, ids: Tensor, workspace: Workspace) -> list[int]:
    """Pairs of each of this rank's experts, or of the shards of experts that it has; `ids` are those of shards."""
    counts = torch.bincount(ids.view(-1).long(), minlength=shape.experts * shape.shards)
    dist.all_reduce(counts, group=workspace.group)
    experts = shape.experts * shape.shards // workspace.world_size
    mine: list[int] = counts[workspace.rank * experts : (workspace.rank + 1) * experts].tolist()
    return mine


def stepwise(launch: MoeLaunch, given: Operands, out: Tensor) -> Callable[[], list[float]]:
    """Seconds of each of our three launches in one layer, by events between them."""

    def call() -> list[float]:
        events = [torch.cuda.Event(enable_timing=True) for _ in range(4)]  # type: ignore[no-untyped-call]  # torch has no types here
        torch.cuda._sleep(1_500_000)  # type: ignore[no-untyped-call]  # noqa: SLF001 - it has no public name
        events[0].record()
        for step, event in zip(launch.parts(*given, out), events[1:], strict=True):
            step()
            event.record()
        torch.cuda.synchronize()
        return [before.elapsed_time(after) / 1e3 for before, after in pairwise(events)]

    return call


def way_of(workspace: Workspace, *, asked: bool) -> str:
    """How a layer runs whose first calls have found it out, in a few words.

    Args:
        workspace: on which this one layer was called.
        asked: a configuration was asked for, so nothing had to be found.
    """
    held = [contest for contest in workspace.planned.contests.values() if contest is not None]
    if asked or not held:
        return "kernels, as asked for" if asked else "kernels, by the model"
    best, first = held[-1].best, held[-1].ways[0]
    if best is None:
        return "series"
    differing = [f"{name}={value}" for name, value in best._asdict().items() if value != getattr(first, name)]
    return " ".join(["kernels", *differing])


def measure_layer(
    shape: MoeShape, workspace: Workspace, config: MoeConfig, turns: Turns, seed: int, *, more: dict[str, MoeConfig]
) -> MoeRow:
    """One row: check, then time. Collective.

    Args:
        shape: the layer.
        workspace: large enough.
        config: how our kernels run; where it is the default, ours finds its way by its first calls.
        turns: how each contender is timed.
        seed: of operands and routing.
        more: further ways to run our kernels, timed beside them by name.
    """
    given = operands(shape, workspace, seed)
    cut = by_shards(given, shape.shards)
    plain = all_to_all.moe(*cut, workspace)
    differing = {name: value for name, value in config._asdict().items() if value != MoeConfig._field_defaults[name]}
    words = " ".join(f"{name}={value}" for name, value in differing.items())

    def ours_with(how: MoeConfig) -> Tensor:
        return moe_experts(*given, workspace, config=how, fused=True, tensor_parallel=shape.shards)

    def ours() -> Tensor:
        if words:
            return ours_with(config)
        return moe_path.moe_experts(*given, workspace, tensor_parallel=shape.shards)

    try:
        by_kernels = ours_with(config)
        workspace.check()
        settle(ours, workspace)
        found = ours()
        workspace.check()
    except Exception as error:  # noqa: BLE001 - a layer that fails is a row that says so
        return MoeRow(shape, words, {}, math.nan, f"{type(error).__name__}: {str(error).splitlines()[0]}")
    way = way_of(workspace, asked=bool(words))
    each = [(one.double() - plain.double()).norm() / plain.double().norm() for one in (by_kernels, found)]
    distance = torch.stack(each).max()
    dist.all_reduce(distance, op=dist.ReduceOp.MAX, group=workspace.group)
    if not float(distance) < WRONG:
        return MoeRow(shape, words, {}, float(distance), "wrong", way)
    counts = local_share(shape, cut.ids, workspace)
    calls: dict[str, Call] = {
        **products(given, counts),
        "bytes": copies(given, workspace),
        "plain": lambda: all_to_all.moe(*cut, workspace),
        "tuned": lambda: moe_experts(*given, workspace, fused=False, tensor_parallel=shape.shards),
        "kernels": lambda: ours_with(config),
        "ours": ours,
    }
    for name, other in more.items():
        calls[name] = lambda other=other: ours_with(other)  # type: ignore[misc]  # its own
    mine = ("kernels", "ours", *more)
    measured = measure(calls, **turns._asdict(), group=workspace.group, check=workspace.check, risky=mine)
    seconds = {name: value for name, value in measured.seconds.items() if math.isfinite(value)}
    note = "; ".join(f"{name}: {error}" for name, error in measured.errors.items())
    if "kernels" in seconds:
        seconds |= time_steps(shape, workspace, config, cut)
        seconds |= {f"host {name}": host_seconds(calls[name], workspace) for name in ("tuned", "kernels")}
    return MoeRow(shape, words, seconds, float(distance), note, way)


def host_seconds(call: Call, workspace: Workspace) -> float:
    """What a call takes the host, the largest over ranks: the least of several, while the device is busy."""
    times = []
    for _ in range(HOST_CALLS):
        dist.barrier(workspace.group)
        torch.cuda.synchronize()
        torch.cuda._sleep(1_500_000)  # type: ignore[no-untyped-call]  # noqa: SLF001 - it has no public name
        began = time.perf_counter()
        call()
        times.append(time.perf_counter() - began)
    torch.cuda.synchronize()
    longest = torch.tensor(min(times), device="cuda")
    dist.all_reduce(longest, op=dist.ReduceOp.MAX, group=workspace.group)
    return float(longest)


def time_steps(shape: MoeShape, workspace: Workspace, config: MoeConfig, given: Operands) -> dict[str, float]:
    """The medians of our three launches, the largest over ranks; `given` has the ids of shards."""
    ranks, (experts, _, inner, hidden) = workspace.world_size, given.w_in.shape
    pitch, top_k = workspace.max_rows // ranks, given.ids.shape[1]
    sizes = Sizes(ranks, pitch, top_k, experts, hidden, inner, shards=shape.shards)
    out = torch.empty_like(given.x)
    call = stepwise(planned(*given, out, sizes, workspace, config), given, out)
    table = torch.tensor([call() for _ in range(6)][1:], device=given.x.device).median(dim=0).values
    dist.all_reduce(table, op=dist.ReduceOp.MAX, group=workspace.group)
    workspace.check()
    return dict(zip(STEPS, table.tolist(), strict=True))
