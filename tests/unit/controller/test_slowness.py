# SPDX-License-Identifier: Apache-2.0
"""Steps that heartbeats tell become warnings of the job, in its status too; and warnings end."""

import msgspec
import pytest

from megascale_ops.cards import card
from megascale_ops.controller.live.words import incident_line
from megascale_ops.schema.health import HostReading
from megascale_ops.schema.messages import Heartbeat, JobReport
from megascale_ops.schema.progress import ProcessReading, StepWork
from megascale_ops.schema.wording import percent
from tests.fakes.controlled_job import World
from tests.fakes.paced_ranks import Fault, PacedRanks, no_fault


def tell(
    world: World, job: PacedRanks, steps: int, fault: Fault = no_fault, starved: tuple[float, ...] = (0.0,) * 4
) -> None:
    """Let a paced job make steps, ten in each heartbeat; ranks want a core in vain for a share of the time."""
    for _ in range(steps // 10):
        rows = [job.works(fault) for _ in range(10)]
        world.now_s += 0.5
        world.train(job.step + 100)
        world.seq["a"] = world.seq.get("a", 0) + 1
        reports = tuple(
            msgspec.structs.replace(
                rank.report(world.round),
                work=tuple(row[rank.rank] for row in rows),
                process=ProcessReading(state="R", starved=starved[rank.rank]),
            )
            for rank in world.ranks["a"]
        )
        world.loop.heartbeat(
            Heartbeat(
                node="a", agent_id="agent-a", seq=world.seq["a"], mono_s=world.now_s, wall_s=world.now_s, full=True,
                host=HostReading(load_1m=23.44, cores=2),
                jobs=(JobReport("job", world.round, "/run/job", reports),),
            )
        )  # fmt: skip
        world.loop.tick()


async def test_a_slow_rank_is_a_warning_and_seen_in_the_status() -> None:
    """The job goes on; the warning carries the verdict, and ends when the rank is well again."""
    world = World(nproc=4)
    await world.up("a")
    job = _Counting(1)
    tell(world, job, 60)
    assert world.loop.jobs["job"].round.warnings == {}

    tell(world, job, 40, lambda _step, rank: {"forward_s": 0.01} if rank == 2 else {})

    (warning,) = world.loop.jobs["job"].round.warnings.values()
    assert warning.verdict is not None
    assert (warning.state, warning.verdict.culprits, warning.verdict.cause) == ("watching", (2,), "host")
    status = world.loop.status("job")
    assert status is not None
    assert [(rank.judged, rank.cause) for rank in status.jobs[0].ranks] == [
        ("ok", ""), ("ok", ""), ("slow", "host"), ("ok", ""),
    ]  # fmt: skip
    assert status.jobs[0].ranks[2].report.work == ()
    assert world.state == "running"

    tell(world, job, 120)

    assert world.loop.jobs["job"].round.warnings == {}
    assert world.memory.incidents[warning.id].state == "over"


async def test_a_straggler_that_is_over_keeps_what_it_was() -> None:
    """Its worst, for how long, at what cost and what was done stay, when its last numbers are next to nothing."""
    world = World(nproc=4)
    await world.up("a", step=100)
    job = _Counting(1)
    tell(world, job, 60)
    tell(world, job, 60, lambda _step, rank: {"forward_s": 0.01} if rank == 2 else {})
    (warning,) = world.loop.jobs["job"].round.warnings.values()
    assert warning.verdict is not None
    tell(world, job, 300)

    over = world.memory.incidents[warning.id]

    assert over.state == "over"
    assert over.verdict is not None
    assert over.course is not None
    assert over.verdict == over.course.worst
    assert over.verdict.excess >= warning.verdict.excess > 0.1
    assert over.verdict.cost >= warning.verdict.cost > 0.1
    assert over.course.until_wall_s > over.marks.detected
    assert over.course.paid_s > 0.3
    assert over.course.rank_hours == pytest.approx(4 * over.course.paid_s / 3600.0)
    assert over.done.startswith("nothing was done to the job; all is as it should be again; lasted ")
    assert f"{percent(over.verdict.cost)} of every step" in over.done
    assert "rank hours in all" in over.done
    assert over.done.endswith(incident_line(over).course)
    assert "nothing is done yet" not in over.done


async def test_what_it_took_to_see_a_straggler_is_told() -> None:
    """It began with its first slow step, not in the moment in which it was named."""
    world = World(nproc=4)
    await world.up("a", step=100)
    job = _Counting(1)
    tell(world, job, 60)
    began_s = world.loop.wall()

    tell(world, job, 60, lambda _step, rank: {"forward_s": 0.01} if rank == 2 else {})

    (warning,) = world.loop.jobs["job"].round.warnings.values()
    assert warning.marks.began < warning.marks.detected
    assert warning.marks.detected > began_s
    times = next(row.lines[0] for row in card(warning) if row.label == "times")
    assert times.startswith("detected after ")
    assert "detected after 0 ms" not in times


@pytest.mark.parametrize(
    ("starved", "more", "cause"),
    [
        ((0.02, 0.02, 0.3, 0.02), {}, "starved"),
        ((0.3, 0.3, 0.3, 0.3), {}, "host"),  # a loaded machine, and slow by itself: as starved as its equals
        ((0.0, 0.0, 0.0, 0.0), {}, "host"),
        ((0.02, 0.02, 0.3, 0.02), {"cpu_s": 0.01}, "compute"),  # it computes for all of its excess
    ],
    ids=["starved", "as-its-equals", "not-starved", "computes"],
)
async def test_a_rank_that_other_processes_starve_is_told_as_that(
    starved: tuple[float, ...], more: dict[str, float], cause: str
) -> None:
    """With its node's load; the negative controls are ranks that are slow by themselves on the same loaded machine."""
    world = World(nproc=4)
    await world.up("a")
    job = _Counting(1)
    tell(world, job, 60, starved=starved)

    tell(world, job, 40, lambda _step, rank: {"forward_s": 0.01, **more} if rank == 2 else {}, starved)

    (warning,) = world.loop.jobs["job"].round.warnings.values()
    assert warning.verdict is not None
    assert (warning.verdict.culprits, warning.verdict.cause) == ((2,), cause)
    told = "mostly starved by other processes (a has a load of 23.4 on 2 cores)" in warning.verdict.reason
    assert told == (cause == "starved")


@pytest.mark.parametrize(("then", "cause"), [(0.4, "starved"), (0.02, "host")], ids=["starved", "slow-by-itself"])
async def test_a_card_is_right_as_soon_as_heartbeats_tell_of_starvation(then: float, cause: str) -> None:
    """They tell it after the steps by which a rank is named; a card is not left as it was for five seconds then."""
    world = World(nproc=4)
    await world.up("a")
    job = _Counting(1)
    calm = (0.02,) * 4

    def slow(_step: int, rank: int) -> dict[str, float]:
        return {"forward_s": 0.01} if rank == 2 else {}

    tell(world, job, 60, starved=calm)
    while not world.loop.jobs["job"].round.warnings and job.step < 200:
        tell(world, job, 10, slow, calm)
    (first,) = world.loop.jobs["job"].round.warnings.values()

    tell(world, job, 40, slow, (0.02, 0.02, then, 0.02))  # 2 s

    (later,) = world.loop.jobs["job"].round.warnings.values()
    assert first.verdict is not None
    assert later.verdict is not None
    assert (first.verdict.cause, later.verdict.cause) == ("host", cause)


async def test_a_clean_job_has_no_warnings() -> None:
    """Nothing is noted for 500 steps."""
    world = World(nproc=4)
    await world.up("a")

    tell(world, _Counting(1), 500)

    assert world.loop.jobs["job"].record.incidents == 0


class _Counting(PacedRanks):
    """Counts its steps as it makes them."""

    def works(self, fault: Fault = no_fault) -> list[StepWork]:
        """Make one step of all ranks."""
        made = super().works(fault)
        self.step += 1
        return made
