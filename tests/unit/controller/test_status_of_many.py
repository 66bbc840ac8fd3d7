# SPDX-License-Identifier: Apache-2.0
"""The status of a job in which every rank is blamed: its cost grows with the ranks, not with their square."""

import msgspec

from megascale_ops.schema.policy import JobPolicy
from megascale_ops.schema.progress import CollectivePosition
from tests.fakes.controlled_job import World


class _Unsearched(tuple[int, ...]):
    """Culprits that may be gone through, and not be searched for each rank."""

    __slots__ = ()

    def __contains__(self, rank: object) -> bool:
        raise AssertionError(f"all culprits were searched for rank {rank}")


async def test_culprits_are_not_searched_for_each_rank() -> None:
    """All three ranks wait in one collective and are suspected; each is told as suspect."""
    world = World(nproc=3, policy=JobPolicy(absent_patience_s=90.0))
    await world.up("a")
    for number in range(3):
        world.rank(number).collective = CollectivePosition(41, 40, "pg 0")
    for _ in range(40):
        await world.wait(0.5)
        world.beat("a")
        await world.settle()
    check = world.loop.jobs["job"].round.silence
    assert check.suspicion is not None
    verdict = msgspec.structs.replace(check.suspicion.verdict, culprits=_Unsearched((0, 2)))
    check.suspicion = check.suspicion._replace(verdict=verdict)

    status = world.loop.status("job")
    assert status is not None
    told = {one.report.rank: one.judged for one in status.jobs[0].ranks}

    assert told[0] == told[2] == "suspect"
    assert told[1] != "suspect"
