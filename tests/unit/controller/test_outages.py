# SPDX-License-Identifier: Apache-2.0
"""A service that is away is waited for with growing pauses and up to a limit; a bug of the script is not."""

import msgspec
import pytest

from megascale_ops.controller.policy.actions import failure_of, state_failure_of
from megascale_ops.controller.policy.answer import answer
from megascale_ops.controller.policy.decision import Decision, Failure, Question, Restart
from megascale_ops.schema.health import Verdict
from megascale_ops.schema.messages import RankExit
from megascale_ops.schema.policy import JobPolicy
from megascale_ops.schema.progress import RankError
from tests.fakes.controlled_job import World

REFUSED = RankError("urllib.error.URLError", "<urlopen error [Errno 111] Connection refused>", "train.py:3 main", 7)
BUG = RankError("RuntimeError", "Connection refused", "train.py:3 main", 7)
KILL = -9
START_S = 10_000.0


def _exit(error: RankError, tail: str = "") -> RankExit:
    return RankExit(
        rank=0, local_rank=0, pid=1, code=1, seen_mono_s=1.0, error=error, step=error.step, stderr_tail=tail
    )


def _verdict(fault: str = "exception") -> Verdict:
    return Verdict(fault=fault, reason="rank 0 on a: it could not", confidence=0.95, culprits=(0,), nodes=("a",))


class Outage:
    """A job whose ranks all fall over the same thing, ``lived_s`` after each start."""

    def __init__(self, error: RankError, policy: JobPolicy | None = None, lived_s: float = 5.0) -> None:
        self.now_s, self.error, self.policy, self.lived_s = START_S, error, policy or JobPolicy(), lived_s
        self.restarts: tuple[Restart, ...] = ()
        self.before: Failure | None = None

    def end(self, *, progressed: bool = False, fault: str = "exception") -> Decision:
        """Let the round end, and take note of what follows."""
        verdict = _verdict(fault)
        failure = failure_of(verdict, (_exit(self.error),))
        decision = answer(
            Question(
                *("end", self.now_s, verdict, self.policy, self.restarts),
                restarts_in_all=len(self.restarts),
                failure=failure,
                failure_before=self.before,
                progressed=progressed,
            )
        )
        self.before = failure.after(self.before) if failure is not None else None
        away = (decision.wait_s, decision.outage_wall_s)
        self.restarts += (Restart(self.now_s, decision.fault, "a", progressed, "", *away),)
        self.now_s += decision.wait_s + self.lived_s
        return decision

    def until_it_ends(self) -> list[Decision]:
        """Return all decisions up to the end of the job, or the first two hundred."""
        found = [self.end(progressed=True)]
        while found[-1].action != "stop" and len(found) < 200:
            found.append(self.end())
        return found


@pytest.mark.parametrize("fault", ["exception", "exception_everywhere"])
def test_the_pauses_grow_and_the_end_has_its_name(fault: str) -> None:
    """An hour of a service that refuses: no bug, fewer than twenty tries, and a last one at the end of the patience."""
    job = Outage(REFUSED)

    found = [job.end(progressed=True, fault=fault)]
    while found[-1].action == "restart":
        found.append(job.end(fault=fault))

    waits = [one.wait_s for one in found[:-1]]
    assert waits[0] == 10.0
    assert max(waits) == 300.0
    assert waits[:-1] == sorted(waits[:-1])
    assert len(found) < 20
    assert {one.fault for one in found} == {"service_down"}
    assert found[-1].rule == "service_patience"
    assert "has not answered for 1 h 0 min" in found[-1].reason


@pytest.mark.parametrize("patience_s", [0.0, 30.0, 400.0])
def test_the_limit_is_the_jobs_own(patience_s: float) -> None:
    """No pause goes beyond it: the last try comes when it is used up, or none at all."""
    found = Outage(REFUSED, JobPolicy(service_patience_s=patience_s)).until_it_ends()

    assert found[-1].rule == "service_patience"
    assert sum(one.wait_s for one in found) <= patience_s


def test_a_bug_with_the_same_words_is_stopped_as_any_other() -> None:
    """The negative control: the script's own exception that quotes a refused connection."""
    found = Outage(BUG).until_it_ends()

    assert [one.action for one in found] == ["restart", "stop"]
    assert found[-1].fault == "script_bug"
    assert not any(one.wait_s for one in found)


def test_a_service_that_came_back_begins_anew() -> None:
    """A later outage is another one: its pauses begin small, and its patience is whole."""
    job = Outage(REFUSED, lived_s=3000.0)
    first = [job.end(progressed=True), job.end(), job.end()]

    later = job.end(progressed=True)

    assert first[-1].action == "stop" or first[-1].wait_s > 10.0
    assert later.wait_s == 10.0


