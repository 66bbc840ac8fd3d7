# SPDX-License-Identifier: Apache-2.0
"""A tick of a large job is long; requests are answered between two of its pieces."""

import asyncio
import contextlib

import pytest

from megascale_ops.controller.job.job import Job
from megascale_ops.controller.record.job_record import JobRecord, Member
from megascale_ops.diagnosis.statistics.cooperative import Pieces, run_through
from tests.fakes.controlled_job import World


def three(log: list[str]) -> Pieces[str]:
    """Work in three pieces."""
    for number in range(2):
        log.append(f"piece {number}")
        yield
    log.append("piece 2")
    return "found"


def test_all_pieces_at_once() -> None:
    """Without interruptions the result is the same."""
    log: list[str] = []

    assert run_through(three(log)) == "found"
    assert log == ["piece 0", "piece 1", "piece 2"]


async def test_others_are_served_between_two_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    """And the tick's own time is what its pieces took, not what was done in between."""
    world = World()
    loop = world.loop
    log: list[str] = []
    to_do_s = iter((0.004, 0.002, 0.001))

    def pieces() -> Pieces[None]:
        for number, each_s in enumerate(to_do_s):  # the next tick finds nothing left to do
            if number:
                yield
            log.append(f"piece {number}")
            world.now_s += each_s

    async def other() -> None:
        while "piece 2" not in log:
            log.append("other")
            world.now_s += 5.0
            await asyncio.sleep(0)

    monkeypatch.setattr(loop, "pieces", pieces)
    ticking = asyncio.create_task(loop.run())
    await asyncio.create_task(other())
    await asyncio.sleep(0)
    ticking.cancel()
    with contextlib.suppress(asyncio.CancelledError):
        await ticking

    assert log == ["piece 0", "other", "piece 1", "other", "piece 2"]
    assert loop.tick_times.total == pytest.approx(0.007)


@pytest.mark.parametrize(("turn_s", "away"), [(1.0, False), (3.0, True)])
async def test_a_long_tick_is_no_absence_and_a_long_turn_is_one(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, turn_s: float, away: bool
) -> None:
    """A loop that answered heartbeats in between has missed none: only an unanswered time extends patience."""
    world = World()
    loop = world.loop
    ticks = 0
    real = loop.pieces

    def pieces() -> Pieces[None]:
        nonlocal ticks
        ticks += 1
        yield from real()
        if ticks == 1:
            for _ in range(4):
                world.now_s += turn_s
                yield

    monkeypatch.setattr(loop, "pieces", pieces)
    ticking = asyncio.create_task(loop.run())
    for _ in range(20):  # until the second tick has measured
        await asyncio.sleep(0)
    ticking.cancel()
    with contextlib.suppress(asyncio.CancelledError):
        await ticking

    assert ("the controller was away for 3.0 s" in caplog.text) is away
    assert loop.lag_s == pytest.approx(turn_s)


def test_the_world_size_follows_the_members() -> None:
    """It is added up once for each record, and a record that is changed is another one."""
    job = Job(JobRecord("job", members=(Member("a", "r", "j", 8, "host-a", 4000),)), 0.0)
    before = job.record.world_size

    job.change(members=(*job.record.members, Member("b", "r", "j", 4, "host-b", 4000)))

    assert (before, job.record.world_size) == (8, 12)
