# SPDX-License-Identifier: Apache-2.0
"""What a rank does that does not come to its collective, and how long that may be left alone.

Marks of the evidence come first, then the phase of the black box, then whether its process uses the CPU. Only repeated
looks separate a rank that is stuck from one that works: a rank that evaluates or compiles is somewhere else
each time, a stuck one is in the same place. Code inside torch is no proof of it (a long evaluation of one layer
stands in the same line for a minute), so it gets the patience of a working rank. The recorder looks ten times a second
(its ``stack_watch``): an evaluation on a GPU waits in one line nearly all the time, and is seen in others now and then.
And the kernel counts what its process and its children get done meanwhile (``diagnosis.hangs.work``): a rank that is
seen to work is busy, whatever its stack looks like.

Pure: a rank in, a class with its reason out.
"""

import enum
import re
from typing import NamedTuple

from megascale_ops.diagnosis.hangs.habits import standing_in
from megascale_ops.diagnosis.hangs.patience import BUSY, wanders
from megascale_ops.diagnosis.hangs.rank_wait import RankWait
from megascale_ops.diagnosis.hangs.suspicion import STALE_BEAT_S
from megascale_ops.diagnosis.hangs.work import computes, waits_for_child, works
from megascale_ops.schema.progress import UNSEEN

# 3 looks, 2 and 4 s apart: a loop of an evaluation is at the same frames twice by chance, hardly three times.
SAME_LOOKS = 3
# How a host waits for its GPU: torch's own functions, and CUDA's where a stack has native frames.
_GPU_WAIT = re.compile(
    r"^synchronize \(torch/cuda/|^(cu|cuda)(Ctx|Device|Stream|Event)Synchronize\w* \(|^(cu|cuda)Memcpy\w* \("
)
_INNERMOST = 6  # below them are libraries of CUDA's that it calls by itself
_COMPILING = (
    "torch/_inductor",
    "torch/_dynamo",
    "torch/_functorch",
    "triton/compiler",
    "triton/runtime/build",
    "codecache.py",
)


class Patience(enum.Enum):
    """How long a rank may go on doing what it does, as the verdict counts it in seconds (``hangs/verdict``)."""

    NONE = "none"  # ranks contradict each other: waiting mends nothing
    HALTED = "halted"  # a process that it needs is stopped
    NETWORK = "network"  # what it sends does not arrive; TCP sends again by itself
    STUCK = "stuck"  # no wait that ended by itself looked like it, and nothing proves that this one does not
    SILENT = "silent"  # nothing suggests that it works, and nothing proves that it can't go on
    SPINNING = "spinning"  # it burns CPU or holds the interpreter in one place, or all are in a call that does not end
    WORKING = "working"  # its stack suggests that it works
    MOVING = "moving"  # it is seen to go on: it compiles, wanders, its children work, bytes move; that may take an hour


class Cause(NamedTuple):
    """A class of ``fault_classes``, how sure it is, what is seen (ends a sentence), and the patience it deserves."""

    fault: str
    confidence: float
    text: str
    patience: Patience


def cause_of(stand: RankWait) -> Cause:
    """Return what a rank does outside collectives."""
    marks, look = stand.look.marks, stand.look
    where = f" in {standing_in(look.frames)}" if look.frames else ""
    where += f", and its loader's {look.worker}" if look.worker else ""
    if "stopped" in marks or stand.view.report.process.state == "T":
        return Cause("frozen", 0.97, "its process is stopped", Patience.NONE)
    return (
        _moves(stand, where)
        or _held(stand, where)
        or _waits_for_device(stand, where)
        or _waits_for_gpu(stand, where)
        or _runs(stand, where)
    )


def _moves(stand: RankWait, where: str) -> Cause | None:
    """Return whether it compiles, or is seen to get something done."""
    if any(part in frame for frame in stand.look.frames for part in _COMPILING):
        return Cause("stuck", 0.5, f"it compiles{where}", Patience.MOVING)
    if (seen := works(stand.look.work)) and "worker_stopped" not in stand.look.marks:
        return Cause("busy", 0.6, f"it works: {seen}{where}", Patience.MOVING)
    return None


def _held(stand: RankWait, where: str) -> Cause | None:
    """Return whether the interpreter's lock is held, or the stack goes on changing."""
    marks, look = stand.look.marks, stand.look
    if _holds_gil(stand):
        sure = 0.95 if "gil_held" in marks else 0.85
        patience = Patience.SPINNING if is_busy(stand) else Patience.SILENT
        return Cause("gil_held", sure, f"native code holds the interpreter's lock{where}", patience)
    if is_busy(stand) and (places := wanders(stand.view)):
        text = f"its stack was in another place {places} times since it moved, so it works{where}"
        return Cause("stuck", 0.5, text, Patience.MOVING)
    if look.seen > 1 and look.alike == 1:
        return Cause("stuck", 0.5, f"its stack changes from look to look, so it works{where}", Patience.WORKING)
    return None


