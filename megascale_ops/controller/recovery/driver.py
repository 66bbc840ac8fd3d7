# SPDX-License-Identifier: Apache-2.0
"""Drive one job along the recovery table: look at what is known, ask the judges, move.

Each state has one function that looks whether it can be left (``starting``, ``running``, ``stopping``); ``advance``
calls them until nothing moves any more and saves. It is called when something has happened (a join, a leave, evidence,
an odd heartbeat), so a crash is answered at once, and ten times a second, for everything that happens by time passing.
"""

from collections.abc import Iterable

from megascale_ops.controller.job.diagnose import Observations
from megascale_ops.controller.job.job import Job
from megascale_ops.controller.job.own_faults import OwnFaults
from megascale_ops.controller.job.transitions import Transitions
from megascale_ops.controller.record.state_machine import EventKind, State
from megascale_ops.controller.recovery.decide import Decider
from megascale_ops.controller.recovery.running import Watching
from megascale_ops.controller.recovery.starting import Starting
from megascale_ops.controller.recovery.stopping import Ending
from megascale_ops.diagnosis.rank_view import RankView


class Driver:
    """Moves jobs; the only thing it remembers is in the jobs themselves, and which of them are not judged now."""

    def __init__(self, transitions: Transitions, observations: Observations, faults: OwnFaults | None = None) -> None:
        self._transitions = transitions
        self._faults = faults or OwnFaults(transitions.clock, lambda _job, _text: None)
        self.decider = Decider(transitions, observations)
        watching = Watching(transitions, observations, self.decider)
        self._starting = starting = Starting(transitions, observations, self.decider, watching)
        self._ending = ending = Ending(transitions, observations, self.decider)
        self._leave_state = {
            State.REPLACING: starting.replacing,
            State.RESTARTING: starting.restarting,
            State.CATCHING_UP: starting.catching_up,
            State.RUNNING: watching.running,
            State.DEGRADED: watching.degraded,
            State.SUSPECT: watching.suspect,
            State.CONFIRMING: watching.confirming,
            State.STOPPING: ending.stopping,
            State.DIAGNOSING: ending.diagnosing,
        }

    def advance(self, job: Job) -> None:
        """Move as far as what is known allows, and journal it; a fault of ours ends no request."""
        now_s = self._transitions.clock()
        self._transitions.save(job)
        if self._faults.is_paused(job.name):
            return
        with self._faults.contain(job.name, f"driving it while it is {job.record.state}"):
            self._move(job, now_s)

    def _move(self, job: Job, now_s: float) -> None:
        while (leave := self._leave_state.get(job.state)) is not None and leave(job, now_s):
            self._transitions.save(job)  # each state of its own, so that a crash between any two finds its place again
        self._transitions.save(job)

    def end(self, job: Job, event: EventKind, text: str, exit_code: int) -> None:
        """The job is over: finished, cancelled or given up."""
        self._ending.end(job, event, text, exit_code)

    def look_at_pace(self, job: Job, node: str, ranks: Iterable[RankView]) -> None:
        """Note how far a node is, from its heartbeat."""
        self._starting.look_at_pace(job, node, ranks)
