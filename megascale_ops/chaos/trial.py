# SPDX-License-Identifier: Apache-2.0
"""One trial: start a job, inject a fault, observe the reaction, end the job, and return what happened."""

import contextlib
import time
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path

from msgspec.structs import replace

from megascale_ops.chaos import outside
from megascale_ops.chaos.faults import Fault
from megascale_ops.chaos.job import Job, Plan, Step
from megascale_ops.chaos.launchers import rival_named
from megascale_ops.chaos.score import NEVER, Outcome
from megascale_ops.errors import MegascaleError
from megascale_ops.schema.events import Incident

# 90 s for a start that takes 6: four ranks import torch on two cores that others use too.
START_S = 90.0
# 1.5 s after recovery: a second verdict on the same fault would come within a heartbeat or two.
SETTLE_S = 1.5
# 0.5 s: an incident may be dated a little before the fault by the agent's last look.
BEFORE_S = 0.5


def hold(fault: Fault, plan: Plan, folder: Path) -> Outcome:
    """Hold one trial in ``folder``; every process of it is gone afterwards.

    Returns:
        What happened; ``problem`` is the reason when the trial could not be held.
    """
    if why := _why_not(fault, plan):
        return Outcome(fault.name, plan.launcher, problem=why)
    try:
        with _disk(fault, plan, folder) as job, contextlib.ExitStack() as undo:
            struck_s = _strike(job, undo)
            _watch(job, struck_s, undo)
            undo.close()
            return _outcome_of(job, struck_s)
    except MegascaleError as error:
        return Outcome(fault.name, plan.launcher, problem=str(error))


def _why_not(fault: Fault, plan: Plan) -> str:
    """Return why such a trial can't be held, or nothing."""
    single = plan.shared_gpus and (fault.kind == "fail_slow" or not fault.classes)
    rows = (
        (
            fault.gpu and plan.backend != "nccl",
            f"{fault.name} is done to a GPU, and ranks over {plan.backend} use none: give --backend nccl",
        ),
        (
            fault.sockets and plan.backend == "nccl",
            f"{fault.name} is done to the sockets that Gloo keeps, and NCCL keeps none of them",
        ),
        (single, f"of {plan.in_words} that take turns one is slower without any fault"),
        (
            fault.kernels and find_spec("triton") is None,
            f"{fault.name} needs the overlapped kernels, and Triton is not installed",
        ),
        (plan.nproc < fault.least, f"{fault.name} has no right answer with fewer than {fault.least} ranks"),
        (
            fault.ours and plan.launcher != "ours",
            f"{fault.name} breaks a part of MegaScale Ops that {plan.launcher} does not have",
        ),
        (
            fault.layout == "two_nodes" and plan.launcher != "ours",
            f"{fault.name} needs a second node, and {plan.launcher} is started on one",
        ),
    )
    return next((why for holds, why in rows if holds), "")


@contextlib.contextmanager
def _disk(fault: Fault, plan: Plan, folder: Path) -> Iterator[Job]:
    """Yield the started job, its checkpoints on a disk of their own where the fault fills it."""
    job = Job(plan, fault, folder)
    with contextlib.ExitStack() as undo:
        if fault.root:
            undo.callback(outside.prepare_disk(job))
        with job:
            yield job


def _strike(job: Job, undo: contextlib.ExitStack) -> float:
    """Wait until the fault happens, or do it; return when (wall clock)."""
    fault = job.fault
    if fault.inside:
        return job.until(lambda: job.struck_at() or _gave_up(job), f"{fault.name} to happen", START_S + fault.at * 0.1)
    job.until(lambda: job.everyone_at(fault.at) or _gave_up(job), f"step {fault.at}", START_S)
    struck_s = time.time()
    undo.callback(outside.inject(job))
    return struck_s


def _gave_up(job: Job) -> float:
    """Return 0.0 while the job runs.

    Raises:
        MegascaleError: it has ended before anything was done to it.
    """
    if job.ended():
        raise MegascaleError(f"the job ended before the fault: {' / '.join(job.output().splitlines()[-3:])}")
    return 0.0


