# SPDX-License-Identifier: Apache-2.0
"""A loop that notes what it takes in before it does, and the orders that it gives out.

Everything that a controller knows comes in by these few methods, so what they noted, handed to another controller at
the same times, makes it see and say the same.
"""

import asyncio
from collections.abc import Callable, Mapping

import msgspec

from megascale_ops.controller.cluster.node_view import NodeView
from megascale_ops.controller.job.job import Job
from megascale_ops.controller.job.transitions import Journal
from megascale_ops.controller.loop import Loop
from megascale_ops.controller.recording.ring import Ring
from megascale_ops.controller.recovery.by_hand import ByHand
from megascale_ops.controller.rendezvous.join import Joining
from megascale_ops.controller.rendezvous.poll import Poll
from megascale_ops.schema.messages import (
    Evidence,
    Heartbeat,
    HeartbeatReply,
    JobReport,
    Join,
    JoinReply,
    Leave,
    OrdersReply,
    PolicyView,
)
from megascale_ops.schema.recording.entries import (
    Answered,
    Beat,
    Joined,
    Known,
    Left,
    PolicySet,
    Polled,
    Start,
    StopAsked,
)

_encode = msgspec.json.Encoder().encode


class RecordedLoop(Loop):
    """``Loop``, and a ring that keeps what came in of late."""

    def __init__(
        self,
        journal: Journal,
        ring: Ring,
        *,
        clock: Callable[[], float],
        wall: Callable[[], float],
        post: Callable[[Callable[[], None]], None],
        is_paused: Callable[[], bool] = lambda: False,
    ) -> None:
        super().__init__(journal, clock=clock, wall=wall, post=post, is_paused=is_paused)
        self.ring = ring
        self.joining = _Joining(self.jobs, self.transitions, self.faults)
        self.joining.ring = ring
        self.by_hand = _ByHand(self.transitions, self.registry)
        self.by_hand.ring = ring

    def begin_recording(self) -> None:
        """Begin: what was restored is known by now."""
        self.ring.begin(lambda: known_of(self))

    def look(self) -> None:
        """Note what has changed since the look before."""
        self.ring.poll(self.incidents)

    async def close_recording(self) -> None:
        """Write what has gathered since the last block."""
        self.look()
        await asyncio.to_thread(self.ring.write, self.ring.cut())

    def heartbeat(self, heartbeat: Heartbeat, only_job: str = "") -> HeartbeatReply:
        """See ``Loop.heartbeat``."""
        self.ring.note(Beat(self.ring.now_s, heartbeat, only_job))
        reply = super().heartbeat(heartbeat, only_job)
        if reply.orders:
            self.ring.note_orders(reply.orders)
        return reply

    def evidence(self, evidence: Evidence) -> None:
        """See ``Loop.evidence``."""
        self.ring.note(Answered(self.ring.now_s, evidence))
        super().evidence(evidence)

    async def orders(self, asked: Poll, wait_s: float) -> OrdersReply:
        """See ``Loop.orders``."""
        ring = self.ring
        number = ring.next_number()
        ring.open(
            Polled(
                ring.now_s, number, asked.job, asked.node, asked.runner_id, asked.round, asked.after, asked.incidents,
                wait_s,
            )
        )  # fmt: skip
        is_broken = False
        try:
            reply = await super().orders(asked, wait_s)
        except asyncio.CancelledError:
            is_broken = True
            raise
        finally:
            ring.close_request(number, broken=is_broken)
        ring.note_orders(reply.orders)
        return reply

    def leave(self, word: Leave) -> None:
        """See ``Loop.leave``."""
        self.ring.note(Left(self.ring.now_s, word))
        super().leave(word)

    def policy(self, name: str, settings: Mapping[str, str] | None = None) -> PolicyView | None:
        """See ``Loop.policy``."""
        if settings is not None:
            self.ring.note(PolicySet(self.ring.now_s, name, dict(settings)))
        return super().policy(name, settings)


def known_of(loop: Loop) -> Start:
    """Return all that a loop knows now, but for requests that wait."""
    records = {
        name: msgspec.Raw(_encode(msgspec.structs.replace(job.record, orders=tuple(job.orders.values()))))
        for name, job in loop.jobs.items()
    }
    lasting = (one for one in loop.incidents.values() if one.state in ("open", "watching"))
    known = tuple(msgspec.structs.replace(one, events=()) for one in lasting)
    wall_s = loop.wall()
    agents = tuple(Known(_as_heartbeat(view, wall_s), view.only_job) for view in loop.registry.nodes())
    return Start(0.0, records, known, agents, loop.hardware.book.entries())


def _as_heartbeat(view: NodeView, wall_s: float) -> Heartbeat:
    """Return what an agent has told so far as one full heartbeat: that it sent last."""
    jobs = tuple(
        JobReport(name, share.round, share.run_dir, tuple(share.ranks.values())) for name, share in view.shares.items()
    )
    return Heartbeat(
        node=view.node,
        agent_id=view.agent_id,
        seq=view.seq,
        mono_s=view.sent_mono_s,
        wall_s=wall_s,
        full=True,
        host=view.host,
        jobs=jobs,
        findings=view.findings,
        metrics=view.metrics,
        serves=view.key.serves,
    )


class _Joining(Joining):
    """``Joining``, which notes each request."""

    ring: Ring

    async def join(self, join: Join, wait_s: float) -> JoinReply:
        """See ``Joining.join``."""
        number = self.ring.next_number()
        self.ring.open(Joined(self.ring.now_s, number, join, wait_s))
        is_broken = False
        try:
            return await super().join(join, wait_s)
        except asyncio.CancelledError:
            is_broken = True
            raise
        finally:
            self.ring.close_request(number, broken=is_broken)


class _ByHand(ByHand):
    """``ByHand``, which notes that a job is to end."""

    ring: Ring

    def stop(self, job: Job, reason: str) -> None:
        """See ``ByHand.stop``."""
        self.ring.note(StopAsked(self.ring.now_s, job.name, reason))
        super().stop(job, reason)
