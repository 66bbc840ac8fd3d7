# SPDX-License-Identifier: Apache-2.0
"""Drive one job along the recovery table: look at what is known, ask the judges, move.

Each state has one function that looks whether it can be left (``starting``, ``running``, ``stopping``); ``advance``
calls them until nothing moves any more and saves. It is called when something has happened (a join, a leave, evidence,
an odd heartbeat), so a crash is answered at once, and ten times a second, for everything that happens by time passing.

All of ``recovery`` is functions: what is remembered is in the jobs themselves, and ``Transitions`` alone moves them.
"""

from collections.abc import Callable, Mapping

from megascale_ops.controller.job.job import Job
from megascale_ops.controller.job.own_faults import OwnFaults
from megascale_ops.controller.job.transitions import Transitions
from megascale_ops.controller.record.state_machine import State
from megascale_ops.controller.recovery import finishing, running, starting, stopping

# What looks whether a state can be left, and then leaves it.
LEAVE_STATE: Mapping[State, Callable[[Transitions, Job, float], bool]] = {
    State.REPLACING: starting.from_replacing,
    State.RESTARTING: starting.from_restarting,
    State.CATCHING_UP: starting.from_catching_up,
    State.RUNNING: running.from_running,
    State.DEGRADED: running.from_degraded,
    State.SUSPECT: running.from_suspect,
    State.CONFIRMING: running.from_confirming,
    State.STOPPING: stopping.from_stopping,
    State.DIAGNOSING: stopping.from_diagnosing,
}


def advance(transitions: Transitions, faults: OwnFaults, job: Job) -> None:
    """Move as far as what is known allows, and journal it; a fault of ours ends no request."""
    now_s = transitions.clock()
    transitions.save(job)
    if faults.is_paused(job.name):
        return
    with faults.contain(job.name, f"driving it while it is {job.record.state}"):
        if job.round.finished_s is not None:
            finishing.finish(transitions, job, now_s)
            transitions.save(job)
            if not job.is_over and now_s - job.round.finished_s < finishing.LAST_STEPS_S:
                return  # all ranks are gone, and that is no loss
        while (leave := LEAVE_STATE.get(job.state)) is not None and leave(transitions, job, now_s):
            transitions.save(job)  # each state of its own, so that a crash between any two finds its place again
        transitions.save(job)
