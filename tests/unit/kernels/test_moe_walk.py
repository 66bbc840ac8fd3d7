# SPDX-License-Identifier: Apache-2.0
# ruff: noqa: ANN001, N803
# (kernels: their types are Triton's to infer, and compile-time arguments are written in capitals)
"""The walk of a MoE layer's tiles: every tile once, in stages; run as kernels run it."""

from collections import Counter

import pytest

torch = pytest.importorskip("torch")
triton = pytest.importorskip("triton", minversion="3.6")

import triton.language as tl  # noqa: E402
from megascale_kernels.device.layout import layout  # noqa: E402
from megascale_kernels.emulate import Launch, World  # noqa: E402
from megascale_kernels.moe.kernels.routing import list_tiles  # noqa: E402
from megascale_kernels.moe.kernels.walk import (  # noqa: E402
    combine_place,
    combine_slot,
    dispatch_place,
    look_up,
    rows_of_unit,
    tile_of,
    tiles_of_stage,
    turns_of,
    unit_at,
    whole_tiles,
)
from megascale_kernels.moe.moe_config import MoeConfig  # noqa: E402
from megascale_kernels.moe.tables import TILE_WORDS  # noqa: E402

ROWS = 16
GROUP_M = 3
FIELDS = 4
# Stretches in the order of the list: (expert, row tiles of the lead), then (expert, row tiles behind it).
LEAD, REST = [(0, 2), (1, 3)], [(0, 1), (1, 2), (2, 4)]


