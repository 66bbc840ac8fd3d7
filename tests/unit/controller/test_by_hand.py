# SPDX-License-Identifier: Apache-2.0
"""What a person asks of a job: a checkpoint by the agents, and the end by the runners."""

import pytest

from megascale_ops.controller.record.state_machine import State
from megascale_ops.errors import RefusedError
from megascale_ops.schema.messages import Evidence, EvidenceItem, Order
from tests.fakes.training_job import Training


async def trained() -> Training:
    """Return a job of four ranks on one node that has made some steps."""
    world = Training(nproc=4)
    await world.up("a", step=-1)
    for _ in range(10):
        world.second()
    return world


def given(world: Training, kind: str) -> list[Order]:
    """Return the orders of a kind that node a's agent has."""
    return [order for order in world.loop.transitions.agent_orders.get("a", {}).values() if order.kind == kind]


def answer(order: Order, *items: EvidenceItem) -> Evidence:
    """Return what an agent says to an order."""
    return Evidence(node="a", job="job", incident="", order=order.id, items=items)


async def test_a_stopped_job_is_stopped_and_its_runners_are_told() -> None:
    """Its runners hear the end; it is no failure, its exit code is that of a Ctrl-C, and there is no second end."""
    world = await trained()
    job = world.loop.jobs["job"]

    world.loop.by_hand.stop(job, "enough")
    await world.settle()

    assert job.state is State.STOPPED
    assert (job.record.reason, job.record.exit_code) == ("enough", 130)
    orders = world.loop.transitions.runner_orders["job", "a"]
    assert [order.kind for order in orders] == ["shutdown"]
    with pytest.raises(RefusedError, match="job job is over already: it is stopped"):
        world.loop.by_hand.stop(job, "")


async def test_a_checkpoint_is_asked_for_and_who_refuses_is_told() -> None:
    """Agents are ordered once; their answers say which ranks got the signal, and why others did not."""
    world = await trained()
    job = world.loop.jobs["job"]

    asked = world.loop.by_hand.ask_checkpoint(job, 5.0)
    (order,) = given(world, "checkpoint")
    told = EvidenceItem("signal", ok=True, rank=0, text="sent")
    refused = EvidenceItem("signal", ok=False, rank=1, text="the script has no handler")
    world.loop.evidence(answer(order, told, refused))
    world.loop.evidence(answer(order, EvidenceItem("signal", ok=True, rank=3, text="twice")))
    seen = world.loop.by_hand.view(job, 6.0)
    world.loop.by_hand.forget("a", [order.id])

    assert (asked.waiting, asked.told, asked.saved_wall_s) == (("a",), (), 5.0)
    assert (seen.waiting, seen.told, seen.saved_wall_s) == ((), (0,), 6.0)
    assert seen.refused == {"1": "the script has no handler"}
    assert given(world, "checkpoint") == []
    assert job.state is State.RUNNING
    assert not world.loop.incidents


async def test_a_job_that_does_not_train_can_t_save() -> None:
    """It is said, and no order is given."""
    world = await trained()
    job = world.loop.jobs["job"]
    world.loop.by_hand.stop(job, "")

    with pytest.raises(RefusedError, match="does not train now"):
        world.loop.by_hand.ask_checkpoint(job, 0.0)

    assert given(world, "checkpoint") == []


async def test_an_answer_to_a_request_before_changes_nothing() -> None:
    """Late or from another agent: it is accepted silently, since an agent must not send it again for ever."""
    world = await trained()
    job = world.loop.jobs["job"]
    world.loop.by_hand.ask_checkpoint(job, 0.0)
    (first,) = given(world, "checkpoint")
    world.now_s += 6.0
    world.beat_all()
    world.loop.by_hand.ask_checkpoint(job, 0.0)

    world.loop.evidence(answer(first, EvidenceItem("signal", ok=True, rank=0)))

    assert world.loop.by_hand.view(job, 0.0).told == ()


async def test_pods_that_are_evicted_together_ask_once() -> None:
    """Within seconds it is the same request: ranks need one signal. Once a checkpoint has come it is a new one."""
    world = await trained()
    job = world.loop.jobs["job"]

    first = world.loop.by_hand.ask_checkpoint(job, 0.0)
    world.now_s += 1.0
    again = world.loop.by_hand.ask_checkpoint(job, 0.0)
    after = world.loop.by_hand.ask_checkpoint(job, world.loop.wall())

    assert again.asked_wall_s == first.asked_wall_s
    assert after.asked_wall_s == first.asked_wall_s + 1.0
