# SPDX-License-Identifier: Apache-2.0
"""GEMM + reduce-scatter: out = rank's rows of sum over ranks of x @ w, where the ranks split K.

FLUX (2406.06858, section 3) fuses the scatter into the *epilogue*: a finished tile goes straight into the staging
buffer of the rank that owns its rows. Here the reduction is fused as well: each rank computes its own rows last,
keeps the accumulator in registers, waits for the other ranks' partials of that tile, adds them in fp32 in the order
of ranks (so the result is the same from run to run), and stores the final tile. No reduce kernel, no barrier.

A remote tile is announced while the *next* tile is being multiplied, when its stores have long arrived: the
announcement never stalls. The last remote tile is announced before the first own tile waits.

Where tiles don't fill the shards (STRADDLES) they are laid over the matrix of all rows. A tile that straddles two
shards is sent to both owners, each of which takes its rows; one of ours is sent, announced, and then added up.
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
    publish_launch,
)
from megascale_kernels.planning.tile_order import (
    blocks,
    blocks_of_shard,
    channel_of_tile,
    grouped,
    scatter_owner,
    scatter_step,
    scatter_stretch,
    shards_of_block,
    staging_slot,
    straddling_scatter,
)

RUNTIME = ("slot", "rank", "signature", "deadline_us", "flags", "channels", "variant", "group_m")


@triton.jit(do_not_specialize=RUNTIME)
def gemm_rs_kernel(
    x_desc, w_desc, out_desc, peer1, peer2, peer3, peer4, peer5, peer6, peer7, out_ptr, bias_ptr,
    control, peers, status, board, trace,
    flags, channels, slot, rank, world_size, signature, deadline_us, staging_bytes, variant,
    m_shard, n_size, k_size, group_m,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, STRADDLES: tl.constexpr,
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
        tiles = tall_of(m_shard, world_size, BLOCK_M, STRADDLES) * blocks(n_size, BLOCK_N)
        head_board(channel, board, ctas, tiles, m_shard, n_size, k_size, PROGRESS)
        publish_launch(channel, m_shard, n_size, k_size, variant)
    multiply_tiles(channel, x_desc, w_desc, out_desc, (peer1, peer2, peer3, peer4, peer5, peer6, peer7),
                   out_ptr, bias_ptr, staging_bytes, m_shard, n_size, k_size, group_m, ring_of(trace, cta, COMPUTE),
                   BLOCK_M, BLOCK_N, BLOCK_K, STRADDLES, W_IS_NK, HAS_BIAS, STORE_TMA, PUSH_TMA, PROGRESS,
                   TRACE)  # fmt: skip
    finish_launch(channel, ctas, 0)


@triton.jit
def tall_of(m_shard, world_size, BLOCK_M: tl.constexpr, STRADDLES: tl.constexpr):
    """The row blocks of all shards."""
    if STRADDLES:
        return blocks(m_shard * world_size, BLOCK_M)
    else:  # noqa: RET505 - Triton decides at compile time which branch exists
        return blocks(m_shard, BLOCK_M) * world_size


@triton.jit
def place_of(channel, tile, m_shard, blocks_n, group_m, BLOCK_M: tl.constexpr, STRADDLES: tl.constexpr):
    """Whose rows a tile holds, and where it lies.

    Returns:
        (owner, last_owner, row, block_n): the first and the last shard of which it has rows, the row of the whole
        matrix at which it begins, and its column block.
    """
    tall = tall_of(m_shard, channel.world_size, BLOCK_M, STRADDLES)
    if not STRADDLES:
        blocks_m = blocks(m_shard, BLOCK_M)
        above, height, inner = scatter_stretch(tile, tall, blocks_m, blocks_n, group_m)
        block, block_n = grouped(inner, height, blocks_n, group_m)
        block += above
        owner = scatter_owner(block // blocks_m, channel.rank, channel.world_size)
        return owner, owner, owner * m_shard + block % blocks_m * BLOCK_M, block_n
    else:  # noqa: RET505 - Triton decides at compile time which branch exists
        first, own = blocks_of_shard(channel.rank, m_shard, BLOCK_M)
        above, height, inner = scatter_stretch(tile, tall, own, blocks_n, group_m)
        block, block_n = grouped(inner, height, blocks_n, group_m)
        block = straddling_scatter(above + block, first, own, tall)
        owner, last_owner = shards_of_block(block, m_shard, BLOCK_M, channel.world_size)
        return owner, last_owner, block * BLOCK_M, block_n


@triton.jit
def flag_at(row, block_n, owner, blocks_n, m_shard, BLOCK_M: tl.constexpr, STRADDLES: tl.constexpr):
    """The flag of the tile that begins at a row of the whole matrix, among those of an owner."""
    block_m = (row - owner * m_shard) // BLOCK_M
    if STRADDLES:
        block_m = row // BLOCK_M - owner * m_shard // BLOCK_M
    return channel_of_tile(block_m, block_n, blocks_n)


@triton.jit
def multiply_tiles(channel, x_desc, w_desc, out_desc, peer_descs, out_ptr, bias_ptr, staging_bytes, m_shard, n_size,
                   k_size, group_m, ring, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
                   STRADDLES: tl.constexpr, W_IS_NK: tl.constexpr, HAS_BIAS: tl.constexpr, STORE_TMA: tl.constexpr,
                   PUSH_TMA: tl.constexpr, PROGRESS: tl.constexpr, TRACE: tl.constexpr):  # fmt: skip
    """Every tile of this CTA: send a peer's, announced one tile later; add up our own."""
    cursor = open_ring(channel, ring, TRACE)
    blocks_n = blocks(n_size, BLOCK_N)
    tiles = tall_of(m_shard, channel.world_size, BLOCK_M, STRADDLES) * blocks_n
    pending_notify = 0  # whether a tile was sent but not yet announced: its owners and its place
    pending_owner = 0
    pending_last_owner = 0
    pending_row = 0
    pending_block_n = 0
    tile = tl.program_id(0)
    while tile < tiles:
        owner, last_owner, row, block_n = place_of(channel, tile, m_shard, blocks_n, group_m, BLOCK_M, STRADDLES)
        is_ours = owner == channel.rank
        is_sent = owner != channel.rank
        if STRADDLES:
            is_ours = is_ours | (last_owner == channel.rank)
            is_sent = is_sent | (last_owner != channel.rank)
        shown = tl.where(is_ours, channel.rank, owner)
        col = block_n * BLOCK_N
        show_tile(channel, COMPUTE, tile, PROGRESS)
        cursor = mark(ring, cursor, TILE_BEGIN, tile, shown, TRACE)
        acc = multiply(x_desc, row, w_desc, col, k_size, BLOCK_M, BLOCK_N, BLOCK_K, W_IS_NK)
        if pending_notify != 0:
            announce(channel, pending_owner, pending_last_owner, pending_row, pending_block_n, blocks_n, m_shard,
                     BLOCK_M, STRADDLES, PUSH_TMA)  # fmt: skip
            pending_notify = 0
        code = 0
        if is_sent:
            cursor = send_tile(channel, owner, last_owner, acc, row, block_n, blocks_n, peer_descs, out_ptr,
                               staging_bytes, m_shard, n_size, ring, cursor, BLOCK_M, BLOCK_N, STRADDLES, PUSH_TMA,
                               TRACE)  # fmt: skip
            pending_notify = 1
            pending_owner = owner
            pending_last_owner = last_owner
            pending_row = row
            pending_block_n = block_n
        if is_ours:
            if pending_notify != 0:  # it straddles: a peer waits for its part, and we for the peer's
                announce(channel, pending_owner, pending_last_owner, pending_row, pending_block_n, blocks_n, m_shard,
                         BLOCK_M, STRADDLES, PUSH_TMA)  # fmt: skip
                pending_notify = 0
            code, cursor = add_up(channel, acc, tile, row, block_n, blocks_n, out_desc, out_ptr, bias_ptr,
                                  staging_bytes, m_shard, n_size, ring, cursor, BLOCK_M, BLOCK_N, STRADDLES, HAS_BIAS,
                                  STORE_TMA, TRACE)  # fmt: skip
        cursor = mark(ring, cursor, TILE_END, tile, shown, TRACE)
        tile = tl.where(code == 0, tile + tl.num_programs(0), tiles)
    if pending_notify != 0:
        announce(channel, pending_owner, pending_last_owner, pending_row, pending_block_n, blocks_n, m_shard, BLOCK_M,
                 STRADDLES, PUSH_TMA)  # fmt: skip
    show_done(channel, COMPUTE, PROGRESS)
    close_ring(ring, cursor, COMPUTE, channel.operator, TRACE)


