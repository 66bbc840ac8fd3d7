# SPDX-License-Identifier: Apache-2.0
"""Heartbeats go out when they should, and nothing is lost while the controller is away."""

import asyncio
import contextlib
import itertools
import time
from collections.abc import AsyncIterator, Iterable

import pytest
from megascale_agents.counters import Tally
from megascale_agents.uplink.sender import HeartbeatSender

from megascale_ops.link import Link
from megascale_ops.schema.messages import Evidence, Heartbeat, Order
from tests.fakes.controller import FakeController


class Orders:
    """Keeps what it is handed."""

    is_busy = False

    def __init__(self) -> None:
        self.taken: list[Order] = []
        self.heard: list[str] = []

    def ingest_orders(self, orders: Iterable[Order]) -> None:
        """Keep orders."""
        self.taken.extend(orders)

    def reported(self, ids: Iterable[str]) -> None:
        """Keep ids."""
        self.heard.extend(ids)


class Speaking:
    """A speaker with a controller, without an agent around it."""

    def __init__(self, controller: FakeController, interval_s: float) -> None:
        self.controller = controller
        self.link = Link(controller.url, timeout_s=1.0)
        self.tally = Tally("node-a")
        self.orders = Orders()
        self.note = 0.0  # content of the next heartbeat, in a field that is free to use
        self.wants_full = 0
        self.seq = 0
        self.speaker = HeartbeatSender(self.link, self.compose, self.want_full, self.tally, interval_s)
        self.speaker.obey_with(self.orders)

    def compose(self, *, urgent: bool) -> Heartbeat:
        """Build a heartbeat that says ``note``."""
        self.seq += 1
        return Heartbeat(
            node="node-a",
            agent_id="agent-1",
            seq=self.seq,
            mono_s=time.monotonic(),
            wall_s=self.note,
            full=urgent,
            done_orders=("o-1",),
        )

    def want_full(self) -> None:
        """Count."""
        self.wants_full += 1

    def said(self) -> list[float]:
        """The notes the controller has heard."""
        return [heartbeat.wall_s for heartbeat in self.controller.heartbeats]

    def count(self, what: str) -> float:
        """A counter of the speaker."""
        return self.tally.values(f"megascale_agent_heartbeats_{what}_total")["node-a",]


@contextlib.asynccontextmanager
async def speaking_to(controller: FakeController, interval_s: float) -> AsyncIterator[Speaking]:
    """A speaker at work."""
    made = Speaking(controller, interval_s)
    task = asyncio.create_task(made.speaker.run())
    try:
        yield made
    finally:
        task.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await task
        await made.link.close()


@pytest.fixture
async def controller() -> AsyncIterator[FakeController]:
    """A controller that listens."""
    made = FakeController()
    await made.start()
    yield made
    await made.stop()


@pytest.fixture
async def speaking(controller: FakeController) -> AsyncIterator[Speaking]:
    """A speaker that speaks every 1,000 s unless urged, so that a test sees who urged."""
    async with speaking_to(controller, interval_s=1000.0) as made:
        yield made


async def test_what_is_urgent_is_said_at_once(speaking: Speaking) -> None:
    """Not at the next turn."""
    await speaking.controller.until(speaking.said, "the first heartbeat")

    speaking.note = 7.0
    speaking.speaker.urge("test")

    await speaking.controller.until(lambda: 7.0 in speaking.said(), "the urgent heartbeat")
    assert speaking.count("sent") >= 2


async def test_orders_are_handed_on_and_done_ones_acknowledged(speaking: Speaking) -> None:
    """What came with the reply is obeyed; what the heartbeat reported was heard."""
    order = Order(id="o-9", job="job", node="node-a", kind="kill", round=1)
    speaking.controller.orders.append(order)
    speaking.speaker.urge("test")

    await speaking.controller.until(lambda: speaking.orders.taken, "the order")

    assert speaking.orders.taken == [order]
    assert "o-1" in speaking.orders.heard


async def test_orders_that_come_before_anybody_obeys_wait(controller: FakeController) -> None:
    """The first reply may bring some, when what obeys them is still being loaded."""
    order = Order(id="o-9", job="job", node="node-a", kind="kill", round=1)
    controller.orders.append(order)
    link, orders = Link(controller.url), Orders()
    made = HeartbeatSender(
        link, lambda *, urgent: Heartbeat("node-a", "a", 1, 0.0, 0.0, full=urgent), int, Tally("a"), 20.0
    )
    task = asyncio.create_task(made.run())
    await asyncio.wait_for(made.has_spoken.wait(), 5.0)
    made.obey_with(orders)
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)
    await link.close()

    assert orders.taken == [order]


