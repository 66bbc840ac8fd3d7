# SPDX-License-Identifier: Apache-2.0
"""What agents answer when they are asked for evidence: the stacks and the collectives of their ranks."""

from collections.abc import Iterator

from megascale_ops.schema.health import SelfCheck
from megascale_ops.schema.messages import DIAGNOSE, SELF_CHECK, CollectiveFact, Evidence, EvidenceItem, Order
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
_ASLEEP = ("sleep (loader.py:31)", "next_batch (train.py:98)", "main (train.py:201)")


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
    make = _stack if order.kind == "dump_stacks" else _calls
    items = tuple(make(crew.training, rank, passed_s) for rank in asked)
    return Evidence(machine.name, order.job, order.incident, order.id, items=items)


def _stack(training: RoundOfRanks, rank: int, passed_s: float) -> EvidenceItem:
    """Return where a rank's main thread is."""
    if rank == training.absent:
        marks, frames = ("in_syscall",), _ASLEEP
    elif training.wait_of(rank, passed_s) is not None:
        marks, frames = ("in_collective",), _WAITING
    else:
        marks, frames = ("in_python",), _RUNNING
    return EvidenceItem("stacks", ok=True, rank=rank, took_s=0.1, frames=frames, marks=marks)


def _calls(training: RoundOfRanks, rank: int, passed_s: float) -> EvidenceItem:
    """Return the collectives of a rank: the last finished one of each group, and the one that it waits in."""
    facts = tuple(_facts(training, rank, training.wait_of(rank, passed_s)))
    return EvidenceItem("flight_recorder", ok=True, rank=rank, took_s=0.1, collectives=facts)


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