@triton.jit
def send_tile(channel, owner, last_owner, acc, row, block_n, blocks_n, peer_descs, out_ptr, staging_bytes, m_shard,
              n_size, ring, cursor, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, STRADDLES: tl.constexpr,
              PUSH_TMA: tl.constexpr, TRACE: tl.constexpr):  # fmt: skip
    """Send a partial tile to its owners, but for us."""
    if not STRADDLES:
        cursor = send_to(channel, owner, acc, row, block_n, blocks_n, peer_descs, out_ptr, staging_bytes, m_shard,
                         n_size, ring, cursor, BLOCK_M, BLOCK_N, STRADDLES, PUSH_TMA, TRACE)  # fmt: skip
    else:
        for one in range(owner, last_owner + 1):
            if one != channel.rank:
                cursor = send_to(channel, one, acc, row, block_n, blocks_n, peer_descs, out_ptr, staging_bytes, m_shard,
                                 n_size, ring, cursor, BLOCK_M, BLOCK_N, STRADDLES, PUSH_TMA, TRACE)  # fmt: skip
    return cursor


@triton.jit
def send_to(channel, owner, acc, row, block_n, blocks_n, peer_descs, out_ptr, staging_bytes, m_shard, n_size, ring,
            cursor, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, STRADDLES: tl.constexpr, PUSH_TMA: tl.constexpr,
            TRACE: tl.constexpr):  # fmt: skip
    """Store a partial tile on a rank that owns its rows, or some of them."""
    staging = staging_of(channel, owner, channel.rank, owner, out_ptr, staging_bytes, m_shard, n_size)
    there = descriptor_of(peer_descs, scatter_step(owner, channel.rank, channel.world_size))
    store_tile(there, staging, acc, row - owner * m_shard, m_shard, block_n * BLOCK_N, n_size, BLOCK_M, BLOCK_N,
               PUSH_TMA, STRADDLES)  # fmt: skip
    index = flag_at(row, block_n, owner, blocks_n, m_shard, BLOCK_M, STRADDLES)
    return mark(ring, cursor, NOTIFY, index, owner, TRACE)


