# SPDX-License-Identifier: Apache-2.0
"""`python -m megascale_kernels.bench {ag_gemm,gemm_rs,attention,moe,moe-family,train} --gpus N`: measure, note.

Without torchrun it starts its own ranks; under torchrun it is one of them.
"""

import argparse
import os
import shlex
import sys
import time
from importlib import import_module

from megascale_kernels.bench.ranks import place, start
from megascale_kernels.bench.report import Report
from megascale_kernels.bench.request import (
    ATTENTION,
    MOE,
    MOE_FAMILY,
    PROGRAM,
    TRAIN,
    UserError,
    beside_of,
    config_of,
    drawn_of,
    parser,
    ranks_of,
    rows_of,
    seed_of,
    shapes_of,
)
from megascale_kernels.bench.shapes import Shape

# What has a command line of its own, and where that is.
_OTHERS = {
    TRAIN: "training.command",
    MOE: "moe.moe_command",
    MOE_FAMILY: "moe_family.family_command",
    ATTENTION: "sp_attention.sequences",
}
SLACK_S = 240.0  # beyond the budget: start, the row in hand, the end


def main(arguments: list[str] | None = None) -> int:
    """Run the command: 0 when all went well, 1 when something was wrong, 2 for a request that cannot be served."""
    arguments = sys.argv[1:] if arguments is None else arguments
    if arguments and arguments[0] in _OTHERS:
        return int(import_module(f"megascale_kernels.bench.{_OTHERS[arguments[0]]}").main(arguments[1:]))
    options = parser().parse_args(arguments)
    import torch

    try:
        ranks = ranks_of(options, dict(os.environ), torch.cuda.device_count())
        shapes = shapes_of(options, ranks)
        config_of(options.config)
        beside_of(options)
    except UserError as error:
        if os.environ.get("RANK", "0") == "0":
            print(f"{PROGRAM}: {error}", file=sys.stderr)
        return 2
    if "RANK" in os.environ:
        return run_rank(options, shapes, shlex.join([*PROGRAM.split(), *arguments]))
    try:
        Report(options.out, is_speaker=True)  # rank 0 writes it; that it can is better known before ranks are started
    except OSError as error:
        print(f"{PROGRAM}: --out: {error}", file=sys.stderr)
        return 2
    return start(arguments, ranks, options.budget_s + SLACK_S)


def run_rank(options: argparse.Namespace, shapes: list[Shape], command: str) -> int:
    """One rank's part."""
    from datetime import timedelta

    import torch
    import torch.distributed as dist

    started_s = time.monotonic()
    local = int(os.environ.get("LOCAL_RANK", os.environ["RANK"]))
    local = place(local, int(os.environ.get("LOCAL_WORLD_SIZE", os.environ["WORLD_SIZE"])), torch.cuda.device_count())
    torch.cuda.set_device(local)
    dist.init_process_group("nccl", device_id=torch.device("cuda", local), timeout=timedelta(seconds=120))
    try:
        return _act(options, shapes, command, started_s)
    finally:
        dist.destroy_process_group()


def _act(options: argparse.Namespace, shapes: list[Shape], command: str, started_s: float) -> int:
    import torch.distributed as dist

    from megascale_kernels.bench import beside, drawn_rows, overheads, soak
    from megascale_kernels.bench.drawn_sweep import sweep_drawn
    from megascale_kernels.bench.report import facts
    from megascale_kernels.bench.sweep import Plan, sweep, workspace_for

    tune_s = options.tune_s if options.tune else 0.0
    plan = Plan(options.operator, options.rounds, options.budget_s, tune_s, config_of(options.config))
    report = Report(options.out, is_speaker=dist.get_rank() == 0)
    head = facts(command, dist.get_world_size())
    if options.soak is not None:
        for text in head.lines():
            report.line(text)
        return soak.run(options.operator, options.soak, options.budget_s, plan.config, report)
    if options.progress_cost:
        overheads.progress_cost(plan, shapes, report, head)
    elif options.trace_cost:
        overheads.trace_cost(plan, shapes, report, head)
    elif options.compute_quality:
        overheads.compute_quality(plan, shapes, report, head)
    elif options.beside:
        return int(not beside.compare(plan, shapes, beside_of(options), report, head, started_s))
    elif options.random is not None:
        drawn = drawn_of(options, dist.get_world_size())
        drawn_rows.begin(report, head, len(drawn), seed_of(options), rows_of(options))
        return int(not sweep_drawn(plan, drawn, report, started_s))
    else:
        report.begin_table(head)
        sweep(plan, shapes, workspace_for(options.operator, shapes), report, started_s)
        return int(any(row.note for row in report.rows))
    return 0


if __name__ == "__main__":
    sys.exit(main())
