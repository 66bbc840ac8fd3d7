# SPDX-License-Identifier: Apache-2.0
"""Whatever nodes have of sets: what is chosen is whole, of one save, and the newest; and any one node may go."""

from itertools import pairwise

from hypothesis import given, settings
from hypothesis import strategies as st

from megascale_ops.checkpoint.tiers import sets
from megascale_ops.checkpoint.tiers.nodes import Nodes
from megascale_ops.checkpoint.tiers.sets import Held
from tests.matrix import some

SETS = {(step, set_id): tuple(f"f{number}" for number in range(1 + step % 3)) for step in range(4) for set_id in "ab"}


@st.composite
def inventories(draw: st.DrawFn) -> list[list[Held]]:
    """What each node has: of each step at most one set, any of its files."""
    found = []
    for _ in range(draw(st.integers(1, 4))):
        node = []
        for step in range(4):
            set_id = draw(st.sampled_from(["a", "b", ""]))
            if set_id:
                names = SETS[step, set_id]
                present = draw(st.sets(st.integers(0, len(names) - 1)))
                node.append(Held(step, set_id, names, tuple(sorted(present)), ord(set_id)))
        found.append(node)
    return found


@given(inventories(), st.lists(st.integers(0, 4), max_size=4, unique=True).map(lambda each: sorted(each, reverse=True)))
@settings(max_examples=some(300), deadline=None)
def test_candidates_are_whole_sets_of_one_save_newest_first(nodes: list[list[Held]], shared: list[int]) -> None:
    """Said another way: by looking for each file of each set on each node."""
    found = sets.candidates(nodes, shared)

    assert [one.step for one in found] == sorted((one.step for one in found), reverse=True)
    assert [one.step for one in found if not one.set_id] == shared
    for one in found:
        if not one.set_id:
            assert shared[one.place] == one.step
            continue
        having = {
            name: [
                number
                for number, node in enumerate(nodes)
                for held in node
                if (held.step, held.set_id) == (one.step, one.set_id) and held.names.index(name) in held.present
            ]
            for name in SETS[one.step, one.set_id]
        }
        assert {name: list(holders) for name, holders in one.holders.items()} == having
        assert one.missing == tuple(sorted(name for name, holders in having.items() if not holders))
    for left, right in pairwise(found):
        if left.step == right.step:  # of one step: whole sets, the later one first; others; the shared storage
            rank = [(not one.set_id, bool(one.missing)) for one in (left, right)]
            assert rank[0] <= rank[1]


@given(inventories(), st.data())
def test_what_turned_out_damaged_counts_no_more(nodes: list[list[Held]], data: st.DataObject) -> None:
    """A file of one node is taken away, and of no other."""
    local = [one for one in sets.candidates(nodes, []) if any(one.holders.values())]
    if not local:
        return
    one = data.draw(st.sampled_from(local))
    name = data.draw(st.sampled_from(sorted(name for name, holders in one.holders.items() if holders)))
    node = data.draw(st.sampled_from(one.holders[name]))

    left = one.without({(node, name)})

    assert set(left.holders[name]) == set(one.holders[name]) - {node}
    assert {key: each for key, each in left.holders.items() if key != name} == {
        key: each for key, each in one.holders.items() if key != name
    }


@given(st.lists(st.integers(0, 6), min_size=1, max_size=24))
def test_every_file_is_on_two_nodes_and_every_node_keeps_one_others(keys: list[int]) -> None:
    """So the loss of any one node loses nothing, and none keeps two shares; a pair is each other's, but for three."""
    nodes = Nodes.of(keys)
    count = len(nodes.members)

    assert sorted(rank for members in nodes.members for rank in members) == list(range(len(keys)))
    assert all(len({keys[rank] for rank in members}) == 1 for members in nodes.members)
    buddies = [nodes.buddy_of(node) for node in range(count)]
    if count == 1:
        assert buddies == [None]
        assert nodes.partner_of(0) is None
        return
    assert sorted(buddies) == list(range(count))
    assert all(buddy != node for node, buddy in enumerate(buddies))
    unpaired = [node for node, buddy in enumerate(buddies) if buddies[buddy] != node]
    assert len(unpaired) == (3 if count % 2 else 0)
    for rank in range(len(keys)):
        assert nodes.partner_of(rank) in nodes.members[buddies[nodes.node_of(rank)]]
        assert nodes.lead_of(rank) == min(nodes.members[nodes.node_of(rank)])
