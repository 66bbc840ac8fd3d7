# SPDX-License-Identifier: Apache-2.0
"""What a row tile costs a MoE layer's products of which half is padding, in times of a whole one.

    torchrun --nproc-per-node 2 kernels/benchmarks/moe_half_tiles.py

Every expert gets the same rows: four, four and a half, or five row tiles. As dealt in turn every program then has the
same work: 66 experts of a rank times five row tiles times columns is a multiple of 132, and five has no factor in
common with 132. So a half tile costs (T(4.5) - T(4)) / (T(5) - T(4)) of a whole one. For that all tiles are dealt in
turn and whole.
"""

import os
import sys

import torch
import torch.distributed as dist
from megascale_kernels import MoeConfig, Workspace
from megascale_kernels.bench.moe.measure import STEPS, Operands, stepwise
from megascale_kernels.bench.moe.moe_shapes import MoeShape
from megascale_kernels.moe.launch import planned
from megascale_kernels.moe.tables import Sizes

RANKS, EXPERTS, TOP_K, TILE_ROWS = 2, 132, 8, 128
HEIGHTS = (4.0, 4.5, 5.0)  # row tiles of an expert
SIZES = ((2048, 640), (2048, 1280), (4096, 640), (1024, 2560))  # H, I
TURNS = 12


def operands(shape: MoeShape, rank: int, rows: int) -> Operands:
    """Every expert gets `rows` rows, half of them from each rank; a token's experts are neighbours."""
    experts = EXPERTS // RANKS
    tokens = rows * EXPERTS // (RANKS * TOP_K)
    ids = (torch.arange(tokens * TOP_K, device="cuda") % EXPERTS).int().view(tokens, TOP_K)
    torch.manual_seed(rank)

    def drawn(*size: int) -> torch.Tensor:
        return torch.randn(size, device="cuda", dtype=torch.bfloat16).mul_(shape.hidden**-0.5)

    return Operands(
        drawn(tokens, shape.hidden), ids, torch.rand(tokens, TOP_K, device="cuda"),
        drawn(experts, 2, shape.inner, shape.hidden), drawn(experts, shape.hidden, shape.inner),
    )  # fmt: skip


def microseconds(workspace: Workspace, hidden: int, inner: int, rows: int) -> list[float]:
    """Of the three launches, the median, the slower rank."""
    shape = MoeShape("even", EXPERTS, TOP_K, hidden, inner, rows * EXPERTS // TOP_K)
    given = operands(shape, workspace.rank, rows)
    config = MoeConfig(lead_rows=0, half_rows=0, shifted=False, cut=False)
    sizes = Sizes(RANKS, workspace.max_rows // RANKS, TOP_K, EXPERTS // RANKS, hidden, inner)
    out = torch.empty_like(given.x)
    call = stepwise(planned(*given, out, sizes, workspace, config), given, out)
    times = torch.tensor([call() for _ in range(TURNS)][2:], device="cuda").median(dim=0).values
    dist.all_reduce(times, op=dist.ReduceOp.MAX)
    workspace.check()
    found: list[float] = (1e6 * times).tolist()
    return found


def main() -> int:
    """Print the table: 0 when it worked, 2 where there are no two ranks."""
    if int(os.environ.get("WORLD_SIZE", "1")) != RANKS or torch.cuda.device_count() < RANKS:
        print("moe_half_tiles: start it by torchrun --nproc-per-node 2, with two GPUs", file=sys.stderr)
        return 2
    device = torch.device("cuda", int(os.environ["LOCAL_RANK"]))
    torch.cuda.set_device(device)
    dist.init_process_group("nccl", device_id=device)
    speaks = dist.get_rank() == 0
    if speaks:
        print(f"{'H':>6} {'I':>6} {'launch':>9} " + " ".join(f"{height:>7g} tiles" for height in HEIGHTS) + "  a half")
    most = round(max(HEIGHTS) * TILE_ROWS) * EXPERTS // TOP_K
    for hidden, inner in SIZES:
        workspace = Workspace(max_rows=most, max_gather_cols=hidden, deadline_s=10.0, adaptive=False)
        found = [microseconds(workspace, hidden, inner, round(height * TILE_ROWS)) for height in HEIGHTS]
        for name, (whole, half, more) in zip(STEPS, zip(*found, strict=True), strict=True):
            if speaks:
                told = " ".join(f"{one:>10.1f} us" for one in (whole, half, more))
                print(f"{hidden:>6} {inner:>6} {name:>9} {told} {(half - whole) / (more - whole):>7.2f}", flush=True)
        workspace.close()
    dist.destroy_process_group()
    return 0


if __name__ == "__main__":
    sys.exit(main())
