# SPDX-License-Identifier: Apache-2.0
# ruff: noqa: ANN001, N803
# (kernels: their types are Triton's to infer, and compile-time arguments are written in capitals)
"""The walk of a MoE layer's tiles: every tile once, in stages, the last wave in parts; run as kernels run it."""

from collections import Counter, defaultdict

import pytest

torch = pytest.importorskip("torch")
triton = pytest.importorskip("triton", minversion="3.6")

import triton.language as tl  # noqa: E402
from megascale_kernels.device.layout import layout  # noqa: E402
from megascale_kernels.emulate import Launch, World  # noqa: E402
from megascale_kernels.moe.tables import TILE_WORDS  # noqa: E402
from megascale_kernels.moe.walk import (  # noqa: E402
    combine_place,
    combine_slot,
    dispatch_place,
    look_up,
    part_of_unit,
    parts_of_last_wave,
    tiles_of_stage,
)
from megascale_kernels.planning.tiling import PART_BLOCKS  # noqa: E402

ROWS = 16
GROUP_M = 3
FIELDS = 9
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
def walk_combine(tiles, out, programs, row_tiles, lead_tiles, blocks_n, chunk_blocks, k_blocks, most, group_m,
                 TILE_ROWS: tl.constexpr, FIELDS: tl.constexpr) -> None:  # fmt: skip
    """Write each unit of layer 1, and behind them how many tiles each stage has."""
    whole, parts = parts_of_last_wave(row_tiles * blocks_n, programs, k_blocks, most)
    units = whole + (row_tiles * blocks_n - whole) * parts
    tl.store(out, units)
    for unit in range(units):
        tile, k_first, k_last, place, before = part_of_unit(unit, whole, parts, k_blocks)
        entry, chunk, width, at = combine_slot(tile, row_tiles, lead_tiles, blocks_n, chunk_blocks)
        expert, row, _, first, height = look_up(tiles, entry)
        begin, block_n, stage = combine_place(chunk, width, at, row_tiles, lead_tiles, chunk_blocks, group_m, row,
                                              first, height, TILE_ROWS)  # fmt: skip
        here = out + (1 + unit) * FIELDS
        tl.store(here, tile)
        tl.store(here + 1, expert)
        tl.store(here + 2, begin)
        tl.store(here + 3, block_n)
        tl.store(here + 4, stage)
        tl.store(here + 5, k_first)
        tl.store(here + 6, k_last)
        tl.store(here + 7, place)
        tl.store(here + 8, before)
    for stage in range(2 * ((blocks_n + chunk_blocks - 1) // chunk_blocks)):
        tl.store(out + (1 + units) * FIELDS + stage,
                 tiles_of_stage(stage, row_tiles, lead_tiles, blocks_n, chunk_blocks))  # fmt: skip


def listed() -> tuple[torch.Tensor, dict[int, int], dict[int, int]]:
    """A list of row tiles, the first row of each expert and the end of its rows."""
    heights: Counter[int] = Counter()
    for expert, height in (*LEAD, *REST):
        heights[expert] += height
    starts, at = {}, 0
    for expert in sorted(heights):
        starts[expert] = at
        at += heights[expert] * ROWS
    ends = {expert: starts[expert] + heights[expert] * ROWS - 5 for expert in heights}
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
@pytest.mark.parametrize(
    ("programs", "k_blocks", "most"), [(7, 40, 1), (7, 40, 4), (64, 40, 6), (9, 3, 4), (12, 64, 2)]
)
def test_layer_1_takes_every_tile_once_in_stages_and_parts(
    chunk_blocks: int, programs: int, k_blocks: int, most: int
) -> None:
    """Chunk by chunk, the lead last; all K blocks of a tile in ascending parts, each with a place of its own."""
    tiles, _, ends = listed()
    blocks_n, row_tiles, lead = 5, len(tiles), sum(height for _, height in LEAD)
    count = row_tiles * blocks_n
    words = FIELDS * (1 + 6 * count) + 16

    out = run(
        walk_combine, tiles, programs, row_tiles, lead, blocks_n, chunk_blocks, k_blocks, most, GROUP_M, words=words,
        TILE_ROWS=ROWS, FIELDS=FIELDS,
    )  # fmt: skip

    units = int(out[0])
    found = out[FIELDS : FIELDS * (1 + units)].view(units, FIELDS).tolist()
    parts: dict[int, list[list[int]]] = defaultdict(list)
    for unit in found:
        parts[unit[0]].append(unit)
    assert sorted(parts) == list(range(count))
    assert Counter((of[0][2], of[0][3]) for of in parts.values()) == Counter(
        (row * ROWS, block_n) for row in range(row_tiles) for block_n in range(blocks_n)
    )
    for of in parts.values():
        assert [unit[5] for unit in of] == [0, *(unit[6] for unit in of[:-1])]
        assert of[-1][6] == k_blocks
        assert [unit[8] for unit in of] == list(range(len(of)))
        assert [of[-1][7] - len(of) + 1 + index for index in range(len(of))] == [unit[7] for unit in of]
        assert of[0][2] < ends[of[0][1]]
    places = [unit[7] for of in parts.values() for unit in of[:-1]]
    assert len(set(places)) == len(places) < max(programs, 1)
    stages = [parts[tile][0][4] for tile in range(count)]
    assert stages == sorted(stages)
    sizes = out[FIELDS * (1 + units) :].tolist()
    assert Counter(stages) == {stage: size for stage, size in enumerate(sizes) if size > 0}
    rest = count % programs
    most_parts = min(programs // max(rest, 1), most, k_blocks)
    saved = k_blocks - -(-k_blocks // most_parts)
    is_cut = rest > 0 and most_parts > 1 and 4 * saved > 5 * PART_BLOCKS * (most_parts - 1)
    assert Counter(map(len, parts.values())) == Counter({1: count - rest, most_parts: rest} if is_cut else {1: count})
