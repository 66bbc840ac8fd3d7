# SPDX-License-Identifier: Apache-2.0
"""A node that several users share: each run brings an agent, all have the node's name, and one controller hears all."""

import re
from pathlib import Path

import msgspec
import pytest

from megascale_ops.controller.cluster.registry import TAKEOVER_S
from megascale_ops.controller.job import diagnose
from megascale_ops.controller.journal.store import open_store
from megascale_ops.controller.loop import MOST_AGENTS
from megascale_ops.controller.metrics.page import Metrics
from megascale_ops.errors import UsageError
from megascale_ops.schema.health import HardwareFinding, Verdict
from megascale_ops.schema.messages import Heartbeat, HeartbeatReply, JobReport
from megascale_ops.schema.progress import ProcessReading, Progress, RankReport
from tests.fakes.controlled_job import World


class User:
    """One user's job of two ranks on the shared node, and the agent that his run has started."""

    def __init__(self, world: World, job: str, serves: str, agent: str = "") -> None:
        self.world = world
        self.job = job
        self.jobs = (job,)  # what the agent sees
        self.serves = serves
        self.agent = agent or f"agent of {job}"
        self.seq = 0
        self.step = 0
        self.state = "S"

    async def start(self) -> None:
        """Form the job's first round."""
        join = msgspec.structs.replace(self.world.new_join("shared"), job=self.job, runner_id=f"runner of {self.job}")
        assert (await self.world.ask(join, wait_s=0.0)).status == "go"

    def beat(self, only_job: str = "", **more: object) -> HeartbeatReply:
        """Send a full heartbeat in which the ranks have just made a step."""
        self.seq += 1
        self.step += self.state == "S"
        now_s = self.world.now_s
        moved_s = now_s if self.state == "S" else now_s - 5.0
        progress = Progress(state="running", step=self.step, steps_seen=self.step, moved_mono_s=moved_s)
        process = ProcessReading(state=self.state, stopped_since_mono_s=moved_s)
        ranks = tuple(RankReport(rank, rank, 10 + rank, 1, progress=progress, process=process) for rank in range(2))
        said: dict[str, object] = {
            "node": "shared",
            "agent_id": self.agent,
            "seq": self.seq,
            "mono_s": now_s,
            "wall_s": now_s,
            "full": True,
            "jobs": tuple(JobReport(job, 1, "/run", ranks) for job in self.jobs),
            "serves": self.serves,
        }
        return self.world.loop.heartbeat(Heartbeat(**{**said, **more}), only_job)  # type: ignore[arg-type]  # fields

    @property
    def now(self) -> str:
        """The job's state."""
        return self.world.loop.jobs[self.job].record.state


async def two(first: str = "1000-a", second: str = "1001-b") -> tuple[World, User, User]:
    """Return the jobs of two users on one node, both in their first round."""
    world = World()
    alice, bob = User(world, "alice", first), User(world, "bob", second)
    await alice.start()
    await bob.start()
    return world, alice, bob


async def train(world: World, seconds: int, *users: User) -> None:
    """Let time pass; the agents of these users speak each second."""
    for _ in range(seconds):
        for user in users:
            user.beat()
        await world.wait(1.0, beating=False)


async def test_two_users_agents_of_one_node_are_both_heard() -> None:
    """A minute side by side: both jobs run, and nothing was dropped."""
    world, alice, bob = await two()

    await train(world, 60, alice, bob)

    assert (alice.now, bob.now) == ("running", "running")
    assert not world.loop.rejected
    steps = [
        max(rank.report.progress.step for rank in world.loop.status(job).jobs[0].ranks) for job in ("alice", "bob")
    ]  # type: ignore[union-attr]  # they are there
    assert steps == [60, 60]


async def test_agents_that_do_not_say_whom_they_serve_put_each_other_out() -> None:
    """The negative control, as it was for all: an older agent is the node's only one, so the other's job is unseen."""
    world, alice, bob = await two("", "")

    await train(world, 10, alice, bob)

    assert world.loop.rejected["stale"] > 5
    assert world.loop.registry.share("shared", "alice", 1) is None


async def test_an_order_goes_to_the_agent_that_speaks_of_the_job() -> None:
    """Another user's agent, which would answer that it knows no such job, neither hears of it nor can call it done."""
    world, alice, bob = await two()
    await train(world, 5, alice, bob)
    alice.state = "T"

    ordered = {"alice": set[str](), "bob": set[str]()}
    for _ in range(5):
        for user in (alice, bob):
            ordered[user.job] |= {order.job for order in user.beat().orders}
        await world.wait(1.0, beating=False)
    held = tuple(world.loop.transitions.agent_orders["shared"])
    bob.beat(done_orders=held)
    still = tuple(world.loop.transitions.agent_orders["shared"])
    alice.beat(done_orders=held)

    assert ordered == {"alice": {"alice"}, "bob": set()}
    assert still == held
    assert "shared" not in world.loop.transitions.agent_orders


