# SPDX-License-Identifier: Apache-2.0
"""Where the time of a job goes while it lives, and what each incident has cost."""

import asyncio
from pathlib import Path

import pytest

from megascale_ops.controller.history.files import HistoryFiles
from megascale_ops.schema.messages import Leave
from tests.fakes.training_job import Training, adds_up


async def test_a_job_that_trains_is_nearly_all_training() -> None:
    """After the start every second is a step; the step that is under way is no loss."""
    world = Training(nproc=2)
    await world.up("a", step=-1)

    for _ in range(100):
        world.second()
    found = world.account()

    assert found.ratio > 0.93
    assert found.effective >= found.ratio
    assert found.ratio_hour == pytest.approx(found.ratio)
    assert found.rows["unknown"] == 0.0


async def test_now_is_the_last_five_minutes() -> None:
    """What was lost ten minutes ago is no part of it, standing still is; a job that is over has no now."""
    world = Training(nproc=2)
    await world.up("a", step=-1)
    for _ in range(60):
        world.second()
    await world.crash()
    for _ in range(600):
        world.second()
    trained = world.account()

    world.now_s += 240.0
    stood = world.account()
    world.loop.leave(Leave("job", "a", "runner-a", "cancelled", round=1))
    world.loop.tick()
    over = world.account()

    assert trained.ratio_now == pytest.approx(1.0, abs=0.01)
    assert trained.ratio_hour < trained.ratio_now
    assert stood.ratio_now == pytest.approx(0.2, abs=0.02)
    assert stood.effective_now == stood.ratio_now
    assert (over.ratio_now, over.effective_now) == (-1.0, -1.0)
    assert over.ratio_hour > 0.5


async def test_an_incident_has_its_own_rows() -> None:
    """What a crash cost is in its rows, and in the counters once it is over."""
    world = Training(nproc=2)
    await world.up("a", step=-1)
    for _ in range(30):
        world.second()

    await world.crash()
    for _ in range(30):
        world.second()
    found = world.account()

    (rows,) = found.incidents.values()
    assert sum(rows.values()) > 1.5
    assert sum(world.loop.accounts.paid.values()) == pytest.approx(sum(rows.values()))
    assert 0.7 < found.ratio < 0.95


async def test_nothing_is_claimed_of_time_before_the_record_began() -> None:
    """A controller that was started again without its files says that it does not know."""
    world = Training(nproc=2)
    await world.up("a", step=-1)
    for _ in range(60):
        world.second()

    world.restart_controller()
    for _ in range(20):
        world.second()
    found = world.account()

    assert found.rows["unknown"] == pytest.approx(60.0, abs=3.0)
    assert found.rows["train"] == pytest.approx(17.0, abs=3.0)
    assert found.ratio == -1.0


async def test_a_controller_that_comes_back_goes_on_with_the_account(tmp_path: Path) -> None:
    """Killed and started again on the same folder: what was trained before still counts."""
    world = Training(nproc=2)
    await world.up("a", step=-1)
    for _ in range(60):
        world.second()
    await asyncio.gather(HistoryFiles(world.loop, tmp_path).close())

    world.restart_controller()
    HistoryFiles(world.loop, tmp_path).restore()
    for _ in range(20):
        world.second()
    found = world.account()

    assert found.rows["unknown"] == 0.0
    assert found.rows["train"] == pytest.approx(72.0, abs=5.0)


async def test_a_job_that_is_over_keeps_its_account() -> None:
    """Its time ends with it."""
    world = Training(nproc=2)
    await world.up("a", step=-1)
    for _ in range(30):
        world.second()
    world.loop.leave(Leave("job", "a", "runner-a", "cancelled", round=1))
    world.loop.tick()
    over = adds_up(world.loop.goodput("job"))

    world.now_s += 3600.0
    world.loop.tick()

    assert world.loop.goodput("job") == over
    assert over.wall_s < 60.0


async def test_a_stepped_wall_clock_moves_what_an_incident_cost_along() -> None:
    """A day forth: the same rows, for the job and for the crash that was over long before."""
    world = Training(nproc=2)
    await world.up("a", step=-1)
    for _ in range(20):
        world.second()
    await world.crash()
    for _ in range(20):
        world.second()
    before = world.account()

    world.stepped_s = 86_400.0
    world.loop.tick()
    after = world.account()

    assert after.until_wall_s == pytest.approx(before.until_wall_s + 86_400.0, abs=0.01)
    assert after.rows == pytest.approx(before.rows, abs=0.01)
    assert after.incidents["job-1"] == pytest.approx(before.incidents["job-1"], abs=0.01)
