# SPDX-License-Identifier: Apache-2.0
"""GEMM + reduce-scatter: out = rank's rows of sum over ranks of x @ w, where the ranks split K.

FLUX (2406.06858, section 3) fuses the scatter into the *epilogue*: a finished tile goes straight into the staging
buffer of the rank that owns its rows. Here the reduction is fused as well: each rank computes its own rows last,
keeps the accumulator in registers, waits for the other ranks' partials of that tile, adds them in fp32 in the order
of ranks (so the result is the same from run to run), and stores the final tile. No reduce kernel, no barrier.

A remote tile is announced while the *next* tile is being multiplied, when its stores have long arrived: the
announcement never stalls. The last remote tile is announced before the first own tile waits.
What it means, in plain torch: `reference.gemm_rs`.
"""

import triton
import triton.language as tl

from megascale_kernels.device.gemm import add_bias, multiply, quarters, store_rows, store_tile
from megascale_kernels.device.layout import COMPUTE, EPOCH, OPERATORS
from megascale_kernels.device.primitives import await_partials, peer_tile_notify
from megascale_kernels.device.progress import (
    NOTIFY,
    TILE_BEGIN,
    TILE_END,
    WAIT_BEGIN,
    WAIT_END,
    close_ring,
    head_board,
    mark,
    open_ring,
    ring_of,
    show_done,
    show_tile,
)
from megascale_kernels.device.signals import (
    drain_tma_stores,
    finish_launch,
    open_channel,
    peer_data,
    publish_launch,
)
from megascale_kernels.planning.tile_order import (
    blocks,
    channel_of_tile,
    grouped,
    scatter_owner,
    scatter_stretch,
    staging_slot,
)

RUNTIME = ("slot", "rank", "signature", "deadline_us", "flags", "channels", "variant", "group_m")


@triton.jit(do_not_specialize=RUNTIME)
def gemm_rs_kernel(
    x_desc, w_desc, out_desc, peer1, peer2, peer3, peer4, peer5, peer6, peer7, out_ptr, bias_ptr,
    control, peers, status, board, trace,
    flags, channels, slot, rank, world_size, signature, deadline_us, staging_bytes, variant,
    m_shard, n_size, k_size, group_m,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
    W_IS_NK: tl.constexpr, HAS_BIAS: tl.constexpr, STORE_TMA: tl.constexpr, PUSH_TMA: tl.constexpr,
    OPERATOR: tl.constexpr, PROGRESS: tl.constexpr, TRACE: tl.constexpr,
):  # fmt: skip
    """One launch of persistent CTAs: the peers' rows first, then our own."""
    cta = tl.program_id(0)
    ctas = tl.num_programs(0)
    channel = open_channel(
        tl.load(control + EPOCH) + 1, control, peers, status, board, flags, channels, slot, rank, world_size,
        signature, OPERATOR, deadline_us,
    )  # fmt: skip
    if cta == ctas - 1:
        tiles = blocks(m_shard, BLOCK_M) * blocks(n_size, BLOCK_N) * world_size
        head_board(channel, board, ctas, tiles, m_shard, n_size, k_size, PROGRESS)
        publish_launch(channel, m_shard, n_size, k_size, variant)
    multiply_tiles(channel, x_desc, w_desc, out_desc, (peer1, peer2, peer3, peer4, peer5, peer6, peer7),
                   out_ptr, bias_ptr, staging_bytes, m_shard, n_size, k_size, group_m, ring_of(trace, cta, COMPUTE),
                   BLOCK_M, BLOCK_N, BLOCK_K, W_IS_NK, HAS_BIAS, STORE_TMA, PUSH_TMA, PROGRESS, TRACE)  # fmt: skip
    finish_launch(channel, ctas, 0)


