# SPDX-License-Identifier: Apache-2.0
"""Whatever happens to a job, its controller and the clock: every second of wall time is in one row of its account."""

import asyncio
import tempfile
from pathlib import Path

from hypothesis import given, settings
from hypothesis import strategies as st

from megascale_ops.controller.history.files import HistoryFiles
from megascale_ops.schema.policy import JobPolicy
from tests.fakes.training_job import Training

HAPPENINGS = st.lists(
    st.sampled_from(["train", "train", "pause", "crash", "controller", "files", "forward", "back"]), max_size=10
)


@settings(max_examples=25, deadline=None)
@given(happenings=HAPPENINGS)
def test_every_second_is_in_one_row_whatever_happens(happenings: list[str]) -> None:
    """Restarts of the job and of the controller, with and without its files, stepped clocks: to the microsecond."""
    with tempfile.TemporaryDirectory() as folder:
        asyncio.run(_live(happenings, Path(folder)))


async def _live(happenings: list[str], folder: Path) -> None:
    patient = JobPolicy(restarts_per_hour=99, restarts_per_cause_per_hour=99, fruitless_restarts=99)
    world = Training(nproc=2, policy=patient)
    await world.up("a", step=-1)
    began_s = world.loop.jobs["job"].record.started_wall_s
    stepped_s = 0.0
    for happening in happenings:
        match happening:
            case "train":
                for _ in range(20):
                    world.second()
            case "pause":
                await world.wait(3.0)
            case "crash":
                await world.crash()
            case "controller":
                world.restart_controller()
            case "files":
                await HistoryFiles(world.loop, folder).close()
                world.restart_controller()
                HistoryFiles(world.loop, folder).restore()
            case _:
                step_s = 5000.0 if happening == "forward" else -7000.0
                world.stepped_s += step_s
                stepped_s += step_s
                world.loop.tick()
        world.loop.tick()
        found = world.account()
        assert abs(began_s + stepped_s + found.wall_s - found.until_wall_s) < 1e-3
        assert found.until_wall_s <= world.loop.wall() + 1e-6
        assert found.wall_s >= 0.0
