# SPDX-License-Identifier: Apache-2.0
"""The overlap kernels' waits: each ends, for no rank waits in a circle, and two slots are enough.

The wait-for graph is that of `tests/fakes/wait_graph.py`.
"""

import itertools
from collections.abc import Callable

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

torch = pytest.importorskip("torch")
triton = pytest.importorskip("triton", minversion="3.6")

from megascale_kernels.planning.tiling import EVEN  # noqa: E402

from tests.fakes import wait_graph, walks  # noqa: E402
from tests.fakes.wait_graph import Graph  # noqa: E402
from tests.fakes.walks import Shape  # noqa: E402

shapes = st.builds(
    Shape,
    ranks=st.integers(1, 4),
    blocks_m=st.integers(1, 3),
    blocks_n=st.integers(1, 3),
    ctas=st.integers(1, 7),
    blocks_k=st.integers(1, 6),
    split=st.one_of(st.none(), st.integers(0, 4)),
    group_m=st.integers(1, 4),
    slots=st.integers(2, 4),
    unit_blocks=st.integers(1, 3),
    lead=st.one_of(st.none(), st.integers(1, 3)),
    whole=st.none(),
    mixed=st.sampled_from((None, False, True)),
    m_shard=st.just(0),
)
# Rows that don't fill tiles of four: of less than one, of a little more than one, and of several.
ragged_shapes = st.builds(
    walks.ragged,
    ranks=st.integers(1, 4),
    m_shard=st.integers(1, 14),
    blocks_n=st.integers(1, 3),
    ctas=st.integers(1, 7),
    blocks_k=st.integers(1, 6),
    split=st.one_of(st.none(), st.integers(0, 4)),
    group_m=st.integers(1, 4),
    slots=st.integers(2, 4),
    unit_blocks=st.integers(1, 3),
    lead=st.one_of(st.none(), st.integers(1, 3)),
    mixed=st.sampled_from((None, False, True)),
)
OPERATORS: dict[str, Callable[..., None]] = {
    name: getattr(wait_graph, name) for name in ("ag_gemm", "gemm_rs", "gemm_ar", "hopper_ag", "hopper_rs")
}


def small_shapes() -> list[Shape]:
    """All of four ranks and fewer with a few tiles, multiprocessors and parts."""
    return [
        Shape(ranks, blocks_m, blocks_n, ctas, blocks_k, split, mixed=mixed)
        for ranks, blocks_m, blocks_n, ctas in itertools.product((1, 2, 3, 4), (1, 2), (1, 2), (1, 2, 3, 5))
        for blocks_k, split in ((1, 1), (3, 1), (3, 2), (3, 3), (3, EVEN))
        for mixed in (False, True)
    ]


@pytest.mark.parametrize("operator", list(OPERATORS))
def test_every_wait_ends_in_every_small_launch(operator: str) -> None:
    """Each wait is for an event that happens, and whose own needs lead back to the beginning and never in a circle."""
    hopper = operator.startswith("hopper")

    for shape in small_shapes():
        if not hopper and (shape.blocks_k, shape.split) != (1, 1):
            continue
        graph = Graph(shape.ranks)
        OPERATORS[operator](graph, shape)
        assert graph.never() == set(), shape
        assert graph.circle() == [], shape


@given(shapes, st.sampled_from(list(OPERATORS)))
@settings(max_examples=60)
def test_every_wait_ends_in_larger_launches(shape: Shape, operator: str) -> None:
    """The same with other groups, rings, units and cuts."""
    graph = Graph(shape.ranks)

    OPERATORS[operator](graph, shape)

    assert graph.never() == set()
    assert graph.circle() == []


@given(ragged_shapes, st.sampled_from(list(OPERATORS)))
@settings(max_examples=120)
def test_every_wait_ends_where_tiles_straddle_shards(shape: Shape, operator: str) -> None:
    """The same with rows that don't fill tiles: ranks wait for each other's parts of tiles, and send them before."""
    graph = Graph(shape.ranks)

    OPERATORS[operator](graph, shape)

    assert graph.never() == set()
    assert graph.circle() == []


