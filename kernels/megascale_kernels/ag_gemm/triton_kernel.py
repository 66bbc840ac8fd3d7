# SPDX-License-Identifier: Apache-2.0
"""All-gather + GEMM: out = gather(x) @ w, where each rank holds M / world_size rows of x.

FLUX (2406.06858, section 3) fuses the gather into the *prologue* of each tile: a tile waits only for the rows it
reads. Every rank pushes its rows from where they lie into its peers' gather buffers, by the copy engine or by a few
CTAs, in units of `unit_rows`, and announces each unit with a flag. The compute CTAs begin with their own rows, read
in place, and go on in the order in which the others arrive; so the first wait comes a quarter of the way in (four
ranks), when the first shard has long arrived.

In the gather buffer each shard begins at a multiple of the tile height, so a tile of one shard never reads rows of the
next, which may not have arrived. There is no barrier: a gather slot is reused two launches later, and a launch ends
only after every peer has begun it. What it means, in plain torch: `reference.ag_gemm`.
"""

import triton
import triton.language as tl

from megascale_kernels.device.gemm import add_bias, multiply, store_tile
from megascale_kernels.device.layout import COMMUNICATE, COMPUTE, EPOCH, OPERATORS
from megascale_kernels.device.primitives import consumer_tile_wait, peer_tile_notify, tile_push_data
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
    finish_launch,
    open_channel,
    peer_data,
    publish_launch,
)
from megascale_kernels.planning.tile_order import (
    blocks,
    gather_source,
    gather_stretch,
    grouped,
    unit_of_row,
)

# Integers that differ between ranks or launches must not become compile-time constants: a rank equal to 1 would be
# compiled apart from the others, and a launch would wait for a compiler.
RUNTIME = ("slot", "rank", "signature", "deadline_us", "flags", "channels", "variant", "counted", "lead")


@triton.jit(do_not_specialize=RUNTIME)
def ag_gemm_kernel(
    x_desc, gathered_desc, w_desc, out_desc, x_ptr, out_ptr, bias_ptr,
    control, peers, status, board, trace,
    flags, channels, slot, rank, world_size, signature, deadline_us, gathered_bytes, variant, counted,
    m_shard, n_size, k_size, unit_rows, lead,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, GROUP_M: tl.constexpr,
    W_IS_NK: tl.constexpr, HAS_BIAS: tl.constexpr, STORE_TMA: tl.constexpr, COMM_CTAS: tl.constexpr,
    PUSH_COLS: tl.constexpr, OPERATOR: tl.constexpr, PROGRESS: tl.constexpr, TRACE: tl.constexpr,
):  # fmt: skip
    """One launch: the lowest `COMM_CTAS` programs push, the others multiply (0: the copy engine pushes)."""
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
    if cta < COMM_CTAS:
        pitch_rows = blocks(m_shard, BLOCK_M) * BLOCK_M
        push_rows(channel, x_ptr, gathered_bytes, pitch_rows, m_shard, k_size, unit_rows,
                  ring_of(trace, cta, COMMUNICATE), cta, COMM_CTAS, PUSH_COLS, PROGRESS, TRACE)  # fmt: skip
    else:
        multiply_tiles(channel, x_desc, gathered_desc, w_desc, out_desc, out_ptr, bias_ptr, m_shard, n_size, k_size,
                       unit_rows, lead, ring_of(trace, cta, COMPUTE), cta - COMM_CTAS, ctas - COMM_CTAS, BLOCK_M,
                       BLOCK_N, BLOCK_K, GROUP_M, W_IS_NK, HAS_BIAS, STORE_TMA, PROGRESS, TRACE)  # fmt: skip
    finish_launch(channel, ctas, counted)


