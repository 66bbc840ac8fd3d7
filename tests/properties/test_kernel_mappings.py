# SPDX-License-Identifier: Apache-2.0
"""Mappings and schedules of the overlap kernels: nothing twice, nothing left out, nobody waits in a circle.

The functions are the kernels' own, called with integers. The wait-for graph is that of `tests/fakes/wait_graph.py`.
"""

import itertools
from collections import Counter
from collections.abc import Callable

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

torch = pytest.importorskip("torch")
triton = pytest.importorskip("triton", minversion="3.6")

from megascale_kernels.autotune.space import HOPPER_TILES, TILES  # noqa: E402
from megascale_kernels.memory.symmetric_memory import MOST_CUT_PARTS, layout_for  # noqa: E402
from megascale_kernels.planning import tile_order  # noqa: E402
from megascale_kernels.planning.config import Config  # noqa: E402
from megascale_kernels.planning.stream_k import Walk, cut, cut_gather, tiling_of  # noqa: E402
from megascale_kernels.planning.tiling import EVEN, WORTH_CUTTING, LastWave, cut_last_wave  # noqa: E402

from tests.fakes import wait_graph  # noqa: E402
from tests.fakes.wait_graph import CONSUMERS, Graph, Shape, grouped, unit_of_work, units_of  # noqa: E402
from tests.matrix import some  # noqa: E402

blocks = tile_order.python(tile_order.blocks)
PROCESSORS = 148  # of the largest chip known here
sizes = st.integers(1, 40)
ranks = st.integers(1, 8)
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
)
OPERATORS: dict[str, Callable[..., None]] = {
    name: getattr(wait_graph, name) for name in ("ag_gemm", "gemm_rs", "gemm_ar", "hopper_ag", "hopper_rs")
}


