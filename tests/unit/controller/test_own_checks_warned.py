# SPDX-License-Identifier: Apache-2.0
"""What ranks find in themselves is a warning of the controller that ends with it."""

import msgspec

from megascale_ops.controller.live.words import incident_line
from megascale_ops.schema.messages import Heartbeat, JobReport
from megascale_ops.schema.progress import RankFinding
from tests.fakes.controlled_job import World

CORRUPT = RankFinding("silent_corruption", 40, "rank 1 holds other values than the 3 other replicas in 1 of 9 tensors")
STALE = RankFinding("stale_weights", 40, "no parameter of 'optimizer' has changed by a bit between steps 30 and 40")


def tell(world: World, findings: dict[int, tuple[RankFinding, ...]], ranks: tuple[int, ...] = (0, 1)) -> None:
    """One heartbeat of node a, of some of its ranks."""
    world.now_s += 1.0
    world.train(world.loop.jobs["job"].round.step + 1)
    world.seq["a"] = world.seq.get("a", 0) + 1
    reports = tuple(
        msgspec.structs.replace(rank.report(world.round), findings=findings.get(rank.rank, ()))
        for rank in world.ranks["a"]
        if rank.rank in ranks
    )
    world.loop.heartbeat(
        Heartbeat(
            *("a", "agent-a", world.seq["a"], world.now_s, world.now_s),
            jobs=(JobReport("job", world.round, "/run/job", reports),),
        )
    )
    world.loop.tick()


async def test_a_finding_is_a_warning_as_long_as_it_stands() -> None:
    """The job goes on; a heartbeat without that rank changes nothing; a save that finds nothing ends it."""
    world = World()
    await world.up("a")
    tell(world, {})
    warnings = world.loop.jobs["job"].round.warnings
    assert warnings == {}

    tell(world, {1: (CORRUPT,)})
    (warning,) = warnings.values()
    tell(world, {}, ranks=(0,))
    assert [one.id for one in warnings.values()] == [warning.id]

    assert warning.state == "watching"
    assert warning.verdict is not None
    assert (warning.verdict.fault, warning.verdict.culprits) == ("silent_corruption", (1,))
    assert "holds other weights than its replicas" in incident_line(warning).what
    assert world.state == "running"
    tell(world, {})
    assert warnings == {}
    assert world.memory.incidents[warning.id].state == "over"


async def test_a_new_round_begins_without_findings() -> None:
    """A report of the round before is no evidence for this one."""
    world = World()
    await world.up("a")
    tell(world, {0: (STALE,), 1: (CORRUPT,)})
    assert len(world.loop.jobs["job"].round.warnings) == 2

    world.loop.slowness.own_checks.ingest_report(
        world.loop.jobs["job"], "a", JobReport("job", world.round + 1, "/run/job", ())
    )

    assert world.loop.jobs["job"].round.warnings == {}
