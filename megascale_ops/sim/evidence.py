# SPDX-License-Identifier: Apache-2.0
"""What agents answer when they are asked for evidence: the stacks and the collectives of their ranks."""

from collections.abc import Iterator

from megascale_ops.schema.gpu_queue import GpuOperation, GpuQueue
from megascale_ops.schema.health import SelfCheck
from megascale_ops.schema.messages import DIAGNOSE, SELF_CHECK, CollectiveFact, Evidence, EvidenceItem, Order
from megascale_ops.schema.work import ProcessWork
from megascale_ops.sim.machine import JOB, Machine, RoundOfRanks
from megascale_ops.sim.mesh import Wait

# A stack takes a tenth of a second for each rank, side by side; a quick self-check half a minute.
TAKES_S = {DIAGNOSE: 30.0}
ANSWER_S = 0.3
# Calls of a group in a step, by the axis that the group lies along.
_CALLS = {"tp": 16, "dp": 1}
_SIZES, _DTYPE, _BYTES = "[[4096, 8192]]", "bfloat16", 67_108_864
_WAITING = ("wait (torch/distributed/distributed_c10d.py:2810)", "train_step (train.py:118)", "main (train.py:201)")
_RUNNING = ("forward (model.py:77)", "train_step (train.py:112)", "main (train.py:201)")
# Where a rank sleeps, by the phase in which it fell asleep, and by what an agent knows such a stack.
_ASLEEP = {
    "data": (
        ("in_data_loader", "in_syscall"),
        ("select (selectors.py:468)", "__next__ (torch/utils/data/dataloader.py:708)", "main (train.py:198)"),
    ),
    "backward": (
        ("in_syscall",),
        ("_engine_run_backward (torch/autograd/graph.py:824)", "train_step (train.py:115)", "main (train.py:201)"),
    ),
    "optimizer": (
        ("in_syscall",),
        ("step (torch/optim/adamw.py:232)", "train_step (train.py:121)", "main (train.py:201)"),
    ),
    "checkpoint": (("in_syscall",), ("save (checkpoint.py:61)", "main (train.py:207)")),
    "eval": (("in_syscall",), ("evaluate (train.py:150)", "main (train.py:211)")),
}
_ASLEEP_AHEAD = (("in_syscall",), ("forward (model.py:77)", "train_step (train.py:112)", "main (train.py:201)"))
_FOR_GPU = ("item (train.py:123)", "train_step (train.py:123)", "main (train.py:201)")
# NCCL's names of what the flight recorder calls so.
_NCCL = {"all_reduce": "AllReduce", "reduce_scatter": "ReduceScatter"}
# Between two looks at a process.
_OVER_S = 2.0


def answer(machine: Machine, order: Order, passed_s: float) -> Evidence | None:
    """Return what an agent says to an order, None where it just obeys."""
    if order.kind == DIAGNOSE:
        is_bad = passed_s < machine.bad_until_s
        check = SelfCheck(node=machine.name, depth="quick", status="bad" if is_bad else "good", made=1)
        item = EvidenceItem(kind=SELF_CHECK, ok=True, check=check)
        return Evidence(machine.name, order.job or JOB, order.incident, order.id, items=(item,))
    crew = machine.life.crew
    if order.kind not in ("dump_stacks", "dump_flight_recorder", "profile") or crew is None:
        return None
    if order.kind == "profile":
        item = EvidenceItem("profile", ok=False, text="kernels are not simulated")
        return Evidence(machine.name, order.job, order.incident, order.id, items=(item,))
    ranks = range(crew.first, crew.first + machine.count)
    asked = [rank for rank in ranks if not order.ranks or rank in order.ranks]
    make = _stacks if order.kind == "dump_stacks" else _calls
    items = tuple(item for rank in asked for item in make(crew.training, rank, passed_s, machine.offset_s))
    return Evidence(machine.name, order.job, order.incident, order.id, items=items)


def _stacks(training: RoundOfRanks, rank: int, passed_s: float, offset_s: float) -> Iterator[EvidenceItem]:
    """Return where a rank's main thread is; of one that sleeps also what its process did: nothing.

    Real agents tell that of every rank; of those that wait in a collective nothing follows from it.
    """
    marks: tuple[str, ...]
    frames: tuple[str, ...]
    if rank == training.absent and training.hangs == "gpu":
        marks, frames = ("in_native",), _FOR_GPU
    elif rank == training.absent and not training.hangs:
        marks, frames = _ASLEEP.get(training.phase_at(passed_s), _ASLEEP_AHEAD)
        yield EvidenceItem("process", ok=True, rank=rank, work=ProcessWork(passed_s + offset_s, _OVER_S))
    elif training.wait_of(rank, passed_s) is not None:
        marks, frames = ("in_collective",), _WAITING
    else:
        marks, frames = ("in_python",), _RUNNING
    yield EvidenceItem("stacks", ok=True, rank=rank, took_s=0.1, frames=frames, marks=marks)


def _calls(training: RoundOfRanks, rank: int, passed_s: float, offset_s: float) -> Iterator[EvidenceItem]:
    """Return the collectives of a rank: the last finished one of each group, and the one that it waits in.

    And what its GPU has of that: where a GPU hangs it has not begun what the others' wait in.
    """
    del offset_s
    wait = training.wait_of(rank, passed_s)
    facts = tuple(_facts(training, rank, wait))
    yield EvidenceItem("flight_recorder", ok=True, rank=rank, took_s=0.1, collectives=facts)
    if training.hangs and wait is not None and wait.function in _NCCL:
        begun = training.hangs != "gpu" or rank != training.absent
        seq = max(0, training.step + 1)
        operation = GpuOperation(wait.group, _NCCL[wait.function], seq, name=wait.group, begun=begun)
        queue = GpuQueue((operation,), state=seq)
        yield EvidenceItem("collectives", ok=True, rank=rank, took_s=0.1, gpu=queue)


def _facts(training: RoundOfRanks, rank: int, wait: Wait | None) -> Iterator[CollectiveFact]:
    layout = training.layout
    steps = max(0, training.step + 1)
    for axis, function in (("tp", "all_reduce"), ("dp", "reduce_scatter")):
        if getattr(layout, axis) > 1:
            # The others of its tensor parallel group have called the third of this step, and it has not.
            done = steps * _CALLS[axis] + (2 if axis == "tp" else 0)
            yield CollectiveFact(layout.group(axis, rank), done - 1, function, _SIZES, _DTYPE, _BYTES, done=True)
    if wait is None:
        return
    if wait.function == "recv":
        yield CollectiveFact(wait.group, -1, "recv", _SIZES, _DTYPE, _BYTES, peer=wait.peer)
        return
    axis = wait.group[:2]
    seq = steps * _CALLS[axis] + (2 if axis == "tp" else 0)
    yield CollectiveFact(wait.group, seq, wait.function, _SIZES, _DTYPE, _BYTES)
