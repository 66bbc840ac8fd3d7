# SPDX-License-Identifier: Apache-2.0
"""The script that the restart benchmark launches, unchanged under every launcher.

Two ranks on Gloo, a tiny model whose gradients are all-reduced by hand (DDP's constructor alone imports 800 modules,
which would drown what is measured), steps of ``STEP_S``. Each rank appends ``<clock> <pid> <rank> <step>`` to its own
file in ``BENCH_DIR`` after every step (CLOCK_MONOTONIC, the same for all processes of a machine). No import of ours.
"""

import os
import time
from pathlib import Path

import torch
from torch import distributed as dist

dist.init_process_group("gloo")
rank = dist.get_rank()
# Its freeing is measured, not its filling: only the rank that will be killed touches memory before its first step.
is_first_life = not (Path(os.environ["BENCH_DIR"]) / f"rank-{rank}").exists()
elements = int(float(os.environ.get("TOUCH_GB", "0")) * (1 << 28))
ballast = torch.ones(elements) if elements and rank == 1 and is_first_life else None
model = torch.nn.Linear(8, 1)
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
if os.environ.get("FT_CLIENT"):
    # NVIDIA's launcher sees a frozen rank only when the script sends it heartbeats.
    from nvidia_resiliency_ext.fault_tolerance import RankMonitorClient

    client = RankMonitorClient()
    client.init_workload_monitoring()
with (Path(os.environ["BENCH_DIR"]) / f"rank-{rank}").open("a", buffering=1) as log:
    for step in range(1_000_000):
        optimizer.zero_grad()
        model(torch.ones(4, 8)).sum().backward()
        for parameter in model.parameters():
            dist.all_reduce(parameter.grad)
        optimizer.step()
        log.write(f"{time.monotonic():.6f} {os.getpid()} {rank} {step}\n")
        if os.environ.get("FT_CLIENT"):
            client.send_heartbeat()
        if step == 0 and os.environ.get("TOUCH_EACH_LIFE"):
            ballast = torch.ones(elements)
        time.sleep(float(os.environ.get("STEP_S", "0.05")))