@pytest.mark.parametrize("operator", ["gemm_rs", "hopper_rs"])
def test_every_wait_ends_in_every_small_launch_of_straddling_tiles(operator: str) -> None:
    """Two to four ranks, one program or several, few tiles and cuts."""
    for ranks_, m_shard, ctas in itertools.product((2, 3, 4), (5, 6, 9), (1, 2, 3)):
        for group_m, split, mixed in ((1, 1, False), (2, 1, True), (3, 2, False), (2, EVEN, False)):
            shape = walks.ragged(ranks_, m_shard, blocks_n=2, ctas=ctas, group_m=group_m, split=split, mixed=mixed)
            graph = Graph(ranks_)
            OPERATORS[operator](graph, shape)
            assert graph.never() == set(), shape
            assert graph.circle() == [], shape


@pytest.mark.parametrize("world_size", [2, 3])
def test_adding_up_a_straddling_tile_before_sending_it_would_be_a_deadlock(world_size: int) -> None:
    """The control: each of its two owners needs the other's part, so each sends before it waits."""
    graph = Graph(world_size)

    wait_graph.hopper_rs(graph, walks.ragged(world_size, 5), adds_first=True)

    assert graph.circle()


@given(shapes, st.integers(0, 30), st.integers(2, 4))
@settings(max_examples=60)
def test_every_wait_ends_however_much_of_a_gather_is_cut(shape: Shape, whole: int, split: int) -> None:
    """Cutting more than the last wave, or everything, makes nobody wait in a circle."""
    graph = Graph(shape.ranks)

    wait_graph.hopper_ag(graph, shape._replace(whole=whole, split=split))

    assert graph.never() == set()
    assert graph.circle() == []


@given(shapes, st.lists(st.sampled_from(list(OPERATORS)), min_size=3, max_size=3))
@settings(max_examples=30)
def test_two_slots_are_enough(shape: Shape, operators: list[str]) -> None:
    """When a rank begins launch L, every rank has ended launch L - 2, whatever ran: its slot is free."""
    graph = Graph(shape.ranks)
    for operator in operators:
        OPERATORS[operator](graph, shape)

    assert graph.circle() == []
    for rank in range(shape.ranks):
        known = graph.before(("begin", 3, rank))
        assert {("end", 1, other) for other in range(shape.ranks)} <= known


def test_one_slot_would_not_be_enough() -> None:
    """When a rank begins launch L, a peer may still be in launch L - 1."""
    for build in OPERATORS.values():
        graph = Graph(2)
        for _ in range(2):
            build(graph, Shape(2))

        assert ("end", 1, 1) not in graph.before(("begin", 2, 0))


@pytest.mark.parametrize("world_size", [2, 3, 4])
def test_waiting_before_the_last_k_block_of_a_tile_would_be_a_deadlock(world_size: int) -> None:
    """The control: if a tile were announced only after the next, that one must not wait before it is multiplied.

    Either of the two alone is harmless; together, and the model sees it, ranks wait for each other.
    """
    circles = {}
    for early, late in itertools.product((False, True), repeat=2):
        graph = Graph(world_size)
        wait_graph.hopper_rs(graph, Shape(world_size), waits_early=early, announces_late=late)
        assert graph.never() == set()
        circles[early, late] = graph.circle()

    assert {key for key, circle in circles.items() if circle} == {(True, True)}
    assert len({event[1] for event in circles[True, True] if event[0] == "flag"}) >= 2


def test_waiting_before_announcing_would_be_a_deadlock() -> None:
    """The same control for the plain kernel: own tiles must not wait while a peer's tile is owed."""
    graph = Graph(2)

    wait_graph.gemm_rs(graph, Shape(2), waits_before_announcing=True)

    assert graph.circle()


def test_a_ring_of_one_slot_would_be_a_deadlock() -> None:
    """A consumer hands back a slot when it has begun with the next, so one slot is never handed back."""
    graph = Graph(1)

    wait_graph.hopper_ag(graph, Shape(1, slots=1))

    assert graph.circle()