def test_tries_of_its_own_for_minutes_are_no_progress_of_a_script_without_steps() -> None:
    """A client that tries for two minutes before it raises has got nothing done, and the outage goes on."""
    job = Outage(msgspec.structs.replace(REFUSED, step=-1), lived_s=120.0)
    job.end(progressed=True)

    found = [job.end(progressed=True) for _ in range(3)]

    assert [one.wait_s for one in found] == [130.0, 300.0, 300.0]


def test_hours_of_work_of_a_script_without_steps_are_progress() -> None:
    """The negative control of that."""
    job = Outage(msgspec.structs.replace(REFUSED, step=-1), lived_s=3000.0)
    job.end(progressed=True)

    assert [job.end(progressed=True).wait_s for _ in range(3)] == [10.0] * 3


def test_an_outage_proves_nothing_about_restarts() -> None:
    """Whatever befalls the job before its first new step after one is judged as if there had been none."""
    job = Outage(REFUSED)
    for _ in range(8):
        job.end()
    killed = Verdict(fault="killed", reason="killed", confidence=0.9, culprits=(0,), nodes=("a",))

    decision = answer(Question("end", job.now_s, killed, JobPolicy(), job.restarts, progressed=False))

    assert decision.action == "restart"


def test_restarts_are_limited_as_the_user_has_said() -> None:
    """``--max-restarts`` and ``service_down=stop`` mean what they say."""
    limited = Outage(REFUSED, JobPolicy(max_restarts=2)).until_it_ends()
    stopped = Outage(REFUSED, JobPolicy(actions={"service_down": "stop"})).until_it_ends()
    plain = Outage(REFUSED, JobPolicy(actions={"service_down": "warn"})).until_it_ends()

    assert [one.action for one in limited] == ["restart", "restart", "stop"]
    assert limited[-1].rule == "budget"
    assert [(one.action, one.fault) for one in stopped] == [("stop", "service_down")]
    assert plain[-1].fault == "script_bug"


def test_no_checkpoint_is_gone_back_for_a_service() -> None:
    """What fails right after a restore may be a bad state; a refused connection never is."""
    ended = (_exit(REFUSED),)
    verdict = _verdict()

    assert state_failure_of(verdict, failure_of(verdict, ended), ended) is None
    assert state_failure_of(verdict, failure_of(verdict, (_exit(BUG),)), (_exit(BUG),)) is not None


async def test_the_next_round_waits_and_says_so() -> None:
    """The runner hears why it waits; the round begins when the pause is over, and not before."""
    world = World()
    await world.up("a")
    exits = (world.exit(1, 1, error=REFUSED),)

    told = await world.ask(world.new_join(cause="failure", exits=exits, previous_round=1))
    record = world.loop.jobs["job"].record

    assert told.status == "wait"
    assert "waits 10 s for a service that its script needs" in told.reason
    assert record.restarts[-1].cause == "service_down"
    assert record.round == 1
    world.now_s += 11.0
    world.loop.tick()
    assert world.loop.jobs["job"].record.round == 2


async def test_a_pause_outlives_the_controller() -> None:
    """One that is started again meanwhile waits for the rest of it."""
    world = World()
    await world.up("a")
    join = world.new_join(cause="failure", exits=(world.exit(1, 1, error=REFUSED),), previous_round=1)
    await world.ask(join)

    world.restart_controller()
    world.now_s += 1.0

    assert (await world.ask(join)).status == "wait"
    assert world.loop.jobs["job"].record.round == 1


async def test_any_other_end_is_not_waited_for() -> None:
    """The negative control."""
    world = World()
    await world.up("a")

    reply = await world.ask(world.new_join(cause="failure", exits=(world.exit(1, KILL),), previous_round=1))

    assert reply.status == "go"


async def test_a_refused_connection_to_a_rank_that_died_is_no_outage() -> None:
    """The negative control: the others' connections were to a peer, and its death is the cause."""
    world = World()
    await world.up("a")
    lost = RankError("ConnectionRefusedError", "[Errno 111] Connection refused", "train.py:3 main", 7)
    exits = (world.exit(0, KILL, ago_s=0.2), world.exit(1, 1, error=lost, ago_s=0.1))

    reply = await world.ask(world.new_join(cause="failure", exits=exits, previous_round=1))

    assert reply.status == "go"
    assert world.loop.jobs["job"].record.restarts[-1].cause == "killed"