@triton.jit
def multiply_tiles(channel, x_desc, w_desc, out_desc, peer_descs, out_ptr, bias_ptr, staging_bytes, m_shard, n_size,
                   k_size, group_m, ring, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
                   W_IS_NK: tl.constexpr, HAS_BIAS: tl.constexpr, STORE_TMA: tl.constexpr, PUSH_TMA: tl.constexpr,
                   PROGRESS: tl.constexpr, TRACE: tl.constexpr):  # fmt: skip
    """Every tile of this CTA: send a peer's, announced one tile later; add up our own."""
    cursor = open_ring(channel, ring, TRACE)
    blocks_m = blocks(m_shard, BLOCK_M)
    blocks_n = blocks(n_size, BLOCK_N)
    tiles = blocks_m * blocks_n * channel.world_size
    pending_notify = 0  # whether a tile was sent but not yet announced: its flag and its owner
    pending_flag = 0
    pending_owner = 0
    tile = tl.program_id(0)
    while tile < tiles:
        above, height, inner = scatter_stretch(tile, blocks_m, blocks_n, group_m, channel.world_size)
        block, block_n = grouped(inner, height, blocks_n, group_m)
        block += above
        step = block // blocks_m
        owner = scatter_owner(step, channel.rank, channel.world_size)
        block_m = block % blocks_m
        row = block_m * BLOCK_M
        col = block_n * BLOCK_N
        index = channel_of_tile(block_m, block_n, blocks_n)
        show_tile(channel, COMPUTE, tile, PROGRESS)
        cursor = mark(ring, cursor, TILE_BEGIN, tile, owner, TRACE)
        acc = multiply(x_desc, owner * m_shard + row, w_desc, col, k_size, BLOCK_M, BLOCK_N, BLOCK_K, W_IS_NK)
        if pending_notify != 0:
            announce(channel, pending_flag, pending_owner, PUSH_TMA)
            pending_notify = 0
        code = 0
        if owner != channel.rank:
            staging = staging_of(channel, owner, channel.rank, owner, out_ptr, staging_bytes, m_shard, n_size)
            store_tile(descriptor_of(peer_descs, step), staging, acc, row, m_shard, col, n_size, BLOCK_M,
                       BLOCK_N, PUSH_TMA)  # fmt: skip
            pending_notify = 1
            pending_flag = index
            pending_owner = owner
            cursor = mark(ring, cursor, NOTIFY, index, owner, TRACE)
        else:
            cursor = mark(ring, cursor, WAIT_BEGIN, index, owner, TRACE)
            code = await_partials(channel, index, tile)
            cursor = mark(ring, cursor, WAIT_END, index, owner, TRACE)
            if code == 0:
                reduce_tile(channel, acc, row, col, out_desc, out_ptr, bias_ptr, staging_bytes, m_shard, n_size,
                            BLOCK_M, BLOCK_N, HAS_BIAS, STORE_TMA)  # fmt: skip
        cursor = mark(ring, cursor, TILE_END, tile, owner, TRACE)
        tile = tl.where(code == 0, tile + tl.num_programs(0), tiles)
    if pending_notify != 0:
        announce(channel, pending_flag, pending_owner, PUSH_TMA)
    show_done(channel, COMPUTE, PROGRESS)
    close_ring(ring, cursor, COMPUTE, channel.operator, TRACE)


@triton.jit
def announce(channel, index, owner, PUSH_TMA: tl.constexpr):
    """Notify the owner that a partial tile has arrived."""
    if PUSH_TMA:
        drain_tma_stores()
    peer_tile_notify(channel, index, owner)


@triton.jit
def staging_of(channel, target, source, owner, out_ptr, staging_bytes, m_shard, n_size):
    """Where on rank `target` the partial rows of `source` for `owner` lie."""
    base = peer_data(channel, target, staging_bytes, out_ptr)
    return base + staging_slot(source, owner, channel.world_size).to(tl.int64) * m_shard * n_size


@triton.jit
def descriptor_of(descriptors, step):
    """One of up to seven descriptors, chosen at run time; the missing ones are None."""
    chosen = descriptors[0]
    for index in tl.static_range(1, 7):
        if descriptors[index] is not None:
            if step == index:
                chosen = descriptors[index]
    return chosen


@triton.jit
def reduce_tile(channel, acc, row, col, out_desc, out_ptr, bias_ptr, staging_bytes, m_shard, n_size,
                BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, HAS_BIAS: tl.constexpr,
                STORE_TMA: tl.constexpr):  # fmt: skip
    """Add every rank's partial of one of our tiles, a quarter of the columns at a time, and store the result."""
    parts = quarters(acc, BLOCK_M, BLOCK_N)
    for index in tl.static_range(4):
        at = col + index * (BLOCK_N // 4)
        part = add_partials(channel, parts[index], row, at, out_ptr, staging_bytes, m_shard, n_size, BLOCK_M,
                            BLOCK_N // 4)  # fmt: skip
        if HAS_BIAS:
            part = add_bias(part, bias_ptr, at, n_size, BLOCK_N // 4)
        if STORE_TMA:
            out_desc.store([row, at], part.to(out_ptr.dtype.element_ty))
        else:
            store_rows(out_ptr, part, row, m_shard, at, n_size, BLOCK_M, BLOCK_N // 4)


@triton.jit
def add_partials(channel, own, row, col, out_ptr, staging_bytes, m_shard, n_size, BLOCK_M: tl.constexpr,
                 COLS: tl.constexpr):  # fmt: skip
    """Sum over ranks in the order of ranks, in fp32; our own term comes from the accumulator."""
    rows = row + tl.arange(0, BLOCK_M)
    cols = col + tl.arange(0, COLS)
    mask = (rows < m_shard)[:, None] & (cols < n_size)[None, :]
    offset = rows.to(tl.int64)[:, None] * n_size + cols[None, :]
    total = tl.zeros((BLOCK_M, COLS), dtype=tl.float32)
    for source in range(channel.world_size):
        if source == channel.rank:
            total += own
        else:
            staging = staging_of(channel, channel.rank, source, channel.rank, out_ptr, staging_bytes, m_shard, n_size)
            total += tl.load(staging + offset, mask=mask, other=0.0).to(tl.float32)
    return total


GEMM_RS = OPERATORS.index("gemm_rs")
