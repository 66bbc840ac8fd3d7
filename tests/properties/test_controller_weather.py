# SPDX-License-Identifier: Apache-2.0
"""The real loop under any weather: joins, leaves, freezes, deaths, silence, and controllers killed in between."""

import asyncio
import contextlib
import signal

from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from megascale_ops.controller.record.state_machine import FINAL, State
from megascale_ops.errors import RefusedError
from megascale_ops.schema.messages import Evidence, EvidenceItem, Leave
from megascale_ops.schema.policy import JobPolicy
from megascale_ops.schema.progress import CollectivePosition
from tests.fakes.controlled_job import World
from tests.matrix import some

NODES = ("a", "b")
WEATHER = (
    "join",
    "fail",
    "obey",
    "replace",
    "leave",
    "give_up",
    "cancel",
    "freeze",
    "thaw",
    "hang",
    "train",
    "die",
    "poll",
    "evidence",
    "kill_controller",
    "spawn",
)
STEPS = st.lists(
    st.tuples(st.sampled_from(WEATHER), st.sampled_from(NODES), st.sampled_from([0.0, 0.2, 1.0, 6.0])), max_size=25
)


class Sky:
    """Makes weather over one job."""

    def __init__(self, minimum: int) -> None:
        policy = JobPolicy(node_lost_s=5.0, join_timeout_s=30.0, last_call_s=0.5)
        self.world = World(min_nodes=minimum, max_nodes=2, policy=policy)
        self.step = 0
        self.runners = {"a": 0, "b": 0}

    async def blow(self, kind: str, node: str, seconds: float) -> None:
        """Let one thing happen, then let time pass."""
        world = self.world
        if kind in ("join", "fail", "obey", "replace"):
            self._join(kind, node)
        elif kind in ("leave", "give_up", "cancel"):
            outcome = {"leave": "succeeded", "give_up": "failed", "cancel": "cancelled"}[kind]
            with contextlib.suppress(RefusedError):
                world.loop.leave(Leave("job", node, self._runner(node), outcome, round=self._round()))
        elif kind == "kill_controller":
            self._kill_controller()
        elif kind == "poll" and "job" in world.loop.jobs:
            world.poll(node, runner_id=self._runner(node))
        elif kind == "evidence":
            self._evidence(node)
        else:
            self._ranks(kind, node)
        await world.settle()
        if "job" in world.loop.jobs:
            await world.wait(seconds)

    def _kill_controller(self) -> None:
        before = {name: job.record for name, job in self.world.loop.jobs.items() if name in self.world.memory.records}
        self.world.restart_controller()
        after = {name: job.record for name, job in self.world.loop.jobs.items()}
        assert {name: (one.state, one.round, one.incidents) for name, one in before.items()} == {
            name: (one.state, one.round, one.incidents) for name, one in after.items()
        }

    def _runner(self, node: str) -> str:
        return f"runner-{node}-{self.runners[node]}"

    def _round(self) -> int:
        return self.world.round if "job" in self.world.loop.jobs else 0

    def _join(self, kind: str, node: str) -> None:
        world = self.world
        exits = ()
        if kind == "replace":
            self.runners[node] += 1
        elif kind != "join":
            code = -signal.SIGKILL if kind == "fail" else -signal.SIGTERM
            exits = tuple(world.exit(rank.rank, code, by_us=kind == "obey") for rank in world.ranks.get(node, []))
        cause = {"fail": "failure", "obey": "order"}.get(kind, "start")
        previous = 0 if kind in ("join", "replace") else self._round()
        join = world.new_join(node, cause=cause, exits=exits, previous_round=previous, runner_id=self._runner(node))
        world.ask(join).add_done_callback(_refusals_are_answers)

    def _evidence(self, node: str) -> None:
        for order in list(self.world.loop.transitions.agent_orders.get(node, {}).values()):
            items = (EvidenceItem(kind="stacks", ok=True),)
            self.world.loop.evidence(Evidence(node, "job", order.incident, order.id, items=items))

    def _ranks(self, kind: str, node: str) -> None:
        world = self.world
        if kind == "train":
            self.step += 6
            world.train(self.step)
        elif kind == "spawn":
            job = world.loop.jobs.get("job")
            if job is not None and job.member(node) is not None:
                world.spawn(node)
        for rank in world.ranks.get(node, [])[:1]:
            if kind == "freeze":
                rank.state, rank.stopped_since_s = "T", world.now_s
            elif kind == "thaw":
                rank.state = "R"
            elif kind == "die":
                rank.state = ""
            elif kind == "hang":
                rank.collective = CollectivePosition(5, 4, "all_reduce")


def _refusals_are_answers(task: "asyncio.Task[object]") -> None:
    if not task.cancelled() and task.exception() is not None:
        assert isinstance(task.exception(), RefusedError), task.exception()


@given(st.integers(1, 2), STEPS)
@settings(max_examples=some(150), deadline=None, suppress_health_check=[HealthCheck.too_slow])
def test_no_weather_sinks_the_controller(minimum: int, steps: list[tuple[str, str, float]]) -> None:
    """Nothing that runners, agents and fate can do leads to an illegal move, and the journal always has the truth."""
    asyncio.run(_sail(minimum, steps))


async def _sail(minimum: int, steps: list[tuple[str, str, float]]) -> None:
    sky = Sky(minimum)
    world = sky.world
    errors: list[dict[str, object]] = []
    asyncio.get_running_loop().set_exception_handler(lambda _loop, context: errors.append(context))

    for kind, node, seconds in steps:
        await sky.blow(kind, node, seconds)
    await _into_port(sky)

    for task in world.tasks:
        task.cancel()
    await asyncio.gather(*world.tasks, return_exceptions=True)
    assert not errors


async def _into_port(sky: Sky) -> None:
    """Fresh runners on both nodes always get somewhere: into a round, or to the end of the job."""
    world = sky.world
    world.ranks = {}
    if "job" in world.loop.jobs:
        await world.wait(12.0, beating=False)
    for node in NODES:
        sky.runners[node] += 1
    joins = [world.new_join(node, runner_id=f"fresh-{node}") for node in NODES]
    replies = [world.ask(join) for join in joins]
    await world.settle()
    for _ in range(8):
        await world.wait(5.0, beating=False)
        # A node that must wait (a spare, an evicted node) polls again, as a runner does.
        waiting = [reply.done() and not reply.exception() and reply.result().status == "wait" for reply in replies]
        replies = [
            world.ask(join) if again else reply for join, reply, again in zip(joins, replies, waiting, strict=True)
        ]
        await world.settle()
        if all(reply.done() for reply in replies):
            break
    answers = [reply.result().status for reply in replies if reply.done() and reply.exception() is None]
    assert "go" in answers or State(world.state) in (*FINAL, State.REPLACING), (answers, world.state)
