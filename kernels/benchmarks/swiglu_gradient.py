# SPDX-License-Identifier: Apache-2.0
"""What each way to SwiGLU's gradient takes: `torchrun --nproc-per-node 2 kernels/benchmarks/swiglu_gradient.py`.

The backward of swiglu(wide) @ w at sizes of `bench train`: all ways of a contest (`dispatch/gated.py`), by its own
turns, and the kernel behind a product alone. Sizes as arguments: MxFxd, F and d over all ranks.
"""

import os
import sys
from statistics import median

import torch
import torch.distributed as dist
from megascale_kernels import Workspace
from megascale_kernels.bench.rows import config_text
from megascale_kernels.dispatch import gated
from megascale_kernels.swiglu import gradient_of_wide

SIZES = "8192x14336x4096 4096x14336x4096 8192x28672x8192 4096x28672x8192 8192x25600x5120 4096x25600x5120"
ROUNDS = 8
SLEEP_CYCLES = 200_000  # the host is ahead when the kernel begins


def measure(m: int, inner: int, hidden: int) -> None:
    """One size, all ways; the first rank prints."""
    ranks = dist.get_world_size()
    share = inner // ranks
    workspace = Workspace(max_rows=m, max_gather_cols=hidden, max_scatter_cols=hidden)
    wide, product = (torch.randn(m, columns, device="cuda", dtype=torch.bfloat16) for columns in (2 * share, share))
    w = torch.randn(hidden, share, device="cuda", dtype=torch.bfloat16).T * inner**-0.5
    dout = torch.randn(m // ranks, hidden, device="cuda", dtype=torch.bfloat16)
    held = None
    while held is None or not held.decided:
        gated.gradient_in_place(dout, w.T, wide, workspace)
        (held,) = workspace.planned.contests.values()
    workspace.check()
    behind = median(timed(wide, product) for _ in range(ROUNDS))
    if dist.get_rank() == 0:
        print(f"M {m}, F {inner}, d {hidden}: the kernel behind a product alone {behind:.4f} ms")
        for way, seconds in sorted(held.seconds.items(), key=lambda pair: pair[1]):
            text = config_text(None if way is None else way.config)
            ends = "" if way is None else ", fused" if way.is_fused else ", apart"
            turns = " ".join(f"{one * 1e3:.4f}" for one in held.turns[way])
            print(f"  {text + ends:46s} {seconds * 1e3:.4f} ms ({turns})", flush=True)


def timed(wide: torch.Tensor, product: torch.Tensor) -> float:
    """Milliseconds of the kernel alone."""
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))  # type: ignore[no-untyped-call]  # torch gives it no types
    torch.cuda._sleep(SLEEP_CYCLES)  # type: ignore[no-untyped-call]  # noqa: SLF001 - it has no public name
    begin.record()
    gradient_of_wide(wide, product)
    end.record()
    torch.cuda.synchronize()
    return float(begin.elapsed_time(end))


def main() -> None:
    """Each size in turn."""
    local = int(os.environ["LOCAL_RANK"])
    torch.cuda.set_device(local)
    dist.init_process_group("nccl", device_id=torch.device("cuda", local))
    for size in sys.argv[1:] or SIZES.split():
        m, inner, hidden = map(int, size.split("x"))
        measure(m, inner, hidden)
        torch.cuda.empty_cache()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
