# SPDX-License-Identifier: Apache-2.0
"""Steps that heartbeats tell become warnings of the job, in its status too; and warnings end."""

import msgspec

from megascale_ops.schema.messages import Heartbeat, JobReport
from megascale_ops.schema.progress import StepWork
from tests.fakes.controlled_job import World
from tests.fakes.paced_ranks import Fault, PacedRanks, no_fault


def tell(world: World, job: PacedRanks, steps: int, fault: Fault = no_fault) -> None:
    """Let a paced job make steps, ten in each heartbeat."""
    for _ in range(steps // 10):
        rows = [job.works(fault) for _ in range(10)]
        world.now_s += 0.5
        world.train(job.step + 100)
        world.seq["a"] = world.seq.get("a", 0) + 1
        reports = tuple(
            msgspec.structs.replace(rank.report(world.round), work=tuple(row[rank.rank] for row in rows))
            for rank in world.ranks["a"]
        )
        world.loop.heartbeat(
            Heartbeat(
                node="a", agent_id="agent-a", seq=world.seq["a"], mono_s=world.now_s, wall_s=world.now_s, full=True,
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
    assert world.loop.jobs["job"].warnings == {}

    tell(world, job, 40, lambda _step, rank: {"forward_s": 0.01} if rank == 2 else {})

    (warning,) = world.loop.jobs["job"].warnings.values()
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

    assert world.loop.jobs["job"].warnings == {}
    assert world.memory.incidents[warning.id].state == "over"


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
