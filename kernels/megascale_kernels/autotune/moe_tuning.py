# SPDX-License-Identifier: Apache-2.0
"""Measure the ways to run one MoE layer under three skews, in turn with the serial path, and remember the best.

`torchrun --nproc-per-node 2 -m megascale_kernels.autotune moe --tokens 8192 --experts 64 --top-k 6 --hidden 2048
--inner 1408`, with `--tensor-parallel 2` where each expert is cut between two ranks.

A way that is fastest when the load is even may be slow when it is not: the one is kept whose worst ratio to the fastest
of its skew is least (COMET's standard deviations: 0, 0.032 and 0.05). Rank 0 decides, writes it down and hands it out.
"""

import argparse
import json
import math
import os
import sys
import time
from collections.abc import Mapping, Sequence
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from megascale_kernels.autotune import store
from megascale_kernels.autotune.handout import from_rank_zero
from megascale_kernels.autotune.moe_choosing import FILE, moe_key, open_moe_table, read_moe_config
from megascale_kernels.autotune.timing import Call, measure
from megascale_kernels.memory.workspace import Workspace
from megascale_kernels.moe.assignment import flags_of, likely_ways
from megascale_kernels.moe.experts import moe_experts, why_sizes_cannot
from megascale_kernels.moe.moe_config import MoeConfig
from megascale_kernels.moe.skewed import SKEWS, drawn_routing
from megascale_kernels.moe.tables import Sizes

ROUNDS = 9
SERIAL = "serial"
PROGRAM = "megascale_kernels.autotune moe"


class TunedMoe(NamedTuple):
    """What tuning one layer found.

    Attributes:
        config: the way that was kept; None when the serial path was.
        seconds: of each way, None the serial path, by skew; infinite where it failed.
        left_out: skews for which the budget did not suffice.
    """

    config: MoeConfig | None
    seconds: dict[MoeConfig | None, list[float]]
    left_out: int


def steadiest(seconds: Mapping[MoeConfig | None, Sequence[float]]) -> MoeConfig | None:
    """The way whose worst ratio to the fastest of its skew is least; the first of equals, none that failed anywhere.

    Args:
        seconds: of each way by skew, None the serial path.
    """
    sound = {way: times for way, times in seconds.items() if all(math.isfinite(one) for one in times)}
    if not sound:
        return None
    best = [min(times) for times in zip(*sound.values(), strict=True)]
    return min(sound, key=lambda way: max(one / least for one, least in zip(sound[way], best, strict=True)))


def tune_moe(sizes: Sizes, workspace: Workspace, *, budget_s: float = 30.0, seed: int = 0) -> TunedMoe:
    """Find the way to run a layer by measuring. Collective; allocates operands.

    Args:
        sizes: of the layer, `pitch` tokens on every rank.
        workspace: large enough, on CUDA.
        budget_s: no further skew is begun after this; the first is measured in any case.
        seed: of operands and routings.

    Returns:
        what was found; `moe_experts` runs with it from now on, in this process and, through the file, in later ones.

    Raises:
        ValueError: a budget that makes no sense, or a workspace that is not on CUDA.
        WorkspaceTooSmall: the layer does not fit.
        KernelError: the workspace was already broken, or rank 0 went missing.
    """
    if workspace.device.type != "cuda":
        raise ValueError(f"tune_moe: the workspace is on {workspace.device}; without CUDA nothing is measured")
    if not 0 < budget_s < math.inf:
        raise ValueError(f"tune_moe(budget_s={budget_s}): give a positive number of seconds")
    workspace.check()
    table, started_s = open_moe_table(workspace), time.monotonic()
    ways = [way for way in likely_ways(sizes) if flags_of(sizes, way) <= workspace.layout.channels]
    seconds: dict[MoeConfig | None, list[float]] = {way: [] for way in (*ways, None)}
    done = 0
    for std in SKEWS:
        if done and _over(workspace, mine=time.monotonic() - started_s > budget_s):
            break
        found = _compare(sizes, ways, std, workspace, seed)
        for way, times in seconds.items():
            times.append(found[way])
        done += 1
    config = steadiest(seconds)
    kept = seconds[config]
    said = json.dumps({"config": config and config._asdict(), "time_s": max(kept), "serial_s": max(seconds[None])})
    heard = json.loads(
        from_rank_zero(workspace.group, workspace.rank, workspace.world_size, said, "MoE tuning result")
    )  # fmt: skip
    decided = heard["config"] and read_moe_config(heard["config"])
    table.learn(sizes, decided)
    workspace.forget_plans()
    if workspace.rank == 0 and math.isfinite(heard["time_s"]):
        entry = store.Entry(decided, heard["time_s"], heard["serial_s"])
        store.write(store.cache_file(FILE), table.environment, moe_key(sizes), entry)
    return TunedMoe(decided, seconds, len(SKEWS) - done)


