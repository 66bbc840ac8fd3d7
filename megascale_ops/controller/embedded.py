# SPDX-License-Identifier: Apache-2.0
"""A controller inside the caller's own process: the same loop, judges and journal, without HTTP and without clocks.

The caller says what time it is, hands in the messages that agents and runners send, lets time pass, and settles: what
was journaled by then is released, in the order in which it was submitted. So everything that happens follows from the
messages alone, however fast the disk is. The simulator (``megascale_ops.sim``) and the replay of recordings
(``megascale_ops.replay``) drive this; it is the only way in.
"""

import queue
from collections.abc import Callable, Iterable, Mapping

from megascale_ops.account import Account
from megascale_ops.controller import going_on
from megascale_ops.controller.cluster.steady import Signs, Steady, Taken, Told
from megascale_ops.controller.journal.rows import Batch
from megascale_ops.controller.journal.store import Store, open_store
from megascale_ops.controller.loop import TICK_S, Loop
from megascale_ops.controller.record.job_record import JobRecord
from megascale_ops.controller.recording.recorded_loop import RecordedLoop, known_of
from megascale_ops.controller.recording.ring import Ring
from megascale_ops.controller.rendezvous.poll import Poll
from megascale_ops.errors import MegascaleError
from megascale_ops.schema.events import Event, Incident, JobStatus
from megascale_ops.schema.health import BadHardware
from megascale_ops.schema.messages import Evidence, Heartbeat, HeartbeatReply, Join, JoinReply, Leave, OrdersReply
from megascale_ops.schema.recording.entries import Start

# 60 s: the journal's writer gives a batch up within seconds; a disk that is away for longer is no simulation's.
_SETTLE_S = 60.0

TICK_EVERY_S = TICK_S
"""How often ``tick`` is due, seconds."""

__all__ = ["TICK_EVERY_S", "Embedded", "JobRecord", "Ring", "Signs", "Steady", "Told"]

_Callback = Callable[[], None]


def _now(callback: _Callback) -> None:
    """Run it: ``settle`` is called on the loop's own thread."""
    callback()


class _Journal:
    """Hands batches to the store and counts those that are not known to be safe."""

    def __init__(self, store: Store) -> None:
        self._store = store
        self._safe: queue.SimpleQueue[_Callback] = queue.SimpleQueue()
        self._open = 0

    def submit(self, batch: Batch, done: _Callback) -> None:
        """Write in order; ``done`` is called by ``settle`` when it is safe."""
        self._open += 1
        self._store.submit(batch, lambda: self._safe.put(done))

    def settle(self) -> bool:
        """Wait until all is safe, and say so to each that submitted something; return whether there was anything."""
        there_was = bool(self._open)
        while self._open:
            try:
                done = self._safe.get(timeout=_SETTLE_S)
            except queue.Empty:
                raise MegascaleError(f"the journal has not answered for {_SETTLE_S:g} s") from None
            self._open -= 1
            done()
        return there_was


class Embedded:
    """One controller with a journal of its own.

    Args:
        store: address of the journal, ``sqlite:///FILE``.
        clock: monotonic seconds.
        wall: wall clock seconds.
        ring: keeps what comes in of late; its blocks are written when it is closed, and by ``record``.

    Raises:
        UsageError: the journal can't be opened.
    """

    def __init__(
        self, store: str, *, clock: Callable[[], float], wall: Callable[[], float], ring: Ring | None = None
    ) -> None:
        self._store = open_store(store)
        self._journal = _Journal(self._store)
        self._recorded: RecordedLoop | None = None
        if ring is None:
            self._loop = Loop(self._journal, clock=clock, wall=wall, post=_now)
        else:
            self._loop = self._recorded = RecordedLoop(self._journal, ring, clock=clock, wall=wall, post=_now)
            self._recorded.begin_recording()

    def restore(
        self, records: Mapping[str, bytes], incidents: Iterable[Incident], hardware: Iterable[BadHardware]
    ) -> None:
        """Go on from what another controller had known; see ``Loop.restore``. Warnings are told anew if they hold."""
        self._loop.restore(records, [one for one in incidents if one.state == "open"])
        self._loop.hardware.restore(hardware)

    def heartbeat(self, heartbeat: Heartbeat, only_job: str = "") -> HeartbeatReply:
        """Take an agent's heartbeat in; see ``Loop.heartbeat``."""
        return self._loop.heartbeat(heartbeat, only_job)

    def go_on(self, steady: Steady) -> Taken:
        """Take heartbeats of many nodes in whose ranks only went on, or stand still; see ``going_on.take``."""
        return going_on.take(self._loop, steady)

    def evidence(self, evidence: Evidence) -> None:
        """Take an agent's evidence in; see ``Loop.evidence``."""
        self._loop.evidence(evidence)

    async def join(self, join: Join, wait_s: float) -> JoinReply:
        """Take a runner's join in; see ``Joining.join``."""
        return await self._loop.joining.join(join, wait_s)

    async def orders(
        self, job: str, node: str, runner_id: str, round_: int, after: str, incidents: int, wait_s: float
    ) -> OrdersReply:
        """Return orders for a runner; see ``Loop.orders``."""
        return await self._loop.orders(Poll(job, node, runner_id, round_, after, incidents), wait_s)

    def leave(self, word: Leave) -> None:
        """Take note that a runner is done; see ``Loop.leave``."""
        self._loop.leave(word)

    def set_policy(self, job: str, settings: Mapping[str, str]) -> None:
        """Change a job's policy; see ``Loop.policy``."""
        self._loop.policy(job, settings)

    def stop(self, job: str, reason: str) -> None:
        """End a job by hand; see ``ByHand.stop``."""
        if job in self._loop.jobs:
            self._loop.by_hand.stop(self._loop.jobs[job], reason)

    def known(self) -> Start:
        """Return all that this controller knows now, but for requests that wait: another one can go on from it."""
        return known_of(self._loop)

    def tick(self) -> None:
        """Let time pass, as ``Loop.run`` does every ``TICK_S``; raise what is a fault of ours."""
        self._loop.tick()
        if self._recorded is not None:
            self._recorded.look()
            self._recorded.ring.write_due()
        if self._loop.faults.total:
            raise MegascaleError(f"the controller has a fault of its own: {self._loop.faults.now()}")

    def settle(self) -> bool:
        """Wait until all that was submitted is journaled, and release it; return whether there was anything.

        Raises:
            MegascaleError: the journal does not answer.
        """
        return self._journal.settle()

    def is_over(self, job: str) -> bool:
        """Return whether a job has ended."""
        return self._loop.jobs[job].is_over

    def status(self, job: str) -> JobStatus:
        """Return where a job stands."""
        status = self._loop.status(job)
        assert status is not None, job
        return status.jobs[0]

    def account(self, job: str) -> Account | None:
        """Return where a job's time went; None when nothing is known."""
        return self._loop.goodput(job)

    def incidents(self, job: str) -> list[Incident]:
        """Return a job's incidents as the journal has them, oldest first, without events and evidence texts."""
        return self._store.incidents(job)

    def incident(self, incident_id: str) -> Incident | None:
        """Return one incident as the journal has it, with events and evidence."""
        return self._store.incident(incident_id)

    def events(self, job: str) -> list[Event]:
        """Return a job's events as the journal has them, oldest first."""
        return self._store.events(job)

    def close(self) -> None:
        """Write what is left and close the journal."""
        if self._recorded is not None:
            self._recorded.look()
            self._recorded.ring.write(self._recorded.ring.cut())
        self._store.close()