@triton.jit
def multiply_tiles(channel, x_desc, gathered_desc, w_desc, out_desc, out_ptr, bias_ptr, m_shard, n_size, k_size,
                   unit_rows, lead, ring, worker, workers, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
                   BLOCK_K: tl.constexpr, GROUP_M: tl.constexpr, W_IS_NK: tl.constexpr, HAS_BIAS: tl.constexpr,
                   STORE_TMA: tl.constexpr, PROGRESS: tl.constexpr, TRACE: tl.constexpr):  # fmt: skip
    """Role of a compute CTA: every `workers`-th tile, our own rows first, each as soon as its rows are there."""
    cursor = open_ring(channel, ring, TRACE)
    blocks_m = blocks(m_shard, BLOCK_M)
    blocks_n = blocks(n_size, BLOCK_N)
    tiles = blocks_m * blocks_n * channel.world_size
    tile = worker
    while tile < tiles:
        above, height, left, width, inner = gather_stretch(tile, blocks_m, blocks_n, lead, channel.world_size)
        block, block_n = grouped(inner, height, width, GROUP_M)
        block += above
        source = gather_source(block // blocks_m, channel.rank, channel.world_size)
        row = (block % blocks_m) * BLOCK_M
        col = (left + block_n) * BLOCK_N
        show_tile(channel, COMPUTE, tile, PROGRESS)
        cursor = mark(ring, cursor, TILE_BEGIN, tile, source, TRACE)
        code = 0
        # One loop over K for both sources: two would each be given shared memory of their own.
        rows_desc = x_desc
        first_row = row
        if source != channel.rank:
            rows_desc = gathered_desc
            first_row = source * blocks_m * BLOCK_M + row
            cursor = mark(ring, cursor, WAIT_BEGIN, tile, source, TRACE)
            code = await_rows(channel, source, row, min(row + BLOCK_M, m_shard), unit_rows, COMPUTE, tile)
            cursor = mark(ring, cursor, WAIT_END, tile, source, TRACE)
        if code == 0:
            acc = multiply(rows_desc, first_row, w_desc, col, k_size, BLOCK_M, BLOCK_N, BLOCK_K, W_IS_NK)
            if HAS_BIAS:
                acc = add_bias(acc, bias_ptr, col, n_size, BLOCK_N)
            out_row = source * m_shard + row
            store_tile(
                out_desc, out_ptr, acc, out_row, (source + 1) * m_shard, col, n_size, BLOCK_M, BLOCK_N, STORE_TMA
            )
            cursor = mark(ring, cursor, TILE_END, tile, source, TRACE)
        tile = tl.where(code == 0, tile + workers, tiles)
    show_done(channel, COMPUTE, PROGRESS)
    close_ring(ring, cursor, COMPUTE, channel.operator, TRACE)


@triton.jit
def await_rows(channel, source, begin, end, unit_rows, role, tile):
    """Wait for the units that hold rows [begin, end) of a shard."""
    code = 0
    for unit in range(unit_of_row(begin, unit_rows), unit_of_row(end - 1, unit_rows) + 1):
        if code == 0:
            code = consumer_tile_wait(channel, unit, source, role, tile)
    return code


@triton.jit
def push_rows(channel, x_ptr, gathered_bytes, pitch_rows, m_shard, k_size, unit_rows, ring, worker,
              WORKERS: tl.constexpr, PUSH_COLS: tl.constexpr, PROGRESS: tl.constexpr, TRACE: tl.constexpr):  # fmt: skip
    """Role of a copying CTA: this rank's rows into every peer's gather buffer, unit by unit, nearest reader first.

    The rank before us multiplies our rows first after its own, so it is served first.
    """
    cursor = open_ring(channel, ring, TRACE)
    units = blocks(m_shard, unit_rows)
    for job in range(worker, units * (channel.world_size - 1), WORKERS):
        unit = job % units
        peer = (channel.rank + channel.world_size - 1 - job // units) % channel.world_size
        show_tile(channel, COMMUNICATE, unit, PROGRESS)
        target = peer_data(channel, peer, gathered_bytes, x_ptr) + channel.rank.to(tl.int64) * pitch_rows * k_size
        begin = (unit * unit_rows).to(tl.int64) * k_size
        end = min((unit + 1) * unit_rows, m_shard).to(tl.int64) * k_size
        tile_push_data(target, x_ptr, begin, end, PUSH_COLS)
        peer_tile_notify(channel, unit, peer)
        cursor = mark(ring, cursor, NOTIFY, unit, peer, TRACE)
    show_done(channel, COMMUNICATE, PROGRESS)
    close_ring(ring, cursor, COMMUNICATE, channel.operator, TRACE)


AG_GEMM = OPERATORS.index("ag_gemm")


PUSH_COLS = 8192  # elements a pushing CTA moves at once: 16 bytes per thread and four loads in flight
