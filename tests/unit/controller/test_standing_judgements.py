# SPDX-License-Identifier: Apache-2.0
"""A long wait through the real loop: judged when something has changed or a deadline is near, to the same end."""

import msgspec
import pytest

from megascale_ops.controller.job import diagnose
from megascale_ops.diagnosis import watchdog
from megascale_ops.diagnosis.hangs.suspicion import Suspicion
from megascale_ops.schema.messages import Evidence, EvidenceItem
from megascale_ops.schema.policy import JobPolicy
from megascale_ops.schema.progress import CollectivePosition
from tests.fakes.controlled_job import World

INSIDE, OUTSIDE = CollectivePosition(41, 40, "pg 0"), CollectivePosition(40, 40, "pg 0")
ASLEEP = EvidenceItem("stacks", ok=True, rank=1, marks=("in_syscall",), frames=("sleep (loader.py:31)",))
LOADS = EvidenceItem("stacks", ok=True, rank=1, marks=("in_data_loader",), frames=ASLEEP.frames)
PATIENCE_S = 90.0


class _Judged:
    """Counts the watchdog's judgements."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.count = 0
        self._judge = watchdog.judge
        monkeypatch.setattr(watchdog, "judge", self._counted)

    def _counted(self, *args: object) -> Suspicion | None:
        self.count += 1
        return self._judge(*args)  # type: ignore[arg-type]  # as the loop calls it


async def _hung() -> World:
    """Three ranks train to step 20, and one does not come to collective 41."""
    world = World(nproc=3, policy=JobPolicy(absent_patience_s=PATIENCE_S))
    await world.up("a")
    for number in range(3):
        world.rank(number).collective = OUTSIDE if number == 1 else INSIDE
    return world


async def _pass(world: World, seconds: float, *, until: str = "", answer: EvidenceItem = ASLEEP) -> float:
    """Let time pass with a heartbeat every half second, and evidence whenever it is asked for."""
    began_s = world.now_s
    while world.now_s - began_s < seconds and world.state != until:
        await world.wait(0.5)
        for order in world.beat("a").orders:
            if order.kind.startswith("dump_"):
                items = (answer,) if order.kind == "dump_stacks" else ()
                world.loop.evidence(Evidence("a", "job", order.incident, order.id, items=items))
        await world.settle()
    return world.now_s - began_s


async def _whole_wait(monkeypatch: pytest.MonkeyPatch, least_ranks: int) -> tuple[int, float, object, list[str]]:
    """Return how often was judged, what the wait took, the verdict, and all that was told of it."""
    monkeypatch.setattr(diagnose, "LEAST_HELD", least_ranks)
    judged = _Judged(monkeypatch)
    world = await _hung()
    took_s = await _pass(world, 200.0, until="stopping")
    texts = [f"{event.kind} {event.text}" for event in world.journal.events]
    monkeypatch.undo()
    return judged.count, took_s, world.incident(1).verdict, texts


async def test_a_wait_is_judged_a_tenth_as_often_to_the_same_end(monkeypatch: pytest.MonkeyPatch) -> None:
    """The same verdict to the last word, at the same moment, after the same events."""
    each = await _whole_wait(monkeypatch, 1_000_000)
    seldom = await _whole_wait(monkeypatch, 0)

    assert seldom[1:] == each[1:]
    assert each[1] == pytest.approx(PATIENCE_S, abs=2.0)
    assert seldom[0] < each[0] / 10


async def test_evidence_that_comes_late_changes_the_verdict_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """The judgement stands, an answer to an older order arrives: the card has it with the next tick."""
    monkeypatch.setattr(diagnose, "LEAST_HELD", 0)
    world = await _hung()
    await _pass(world, 30.0)
    job = world.loop.jobs["job"]
    check = job.round.silence
    assert check.hold is not None
    assert check.hold.until_s > world.now_s + 1.0
    incident = world.incident(1)
    order = next(reversed(job.asked[incident.id].nodes))

    job.asked[incident.id].answered.discard(order)
    world.loop.evidence(Evidence("a", "job", incident.id, order, items=(LOADS,)))
    world.loop.tick()
    await world.settle()

    verdict = world.incident(1).verdict
    assert verdict is not None
    assert verdict.fault == "data_stall"
    assert f"silent for {job.suspects.age_s:.1f} s" in verdict.reason


async def test_a_rank_that_moves_ends_the_wait_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """While its judgement stands, one heartbeat shows that the job goes on: within a tick it runs."""
    monkeypatch.setattr(diagnose, "LEAST_HELD", 0)
    world = await _hung()
    await _pass(world, 40.0)
    assert world.state == "confirming"
    age_s = world.loop.jobs["job"].suspects.age_s

    for number in range(3):
        rank = world.rank(number)
        rank.moved_s, rank.step, rank.steps_seen, rank.collective = world.now_s, 21, 22, OUTSIDE
    await _pass(world, 1.0)

    assert world.state == "running"
    assert world.loop.jobs["job"].harmless_s == pytest.approx(age_s, abs=1.1)


@pytest.mark.parametrize("change", ["policy", "frozen", "unheard"])
async def test_nothing_stands_once_what_it_rests_on_is_another(monkeypatch: pytest.MonkeyPatch, change: str) -> None:
    """Another policy, a culprit whose process is stopped, a node that is not heard: judged with the next tick."""
    monkeypatch.setattr(diagnose, "LEAST_HELD", 0)
    world = await _hung()
    await _pass(world, 30.0)
    job = world.loop.jobs["job"]
    before = job.round.silence
    assert before.hold is not None
    assert before.hold.until_s > world.now_s + 4.0

    if change == "policy":
        job.change(policy=msgspec.structs.replace(job.record.policy, absent_patience_s=70.0))
    elif change == "frozen":
        world.rank(1).state, world.rank(1).stopped_since_s = "T", world.now_s
        world.beat("a")
    await world.wait(3.5 if change == "unheard" else 0.2)

    assert job.round.silence is not before