async def test_a_dead_agent_is_the_loss_of_its_own_users_job_alone() -> None:
    """While the other goes on speaking for the node, the one that is gone is missed."""
    world, alice, bob = await two()
    await train(world, 10, alice, bob)

    await train(world, 25, bob)

    assert bob.now == "running"
    verdict = world.loop.jobs["alice"].record.ended_verdict
    assert verdict is not None
    assert verdict.fault in {"node_lost", "runner_lost"}
    assert verdict.nodes == ("shared",)


async def test_an_agent_that_was_restarted_replaces_its_forerunner_at_once() -> None:
    """A late word of the one before is dropped, and the other user's agent is not asked for anything anew."""
    world, alice, bob = await two()
    await train(world, 5, alice, bob)

    again = User(world, "alice", alice.serves, agent="another")
    again.step = alice.step
    again.beat()
    alice.beat(full=False)

    assert world.loop.rejected["stale"] == 1
    assert not bob.beat(full=False).send_full
    assert len(world.loop.registry) == 2


@pytest.mark.parametrize("ended", [False, True])
async def test_of_two_agents_that_see_a_job_one_speaks(*, ended: bool) -> None:
    """A root's agent that comes later takes a user's job over; once it is silent, the user's own speaks again."""
    world, alice, bob = await two()
    root = User(world, "alice", "0-r", agent="root's")
    root.jobs = ("alice", "bob")
    await train(world, 5, alice, bob)
    root.step = alice.step

    await train(world, 5, alice, bob, root)
    view = world.loop.registry.node("shared", "bob")
    assert view is not None
    assert view.agent_id == "root's"
    if ended:
        await train(world, round(TAKEOVER_S) + 5, alice, bob)
        view = world.loop.registry.node("shared", "bob")
        assert view is not None
        assert view.agent_id == "agent of bob"

    assert (alice.now, bob.now) == ("running", "running")


async def test_the_agent_of_one_job_is_not_believed_about_the_hardware_for_others() -> None:
    """What a job's agent finds is quoted to its own job; who speaks for the whole node is quoted to all."""
    world, alice, bob = await two()
    finding = HardwareFinding("xid_79", "Xid 79: fallen off the bus", "kernel_log", severity="fail")
    alice.beat("alice", findings=(finding,))
    bob.beat()

    asked = {job: world.loop.registry.findings("shared", job) for job in ("alice", "bob")}
    quoted = diagnose.quote_hardware(
        world.loop.registry,
        world.loop.jobs["bob"],
        Verdict("silent", "x", 0.9, culprits=(0,), nodes=("shared",), round=1),
    )

    assert asked == {"alice": (finding,), "bob": ()}
    assert "Xid 79" not in str(quoted)


async def test_a_node_has_room_for_so_many_agents_and_half_of_them_for_jobs_alone() -> None:
    """The holder of a token for one job can't fill a node with made-up agents, nor keep a node's own one out."""
    world, alice, _bob = await two()
    for number in range(MOST_AGENTS // 2):
        User(world, "alice", f"{number}-x", agent=str(number)).beat("alice")

    with pytest.raises(UsageError, match=f"node shared has {MOST_AGENTS // 2} agents already"):
        User(world, "alice", "one-more").beat("alice")
    alice.beat()

    assert world.loop.registry.agents("shared") == MOST_AGENTS // 2 + 1


async def test_what_is_forgotten_of_one_agent_stays_of_the_other() -> None:
    """An hour after the last word of one, the node is what the other says."""
    world, alice, bob = await two()
    await train(world, 3, alice, bob)
    before_s = world.now_s
    await train(world, 3, bob)

    world.loop.registry.forget(before_s)

    assert (world.loop.registry.agents("shared"), len(world.loop.registry)) == (1, 1)
    assert world.loop.registry.share("shared", "alice", 1) is None
    assert world.loop.registry.share("shared", "bob", 1) is not None
    world.loop.registry.forget(world.now_s + 1.0)
    assert world.loop.registry.node("shared") is None


async def test_prometheus_is_told_of_a_shared_node_once(tmp_path: Path) -> None:
    """Two series of one name and node would be refused with the whole page."""
    world, alice, bob = await two()
    await train(world, 3, alice, bob)
    await train(world, 2, bob)
    store = open_store(f"sqlite:///{tmp_path}/ops.db")

    text = (await Metrics(world.loop, store).page()).body.decode()
    store.close()

    heard = re.findall(r"megascale_agent_heard_timestamp_seconds\{.*?\} (\S+)", text)
    assert len(heard) == 1
    assert "megascale_controller_nodes 1" in text


async def test_a_job_whose_values_were_cut_says_so_once_for_each_round() -> None:
    """An agent that has no room for all of a job tells it: an event of that job, with the node, and of no other."""
    world, alice, bob = await two()

    for _ in range(3):
        alice.beat(jobs=(JobReport("alice", 1, "/run", cut=300),))
        bob.beat()

    told = [(event.job, event.node, event.text) for event in world.memory.events if event.kind == "values_cut"]
    assert [one[:2] for one in told] == [("alice", "shared")]
    assert "300 of them are cut" in told[0][2]
