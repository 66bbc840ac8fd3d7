# SPDX-License-Identifier: Apache-2.0
"""NCCL inside the node: all-reduce, all-gather and all-to-all over all its GPUs, one process each, as in a job.

Figures are bus bandwidths as nccl-tests defines them, comparable whatever the number of GPUs: bytes of the whole
buffer a second, times 2(n-1)/n for an all-reduce and (n-1)/n for the others. Processes are forked from one that has
loaded torch and has not touched a GPU.
Source: nccl-tests, doc/PERFORMANCE.md.
"""

from __future__ import annotations

import multiprocessing
import os
import signal
import time
from datetime import timedelta
from statistics import median
from typing import TYPE_CHECKING, Any

from megascale_ops.diagnostics.check import Check, Reading, Task, UnmeasuredError, doing
from megascale_ops.diagnostics.child import die_with
from megascale_ops.diagnostics.gpu.devices import clock_mark, devices
from megascale_ops.diagnostics.report import CheckFinding, Fact, Figure

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from multiprocessing.connection import Connection
    from multiprocessing.process import BaseProcess

CHECK = Check("nccl", "NCCL inside the node", ("gpus", "torch"), quick_s=30.0, full_s=150.0, alone=True)

_REPETITIONS = 10
_QUICK_BYTES, _FULL_BYTES = 512 << 20, 4 << 30
# Ten of them in a repetition: 15 ms of all-reduce at 400 GB/s.
_CALLS = 10
_BUFFERS = 2
_HOST = "127.0.0.1"
_LOOK_S = 0.2


def measure(task: Task) -> Reading:
    """Run one process a GPU.

    Raises:
        UnmeasuredError: fewer than two GPUs have room, or torch is built without NCCL.
    """
    import torch

    if not torch.distributed.is_available() or not torch.distributed.is_nccl_available():
        raise UnmeasuredError("torch is built without NCCL")
    size = _FULL_BYTES if task.thorough else _QUICK_BYTES
    fork = multiprocessing.get_context("fork")
    told, telling = fork.Pipe(duplex=False)
    first = fork.Process(target=_look, args=(telling, os.getpid(), size * _BUFFERS), daemon=True)
    first.start()
    found, missing, model, version, port = _heard(told, [first], task.deadline_s)
    if len(found) < 2:
        raise UnmeasuredError(f"fewer than two GPUs have room: {'; '.join(missing)}")
    doing(f"running NCCL on {len(found)} GPUs")
    ranks = []
    for rank, index in enumerate(found):
        arguments = (telling, os.getpid(), port, rank, len(found), index, size, task.deadline_s)
        ranks.append(fork.Process(target=_rank, args=arguments, daemon=True))
    for process in ranks:
        process.start()
    rates = _heard(told, [first, *ranks], task.deadline_s)
    for process in ranks:
        process.join()
    first.kill()
    peers = f"{model}, {len(found)} GPUs"
    figures = tuple(Figure(name, "node", median(each), tuple(each), peers) for name, each in rates.items())
    return Reading(figures, (Fact("nccl_version", "node", version, "nccl"),), tuple(missing))


def _heard(told: Connection, processes: Sequence[BaseProcess], deadline_s: float) -> Any:  # noqa: ANN401  what they send
    """Return what a process says.

    Raises:
        RuntimeError: one has failed; what it says of that.
    """
    end_s = time.monotonic() + deadline_s
    while not told.poll(_LOOK_S):
        died = [one for one in processes if one.exitcode]
        if died and not told.poll(0):
            raise RuntimeError(f"a rank's process ended with code {died[0].exitcode}")
        if time.monotonic() > end_s:
            raise RuntimeError("no process answered")
    answer = told.recv()
    if isinstance(answer, str):
        raise RuntimeError(answer)  # noqa: TRY004  the text of another process's error
    return answer


def _look(telling: Connection, parent: int, needs_bytes: int) -> None:
    """Find GPUs with room, then be where ranks meet; not the parent: one that has asked CUDA can't be forked."""
    die_with(parent)
    import torch
    from torch._C._distributed_c10d import TCPStore

    try:
        found, missing = devices(needs_bytes)
        version = ".".join(map(str, torch.cuda.nccl.version()))  # type: ignore[no-untyped-call]  # torch has no types
        store = TCPStore(_HOST, 0, is_master=True, wait_for_workers=False)
        telling.send(([one.place for one in found], missing, found[0].model, version, store.port))
        signal.pause()
    except UnmeasuredError as error:
        telling.send(([], [str(error)], "", "", 0))
    except Exception as error:  # noqa: BLE001  raised by the process that waits
        telling.send(f"{type(error).__name__}: {error}")


def _rank(
    telling: Connection, parent: int, port: int, rank: int, world_size: int, index: int, size: int, deadline_s: float
) -> None:
    """Be one rank; rank 0 tells, and whichever fails."""
    die_with(parent)
    import torch
    import torch.distributed as dist
    from torch._C._distributed_c10d import TCPStore

    try:
        torch.cuda.set_device(index)
        dist.init_process_group(
            "nccl",
            store=TCPStore(_HOST, port, is_master=False, timeout=timedelta(seconds=deadline_s)),
            rank=rank,
            world_size=world_size,
            timeout=timedelta(seconds=deadline_s),
            device_id=torch.device("cuda", index),
        )
        rates = _measured(size // world_size // 2 * world_size, world_size)
        if rank == 0:
            telling.send(rates)
        dist.barrier()
        dist.destroy_process_group()
    except Exception as error:  # noqa: BLE001  raised by the process that waits
        telling.send(f"rank {rank} on device {index}: {type(error).__name__}: {error}")


def _measured(elements: int, world_size: int) -> dict[str, list[float]]:
    """Return bus bandwidths of each collective, one a repetition; ``elements`` of two bytes."""
    import torch
    import torch.distributed as dist

    whole = torch.ones(elements, dtype=torch.bfloat16, device="cuda")
    other = torch.empty_like(whole)
    part = other[: elements // world_size]
    others = (world_size - 1) / world_size
    calls: dict[str, tuple[float, Callable[[], object]]] = {
        "all_reduce": (2 * others, lambda: dist.all_reduce(whole)),
        "all_gather": (others, lambda: dist.all_gather_into_tensor(whole, part)),
        "all_to_all": (others, lambda: dist.all_to_all_single(whole, other)),
    }
    found: dict[str, list[float]] = {}
    for name, (factor, call) in calls.items():
        rates = found.setdefault(name, [])
        for repetition in range(_REPETITIONS + 1):
            first, last = (clock_mark() for _ in range(2))
            first.record()
            for _ in range(_CALLS):
                call()
            last.record()
            torch.cuda.synchronize()
            if repetition:  # the first one connects
                rates.append(factor * 2 * elements * _CALLS / (first.elapsed_time(last) * 1e-3))
    return found


def judge(reading: Reading) -> list[CheckFinding]:
    """Leave it to the fleet and the model: inside one node a collective has no equal."""
    del reading
    return []
