# SPDX-License-Identifier: Apache-2.0
"""Ways to run a MoE layer's kernels in turn, of layers that are given, beside its products and its bytes alone.

    torchrun --nproc-per-node 2 kernels/benchmarks/moe_ways_in_turn.py 'chunks=1/follows=0;early=0' 16,2,2352,1200,6624

A way is NAME=VALUE;NAME=VALUE of `MoeConfig`, or "default"; a layer is experts, top k, H, I and tokens of all ranks.
Layers with the same experts and top k share what is compiled. Milliseconds, the maximum over ranks, the median of nine
rounds of eight calls in a row, and shares of the first way; results must be equal, bit for bit.
"""

import math
import os
import sys

import torch
import torch.distributed as dist
from megascale_kernels import MoeConfig, Workspace, moe_experts
from megascale_kernels.autotune.timing import measure
from megascale_kernels.bench.moe.measure import Operands, copies, local_share, operands, products
from megascale_kernels.bench.moe.moe_command import settings
from megascale_kernels.bench.moe.moe_shapes import MoeShape

ROUNDS, IN_A_ROW = 9, 8
ALONE = ("products", "bytes")


def way_of(words: str) -> MoeConfig:
    """The configuration that a way asks for."""
    return MoeConfig(**({} if words == "default" else settings(words.split(";"))))


def seconds_of(shape: MoeShape, ways: dict[str, MoeConfig]) -> dict[str, float]:
    """Each way's seconds, and those of products and bytes alone. Collective."""
    workspace = Workspace(max_rows=shape.tokens, max_gather_cols=shape.hidden, adaptive=False, deadline_s=10.0)
    given: Operands = operands(shape, workspace, 0)
    counts = local_share(shape, given.ids, workspace)
    calls = {"products": products(given, counts)["products"], "bytes": copies(given, workspace)}
    for name, way in ways.items():
        calls[name] = lambda way=way: moe_experts(*given, workspace, config=way, fused=True)  # type: ignore[misc]  # its own
    outs = [calls[name]() for name in ways]
    workspace.check()
    assert all(torch.equal(out, outs[0]) for out in outs), shape.label
    measured = measure(
        calls, rounds=ROUNDS, in_a_row=IN_A_ROW, group=workspace.group, check=workspace.check, risky=tuple(ways)
    )
    workspace.close()
    assert not measured.errors, measured.errors
    return measured.seconds


def main() -> None:
    """Measure and print."""
    local = int(os.environ["LOCAL_RANK"])
    torch.cuda.set_device(local)
    dist.init_process_group("nccl", device_id=torch.device("cuda", local))
    ways = {words: way_of(words) for words in sys.argv[1].split("/")}
    shares: dict[str, list[float]] = {name: [] for name in ways}
    is_speaker = dist.get_rank() == 0
    if is_speaker:
        print(f"{'layer':24}" + "".join(f"{name:>10}" for name in ALONE) + "  " + "  ".join(ways), flush=True)
    for words in sys.argv[2:]:
        experts, top_k, hidden, inner, tokens = map(int, words.split(","))
        seconds = seconds_of(MoeShape("given", experts, top_k, hidden, inner, tokens), ways)
        for name, found in shares.items():
            found.append(seconds[name] / seconds[next(iter(ways))])
        if is_speaker:
            alone = "".join(f"{seconds[name] * 1e3:10.4f}" for name in ALONE)
            each = "".join(f"  {seconds[name] * 1e3:8.4f} {found[-1]:.3f}" for name, found in shares.items())
            print(f"{words:24}{alone}{each}", flush=True)
    if is_speaker:
        means = [math.exp(sum(map(math.log, found)) / len(found)) for found in shares.values()]
        print(f"{'geometric mean':44}" + "".join(f"  {'':8} {mean:.3f}" for mean in means), flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
