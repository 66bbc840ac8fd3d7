# SPDX-License-Identifier: Apache-2.0
"""Tune one shape on the GPUs of this host and remember the result.

`torchrun --nproc-per-node 4 -m megascale_kernels.autotune ag_gemm --m 8192 --n 7168 --k 8192`, or a MoE layer:
`... autotune moe --tokens 8192 --experts 64 --top-k 6 --hidden 2048 --inner 1408` (`moe_tuning.py`;
`--tensor-parallel` where experts are cut).
"""

import argparse
import math
import os
import sys

from megascale_kernels.planning.cost_model import OPERATORS


def parser() -> argparse.ArgumentParser:
    """The command line."""
    made = argparse.ArgumentParser(
        prog="python -m megascale_kernels.autotune",
        description="Measure an overlap operator's configurations and remember the fastest. Run it under torchrun.",
        epilog="`moe --help`: layers of mixtures of experts.",
    )
    made.add_argument("operator", choices=OPERATORS)
    made.add_argument("--m", type=int, required=True, help="rows of the whole input")
    made.add_argument("--n", type=int, required=True, help="columns of the weight on one rank")
    made.add_argument("--k", type=int, required=True, help="rows of the weight on one rank")
    made.add_argument("--dtype", choices=("bfloat16", "float16"), default="bfloat16")
    made.add_argument("--budget-s", type=float, default=20.0, help="begin no further candidate after this")
    return made


def complaint(options: argparse.Namespace, environment: dict[str, str], gpus: int) -> str | None:
    """What is wrong with the request, in one sentence; None when nothing is."""
    if min(options.m, options.n, options.k) < 1:
        return f"--m {options.m} --n {options.n} --k {options.k}: sizes must be positive"
    if not 0 < options.budget_s < math.inf:
        return f"--budget-s {options.budget_s}: give a positive number of seconds"
    if "RANK" not in environment or "WORLD_SIZE" not in environment:
        return "no ranks: start it with torchrun --nproc-per-node GPUS -m megascale_kernels.autotune ..."
    world_size = int(environment["WORLD_SIZE"])
    if gpus < world_size:
        return f"{world_size} ranks want a GPU each, but torch sees {gpus} on this machine"
    if options.operator != "gemm_ar" and options.m % world_size:
        return f"--m {options.m} does not divide among {world_size} ranks: choose a multiple of {world_size}"
    return None


def main(arguments: list[str] | None = None) -> int:
    """Run the command; 0 when it worked, 2 for a request that makes no sense."""
    arguments = sys.argv[1:] if arguments is None else arguments
    if arguments[:1] == ["moe"]:
        from megascale_kernels.autotune import moe_tuning

        return moe_tuning.main(arguments[1:])
    options = parser().parse_args(arguments)
    import torch

    wrong = complaint(options, dict(os.environ), torch.cuda.device_count())
    if wrong is not None:
        if os.environ.get("RANK", "0") == "0":
            print(f"megascale_kernels.autotune: {wrong}", file=sys.stderr)
        return 2
    return _tune(options)


def _tune(options: argparse.Namespace) -> int:
    from datetime import timedelta

    import torch
    import torch.distributed as dist

    from megascale_kernels.autotune import tune
    from megascale_kernels.memory.workspace import Workspace

    local = int(os.environ.get("LOCAL_RANK", os.environ["RANK"]))
    torch.cuda.set_device(local)
    dist.init_process_group("nccl", device_id=torch.device("cuda", local), timeout=timedelta(seconds=300))
    try:
        rows = options.m * (dist.get_world_size() if options.operator == "gemm_ar" else 1)
        is_gather = options.operator == "ag_gemm"
        workspace = Workspace(
            max_rows=rows,
            max_gather_cols=options.k if is_gather else 0,
            max_scatter_cols=0 if is_gather else options.n,
            dtype=getattr(torch, options.dtype),
        )
        tuned = tune(options.operator, options.m, options.n, options.k, workspace, budget_s=options.budget_s)
        if dist.get_rank() == 0:
            print(f"serial  {tuned.serial_s * 1e3:8.3f} ms")
            for config, seconds in tuned.measured:
                print(f"{'chosen' if config == tuned.config else '':7s} {seconds * 1e3:8.3f} ms  {config}")
            for config, why in tuned.dropped:
                print(f"dropped {config}: {why}")
            if tuned.left_out:
                print(f"left out: {tuned.left_out} candidates (budget of {options.budget_s:g} s)")
            if tuned.config is None:
                print("chosen: the serial path")
    finally:
        dist.destroy_process_group()
    return 0


if __name__ == "__main__":
    sys.exit(main())