@given(sizes, sizes, st.integers(1, 50))
def test_grouping_visits_every_block_once(blocks_m: int, blocks_n: int, group_m: int) -> None:
    """For any sizes and groups the order of tiles is a bijection, and a group's columns are walked in turn."""
    order = [grouped(inner, blocks_m, blocks_n, group_m) for inner in range(blocks_m * blocks_n)]

    assert set(order) == set(itertools.product(range(blocks_m), range(blocks_n)))
    groups = [block_m // group_m for block_m, _ in order]
    assert groups == sorted(groups)


@given(ranks, st.data())
def test_own_rows_come_first_in_a_gather_and_last_in_a_scatter(world_size: int, data: st.DataObject) -> None:
    """Both orders are permutations of the ranks; at each step no two ranks serve the same one."""
    rank = data.draw(st.integers(0, world_size - 1))

    gather = [wait_graph.gather_source(step, rank, world_size) for step in range(world_size)]
    scatter = [wait_graph.scatter_owner(step, rank, world_size) for step in range(world_size)]

    everybody = set(range(world_size))
    assert set(gather) == set(scatter) == everybody
    assert gather[0] == scatter[-1] == rank
    for step in range(world_size):
        assert {wait_graph.scatter_owner(step, other, world_size) for other in everybody} == everybody


@given(ranks, st.integers(1, 12), st.integers(1, 12), st.integers(1, 20), st.data())
def test_a_scatter_visits_every_block_of_every_shard_once_and_its_own_last(
    world_size: int, blocks_m: int, blocks_n: int, group_m: int, data: st.DataObject
) -> None:
    """The peers' shards are walked as one matrix: a bijection, and no tile of ours comes before one of theirs."""
    rank = data.draw(st.integers(0, world_size - 1))
    shape = Shape(world_size, blocks_m, blocks_n, ctas=1, group_m=group_m, mixed=False)

    order = [shape.scattered(tile, rank) for tile in range(shape.tiles)]

    assert set(order) == set(itertools.product(range(world_size), range(blocks_m), range(blocks_n)))
    assert [owner == rank for owner, *_ in order] == [False] * (shape.tiles - shape.per_shard) + [
        True
    ] * shape.per_shard


@given(ranks, st.integers(1, 12), st.integers(1, 12), st.integers(1, 20), st.data())
def test_a_mixed_scatter_reads_each_column_once_and_its_own_rows_last_there(
    world_size: int, blocks_m: int, blocks_n: int, group_m: int, data: st.DataObject
) -> None:
    """Whatever is walked together else: column by column all shards, and in each column the peers' before ours."""
    rank = data.draw(st.integers(0, world_size - 1))
    shape = Shape(world_size, blocks_m, blocks_n, ctas=1, group_m=group_m, mixed=True)

    order = [shape.scattered(tile, rank) for tile in range(shape.tiles)]

    assert set(order) == set(itertools.product(range(world_size), range(blocks_m), range(blocks_n)))
    assert [column for *_, column in order] == [
        column for column in range(blocks_n) for _ in range(world_size * blocks_m)
    ]
    for column in range(blocks_n):
        owned = [owner == rank for owner, _, at in order if at == column]
        assert owned == sorted(owned)


def test_few_rows_are_mixed_and_more_are_not() -> None:
    """Two ranks with two row blocks each, M 512, are; with four each, M 1024, not."""
    assert tile_order.scatter_group(2, 2, 16) == 4
    assert tile_order.scatter_group(4, 2, 16) == 4
    assert Shape(2, 4, 2, ctas=1).scattered(0, 0)[0] == 1
    assert {Shape(2, 4, 2, ctas=1, group_m=16).scattered(tile, 0)[0] for tile in range(8)} == {1}


@given(ranks, st.integers(1, 12), st.integers(1, 12), st.integers(1, 20), st.integers(1, 14), st.data())
def test_a_gather_visits_every_block_of_every_shard_once_and_its_own_first(
    world_size: int, blocks_m: int, blocks_n: int, group_m: int, lead: int, data: st.DataObject
) -> None:
    """First `lead` columns shard by shard, in the order of arrival; no other column comes before they are done."""
    rank = data.draw(st.integers(0, world_size - 1))
    shape = Shape(world_size, blocks_m, blocks_n, ctas=1, group_m=group_m, lead=lead)
    columns = min(lead, blocks_n)

    order = [shape.gathered(tile, rank) for tile in range(shape.tiles)]

    assert set(order) == set(itertools.product(range(world_size), range(blocks_m), range(blocks_n)))
    early = order[: blocks_m * columns * world_size]
    assert [(source - rank) % world_size for source, *_ in early] == [
        step for step in range(world_size) for _ in range(blocks_m * columns)
    ]
    assert all(block_n < columns for *_, block_n in early)


@given(ranks, st.integers(1, 12), st.integers(1, 12), st.integers(1, 20), st.integers(1, 14), st.data())
def test_both_all_gathers_take_their_tiles_in_the_same_order(
    world_size: int, blocks_m: int, blocks_n: int, group_m: int, lead: int, data: st.DataObject
) -> None:
    """The warp-specialised kernel, with its two ways to compile the order, and its twin in plain Triton."""
    rank = data.draw(st.integers(0, world_size - 1))
    shape = Shape(world_size, blocks_m, blocks_n, ctas=1, group_m=group_m, lead=lead)

    for tile in range(shape.tiles):
        assert wait_graph.place_of(shape, tile, rank, tall=True) == shape.gathered(tile, rank)
        if lead >= blocks_n:
            assert wait_graph.place_of(shape, tile, rank, tall=False) == shape.gathered(tile, rank)


def test_each_column_of_the_rest_is_walked_with_all_shards() -> None:
    """Two ranks, M 512: behind the first columns all four row blocks of a column come together."""
    shape = Shape(2, 2, 10, ctas=1, group_m=16, lead=3)

    columns = [shape.gathered(tile, 0)[2] for tile in range(12, shape.tiles)]

    assert columns == [column for column in range(3, 10) for _ in range(4)]


def test_a_wave_of_peers_tiles_is_about_square() -> None:
    """Four ranks, M 4096: 24 row blocks of the peers are walked in twos of 12, not in eights."""
    shape = Shape(4, 8, 48, ctas=132, group_m=16)

    owners_and_rows = {shape.scattered(tile, 0)[:2] for tile in range(132)}

    assert len(owners_and_rows) == 12


@given(ranks)
def test_staging_slots_are_never_shared(world_size: int) -> None:
    """An owner's sources write different slots, all of its world_size - 1."""
    staging_slot = tile_order.python(tile_order.staging_slot)

    for owner in range(world_size):
        slots = [staging_slot(source, owner, world_size) for source in range(world_size) if source != owner]
        assert sorted(slots) == list(range(world_size - 1))


@given(sizes, sizes)
def test_every_tile_has_a_flag_of_its_own(blocks_m: int, blocks_n: int) -> None:
    """Flags of a shard's tiles are 0 to blocks_m * blocks_n - 1, each once."""
    blocks = itertools.product(range(blocks_m), range(blocks_n))

    flags = [wait_graph.channel_of_tile(block_m, block_n, blocks_n) for block_m, block_n in blocks]

    assert flags == list(range(blocks_m * blocks_n))


@given(st.integers(1, 500), st.integers(1, 100), st.integers(1, 6))
def test_a_tile_waits_for_the_units_that_hold_its_rows_and_no_others(m_shard: int, block_m: int, units: int) -> None:
    """From the unit of its first row to that of its last: the rows of those units are the tile's and perhaps more."""
    unit_rows = blocks(blocks(m_shard, units), block_m) * block_m

    for row in range(0, m_shard, block_m):
        end = min(row + block_m, m_shard)
        waited = range(wait_graph.unit_of_row(row, unit_rows), wait_graph.unit_of_row(end - 1, unit_rows) + 1)
        assert len(waited) == 1
        assert waited[0] * unit_rows <= row
        assert end <= (waited[0] + 1) * unit_rows
        assert waited[0] < blocks(m_shard, unit_rows) <= units


@given(
    st.sampled_from([2, 4, 8]),
    st.integers(1, 3000),
    st.integers(1, 2048).map(lambda n: n * 8),
    st.sampled_from([*TILES, *HOPPER_TILES]),
)
def test_a_workspace_made_for_a_size_serves_it_with_every_configuration(
    world_size: int, m_shard: int, cols: int, config: Config
) -> None:
    """Its flags and its data slots are enough for the tiles, units and padded shards of every tile we may choose."""
    made = layout_for(world_size, m_shard * world_size, cols, element_bytes=2)

    tiles = -(-m_shard // config.block_m) * -(-cols // config.block_n)
    assert tiles * 2 <= made.channels
    padded = -(-m_shard // config.block_m) * config.block_m
    assert world_size * padded * cols * 2 <= made.data_bytes


@given(
    st.sampled_from([1, 2, 4, 8]), st.integers(1, 20000), st.integers(1, 20000), st.integers(1, 40000),
    st.integers(1, PROCESSORS), st.sampled_from(HOPPER_TILES), st.booleans(), st.integers(1, 16),
)  # fmt: skip
def test_parts_of_cut_tiles_have_flags(
    world_size: int, m_shard: int, n: int, k: int, programs: int, config: Config, keeps: bool, height: int
) -> None:
    """However the last wave is cut, every part but the last of its tile has a flag per consumer."""
    tiling = tiling_of(config, is_nk=True, keeps_tiles=keeps)

    work = cut(tiling, m_shard, n, k, Walk(world_size, height), programs, config.tail_split)

    assert work.partial_places * tiling.consumers <= MOST_CUT_PARTS
    assert work.split <= work.blocks_k


@given(
    st.sampled_from([1, 2, 4, 8]), st.integers(1, 20000), st.integers(1, 20000), st.integers(1, 40000),
    st.integers(1, PROCESSORS), st.sampled_from(HOPPER_TILES), st.integers(1, 4),
)  # fmt: skip
def test_parts_of_a_planned_gather_have_flags(
    world_size: int, m_shard: int, n: int, k: int, programs: int, config: Config, splits: int
) -> None:
    """However much is cut, every part has a flag per consumer; the first columns are some of those there are."""
    asked = config._replace(planned=True, splits=splits)

    work, lead = cut_gather(tiling_of(asked, is_nk=True), m_shard, n, k, world_size, programs, asked)

    assert work.partial_places * CONSUMERS <= MOST_CUT_PARTS
    assert work.split <= work.blocks_k
    assert 1 <= lead <= work.blocks_n
    assert work.tiles == work.blocks_m * work.blocks_n * world_size
    if work.split != EVEN:
        assert work.units == work.whole_tiles + (work.tiles - work.whole_tiles) * work.split


def assert_every_k_block_has_one_unit(shape: Shape) -> None:
    """Each unit has a K block or more, and where its tile is cut, the places before its own hold the K blocks below."""
    found = [unit_of_work(shape, unit) for cta in range(shape.ctas) for unit in units_of(shape, cta)]

    covered = Counter((tile, block) for tile, first, last, *_ in found for block in range(first, last))
    assert covered == Counter(itertools.product(range(shape.tiles), range(shape.blocks_k)))
    lent = {unit.place: unit for unit in found if unit.last < shape.blocks_k}
    assert len(lent) == sum(unit.last < shape.blocks_k for unit in found)  # no two units lend at one place
    assert all(0 <= place < shape.cut().partial_places for place in lent)
    for unit in found:
        assert unit.first < unit.last
        if unit.last == shape.blocks_k:
            before = [lent[place] for place in range(unit.place - unit.before, unit.place)]
            assert [one.tile for one in before] == [unit.tile] * unit.before
            edges = [*(one.first for one in before), unit.first]
            assert edges == [0, *(one.last for one in before)]


@given(st.integers(1, 400), st.integers(1, PROCESSORS), st.integers(1, 64), st.one_of(st.none(), st.integers(0, 6)))
def test_units_of_work_cover_every_k_block_of_every_tile_once(
    tiles: int, programs: int, blocks_k: int, split: int | None
) -> None:
    """Whole tiles, then parts or shares."""
    assert_every_k_block_has_one_unit(Shape(1, 1, tiles, programs, blocks_k, split))


@given(st.integers(1, 40), st.integers(0, 40), st.integers(2, 6), st.integers(2, 20))
def test_units_of_work_cover_every_k_block_however_much_is_cut(
    tiles: int, whole: int, split: int, blocks_k: int
) -> None:
    """The same when more than the last wave is cut, as a planned gather does."""
    assert_every_k_block_has_one_unit(Shape(1, 1, tiles, 7, blocks_k, split, whole=whole))


@given(st.integers(1, 12), st.integers(1, 12), st.integers(1, 12), st.integers(1, 64))
def test_even_shares_differ_by_one_k_block_and_begin_with_what_they_lend(
    height: int, columns: int, teams: int, blocks_k: int
) -> None:
    """Programs of a team have the same K blocks of neighbouring tiles; only the first tile of a share is lent of."""
    shape = Shape(1, height, columns, height * teams, blocks_k, EVEN, group_m=height)
    if shape.cut().split != EVEN:
        return

    shares = [[unit_of_work(shape, unit) for unit in units_of(shape, cta)] for cta in range(shape.ctas)]

    cut = [[unit for unit in share if unit.tile >= shape.cut().whole_tiles] for share in shares]
    sizes = [sum(unit.last - unit.first for unit in share) for share in cut]
    assert max(sizes) - min(sizes) <= 1
    assert all(unit.last == blocks_k for share in cut for unit in share[1:])
    for share, same in zip(cut[:teams], cut[teams:], strict=False):  # programs p and p + teams are of one team
        assert [unit[1:3] for unit in share] == [unit[1:3] for unit in same]
        assert [unit.tile + 1 for unit in share] == [unit.tile for unit in same]


@given(st.integers(1, 3000), st.integers(1, PROCESSORS), st.integers(1, 600), st.integers(1, 16), st.integers(0, 7))
def test_only_the_last_wave_is_cut(tiles: int, programs: int, blocks_k: int, height: int, peers: int) -> None:
    """Full waves stay whole, no tile is cut into more parts than it has K blocks, and a cut promises to be worth it."""
    whole, split = cut_last_wave(tiles, programs, blocks_k, height=height, peers=peers)

    assert tiles - whole in (0, tiles % programs)
    assert 0 <= split <= max(blocks_k, 1)
    assert split != 1 or whole == tiles
    if split != 1:
        wave = LastWave(tiles % programs, programs, blocks_k, height=height, peers=peers)
        assert wave.cost(split) < WORTH_CUTTING
        assert split != EVEN or wave.is_worth_sharing()


# --- no circular waits ------------------------------------------------------------------------------------------


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
@settings(max_examples=some(60))
def test_every_wait_ends_in_larger_launches(shape: Shape, operator: str) -> None:
    """The same with other groups, rings, units and cuts."""
    graph = Graph(shape.ranks)

    OPERATORS[operator](graph, shape)

    assert graph.never() == set()
    assert graph.circle() == []


@given(shapes, st.integers(0, 30), st.integers(2, 4))
@settings(max_examples=some(60))
def test_every_wait_ends_however_much_of_a_gather_is_cut(shape: Shape, whole: int, split: int) -> None:
    """Cutting more than the last wave, or everything, makes nobody wait in a circle."""
    graph = Graph(shape.ranks)

    wait_graph.hopper_ag(graph, shape._replace(whole=whole, split=split))

    assert graph.never() == set()
    assert graph.circle() == []


@given(shapes, st.lists(st.sampled_from(list(OPERATORS)), min_size=3, max_size=3))
@settings(max_examples=some(30))
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


def test_more_parts_than_flags_are_refused() -> None:
    """More parts than a workspace has flags for would announce themselves on the flags of other ranks."""
    with pytest.raises(ValueError, match="tail_split=20: a tile of the last wave is cut into 1 to 6 parts"):
        cut_last_wave(131, 132, 64, 20)
    with pytest.raises(ValueError, match=r"tail_split=-1: .*or its K blocks are dealt out evenly \(0\)"):
        cut_last_wave(131, 132, 64, -1)