def _watch(job: Job, struck_s: float, undo: contextlib.ExitStack) -> None:
    """Look on until it is over or its time is up."""
    fault = job.fault
    if fault.inside:
        outside.after_mark(job)
    with contextlib.suppress(MegascaleError):  # time being up is an outcome too: shown by what is missing
        if fault.quiet:
            # 0.3 s a step: the longest steps of any row, on a machine that others use too.
            job.until(job.ended, "the end of the job", fault.end_s + fault.steps * 0.3)
            return
        if fault.acted or fault.goes_on:
            deadline_s = fault.name_s + fault.recover_s
            if fault.root:  # nothing can be saved before the disk is free again
                job.until(lambda: _rightly(job, struck_s) or job.ended(), "its verdict", fault.name_s)
                undo.close()
            job.until(lambda: _recovered_at(job, struck_s) or job.ended(), "training to go on", deadline_s)
        else:
            job.until(lambda: _since(job, struck_s) or job.ended(), "a verdict", fault.name_s + BEFORE_S)
        end = time.monotonic() + SETTLE_S
        job.until(lambda: time.monotonic() > end, "the dust to settle", SETTLE_S + 1.0)


def _since(job: Job, struck_s: float) -> list[Incident]:
    """Return the incidents since the fault that are not known to be harmless and have a verdict."""
    return [
        each
        for each in job.incidents()
        if each.state != "harmless" and each.verdict is not None and each.marks.detected >= struck_s - BEFORE_S
    ]


def _rightly(job: Job, struck_s: float) -> bool:
    """Return whether the fault was called by one of its names: another verdict may come before that one's evidence."""
    named = [each.verdict.fault for each in _since(job, struck_s) if each.verdict is not None]
    return any(name in job.fault.classes for name in named)


def _recovered_at(job: Job, struck_s: float) -> float:
    """Return when the last rank made its first step as a new process after the fault; 0.0 before that."""
    steps = job.steps()
    before = {row.pid for rows in steps.values() for row in rows if row.wall_s <= struck_s}
    first = [_first_new(rows, before, struck_s) for rows in steps.values()]
    came = [wall_s for wall_s in first if wall_s]
    # Without its second node the job goes on with the other half of its ranks.
    needed = job.plan.nproc // 2 if job.fault.layout == "two_nodes" else job.plan.nproc
    return max(came) if len(came) >= needed else 0.0


def _first_new(rows: list[Step], before: set[int], struck_s: float) -> float:
    return next((row.wall_s for row in rows if row.wall_s > struck_s and row.pid not in before), 0.0)


def _outcome_of(job: Job, struck_s: float) -> Outcome:
    """Put together what happened."""
    job.read_journal()
    found = _since(job, struck_s)
    recovered_s = _recovered_at(job, struck_s)
    outcome = Outcome(
        job.fault.name,
        job.plan.launcher,
        acted=_anew(job, struck_s),
        recovered=recovered_s > 0.0,
        ended=job.procs[-1].poll(),
        resumed_from_damaged=_resumed_from_damaged(job, struck_s),
        recover_s=recovered_s - struck_s if recovered_s else NEVER,
    )
    if job.plan.launcher != "ours":
        named, ranks = rival_named(job.output())
        return replace(outcome, named=named, ranks=ranks)
    if not found:
        return outcome
    first, verdict = found[0], found[0].verdict
    assert verdict is not None
    return replace(
        outcome,
        named=verdict.fault,
        ranks=verdict.culprits,
        nodes=verdict.nodes,
        further=tuple(each.verdict.fault for each in found[1:] if each.verdict is not None),
        detect_s=max(0.0, first.marks.detected - struck_s),
        name_s=max(0.0, first.marks.named - struck_s) if first.marks.named else NEVER,
        reason=verdict.reason,
    )


def _anew(job: Job, struck_s: float) -> bool:
    """Return whether a rank was started anew after the fault, other than by us."""
    if job.fault.name == "runner_killed":
        return False
    rows = [row for rank in job.steps().values() for row in rank]
    before = {row.pid for row in rows if row.wall_s <= struck_s}
    if not before:
        # The fault came before the first step: where it blocks a rank, steps are made only by ranks started anew.
        return job.fault.acted and bool(rows)
    return any(row.wall_s > struck_s and row.pid not in before for row in rows)


def _resumed_from_damaged(job: Job, struck_s: float) -> bool:
    path = job.folder / "damaged"
    if not path.exists():
        return False
    damaged = int(path.read_text())
    first = [row for rows in job.steps().values() for row in rows if row.wall_s > struck_s and row.restored >= 0]
    return any(row.restored == damaged for row in first)
