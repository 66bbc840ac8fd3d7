# SPDX-License-Identifier: Apache-2.0
"""What each way to SwiGLU behind a product takes: `torchrun --nproc-per-node 2 kernels/benchmarks/swiglu_forward.py`.

swiglu(gather(x) @ w) at sizes of `bench train`: our kernel in wide and in narrow tiles with SwiGLU in it, the same with
a kernel behind it, cuBLAS in pieces and the serial path with one behind them. All in turn, in another order each round,
on the slower rank; medians, and the turns themselves. With gates and values kept as
in training, and, `--inference`, without. Sizes as arguments: MxFxd, F and d over all ranks.
"""

import argparse
import os
from collections.abc import Callable
from statistics import median

import torch
import torch.distributed as dist
from megascale_kernels import Workspace
from megascale_kernels.autotune.timing import order_of
from megascale_kernels.bench.rows import config_text
from megascale_kernels.dispatch import gated
from megascale_kernels.dispatch.gated import Gated, Way
from megascale_kernels.planning.config import Config
from megascale_kernels.swiglu import silu_times_value

SIZES = "8192x14336x4096 4096x14336x4096 8192x28672x8192 4096x28672x8192 8192x25600x5120 4096x25600x5120"
ROUNDS = 12
IN_A_ROW = 4  # calls of a turn, between two readings of the clock
SLEEP_CYCLES = 2_000_000  # the host is ahead when the first begins
OURS = [Config(128, columns, group_m=16, kernel="hopper", planned=True) for columns in (256, 128)]
PIECES = [Config(kernel="cublas", pieces=pieces) for pieces in (1, 2)]
WAYS: list[Way | None] = [
    *(Way(config, is_fused=fused) for config in OURS for fused in (True, False)),
    *(Way(config, is_fused=False) for config in PIECES), None,
]  # fmt: skip


def measure(m: int, inner: int, hidden: int, *, keeps_wide: bool) -> None:
    """One size, all ways; the first rank prints."""
    ranks = dist.get_world_size()
    share = inner // ranks
    workspace = Workspace(max_rows=m, max_gather_cols=hidden, max_scatter_cols=hidden, adaptive=False)
    x = torch.randn(m // ranks, hidden, device="cuda", dtype=torch.bfloat16)
    w = (torch.randn(2 * share, hidden, device="cuda", dtype=torch.bfloat16) * hidden**-0.5).T

    def call() -> None:
        gated.product_and_swiglu(x, w, None, workspace, keeps_wide=keeps_wide, gathered=keeps_wide)

    call()
    plans = workspace.planned.plans
    (key,) = [key for key in plans if isinstance(key, tuple) and key[0] == "ag_gemm, swiglu"]
    made: Gated = plans[key]
    times: dict[Way | None, list[float]] = {way: [] for way in WAYS}
    for number in range(ROUNDS + 1):
        for way in order_of(WAYS, number):
            plans[key] = made._replace(way=way)  # instead of the model's
            took_ms = turn(call)
            if number:  # the first round compiles
                times[way].append(took_ms)
    workspace.check()
    wide = torch.randn(m, 2 * share, device="cuda", dtype=torch.bfloat16)
    behind = median(turn(lambda: silu_times_value(wide)) for _ in range(ROUNDS))
    if dist.get_rank() == 0:
        told = "gates and values kept" if keeps_wide else "inference"
        print(f"M {m}, F {inner}, d {hidden}, {told}: the kernel behind a product alone {behind:.4f} ms")
        for way, turns in sorted(times.items(), key=lambda pair: median(pair[1])):
            text = config_text(None if way is None else way.config)
            ends = "" if way is None else ", fused" if way.is_fused else ", apart"
            print(f"  {text + ends:46s} {median(turns):.4f} ms ({' '.join(f'{one:.4f}' for one in turns)})", flush=True)


def turn(call: Callable[[], object]) -> float:
    """Milliseconds a call takes, on the slower rank."""
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))  # type: ignore[no-untyped-call]  # torch gives it no types
    dist.barrier()
    torch.cuda._sleep(SLEEP_CYCLES)  # type: ignore[no-untyped-call]  # noqa: SLF001 - it has no public name
    call()
    begin.record()
    for _ in range(IN_A_ROW):
        call()
    end.record()
    torch.cuda.synchronize()
    took = torch.tensor(begin.elapsed_time(end) / IN_A_ROW, device="cuda")
    dist.all_reduce(took, op=dist.ReduceOp.MAX)
    return float(took)


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
