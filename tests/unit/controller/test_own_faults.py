# SPDX-License-Identifier: Apache-2.0
"""An internal fault in judging one job suspends that job's judgement for a while, and no other's."""

import msgspec
import pytest

from megascale_ops.controller.job.own_faults import FIRST_PAUSE_S, MOST_PAUSE_S, OwnFaults
from megascale_ops.controller.recovery import failures
from tests.fakes.controlled_job import World


class Trap:
    """A judge that fails for one job while it is set."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.is_set = False
        self.seen: list[str] = []
        self._check = failures.check_nodes
        monkeypatch.setattr(failures, "check_nodes", self.check_nodes)

    def check_nodes(self, transitions: object, job: object, *more: object) -> None:
        """Look at a job, or fail."""
        name = job.name  # type: ignore[attr-defined]  # a Job
        if name == "job" and self.is_set:
            raise OverflowError("cannot convert float infinity to integer")
        self.seen.append(name)
        self._check(transitions, job, *more)  # type: ignore[arg-type]  # as given


async def two_jobs() -> World:
    """Return a world with a second job beside the usual one."""
    world = World(allows_faults=True)
    await world.up("a")
    world.ask(msgspec.structs.replace(world.new_join("b"), job="other"))
    await world.settle()
    return world


async def test_others_are_judged_while_one_jobs_judge_fails(monkeypatch: pytest.MonkeyPatch) -> None:
    """The tick goes on to the next job, the job's own agents and runners are answered, the journal has the fault."""
    world = await two_jobs()
    trap = Trap(monkeypatch)

    trap.is_set = True
    await world.wait(1.0)

    assert trap.seen.count("other") == 10
    assert world.loop.faults.total == {"job": 1}
    (told,) = [event for event in world.memory.events if event.kind == "own_fault"]
    assert "OverflowError" in told.text
    assert world.loop.faults.now() == (told.text,)
    assert world.beat("a").orders == ()
    assert world.loop.goodput("other") is not None


async def test_it_is_judged_again_after_a_pause(monkeypatch: pytest.MonkeyPatch) -> None:
    """What was wrong is over: the job is watched as before, and nothing is degraded any more."""
    world = await two_jobs()
    trap = Trap(monkeypatch)
    trap.is_set = True
    await world.wait(0.2)

    trap.is_set = False
    await world.wait(FIRST_PAUSE_S + 0.2)

    assert "job" in trap.seen
    assert world.loop.faults.now() == ()


async def test_a_rank_that_dies_meanwhile_is_dealt_with_after_the_pause(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its runner's join is taken and waits; no request fails."""
    world = await two_jobs()
    trap = Trap(monkeypatch)
    trap.is_set = True
    await world.wait(0.2)

    again = world.ask(world.new_join("a", cause="failure", exits=(world.exit(0, -9),), previous_round=1))
    await world.wait(0.2, beating=False)
    assert not again.done()
    trap.is_set = False
    await world.wait(FIRST_PAUSE_S, beating=False)

    assert again.result().status == "go"


def test_a_fault_that_stays_is_met_ever_more_seldom_and_one_that_went_is_forgiven() -> None:
    """Twice as long each time, up to five minutes."""
    now_s = [0.0]
    faults = OwnFaults(lambda: now_s[0], lambda _job, _text: None)
    pauses = []
    for _ in range(8):
        faults.note("job", "judging it", ValueError("x"))
        began_s = now_s[0]
        while faults.is_paused("job"):
            now_s[0] += 1.0
        pauses.append(now_s[0] - began_s)

    now_s[0] += 700.0
    faults.note("job", "judging it", ValueError("x"))

    assert pauses == [5.0, 10.0, 20.0, 40.0, 80.0, 160.0, MOST_PAUSE_S, MOST_PAUSE_S]
    assert "5 s" in faults.now()[0]


def test_a_journal_that_fails_too_ends_nothing(caplog: pytest.LogCaptureFixture) -> None:
    """The log has both."""
    faults = OwnFaults(lambda: 0.0, lambda _job, _text: {}["no such job"])

    with faults.contain("job", "judging it"):
        raise ValueError("x")

    assert "a fault of ours while judging it (ValueError: x)" in caplog.text
    assert "can't be journaled" in caplog.text


async def test_what_can_only_not_be_shown_is_judged_on(monkeypatch: pytest.MonkeyPatch) -> None:
    """A figure of one job that can't be reckoned: others are shown, that job is judged, and it is told once."""
    world = await two_jobs()
    trap = Trap(monkeypatch)
    of = world.loop.accounts.of
    monkeypatch.setattr(world.loop.accounts, "of", lambda job, *more: 1 // 0 if job.name == "job" else of(job, *more))

    await world.wait(1.0)
    status = world.loop.status()

    assert trap.seen.count("job") == trap.seen.count("other") == 10
    assert status is not None
    assert [job.job for job in status.jobs] == ["job", "other"]
    assert [event.kind for event in world.memory.events].count("own_fault") == 1
    assert world.loop.faults.unjudged == 0
    assert "of job job it is not shown" in world.loop.faults.now()[0]