async def test_a_full_heartbeat_is_sent_when_asked_for(speaking: Speaking) -> None:
    """At once: the controller has just been started and has no agents yet."""
    await speaking.controller.until(speaking.said, "the first heartbeat")
    speaking.controller.send_full = True
    speaking.speaker.urge("test")

    await speaking.controller.until(lambda: len(speaking.said()) >= 3, "the full heartbeat")

    assert speaking.wants_full == 1


async def test_what_is_urgent_while_the_controller_is_away_is_kept_as_it_was(speaking: Speaking) -> None:
    """A process that was stopped and went on meanwhile has been stopped all the same."""
    await speaking.controller.until(speaking.said, "the first heartbeat")
    await speaking.controller.stop()

    for note in (1.0, 2.0, 3.0):
        speaking.note = note
        speaking.speaker.urge("test")
        await asyncio.sleep(0.15)
    speaking.note = 4.0
    await speaking.controller.start()

    await speaking.controller.until(lambda: 4.0 in speaking.said(), "the heartbeat afterwards")
    said = speaking.said()
    assert {1.0, 2.0, 3.0, 4.0} <= set(said)
    assert said == sorted(said)
    assert speaking.controller.heartbeats[-1].spooled > 0
    assert speaking.count("failed") >= 1
    assert speaking.count("spooled") >= 2
    seqs = [heartbeat.seq for heartbeat in speaking.controller.heartbeats]
    assert seqs == list(range(1, len(seqs) + 1))


async def test_evidence_waits_for_the_controllers_return(speaking: Speaking) -> None:
    """What was gathered is delivered once, later."""
    await speaking.controller.until(speaking.said, "the first heartbeat")
    await speaking.controller.stop()

    await speaking.speaker.report_evidence(Evidence(node="node-a", job="job", incident="job-1", order="o-1"))
    await speaking.controller.start()
    speaking.speaker.urge("test")

    await speaking.controller.until(lambda: speaking.controller.evidence, "the evidence")
    assert len(speaking.controller.evidence) == 1


async def test_a_refused_heartbeat_is_not_sent_again(speaking: Speaking, caplog: pytest.LogCaptureFixture) -> None:
    """It would be refused again; the next one says everything anew, and the log says so once."""
    await speaking.controller.until(speaking.said, "the first heartbeat")
    speaking.controller.refuse_with = 401
    speaking.note = 1.0
    speaking.speaker.urge("test")
    await speaking.controller.until(lambda: speaking.count("failed") >= 2, "two refusals")

    speaking.controller.refuse_with = 0
    speaking.note = 2.0

    await speaking.controller.until(lambda: 2.0 in speaking.said(), "the heartbeat afterwards")
    assert 1.0 not in speaking.said()
    assert speaking.wants_full >= 1
    assert [record.levelname for record in caplog.records].count("WARNING") == 1


async def test_a_flapping_rank_is_no_storm(speaking: Speaking) -> None:
    """At most twenty heartbeats a second, however often is urged."""
    await speaking.controller.until(speaking.said, "the first heartbeat")

    for _ in range(100):
        speaking.speaker.urge("test")
        await asyncio.sleep(0.005)

    moments = [heartbeat.mono_s for heartbeat in speaking.controller.heartbeats]
    gaps = [after - before for before, after in itertools.pairwise(moments)]
    assert min(gaps) >= 0.025
    assert sum(gaps) / len(gaps) >= 0.045  # a single one is shorter after one that a busy machine made longer


async def test_trouble_makes_it_speak_five_times_as_often(controller: FakeController) -> None:
    """Orders come with replies only; in an incident they come soon. A restart is no such trouble."""
    async with speaking_to(controller, interval_s=2.0) as speaking:
        await controller.until(speaking.said, "the first heartbeat")
        speaking.speaker.urge("restart")
        await controller.until(lambda: len(speaking.said()) >= 2, "the urgent heartbeat")
        speaking.speaker.urge("stopped", trouble=True)

        await controller.until(lambda: len(speaking.said()) >= 6, "heartbeats without further urging", 7.5)


async def test_a_controller_that_judges_is_told_sooner(controller: FakeController) -> None:
    """``again_s`` of a reply shortens the pause, and the next reply without it restores the old one."""
    controller.again_s = 0.1
    async with speaking_to(controller, interval_s=20.0) as speaking:
        await controller.until(lambda: len(speaking.said()) >= 4, "heartbeats sooner than every 20 s", 50.0)
        controller.again_s = 0.0
        told = len(speaking.said())
        await asyncio.sleep(0.5)

        assert len(speaking.said()) <= told + 2
