# SPDX-License-Identifier: Apache-2.0
"""While a large job waits for one rank, the others are not looked at again and again: same verdict, fewer orders."""

from collections import Counter

import pytest

from megascale_ops.controller.recovery import confirming
from megascale_ops.schema.messages import Evidence, EvidenceItem, Order
from megascale_ops.schema.policy import JobPolicy
from megascale_ops.schema.progress import CollectivePosition
from tests.fakes.controlled_job import World
from tests.fakes.hung_job import ABSENT, WAITING, said_of

NODES = ("a", "b", "c")
INSIDE, OUTSIDE = CollectivePosition(41, 40, "pg 0"), CollectivePosition(40, 40, "pg 0")
CULPRIT = 3  # the second rank of node b
PATIENCE_S = 200.0


class _Answers:
    """Answers each order for evidence, and counts them by node and look; ``mute`` nodes do not answer."""

    def __init__(self, world: World) -> None:
        self.world = world
        self.looks: list[Counter[str]] = []
        self._began_s = 0.0
        self._taken: set[str] = set()  # an order is given until it is answered
        self.mute: set[str] = set()

    def answer(self, node: str, order: Order) -> None:
        """Say where the node's ranks are."""
        if order.id in self._taken:
            return
        self._taken.add(order.id)
        if order.kind == "dump_stacks":
            if self.world.now_s - self._began_s > 1.0:  # between two looks are two seconds at least
                self._began_s = self.world.now_s
                self.looks.append(Counter())
            self.looks[-1][node] += 1
        if node in self.mute:
            return
        items: list[EvidenceItem] = []
        for rank in (2 * NODES.index(node), 2 * NODES.index(node) + 1):
            stack = EvidenceItem("stacks", ok=True, marks=("in_collective",), frames=("wait (distributed.py:9)",))
            if rank == CULPRIT:
                stack = EvidenceItem("stacks", ok=True, marks=("in_syscall",), frames=("sleep (train.py:3)",))
            calls = ABSENT if rank == CULPRIT else WAITING
            items += said_of(rank, stack if order.kind == "dump_stacks" else calls)
        self.world.loop.evidence(Evidence(node, "job", order.incident, order.id, items=tuple(items)))


async def _hung() -> World:
    world = World(nproc=2, min_nodes=3, max_nodes=3, policy=JobPolicy(absent_patience_s=PATIENCE_S))
    await world.up(*NODES)
    for number in range(6):
        world.rank(number).collective = OUTSIDE if number == CULPRIT else INSIDE
    return world


async def _pass(world: World, answers: _Answers, seconds: float) -> float:
    began_s = world.now_s
    while world.now_s - began_s < seconds and world.state != "stopping":
        await world.wait(0.5, tick_s=0.25)
        for node in NODES:
            for order in world.beat(node).orders:
                if order.kind.startswith("dump_"):
                    answers.answer(node, order)
        await world.settle()
    return world.now_s - began_s


async def _whole(monkeypatch: pytest.MonkeyPatch, least_ranks: int) -> tuple[list[Counter[str]], float, object]:
    monkeypatch.setattr(confirming, "LEAST_NARROW", least_ranks)
    world = await _hung()
    answers = _Answers(world)
    took_s = await _pass(world, answers, 300.0)
    return answers.looks, took_s, world.incident(1).verdict


async def test_later_looks_are_at_the_named_ranks_node_to_the_same_end(monkeypatch: pytest.MonkeyPatch) -> None:
    """The first two and each eighth are at all nodes; the verdict and its moment are those of looks at all."""
    each, each_took_s, each_verdict = await _whole(monkeypatch, 1_000_000)
    narrow, took_s, verdict = await _whole(monkeypatch, 0)

    assert all(set(look) == set(NODES) for look in each)
    assert [set(look) for look in narrow] == [
        set(NODES) if number < 2 or number % 8 == 0 else {"b"} for number in range(len(narrow))
    ]
    assert len(narrow) > 5
    assert (took_s, verdict) == (each_took_s, each_verdict)
    assert took_s == pytest.approx(PATIENCE_S, abs=3.0)


async def test_a_small_job_is_looked_at_whole_each_time() -> None:
    """What is saved there is nothing, and another look costs nothing."""
    world = await _hung()
    answers = _Answers(world)
    await _pass(world, answers, 60.0)

    assert len(answers.looks) > 4
    assert all(set(look) == set(NODES) for look in answers.looks)


async def test_a_rank_that_enters_another_collective_is_looked_at_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its heartbeat tells that it is not where it was seen: the next look is at its node, too."""
    monkeypatch.setattr(confirming, "LEAST_NARROW", 0)
    world = await _hung()
    answers = _Answers(world)
    await _pass(world, answers, 30.0)
    before = len(answers.looks)
    assert set(answers.looks[-1]) == {"b"}

    world.rank(4).collective = CollectivePosition(42, 40, "pg 0")
    await _pass(world, answers, 50.0)

    assert set(answers.looks[before]) == {"b", "c"}


async def test_a_node_that_did_not_answer_is_asked_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """No answer is not "as before"."""
    monkeypatch.setattr(confirming, "LEAST_NARROW", 0)
    world = await _hung()
    answers = _Answers(world)
    answers.mute = {"c"}
    await _pass(world, answers, 40.0)

    assert len(answers.looks) > 3
    assert all({"b", "c"} <= set(look) for look in answers.looks)
    assert set(answers.looks[-1]) == {"b", "c"}


@pytest.mark.parametrize(("pause_s", "fewest", "most"), [(0.0, 8, 12), (16.0, 5, 6)])
async def test_pauses_between_looks_grow_with_the_ranks(
    monkeypatch: pytest.MonkeyPatch, pause_s: float, fewest: int, most: int
) -> None:
    """What a look costs the controller is a part of its time; whom it names, and when, stays as it was."""
    monkeypatch.setattr(confirming, "LOOK_EACH_RANK_S", pause_s / 6)
    world = await _hung()
    answers = _Answers(world)
    await _pass(world, answers, 100.0)
    looks = len(answers.looks)

    took_s = 100.0 + await _pass(world, answers, 200.0)

    assert fewest <= looks <= most
    assert took_s == pytest.approx(PATIENCE_S, abs=3.0)
    verdict = world.incident(1).verdict
    assert verdict is not None
    assert verdict.culprits == (CULPRIT,)