class _Given(NamedTuple):
    """A layer's operands on this rank."""

    x: Tensor
    ids: Tensor
    gates: Tensor
    w_in: Tensor
    w_out: Tensor


def _operands(sizes: Sizes, std: float, workspace: Workspace, seed: int) -> _Given:
    device, dtype = workspace.memory.device, workspace.dtype
    generator = torch.Generator(device).manual_seed(seed + 104729 * (workspace.rank + 1))

    def values(*size: int, scale: float) -> Tensor:
        return torch.randn(size, generator=generator, device=device, dtype=dtype).mul_(scale)

    ids, gates = drawn_routing(
        sizes.experts * sizes.world_size // sizes.shards, sizes.most_here, sizes.pitch, std, seed=seed,
        rank=workspace.rank, device=device,
    )  # fmt: skip
    return _Given(
        values(sizes.pitch, sizes.hidden, scale=1.0), ids, gates,
        values(sizes.experts, 2, sizes.inner, sizes.hidden, scale=sizes.hidden**-0.5),
        values(sizes.experts, sizes.hidden, sizes.inner, scale=sizes.inner**-0.5),
    )  # fmt: skip


def _compare(
    sizes: Sizes, ways: Sequence[MoeConfig], std: float, workspace: Workspace, seed: int
) -> dict[MoeConfig | None, float]:
    """Seconds of each way under one skew; after a failure the workspace is reset."""
    given = _operands(sizes, std, workspace, seed)
    shards = sizes.shards
    calls: dict[str, Call] = {SERIAL: lambda: moe_experts(*given, workspace, fused=False, tensor_parallel=shards)}
    for place, way in enumerate(ways):
        calls[str(place)] = lambda way=way: moe_experts(  # type: ignore[misc]  # its own
            *given, workspace, config=way, fused=True, tensor_parallel=shards
        )
    names = [str(place) for place in range(len(ways))]
    found = measure(calls, rounds=ROUNDS, group=workspace.group, check=workspace.check, risky=names).seconds
    if not all(math.isfinite(found[name]) for name in names):
        workspace.reset()
    return {None: found[SERIAL], **{way: found[name] for way, name in zip(ways, names, strict=True)}}


def _over(workspace: Workspace, *, mine: bool) -> bool:
    """Whether rank 0's time is up; a device collective, like everything around it."""
    flag = torch.tensor([mine and workspace.rank == 0], dtype=torch.int32, device=workspace.device)
    dist.all_reduce(flag, op=dist.ReduceOp.MAX, group=workspace.group)
    return bool(flag.item())


def parser() -> argparse.ArgumentParser:
    """The command line."""
    made = argparse.ArgumentParser(
        prog=f"python -m {PROGRAM}",
        description="Measure the ways to run a MoE layer and remember the steadiest. Run it under torchrun.",
    )
    for name, told in (
        ("--tokens", "of all ranks"), ("--experts", "whole ones, of all ranks"), ("--top-k", "experts of a token"),
        ("--hidden", "H"), ("--inner", "I of a whole expert"),
    ):  # fmt: skip
        made.add_argument(name, type=int, required=True, help=told)
    made.add_argument(
        "--tensor-parallel", type=int, default=1, metavar="S", help="ranks among which each expert is cut along I (1)"
    )
    made.add_argument("--budget-s", type=float, default=30.0, help="begin no further skew after this")
    return made