def is_busy(stand: RankWait) -> bool:
    """Return whether the rank uses CPU, or is runnable: on a loaded machine a rank in state R may get hardly any."""
    process = stand.view.report.process
    return process.cpu_busy > BUSY or computes(stand.look.work)


def _holds_gil(stand: RankWait) -> bool:
    """Return whether the lock is held; a recorder whose thread has ended proves nothing once Python has answered."""
    if "gil_held" in stand.look.marks:
        return True
    progress = stand.view.report.progress
    if progress is None or not progress.beat_mono_s or stand.look.seen:
        return False
    return stand.view.silent_s + progress.moved_mono_s - progress.beat_mono_s > STALE_BEAT_S


def _waits_for_device(stand: RankWait, where: str) -> Cause | None:
    """Return whether it waits for data or for storage."""
    marks, report = stand.look.marks, stand.view.report
    phase = report.progress.phase if report.progress is not None else ""
    stopped = ", and a worker of its own is stopped" if "worker_stopped" in marks else ""
    asleep = not is_busy(stand)
    rows = (
        ("data_stall", 0.95, "in_data_loader" in marks, "it waits for its data loader"),
        ("storage_stall", 0.95, "in_storage" in marks, "it waits for storage"),
        ("storage_stall", 0.9, "uninterruptible" in marks, "its process waits for a device (state D)"),
        ("storage_stall", 0.9, report.process.state == "D" and asleep, "its process waits for a device (state D)"),
        ("sleeping", 0.8, bool(stopped), "it goes on no more"),
        ("storage_stall", 0.8, phase == "checkpoint", "it saves a checkpoint"),
        ("data_stall", 0.8, phase == "data" and asleep, "it gets its next batch"),
    )
    for fault, confidence, seen, text in rows:
        if seen:
            # No user pauses a loader's worker; a program that was stopped by hand may be continued.
            patience = Patience.HALTED if stopped and "in_data_loader" in marks else Patience.SILENT
            return Cause(fault, confidence, f"{text}{where}{stopped}", patience)
    return None


def _waits_for_gpu(stand: RankWait, where: str) -> Cause | None:
    """Return whether its host waits for its GPU: of long work and of a kernel without an end that looks the same."""
    look = stand.look
    if not any(_GPU_WAIT.search(frame) for frame in look.frames[:_INNERMOST]):
        return None
    same = look.alike >= SAME_LOOKS
    text = f"it waits for its GPU{where}" + (f", the same place in {look.alike} looks" if same else "")
    return Cause("gpu_stuck", 0.8 if same else 0.65, text, Patience.WORKING)


def _runs(stand: RankWait, where: str) -> Cause:
    """Separate a rank that runs from one that sleeps."""
    marks, look = stand.look.marks, stand.look
    if is_busy(stand):
        cores = f"it uses {_cores(stand):.2f} cores{where}"
        same = look.alike >= SAME_LOOKS
        if same and "torch/" not in look.frames[0]:
            return Cause("stuck", 0.95, f"{cores}, the same place in {look.alike} looks", Patience.SPINNING)
        return Cause("stuck", 0.7 if same else 0.6, cores, Patience.WORKING)
    if child := waits_for_child(look.work):
        text = f"it uses no CPU{where}, and {child} lives, which it has started since it last moved"
        return Cause("sleeping", 0.8, text, Patience.SILENT)
    # What a script does besides (evaluates, uploads, waits for a lock, a file, a server, a person) it does between
    # passes. Work there shows as CPU time, its own or a child's, or as bytes that move.
    phase = stand.view.report.progress.phase if stand.view.report.progress is not None else ""
    inside = phase == "backward" and look.work is not None and look.alike >= SAME_LOOKS
    patience, of_pass = (Patience.STUCK, " inside its backward pass") if inside else (Patience.SILENT, "")
    if "in_syscall" in marks:
        return Cause("sleeping", 0.95, f"it sleeps in a system call{of_pass}{where}", patience)
    if look.frames:
        unseen = stand.view.report.process.state == UNSEEN
        text = f"it is{where}, whether at work or asleep nobody saw" if unseen else f"it uses no CPU{of_pass}{where}"
        return Cause("sleeping", 0.7 if unseen else 0.85, text, patience)
    return Cause("not_joined", 0.85, "nothing tells what it does instead", Patience.SILENT)


def _cores(stand: RankWait) -> float:
    """Return how many cores it uses, by its newest look where that has it."""
    work = stand.look.work
    looked = work.own_cpu_s / work.over_s if work is not None else 0.0
    return max(stand.view.report.process.cpu_busy, looked)