@triton.jit
def add_up(channel, acc, tile, row, block_n, blocks_n, out_desc, out_ptr, bias_ptr, staging_bytes, m_shard, n_size,
           ring, cursor, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, STRADDLES: tl.constexpr, HAS_BIAS: tl.constexpr,
           STORE_TMA: tl.constexpr, TRACE: tl.constexpr):  # fmt: skip
    """Wait for the peers' partials of a tile of ours and store the sum; 0, or why the CTA must leave."""
    index = flag_at(row, block_n, channel.rank, blocks_n, m_shard, BLOCK_M, STRADDLES)
    cursor = mark(ring, cursor, WAIT_BEGIN, index, channel.rank, TRACE)
    code = await_partials(channel, index, tile)
    cursor = mark(ring, cursor, WAIT_END, index, channel.rank, TRACE)
    if code == 0:
        reduce_tile(channel, acc, row - channel.rank * m_shard, block_n * BLOCK_N, out_desc, out_ptr, bias_ptr,
                    staging_bytes, m_shard, n_size, BLOCK_M, BLOCK_N, HAS_BIAS, STORE_TMA, STRADDLES)  # fmt: skip
    return code, cursor


@triton.jit
def announce(channel, owner, last_owner, row, block_n, blocks_n, m_shard, BLOCK_M: tl.constexpr,
             STRADDLES: tl.constexpr, PUSH_TMA: tl.constexpr):  # fmt: skip
    """Notify the owners that a partial tile has arrived."""
    if PUSH_TMA:
        drain_tma_stores()
    if not STRADDLES:
        peer_tile_notify(channel, flag_at(row, block_n, owner, blocks_n, m_shard, BLOCK_M, STRADDLES), owner)
    else:
        for one in range(owner, last_owner + 1):
            if one != channel.rank:
                peer_tile_notify(channel, flag_at(row, block_n, one, blocks_n, m_shard, BLOCK_M, STRADDLES), one)


@triton.jit
def staging_of(channel, target, source, owner, out_ptr, staging_bytes, m_shard, n_size):
    """Where on rank `target` the partial rows of `source` for `owner` lie."""
    base = (tl.load(channel.peers + target) + staging_bytes).to(tl.pointer_type(out_ptr.dtype.element_ty))
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
                BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, HAS_BIAS: tl.constexpr, STORE_TMA: tl.constexpr,
                STRADDLES: tl.constexpr):  # fmt: skip
    """Add every rank's partial of one of our tiles, a quarter of the columns at a time, and store the result."""
    parts = quarters(acc, BLOCK_M, BLOCK_N)
    for index in tl.static_range(4):
        at = col + index * (BLOCK_N // 4)
        part = add_partials(channel, parts[index], row, at, out_ptr, staging_bytes, m_shard, n_size, BLOCK_M,
                            BLOCK_N // 4, STRADDLES)  # fmt: skip
        if HAS_BIAS:
            part = add_bias(part, bias_ptr, at, n_size, BLOCK_N // 4)
        if STORE_TMA:
            out_desc.store([row, at], part.to(out_ptr.dtype.element_ty))
        else:
            store_rows(out_ptr, part, row, m_shard, at, n_size, BLOCK_M, BLOCK_N // 4, STRADDLES)


@triton.jit
def add_partials(channel, own, row, col, out_ptr, staging_bytes, m_shard, n_size, BLOCK_M: tl.constexpr,
                 COLS: tl.constexpr, STRADDLES: tl.constexpr):  # fmt: skip
    """Sum over ranks in the order of ranks, in fp32; our own term comes from the accumulator."""
    rows = row + tl.arange(0, BLOCK_M)
    cols = col + tl.arange(0, COLS)
    ours = rows < m_shard
    if STRADDLES:
        ours = ours & (rows >= 0)
    mask = ours[:, None] & (cols < n_size)[None, :]
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
