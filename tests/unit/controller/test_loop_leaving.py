# SPDX-License-Identifier: Apache-2.0
"""Ranks that are gone without a word, seen by the real loop with a clock that the test winds."""

import pytest

from megascale_ops.schema.progress import CollectivePosition
from tests.fakes.controlled_job import World


@pytest.mark.parametrize(("polls", "named"), [(True, "exited_early"), (False, "")])
async def test_a_rank_that_left_without_a_word_exited_early(*, polls: bool, named: str) -> None:
    """``os._exit(0)`` leaves a box that says "running". Its runner would tell of a failure, if it is heard itself."""
    world = World()
    await world.up("a")
    poll = world.poll("a")
    await world.wait(0.2)
    if not polls:
        world.loop.jobs["job"].runners["a"].broken = True
    world.rank(1).state = ""
    world.rank(0).collective = CollectivePosition(5, 4, "pg 0")

    await world.wait(2.9)
    early = dict(world.memory.incidents)
    await world.wait(1.1)  # nothing waits for the next heartbeat, or for half the patience before it looks

    assert early == {}
    verdicts = [incident.verdict for incident in world.memory.incidents.values()]
    assert [(one.fault, one.culprits) for one in verdicts if one is not None] == ([(named, (1,))] if named else [])
    poll.cancel()