@triton.jit
def walk_dispatch(tiles, out, count, blocks_n, group_m, TILE_ROWS: tl.constexpr) -> None:
    """Write where each tile of layer 0 lies."""
    for tile in range(count):
        expert, row, end, first, height = look_up(tiles, tile // blocks_n)
        begin, valid, block_n = dispatch_place(tile, blocks_n, group_m, row, end, first, height, TILE_ROWS)
        tl.store(out + tile * 4, expert)
        tl.store(out + tile * 4 + 1, begin)
        tl.store(out + tile * 4 + 2, valid)
        tl.store(out + tile * 4 + 3, block_n)


@triton.jit
def walk_combine(tiles, out, row_tiles, lead_tiles, blocks_n, chunk_blocks, group_m, TILE_ROWS: tl.constexpr,
                 FIELDS: tl.constexpr) -> None:  # fmt: skip
    """Write each tile of layer 1, and behind them how many tiles each stage has."""
    count = row_tiles * blocks_n
    for tile in range(count):
        entry, chunk, width, at = combine_slot(tile, row_tiles, lead_tiles, blocks_n, chunk_blocks)
        expert, row, _, first, height = look_up(tiles, entry)
        begin, block_n, stage = combine_place(chunk, width, at, row_tiles, lead_tiles, chunk_blocks, group_m, row,
                                              first, height, TILE_ROWS)  # fmt: skip
        here = out + tile * FIELDS
        tl.store(here, expert)
        tl.store(here + 1, begin)
        tl.store(here + 2, block_n)
        tl.store(here + 3, stage)
    for stage in range(2 * ((blocks_n + chunk_blocks - 1) // chunk_blocks)):
        tl.store(out + count * FIELDS + stage,
                 tiles_of_stage(stage, row_tiles, lead_tiles, blocks_n, chunk_blocks))  # fmt: skip


@triton.jit
def walk_units(tiles, out, count, blocks_n, group_m, programs, shift, cuts, MOST: tl.constexpr,
               TILE_ROWS: tl.constexpr) -> None:  # fmt: skip
    """Write every program's units of layer 0: tile, first row, rows that are no padding, block of columns."""
    whole = whole_tiles(count, programs, cuts)
    for program in range(programs):
        for turn in range(turns_of(program, programs, 2 * count - whole, shift)):
            unit = unit_at(turn, program, programs, shift)
            tile = tile_of(unit, count, whole)
            _, row, end, first, height = look_up(tiles, tile // blocks_n)
            begin, _, block_n = dispatch_place(tile, blocks_n, group_m, row, end, first, height, TILE_ROWS)
            begin, valid = rows_of_unit(unit, whole, begin, end, TILE_ROWS)
            here = out + (program * MOST + turn) * 4
            tl.store(here, tile)
            tl.store(here + 1, begin)
            tl.store(here + 2, valid)
            tl.store(here + 3, block_n)


@triton.jit
def list_all(tiles, out, rows, totals, half_rows, cuts, columns, programs, EXPERTS: tl.constexpr,
             TILE_ROWS: tl.constexpr) -> None:  # fmt: skip
    """List the row tiles of experts of which no row is our own tokens'."""
    total = tl.load(totals + tl.arange(0, EXPERTS))
    height = (total + TILE_ROWS - 1) // TILE_ROWS
    starts = (tl.cumsum(height, axis=0) - height) * TILE_ROWS
    list_tiles(out, tiles, rows, total, total * 0, height, starts, 0, half_rows, cuts, columns, programs, 1, EXPERTS,
               EXPERTS, TILE_ROWS)  # fmt: skip


def listed() -> tuple[torch.Tensor, dict[int, int], dict[int, int]]:
    """A list of row tiles, the first row of each expert and the end of its rows."""
    heights: Counter[int] = Counter()
    for expert, height in (*LEAD, *REST):
        heights[expert] += height
    starts, at = {}, 0
    for expert in sorted(heights):
        starts[expert] = at
        at += heights[expert] * ROWS
    # The last row tile of the second expert is more than half empty.
    ends = {expert: starts[expert] + heights[expert] * ROWS - (12 if expert == 1 else 5) for expert in heights}
    rows: list[list[int]] = []
    begun = dict(starts)
    for expert, height in (*LEAD, *REST):
        first = len(rows)
        rows += [[expert, begun[expert], ends[expert], first, height, *[0] * (TILE_WORDS - 5)]] * height
        begun[expert] += height * ROWS
    return torch.tensor(rows, dtype=torch.int32), starts, ends


def run(kernel, *arguments: object, words: int, **constants: int) -> torch.Tensor:
    """What a kernel of one program writes."""
    out = torch.full((words,), -7, dtype=torch.int32)
    world = World(layout(1, 32, 4096), max_steps=10_000_000)
    world.launch([Launch(0, kernel, 1, (arguments[0], out, *arguments[1:]), constants)])
    assert world.findings == ()
    return out


def test_layer_0_takes_every_tile_once_and_a_stretch_s_columns_together() -> None:
    """All columns of every row tile; the lead first; the valid rows of an expert's last tile are fewer."""
    tiles, starts, ends = listed()
    blocks_n = 5
    count = len(tiles) * blocks_n

    found = run(walk_dispatch, tiles, count, blocks_n, GROUP_M, words=4 * count, TILE_ROWS=ROWS).view(count, 4).tolist()

    lead = sum(height for _, height in LEAD)
    assert Counter((row, block_n) for _, row, _, block_n in found) == Counter(
        (row * ROWS, block_n) for row in range(len(tiles)) for block_n in range(blocks_n)
    )
    assert {expert for expert, *_ in found[: lead * blocks_n]} == {expert for expert, _ in LEAD}
    for expert, row, valid, _ in found:
        assert starts[expert] <= row < ends[expert]
        assert valid == min(ends[expert] - row, ROWS)
    assert [expert for expert, *_ in found] == sorted([expert for expert, *_ in found][: lead * blocks_n]) + sorted(
        [expert for expert, *_ in found][lead * blocks_n :]
    )


@pytest.mark.parametrize("chunk_blocks", [5, 2, 1])
def test_layer_1_takes_every_tile_once_in_stages(chunk_blocks: int) -> None:
    """Chunk by chunk, the lead last; a stage has as many tiles as it says."""
    tiles, starts, ends = listed()
    blocks_n, row_tiles, lead = 5, len(tiles), sum(height for _, height in LEAD)
    count = row_tiles * blocks_n

    out = run(
        walk_combine, tiles, row_tiles, lead, blocks_n, chunk_blocks, GROUP_M, words=FIELDS * count + 16,
        TILE_ROWS=ROWS, FIELDS=FIELDS,
    )  # fmt: skip

    found = out[: FIELDS * count].view(count, FIELDS).tolist()
    assert Counter((row, block_n) for _, row, block_n, _ in found) == Counter(
        (row * ROWS, block_n) for row in range(row_tiles) for block_n in range(blocks_n)
    )
    assert all(starts[expert] <= row < ends[expert] for expert, row, *_ in found)
    stages = [stage for *_, stage in found]
    assert stages == sorted(stages)
    sizes = out[FIELDS * count :].tolist()
    assert Counter(stages) == {stage: size for stage, size in enumerate(sizes) if size > 0}


BLOCKS_N, MOST_TURNS = 5, 64


def units_of(programs: int, shift: int, cuts: int) -> list[list[list[int]]]:
    """By program its units of the list's tiles, in its turns: tile, first row, valid rows, block of columns."""
    tiles, _, _ = listed()
    out = run(
        walk_units, tiles, len(tiles) * BLOCKS_N, BLOCKS_N, GROUP_M, programs, shift, cuts,
        words=4 * programs * MOST_TURNS, MOST=MOST_TURNS, TILE_ROWS=ROWS,
    )  # fmt: skip
    found = out.view(programs, MOST_TURNS, 4).tolist()
    return [[unit for unit in of_program if unit[0] >= 0] for of_program in found]


@pytest.mark.parametrize("programs", [1, 7, 12, 16, 25, 28, 59, 60, 61, 200])
@pytest.mark.parametrize("shift", [0, 1, 5])
@pytest.mark.parametrize("cuts", [0, 1])
def test_every_row_of_every_tile_is_some_program_s_once(programs: int, shift: int, cuts: int) -> None:
    """Waves that are dealt further on, and a last one that is cut, miss no row, take none twice, and keep the order."""
    tiles, _, ends = listed()

    found = units_of(programs, shift, cuts)

    rows = Counter(
        (row, block_n) for units in found for _, begin, valid, block_n in units for row in range(begin, begin + valid)
    )
    valid = [row for start in range(0, len(tiles) * ROWS, ROWS) for row in range(start, start + ROWS)]
    padding = {row for end in ends.values() for row in range(end, -(-end // ROWS) * ROWS)}
    assert rows == Counter((row, block_n) for row in valid if row not in padding for block_n in range(BLOCKS_N))
    turns = [len(units) for units in found]
    assert max(turns) - min(turns) <= 1
    for turn in range(max(turns)):  # waves follow one another
        wave = [units[turn][0] for units in found if turn < len(units)]
        before = [units[turn - 1][0] for units in found] if turn else [-1]
        assert min(wave) > max(before)


@pytest.mark.parametrize(("programs", "is_cut"), [(16, False), (28, True), (59, True), (61, False), (200, True)])
def test_the_last_wave_is_cut_where_every_half_finds_a_program(programs: int, is_cut: bool) -> None:
    """60 tiles are 3 waves of 16 and 12 tiles, 2 of 28 and 4, one of 59 and one, none of 61 and 60, none of 200."""
    whole, cut = units_of(programs, 0, 0), units_of(programs, 0, 1)

    assert (cut != whole) == is_cut
    halves = [tile for tile, count in Counter(unit[0] for units in cut for unit in units).items() if count == 2]
    assert halves == (list(range(60 - 60 % programs, 60)) if is_cut else [])
    assert all(valid <= ROWS // 2 for units in cut for tile, _, valid, _ in units if tile in halves)


@pytest.mark.parametrize("programs", [132, 114, 78, 108, 131])
@pytest.mark.parametrize("height", range(2, 11))
def test_no_program_gets_all_half_empty_tiles(programs: int, height: int) -> None:
    """Where every stretch has as many row tiles and the last is half empty, each program gets its share of these.

    Dealt alike in every wave, programs get all or none where the height divides their number.
    """
    waves = 4 * height

    def most(shift: int) -> int:
        """The most half-empty tiles of a program."""
        places = [[(program + turn * shift) % programs for turn in range(waves)] for program in range(programs)]
        return max(
            sum((turn * programs + place) % height == height - 1 for turn, place in enumerate(of_program))
            for of_program in places
        )

    assert most(MoeConfig(shifted=True).shift(programs)) <= waves // height + 2
    if programs % height == 0:
        assert most(MoeConfig(shifted=False).shift(programs)) == waves


@pytest.mark.parametrize(("programs", "cuts", "late"), [(8, 0, True), (8, 1, False), (5, 0, True), (5, 1, True)])
def test_half_empty_tiles_come_last_only_where_the_last_wave_stays_whole(programs: int, cuts: int, late: bool) -> None:
    """Of the last wave of 8 programs 4 have a tile and all would have half a one; of 5 programs' 4 have."""
    totals = torch.tensor([ROWS + 3, ROWS + 3, ROWS, ROWS if programs == 8 else 2 * ROWS], dtype=torch.int32)
    columns, heights = 2, [2, 2, 1, 1 if programs == 8 else 2]
    assert sum(heights) * columns % programs == 4
    tiles = torch.zeros(64 * TILE_WORDS, dtype=torch.int32)

    run(list_all, tiles, torch.zeros(256, dtype=torch.int32), totals, ROWS // 2, cuts, columns, programs, words=64,
        EXPERTS=4, TILE_ROWS=ROWS)  # fmt: skip

    experts = tiles.view(-1, TILE_WORDS)[: sum(heights), 0].tolist()
    in_order = [expert for expert, height in enumerate(heights) for _ in range(height)]
    assert experts == ([0, 1, 2, *[3] * heights[3], 0, 1] if late else in_order)
