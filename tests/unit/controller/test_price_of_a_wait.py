# SPDX-License-Identifier: Apache-2.0
"""A wait may cost what a restart would cost at that moment: little right after a start or a save."""

import pytest

from megascale_ops.controller.job.diagnose import restart_price_s
from megascale_ops.controller.job.round import WRITTEN_S
from megascale_ops.schema.messages import EvidenceItem
from megascale_ops.schema.policy import JobPolicy
from megascale_ops.schema.progress import CollectivePosition
from tests.fakes.controlled_job import World
from tests.fakes.hung_job import ABSENT, WAITING
from tests.fakes.looked_at import answer_looks

USUAL_S, START_S = 1_400.0, 160.0
INSIDE, OUTSIDE = CollectivePosition(41, 40, "pg 0"), CollectivePosition(40, 40, "pg 0")


async def _known(*, steps_s: float = 0.0, prices_s: tuple[float, ...] = (USUAL_S,), start_s: float = START_S) -> World:
    """A job whose restarts and starts have been measured, and whose round has made steps for a while."""
    world = World()
    await world.up("a")
    job = world.loop.jobs["job"]
    job.change(prices_s=prices_s, start_s=start_s)
    job.round.steps_began_wall_s = world.loop.wall()
    job.round.last_step_wall_s = world.loop.wall() + steps_s
    return world


def _price_s(world: World, *, waited_s: float = 0.0) -> float:
    job = world.loop.jobs["job"]
    return restart_price_s(job, job.round.last_step_wall_s + waited_s)


async def test_right_after_a_start_only_the_start_would_be_made_again() -> None:
    """And the steps since: at most what restarts usually cost."""
    assert _price_s(await _known()) == pytest.approx(START_S)
    assert _price_s(await _known(steps_s=300.0)) == pytest.approx(START_S + 300.0)
    assert _price_s(await _known(steps_s=7_200.0)) == USUAL_S


async def test_the_wait_itself_is_no_work_that_would_be_lost() -> None:
    """Half an hour of standing still makes a restart no dearer, or patience would grow as it is used up."""
    world = await _known(steps_s=300.0)

    assert _price_s(world, waited_s=1_800.0) == _price_s(world)


async def test_a_save_makes_a_restart_cheap_once_it_is_written() -> None:
    """Until then the one before is what a restart would begin at."""
    world = await _known(steps_s=7_200.0)
    round_ = world.loop.jobs["job"].round
    round_.saves = round_.saves.with_newest(round_.last_step_wall_s - 100.0)

    assert _price_s(world, waited_s=0.0) == pytest.approx(START_S + 100.0)
    round_.saves = round_.saves.with_newest(round_.last_step_wall_s - WRITTEN_S / 2)
    assert _price_s(world, waited_s=0.0) == pytest.approx(START_S + 100.0)
    assert _price_s(world, waited_s=WRITTEN_S) == pytest.approx(START_S + WRITTEN_S / 2)


@pytest.mark.parametrize(
    ("prices_s", "start_s", "price_s"),
    [((), START_S, JobPolicy().restart_price_s), ((USUAL_S,), 0.0, USUAL_S), ((100.0,), START_S, 100.0)],
)
async def test_what_was_not_measured_is_not_reckoned_with(
    prices_s: tuple[float, ...], start_s: float, price_s: float
) -> None:
    """Before the first restart the policy's word counts; and what restarts have cost is never raised."""
    assert _price_s(await _known(prices_s=prices_s, start_s=start_s)) == price_s


@pytest.mark.parametrize(("steps_s", "waited_s"), [(0.0, 540.0), (3_600.0, USUAL_S)])
async def test_a_dear_job_waits_for_an_absentee_as_long_as_there_is_to_lose(steps_s: float, waited_s: float) -> None:
    """Nine minutes right after a start; after an hour without a save as long as its restarts have cost."""
    world = World(nproc=3)
    await world.up("a")
    job = world.loop.jobs["job"]
    job.change(prices_s=(USUAL_S,), start_s=START_S)
    job.round.steps_began_wall_s = job.round.last_step_wall_s - steps_s
    for number in range(3):
        world.rank(number).collective = OUTSIDE if number == 1 else INSIDE
    asleep = EvidenceItem("stacks", ok=True, marks=("in_syscall",), frames=("sleep (train.py:3)",))
    entered = EvidenceItem("stacks", ok=True, marks=("in_collective",), frames=("wait (distributed.py:9)",))

    began_s = world.now_s
    while world.state != "stopping" and world.now_s - began_s < 2.0 * USUAL_S:
        await world.wait(2.0, tick_s=1.0)
        answer_looks(world, "a", {rank: (asleep, ABSENT) if rank == 1 else (entered, WAITING) for rank in range(3)})
        await world.settle()

    assert world.now_s - began_s == pytest.approx(waited_s, abs=25.0)
