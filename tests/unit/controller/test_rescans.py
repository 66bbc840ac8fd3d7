# SPDX-License-Identifier: Apache-2.0
"""A round of many nodes that waits for one of them: who asks again is not looked at with all others each time."""

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from megascale_ops.controller.job import diagnose
from megascale_ops.controller.recovery.formation import form
from megascale_ops.schema.health import NodeCheck
from megascale_ops.schema.messages import Join
from tests.fakes.controlled_job import World

NODES = [f"n{number:02d}" for number in range(diagnose.SMALL + 6)]


class _Scans:
    """Counts the looks at all nodes that have joined."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.count = 0
        self._joined = diagnose.joined
        monkeypatch.setattr(diagnose, "joined", self._counted)

    def _counted(self, *args: object) -> dict[str, float]:
        self.count += 1
        return self._joined(*args)  # type: ignore[arg-type]  # as the driver calls it


async def _waiting(nodes: list[str]) -> tuple[World, dict[str, Join]]:
    """All nodes have joined, one of them was taken out by hand, and without it the round is not full."""
    world = World(nproc=1, min_nodes=len(nodes), max_nodes=len(nodes))
    world.loop.nodes.quarantine(nodes[0], "test", "a person's word", 0.0)
    joins = {node: world.new_join(node) for node in nodes}
    for join in joins.values():
        world.ask(join, wait_s=300.0)
    await world.settle()
    await world.wait(0.3, beating=False)
    assert world.state == "replacing"
    return world, joins


async def test_who_asks_again_costs_no_look_at_all(monkeypatch: pytest.MonkeyPatch) -> None:
    """Seventy runners repeat their joins: none of them has anything new to tell."""
    world, joins = await _waiting(NODES)
    scans = _Scans(monkeypatch)

    for join in joins.values():
        world.ask(join)
    await world.settle()

    assert scans.count == 0
    world.loop.tick()
    assert scans.count == 1  # the control: time passing is looked at


@pytest.mark.parametrize("news", ["result", "runner", "join", "died"])
async def test_what_is_new_in_a_join_is_looked_at_at_once(monkeypatch: pytest.MonkeyPatch, news: str) -> None:
    """A check's result, another runner, another join, a runner whose connection was broken for long."""
    world, joins = await _waiting(NODES)
    join = joins[NODES[1]]
    if news == "result":
        join = msgspec.structs.replace(join, check=NodeCheck("good", "", 30.0))
    elif news in ("runner", "died"):
        world.tasks[1].cancel()
        await world.settle()
        world.now_s += 10.0
        join = msgspec.structs.replace(join, runner_id="another") if news == "runner" else join
    else:
        join = world.new_join(NODES[1])
    scans = _Scans(monkeypatch)

    world.ask(join)
    await world.settle()

    assert scans.count == 1


async def test_of_few_nodes_each_request_is_looked_at(monkeypatch: pytest.MonkeyPatch) -> None:
    """Up to 64 nodes nothing is saved by waiting for the next tick."""
    world, joins = await _waiting(NODES[: diagnose.SMALL])
    scans = _Scans(monkeypatch)

    world.ask(joins[NODES[1]])
    await world.settle()

    assert scans.count == 1


async def test_a_round_begins_once_the_node_is_back() -> None:
    """Nobody asks again, and a person takes the node back: the next tick forms the round."""
    world, _ = await _waiting(NODES)

    world.loop.nodes.release(NODES[0], "test", "")
    await world.wait(0.2, beating=False)

    assert world.state == "restarting"


@given(
    st.lists(st.sampled_from(NODES[:12]), unique=True),
    st.dictionaries(st.sampled_from(NODES[:12]), st.sampled_from([1.0, 2.0]), min_size=1),
    st.dictionaries(st.sampled_from(NODES[:12]), st.integers(0, 3)),
)
def test_nodes_of_the_round_before_come_first_in_their_order(
    before: list[str], joined: dict[str, float], asked: dict[str, int]
) -> None:
    """Then newcomers: by the place that they ask for, by when they came, by name."""
    found = form(
        joined, min_nodes=1, max_nodes=12, before=before, alive=(), now_s=100.0, waiting_since_s=0.0, last_call_s=0.0,
        straggler_s=1.0, asked=asked,
    ).nodes  # fmt: skip

    last = len(joined) + max(asked.values(), default=0)
    place = {node: number for number, node in enumerate(before)}
    wanted = sorted(joined, key=lambda one: (place.get(one, 12), asked.get(one, last), joined[one], one))
    assert list(found) == wanted
