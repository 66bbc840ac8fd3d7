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
from megascale_kernels.moe.kernels.walk import (  # noqa: E402
    combine_place,
    combine_slot,
    dispatch_place,
    look_up,
    tiles_of_stage,
)
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
