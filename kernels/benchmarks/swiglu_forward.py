# SPDX-License-Identifier: Apache-2.0
"""What each way to SwiGLU behind a product takes: `torchrun --nproc-per-node 2 kernels/benchmarks/swiglu_forward.py`.

swiglu(gather(x) @ w) at sizes of `bench train`, until the contest between its ways is decided: our kernel with SwiGLU
in it, the same with a kernel behind it, cuBLAS in pieces with one behind each. All in turn on the slower rank; prints
the medians of that contest, and its turns. With gates and values kept as in training, and, `--inference`, without.
Sizes as arguments: MxFxd, F and d over all ranks.
"""

import argparse
import os
from statistics import median

import torch
import torch.distributed as dist
from megascale_kernels import Workspace
from megascale_kernels.bench.rows import config_text
from megascale_kernels.dispatch import gated
from megascale_kernels.swiglu import silu_times_value

SIZES = "8192x14336x4096 4096x14336x4096 8192x28672x8192 4096x28672x8192 8192x25600x5120 4096x25600x5120"
ROUNDS = 8
SLEEP_CYCLES = 200_000  # the host is ahead when the kernel begins


def measure(m: int, inner: int, hidden: int, *, keeps_wide: bool) -> None:
    """One size, all ways; the first rank prints."""
    ranks = dist.get_world_size()
    share = inner // ranks
    workspace = Workspace(max_rows=m, max_gather_cols=hidden, max_scatter_cols=hidden)
    x = torch.randn(m // ranks, hidden, device="cuda", dtype=torch.bfloat16)
    w = (torch.randn(2 * share, hidden, device="cuda", dtype=torch.bfloat16) * hidden**-0.5).T
    held = None
    while held is None or not held.decided:
        gated.product_and_swiglu(x, w, None, workspace, keeps_wide=keeps_wide, gathered=keeps_wide)
        (held,) = workspace.planned.contests.values()
    workspace.check()
    wide = torch.randn(m, 2 * share, device="cuda", dtype=torch.bfloat16)
    behind = median(timed(wide) for _ in range(ROUNDS))
    if dist.get_rank() == 0:
        told = "gates and values kept" if keeps_wide else "inference"
        print(f"M {m}, F {inner}, d {hidden}, {told}: the kernel behind a product alone {behind:.4f} ms")
        for way, seconds in sorted(held.seconds.items(), key=lambda pair: pair[1]):
            text = config_text(None if way is None else way.config)
            ends = "" if way is None else ", fused" if way.is_fused else ", apart"
            turns = " ".join(f"{one * 1e3:.4f}" for one in held.turns[way])
            print(f"  {text + ends:46s} {seconds * 1e3:.4f} ms ({turns})", flush=True)


def timed(wide: torch.Tensor) -> float:
    """Milliseconds of the kernel alone."""
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))  # type: ignore[no-untyped-call]  # torch gives it no types
    torch.cuda._sleep(SLEEP_CYCLES)  # type: ignore[no-untyped-call]  # noqa: SLF001 - it has no public name
    begin.record()
    silu_times_value(wide)
    end.record()
    torch.cuda.synchronize()
    return float(begin.elapsed_time(end))


def main() -> None:
    """Each size in turn."""
    made = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    made.add_argument("--inference", action="store_true", help="gates and values are not kept")
    made.add_argument("sizes", nargs="*", help="MxFxd, F and d over all ranks")
    options = made.parse_args()
    local = int(os.environ["LOCAL_RANK"])
    torch.cuda.set_device(local)
    dist.init_process_group("nccl", device_id=torch.device("cuda", local))
    for size in options.sizes or SIZES.split():
        m, inner, hidden = map(int, size.split("x"))
        measure(m, inner, hidden, keeps_wide=not options.inference)
        torch.cuda.empty_cache()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