def complaint(options: argparse.Namespace, environment: dict[str, str], gpus: int) -> str | None:
    """What is wrong with the request, in one sentence; None when nothing is."""
    given = (options.tokens, options.experts, options.top_k, options.hidden, options.inner, options.tensor_parallel)
    if min(given) < 1:
        return "--tokens, --experts, --top-k, --hidden, --inner and --tensor-parallel are positive numbers"
    if options.top_k > options.experts or not 0 < options.budget_s < math.inf:
        return (
            f"--top-k {options.top_k} of {options.experts} experts, --budget-s {options.budget_s}: at most all "
            "experts, and a positive number of seconds"
        )
    if "RANK" not in environment or "WORLD_SIZE" not in environment:
        return f"no ranks: start it with torchrun --nproc-per-node GPUS -m {PROGRAM} ..."
    world_size = int(environment["WORLD_SIZE"])
    if gpus < world_size:
        return f"{world_size} ranks want a GPU each, but torch sees {gpus} on this machine"
    return _does_not_divide(options, world_size) or _kernels_cannot(options, world_size)


def _does_not_divide(options: argparse.Namespace, world_size: int) -> str | None:
    shards = options.tensor_parallel
    if world_size % shards:
        return f"--tensor-parallel {shards}: {world_size} ranks cannot be divided into groups of {shards}"
    groups = world_size // shards
    if options.tokens % world_size:
        return f"--tokens {options.tokens} does not divide among {world_size} ranks"
    if options.experts % groups:
        among = f"{world_size} ranks" if shards == 1 else f"{groups} groups of {shards} ranks"
        return f"--experts {options.experts} does not divide among {among}"
    if options.inner % shards:
        return f"--inner {options.inner} cannot be cut into {shards} shards (--tensor-parallel)"
    return None


def _kernels_cannot(options: argparse.Namespace, world_size: int) -> str | None:
    sizes = sizes_of(options, world_size)
    why = why_sizes_cannot(sizes.top_k, sizes.experts, sizes.hidden, sizes.inner, sizes.shards)
    return f"there is nothing to tune: {why}, so this layer takes the serial path" if why else None


def sizes_of(options: argparse.Namespace, world_size: int) -> Sizes:
    """The layer that is asked for, as one of so many ranks has it: a shard is an expert (`expert_shards`)."""
    shards = options.tensor_parallel
    return Sizes(
        world_size, options.tokens // world_size, options.top_k * shards, options.experts * shards // world_size,
        options.hidden, options.inner // shards, shards=shards,
    )  # fmt: skip


def main(arguments: list[str]) -> int:
    """Run the command; 0 when it worked, 2 for a request that makes no sense."""
    options = parser().parse_args(arguments)
    wrong = complaint(options, dict(os.environ), torch.cuda.device_count())
    if wrong is not None:
        if os.environ.get("RANK", "0") == "0":
            print(f"{PROGRAM}: {wrong}", file=sys.stderr)
        return 2
    from datetime import timedelta

    local = int(os.environ.get("LOCAL_RANK", os.environ["RANK"]))
    torch.cuda.set_device(local)
    dist.init_process_group("nccl", device_id=torch.device("cuda", local), timeout=timedelta(seconds=300))
    try:
        workspace = Workspace(max_rows=options.tokens, max_gather_cols=options.hidden)
        tuned = tune_moe(sizes_of(options, dist.get_world_size()), workspace, budget_s=options.budget_s)
        if dist.get_rank() == 0:
            for way, times in sorted(tuned.seconds.items(), key=lambda pair: max(pair[1])):
                told = "serial path" if way is None else str(way)
                chosen = "chosen" if way == tuned.config else ""
                print(f"{chosen:7s}" + "".join(f"{one * 1e3:9.3f}" for one in times) + f" ms  {told}")
            if tuned.left_out:
                print(f"left out: {tuned.left_out} skews (budget of {options.budget_s:g} s)")
    finally:
        dist.destroy_process_group()
    return 0
