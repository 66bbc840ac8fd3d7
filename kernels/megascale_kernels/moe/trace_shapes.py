# SPDX-License-Identifier: Apache-2.0
"""What the flags of a recorded MoE layer mean: which copy a tile of layer 0 waited for, what a job of layer 1 sent.

A trace holds tile and job numbers. Which tokens they stand for is in the routing's tables, which lie on the device
until the next layer: read them when the layer has ended and pass the shapes to `tracing.save_trace`, whose arrows
(`tracing/flows.py`) follow from them. With `MoeConfig.selective` no copy engine brings tokens, so no
arrow leads from a copy.
"""

from torch import Tensor

from megascale_kernels.moe.moe_config import MoeConfig
from megascale_kernels.moe.tables import ROW_TILES, TOKENS_OF, Routing, Sizes
from megascale_kernels.planning import tile_order
from megascale_kernels.tracing.dump import Shape


def layer_shapes(routing: Routing, sizes: Sizes, config: MoeConfig, rank: int, launch: int) -> dict[int, Shape]:
    """The shapes of a layer's launches, by launch number; waits for the device.

    Args:
        routing: the tables that the layer left.
        sizes: of the layer.
        config: `MoeConfig.resolved`, as it ran.
        rank: this rank.
        launch: number of the layer's first launch, that of the routing.

    Returns:
        for `moe_dispatch` by tile the peer and unit whose copy it needs last, or this rank where it needs none; for
        `moe_combine` by job the rank whose tokens it adds up, and the flag of these.
    """
    head = routing.head.tolist()
    row_tiles = head[ROW_TILES]
    dispatch = _dispatch_units(routing.tiles[:row_tiles].tolist(), routing.rows, sizes, config, rank)
    combine = _combine_jobs(head, sizes, config, rank)
    return {
        launch: Shape("moe_route", 0),
        launch + 1: Shape("moe_dispatch", len(dispatch), dispatch),
        launch + 2: Shape("moe_combine", row_tiles * -(-sizes.hidden // config.combine_n), combine),
    }


def _dispatch_units(
    tiles: list[list[int]], rows: Tensor, sizes: Sizes, config: MoeConfig, rank: int
) -> tuple[tuple[int, int], ...]:
    """By tile of layer 0 the (peer, unit) that it needs last: `walk.dispatch_place` and `walk.units_of` on the host."""
    grouped = tile_order.python(tile_order.grouped)
    tokens = rows.tolist()
    blocks_n, unit_tokens = -(-sizes.inner // config.block_n), -(-sizes.pitch // config.units)
    found = []
    for tile in range(len(tiles) * blocks_n):
        _, row, end, first, height = tiles[tile // blocks_n][:5]
        begin = row + grouped(tile - first * blocks_n, height, blocks_n, config.group_m)[0] * sizes.tile_rows
        last = tokens[min(begin + sizes.tile_rows, end) - 1]
        source = last // sizes.pitch
        found.append((source, 0 if source == rank else last % sizes.pitch // unit_tokens))
    return tuple(found)


def _combine_jobs(head: list[int], sizes: Sizes, config: MoeConfig, rank: int) -> tuple[tuple[int, int], ...]:
    """By job of layer 1 its (owner, flag): `combine_kernel.find_job` on the host."""
    ranks = [(rank + step) % sizes.world_size for step in range(1, sizes.world_size + 1)]
    blocks = [(owner, block) for owner in ranks for block in range(-(-head[TOKENS_OF + owner] // config.job_tokens))]
    of_pitch = -(-sizes.pitch // config.job_tokens)
    # `combine_kernel.count_jobs`: whole chunks of columns, the last of which may be narrower.
    blocks_n = -(-sizes.hidden // config.combine_n)
    chunks = -(-blocks_n // -(-blocks_n // (config.chunks or 1)))
    return tuple((owner, chunk * of_pitch + block) for chunk in range(chunks) for owner, block in blocks)
