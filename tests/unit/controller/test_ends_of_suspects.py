# SPDX-License-Identifier: Apache-2.0
"""A suspect whose process ends: one incident, with the runner's word of how it ended, or none that blames a rank."""

from megascale_ops.diagnosis.exits.last_errors import GRACE_S
from megascale_ops.schema.progress import RankError
from tests.fakes.controlled_job import World


def fail(world: World, rank: int, kind: str, text: str) -> None:
    """Let a rank's script fail; its process lives."""
    one = world.rank(rank)
    one.error = RankError(kind, text, "train.py:5 f", one.step, "", world.now_s)


async def test_a_suspect_that_ends_is_one_incident_with_the_runners_word_of_its_end() -> None:
    """Its process is gone before the runner has told how it ended: that is not "it moved again"."""
    world = World()
    await world.up("a")
    fail(world, 1, "ValueError", "bad row")
    await world.wait(2.5)
    state = world.state
    world.rank(1).state = ""
    world.train(21)
    for step in range(22, 26):  # a wrapped launcher takes its time to end
        world.train(step)
        await world.wait(1.0)

    exits = (world.exit(1, 1, step=20), world.exit(0, -15, by_us=True))
    await world.ask(world.new_join(cause="failure", exits=exits, previous_round=1))

    assert state == "confirming"
    assert list(world.memory.incidents) == ["job-1"]
    verdict = world.incident(1).verdict
    assert verdict is not None
    assert (verdict.fault, verdict.culprits, verdict.action) == ("exception", (1,), "restart")


async def test_a_suspect_that_leaves_in_order_has_not_moved_again() -> None:
    """An error that a framework caught, whatever is in the box: no runner reports a failure, nothing was stopped."""
    world = World()
    await world.up("a")
    fail(world, 1, "ValueError", "caught by a framework")
    await world.wait(2.5)
    world.rank(1).state = ""
    world.poll()  # the runner lives, and reports no failure
    for step in range(21, 21 + 2 * int(GRACE_S) + 4):
        world.train(step)
        await world.wait(0.5)

    assert world.incident(1).state == "harmless"
    assert world.incident(1).done == "its process ended by itself, without a failure, before anything was stopped"
