# SPDX-License-Identifier: Apache-2.0
"""The list of all jobs that a page shows: what stands in it, when a job leaves it, and which is opened first."""

from megascale_ops.controller.job.job import Job
from megascale_ops.controller.live.feed import Feed
from megascale_ops.controller.live.job_lines import ENDED_KEPT_S, FAILED_KEPT_S, choose, job_lines
from megascale_ops.schema.health import Verdict
from tests.fakes.controlled_job import World
from tests.fakes.gathered_frames import gather

NOW_S = 1_000_000.0


async def _job(state: str = "", ended_s: float = 0.0) -> Job:
    """Return a job that trains, or one that ended ``ended_s`` before now."""
    world = World(nproc=1)
    await world.up("a", step=50)
    job = world.loop.jobs["job"]
    if state:
        job.change(state=state, since_wall_s=NOW_S - ended_s)
    return job


def _listed(jobs: dict[str, Job], watched: str = "") -> int:
    return len(job_lines(jobs, NOW_S, watched))


async def test_a_job_that_lives_is_opened_before_one_that_is_over() -> None:
    """A calm job is worth more of a look than one that failed; without jobs there is none."""
    living, failed = await _job(), await _job("failed")

    assert choose({"failed": failed, "living": living}, NOW_S) is living.name
    assert choose({}, NOW_S) == ""


async def test_a_failed_job_is_opened_before_a_finished_one() -> None:
    """Whichever of them is newer, the one that failed comes first; until it has left the list."""
    finished, failed = await _job("finished"), await _job("failed")
    finished.change(job="finished", started_wall_s=NOW_S)
    failed.change(job="failed", started_wall_s=NOW_S - 9.0)
    jobs = {"finished": finished, "failed": failed}

    fresh = choose(jobs, NOW_S)
    failed.change(since_wall_s=NOW_S - FAILED_KEPT_S - 1)

    assert fresh == "failed"
    assert choose(jobs, NOW_S) == "finished"


async def test_jobs_that_are_over_leave_the_list() -> None:
    """One that ended leaves after a day, one that failed after a week, one that lives never."""
    for state, kept_s in (("finished", ENDED_KEPT_S), ("stopped", ENDED_KEPT_S), ("failed", FAILED_KEPT_S)):
        assert _listed({"job": await _job(state, kept_s - 1)}) == 1, state
        assert _listed({"job": await _job(state, kept_s + 1)}) == 0, state
    assert _listed({"job": await _job("running", 99 * FAILED_KEPT_S)}) == 1


async def test_the_job_that_is_watched_stays_on_the_list() -> None:
    """Who asks for an old job by its name has it in the list while it is on show."""
    assert _listed({"job": await _job("finished", ENDED_KEPT_S + 1)}, "job") == 1


async def test_a_line_says_since_when_and_what_is_wrong() -> None:
    """Of a job that failed the line has its verdict, in the past tense; of one that finished it has none."""
    verdict = Verdict("killed", "rank 0: SIGKILL", 1.0, (0,), ("a",))
    failed, finished = await _job("failed", 60.0), await _job("finished", 60.0)
    for job in (failed, finished):
        job.change(ended_verdict=verdict)

    (bad,), (good,) = job_lines({"job": failed}, NOW_S), job_lines({"job": finished}, NOW_S)

    assert (bad.level, bad.what, bad.since_wall_s) == ("act", "Rank 0 was killed", NOW_S - 60.0)
    assert (good.level, good.what) == ("over", "")


async def test_a_job_that_is_suspected_says_of_what() -> None:
    """While a rank is silent the line of its job says so, and a job that is well says nothing."""
    world = World(nproc=2)
    await world.up("a", step=50)
    well = gather(Feed("job"), world).jobs
    world.rank(1).state = "T"
    world.rank(1).stopped_since_s = world.loop.clock()
    for _second in range(60):
        await world.wait(1.0)
        world.rank(0).moved_s = world.loop.clock()
        world.beat_all()

    suspected = gather(Feed("job"), world).jobs

    assert well is not None
    assert suspected is not None
    assert well[0].what == ""
    assert suspected[0].what.startswith("Rank 1 ")
