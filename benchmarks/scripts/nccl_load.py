# SPDX-License-Identifier: Apache-2.0
"""What the NCCL profiler benchmark launches: collectives back to back, and training steps of two sizes.

Rank 0 writes ``{"all_reduce 2 MB": [seconds an operation, ...], "step small": [seconds a step, ...]}``, a number for
each block, to ``BENCH_OUT``. No import of ours: what is on or off is the launcher's doing. With ``BENCH_WITHIN`` the
blocks take turns: the plugin is paused, thins, records all with their channels, and so on.
"""

import ctypes
import faulthandler
import json
import os
import sys
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path

import torch
from torch import distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

WITHIN = bool(os.environ.get("BENCH_WITHIN"))
BLOCKS = 90 if WITHIN else 5
STATES, THINNED, FULL = 3, 1, 2
MB = 1 << 20
# 0.15 s a block: enough operations that one late interrupt does not count.
BLOCK_S = 0.03 if WITHIN else 0.15
# 3 s thinned before each: it looks once a second how many operations there are.
SETTLE_S = 3.0
PLUGIN = ctypes.CDLL(os.environ["NCCL_PROFILER_PLUGIN"]) if WITHIN else None
if WITHIN:
    from megascale_ops.blackbox.reader import BoxReader


def turn(block: int) -> None:
    """Let the plugin do in this block what its turn is."""
    if PLUGIN is not None:
        PLUGIN.megascale_profiler_pause(int(block % STATES == 0))
        PLUGIN.megascale_profiler_hold(0 if block % STATES == FULL else -1)


def settle(run: Callable[[], object], known_s: float) -> str:
    """Run thinned until it has settled; return how it settled on this rank."""
    turn(THINNED)
    for number in range(max(4, round(SETTLE_S / known_s))):
        run()
        if number % 256 == 0:
            torch.cuda.synchronize()
    torch.cuda.synchronize()
    with BoxReader(Path(os.environ["MEGASCALE_BOX_DIR"]) / f"{os.environ['RANK']}.box") as box:
        state = box.profiler()
    return "" if state is None else f", one in {state.timed_one_in} timed, level {state.level}, {state.share_ppm} ppm"


def blocks_of(name: str, run: Callable[[], object], known_s: float) -> list[float]:
    """Return the seconds that one run takes, once for each block of many back to back."""
    count, blocks = max(4, round(BLOCK_S / known_s)), BLOCKS if known_s < BLOCK_S else min(BLOCKS, 8 * STATES)
    settled = settle(run, known_s) if WITHIN else ""
    if WITHIN and os.environ["RANK"] == "0":  # minutes: shows progress
        print(f"{name}: {blocks} blocks of {count}{settled}", file=sys.stderr, flush=True)
    found = []
    for block in range(blocks):
        turn(block)
        dist.barrier()
        torch.cuda.synchronize()
        began = time.perf_counter()
        for _ in range(count):
            run()
        torch.cuda.synchronize()
        found.append((time.perf_counter() - began) / count)
    return found


def once(run: Callable[[], object]) -> float:
    """Warm up, and return about how long a run takes, the same number on every rank."""
    for _ in range(5):
        run()
    torch.cuda.synchronize()
    began = time.perf_counter()
    for _ in range(10):
        run()
    torch.cuda.synchronize()
    took = torch.tensor((time.perf_counter() - began) / 10, device="cuda")
    dist.all_reduce(took, dist.ReduceOp.MAX)
    return float(took)


def operations(world: int) -> dict[str, Callable[[], object]]:
    """Return every collective by name; sizes are of the larger of its two buffers."""
    found: dict[str, Callable[[], object]] = {}
    for size_mb in (0.5, 2, 32, 256):
        whole = torch.zeros(int(size_mb * MB) // 2 // world * world, dtype=torch.bfloat16, device="cuda")
        part = torch.zeros(len(whole) // world, dtype=torch.bfloat16, device="cuda")
        found[f"all_reduce {size_mb:g} MB"] = partial(dist.all_reduce, whole)
        found[f"all_gather {size_mb:g} MB"] = partial(dist.all_gather_into_tensor, whole, part)
        found[f"reduce_scatter {size_mb:g} MB"] = partial(dist.reduce_scatter_tensor, part, whole)
    return found


def training(layers: int, width: int, tokens: int, local_rank: int) -> Callable[[], object]:
    """Return one training step of a transformer in bfloat16 under DDP."""
    layer = nn.TransformerEncoderLayer(width, width // 64, 4 * width, dropout=0.0, batch_first=True, norm_first=True)
    model = nn.TransformerEncoder(layer, layers, enable_nested_tensor=False).cuda().bfloat16()
    ddp = DistributedDataParallel(model, device_ids=[local_rank])
    optimizer = torch.optim.AdamW(ddp.parameters(), lr=1e-4, fused=True)
    x = torch.randn(max(1, tokens // 1024), 1024, width, device="cuda", dtype=torch.bfloat16)

    def step() -> None:
        ddp(x).float().square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()

    return step


def main() -> None:
    """Measure."""
    if dump_s := float(os.environ.get("BENCH_DUMP_S", "0")):
        faulthandler.dump_traceback_later(dump_s)
    rank, local_rank = int(os.environ["RANK"]), int(os.environ["LOCAL_RANK"])
    # Cores of its own: small operations are bound by the host, and a thread that moves costs more than is measured.
    cores = sorted(os.sched_getaffinity(0))
    if len(cores) >= 16:
        os.sched_setaffinity(0, cores[8 + 4 * local_rank : 12 + 4 * local_rank] or cores)
    torch.cuda.set_device(local_rank)
    dist.init_process_group("nccl", device_id=torch.device("cuda", local_rank))
    found = {name: blocks_of(name, run, once(run)) for name, run in operations(dist.get_world_size()).items()}
    for name, shape in (("step small", (6, 512, 4096)), ("step large", (12, 2048, 16384))):
        run = training(*shape, local_rank)
        found[name] = blocks_of(name, run, once(run))
        del run
    if rank == 0:
        Path(os.environ["BENCH_OUT"]).write_text(json.dumps(found), encoding="utf-8")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
