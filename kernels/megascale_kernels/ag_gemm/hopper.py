# SPDX-License-Identifier: Apache-2.0
"""All-gather + GEMM with Hopper's warp specialisation: the same operator as `ag_gemm_kernel`, faster.

Roles as in `hopper_gemm.py`. Only the producer waits for peers, before the first load of a tile, so the multiplication
of the tiles before goes on meanwhile. `ag_gemm_kernel`, in plain Triton, is the twin that the emulator runs.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import tma

from megascale_kernels.ag_gemm.hopper_gated import fetch_gates, store_gradients
from megascale_kernels.ag_gemm.hopper_swiglu import fetch_halves, store_swiglu
from megascale_kernels.ag_gemm.triton_kernel import await_rows
from megascale_kernels.device.hopper_gemm import (
    WHOLE,
    Work,
    add_bias_slice,
    add_split_partials,
    column_slices,
    end_of_units,
    fetch,
    fetch_split_partials,
    make_ring,
    multiply,
    reinterpreted,
    store_slice,
    store_slice_masked,
    store_slice_of_shard,
    store_split_partial,
    unit_of_work,
)
from megascale_kernels.device.layout import COMMUNICATE, COMPUTE, EPOCH
from megascale_kernels.device.progress import (
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
from megascale_kernels.device.signals import finish_launch, open_channel, publish_launch
from megascale_kernels.planning.tile_order import gather_source, gather_stretch, grouped

# Nothing that changes with a shape is specialised: a new shape then runs at once, without a compiler.
RUNTIME = (
    "slot", "rank", "signature", "deadline_us", "flags", "channels", "variant", "counted", "m_shard", "n_size",
    "k_size", "unit_rows", "group_m", "lead", "whole_tiles", "split",
    "blocks_m", "blocks_n", "blocks_k", "units",
)  # fmt: skip


# How tiles are stored: by the threads, each element if it is there; by TMA into the matrix of all rows; by TMA into
# one shard, whose last rows do not fill a tile. Or, the same way, what is stored is SwiGLU's gradient (`hopper_gated`),
# SwiGLU of the product (`hopper_swiglu`), or that and the product itself.
BY_THREADS, BY_MATRIX, BY_SHARD, GRADIENTS, SWIGLU, SWIGLU_AND_WIDE = map(gl.constexpr, range(6))


@gluon.jit
def place_of(work, channel, lead, tile, TALL: gl.constexpr):
    """Whose rows a tile belongs to, and its block within that shard."""
    if not TALL:
        per_shard = work.blocks_m * work.blocks_n
        source = gather_source(tile // per_shard, channel.rank, channel.world_size)
        block_m, block_n = grouped(tile % per_shard, work.blocks_m, work.blocks_n, work.group_m)
        return source, block_m, block_n
    else:  # noqa: RET505 - Triton decides at compile time which branch exists
        above, height, left, width, inner = gather_stretch(tile, work.blocks_m, work.blocks_n, lead, channel.world_size)
        block, block_n = grouped(inner, height, width, work.group_m)
        block += above
        source = gather_source(block // work.blocks_m, channel.rank, channel.world_size)
        return source, block % work.blocks_m, left + block_n


@gluon.jit
def produce(ring, x_desc, gathered_desc, w_desc, split_desc, wide_desc, work, channel, trace, m_shard, n_size,
            unit_rows, lead, CFG: gl.constexpr, CUT: gl.constexpr, TALL: gl.constexpr, STORE: gl.constexpr,
            PROGRESS: gl.constexpr, TRACE: gl.constexpr):  # fmt: skip
    """Keep the ring full; wait for a shard's rows before the first load of a tile that reads them."""
    slot = 0
    phase = 1  # no slot is filled yet: the first lap finds every slot empty
    code = 0
    events = ring_of(trace, gl.program_id(0), COMMUNICATE)
    cursor = open_ring(channel, events, TRACE)
    for unit in range(gl.program_id(0), end_of_units(work, CUT), gl.num_programs(0)):
        tile, first, last, place, before = unit_of_work(work, unit, CUT)
        source, block_m, block_n = place_of(work, channel, lead, tile, TALL)
        row = block_m * CFG.block_m
        show_tile(channel, COMMUNICATE, tile, PROGRESS)
        rows_desc = x_desc
        first_row = row
        if source != channel.rank:
            rows_desc = gathered_desc
            first_row = source * work.blocks_m * CFG.block_m + row
            cursor = mark(events, cursor, WAIT_BEGIN, tile, source, TRACE)
            if code == 0:
                code = await_rows(
                    channel, source, row, gl.minimum(row + CFG.block_m, m_shard), unit_rows, COMMUNICATE, tile
                )
            cursor = mark(events, cursor, WAIT_END, tile, source, TRACE)
        if STORE >= SWIGLU:
            slot, phase = fetch_halves(ring, rows_desc, first_row, w_desc, block_n * (CFG.block_n // 2), n_size // 2,
                                       first, last, slot, phase, CFG)  # fmt: skip
        else:
            slot, phase = fetch(
                ring, rows_desc, first_row, w_desc, block_n * CFG.block_n, first, last, slot, phase, CFG
            )
        if CUT != WHOLE:
            if (last == work.blocks_k) & (before > 0):
                slot, phase, code = fetch_split_partials(
                    ring, split_desc, channel, tile, place, before, code, slot, phase, CFG
                )
        if STORE == GRADIENTS:
            if last == work.blocks_k:
                slot, phase = fetch_gates(ring, wide_desc, source, row, block_n * CFG.block_n, slot, phase, CFG)
    show_done(channel, COMMUNICATE, PROGRESS)
    close_ring(events, cursor, COMMUNICATE, channel.operator, TRACE)


@gluon.jit
def store_tile(acc, staging, out_desc, out_ptr, bias_ptr, source, m_shard, row, column, n_size, ME: gl.constexpr,
               CFG: gl.constexpr, HAS_BIAS: gl.constexpr, STORE: gl.constexpr):  # fmt: skip
    """Store this consumer's part of a finished tile: rows from `row` on of the shard of `source`, a slice at a time."""
    boxes = staging
    if STORE == BY_SHARD:
        buffers: gl.constexpr = CFG.consumers * CFG.store_buffers
        shape: gl.constexpr = [buffers, 1, CFG.rows, CFG.store_columns]
        boxes = reinterpreted(staging, staging.dtype, shape, CFG.store_layout_of_shard)
    count: gl.constexpr = CFG.columns // CFG.store_columns
    slices = column_slices(acc, count)
    for i in gl.static_range(count):
        piece = slices[i]
        at = column + i * CFG.store_columns
        if HAS_BIAS:
            piece = add_bias_slice(piece, bias_ptr, at, n_size)
        if STORE == BY_MATRIX:
            store_slice(piece, staging, out_desc, source * m_shard + row, column, i, ME, CFG)
        elif STORE == BY_SHARD:
            store_slice_of_shard(piece, staging, boxes, out_desc, source, row, column, i, ME, CFG)
        else:
            store_slice_masked(piece, out_ptr, source * m_shard + row, (source + 1) * m_shard, at, n_size)


@gluon.jit
def consume(ring, staging, wide_desc, out_desc, out_ptr, bias_ptr, work, channel, board, trace, m_shard, n_size,
            k_size, variant, counted, lead, ME: gl.constexpr, CFG: gl.constexpr, CUT: gl.constexpr,
            TALL: gl.constexpr, HAS_BIAS: gl.constexpr,
            STORE: gl.constexpr, PROGRESS: gl.constexpr, TRACE: gl.constexpr):  # fmt: skip
    """Multiply this consumer's share of every tile and store it."""
    cta = gl.program_id(0)
    ctas = gl.num_programs(0)
    last_consumer: gl.constexpr = CFG.consumers - 1
    if last_consumer == ME:
        if cta == ctas - 1:
            tiles = work.blocks_m * work.blocks_n * channel.world_size
            head_board(channel, board, ctas, tiles, m_shard, n_size, k_size, PROGRESS)
            publish_launch(channel, m_shard, n_size, k_size, variant)
    slot = 0
    phase = 0
    speaks: gl.constexpr = ME == 0
    shows: gl.constexpr = PROGRESS and speaks
    traces: gl.constexpr = TRACE and speaks
    events = ring_of(trace, cta, COMPUTE)
    cursor = open_ring(channel, events, traces)
    for unit in range(cta, end_of_units(work, CUT), ctas):
        tile, first, last, place, before = unit_of_work(work, unit, CUT)
        source, block_m, block_n = place_of(work, channel, lead, tile, TALL)
        row = block_m * CFG.block_m + (ME % CFG.across_m) * CFG.rows
        column = block_n * CFG.block_n + (ME % CFG.across_n) * CFG.columns
        show_tile(channel, COMPUTE, tile, shows)
        cursor = mark(events, cursor, TILE_BEGIN, tile, source, traces)
        acc, slot, phase = multiply(ring, slot, phase, first, last, ME, CFG)
        whole = True
        if CUT != WHOLE:
            if last < work.blocks_k:
                store_split_partial(channel, acc, work, place, ME, CFG)
                whole = False
            else:
                acc, slot, phase = add_split_partials(ring, acc, before, slot, phase, ME, CFG)
        if STORE == GRADIENTS:
            if whole:
                slot, phase = store_gradients(ring, acc, staging, out_desc, source, row, column, slot, phase, ME, CFG)
        elif STORE >= SWIGLU:
            if whole:
                store_swiglu(acc, staging, wide_desc, out_desc, bias_ptr, source, row, column // 2, n_size // 2, ME,
                             CFG, HAS_BIAS, STORE == SWIGLU_AND_WIDE)  # fmt: skip
        elif whole:
            store_tile(acc, staging, out_desc, out_ptr, bias_ptr, source, m_shard, row, column, n_size, ME, CFG,
                       HAS_BIAS, STORE)  # fmt: skip
        cursor = mark(events, cursor, TILE_END, tile, source, traces)
    tma.store_wait(0)
    show_done(channel, COMPUTE, shows)
    close_ring(events, cursor, COMPUTE, channel.operator, traces)
    finish_launch(channel, ctas * CFG.consumers, counted)


@gluon.jit(do_not_specialize=RUNTIME)
def hopper_ag_gemm_kernel(
    x_desc, gathered_desc, w_desc, split_desc, wide_desc, out_desc, out_ptr, bias_ptr,
    control, peers, status, board, trace, partials,
    flags, channels, slot, rank, world_size, signature, deadline_us, variant, counted,
    m_shard, n_size, k_size, unit_rows, blocks_m, blocks_n, blocks_k, group_m, whole_tiles, split, units, lead,
    CFG: gl.constexpr, CUT: gl.constexpr, TALL: gl.constexpr, HAS_BIAS: gl.constexpr, STORE: gl.constexpr,
    OPERATOR: gl.constexpr,
    PROGRESS: gl.constexpr, TRACE: gl.constexpr,
):  # fmt: skip
    """Entry point: build the ring, then part into roles. One program per multiprocessor.

    TALL: columns from `lead` on are walked with all shards as one matrix; else `lead` is not looked at.
    STORE: with GRADIENTS the output is twice as wide as the product, as `wide_desc` is, which is read; with SWIGLU half
    as wide, and `wide_desc`, as wide as the product, is stored in SWIGLU_AND_WIDE; else it is None.
    """
    channel = open_channel(
        gl.load(control + EPOCH) + 1, control, peers, status, board, flags, channels, slot, rank, world_size,
        signature, OPERATOR, deadline_us,
    )  # fmt: skip
    work = Work(blocks_m, blocks_n, blocks_k, group_m, whole_tiles, split, units, partials)
    ring = make_ring(x_desc, w_desc, CFG)
    staging = gl.allocate_shared_memory(
        x_desc.dtype, [CFG.consumers * CFG.store_buffers, CFG.rows, CFG.store_columns], CFG.store_layout
    )
    gl.static_assert(CFG.consumers == 2)
    gl.warp_specialize(
        [
            (
                consume,
                (ring, staging, wide_desc, out_desc, out_ptr, bias_ptr, work, channel, board, trace, m_shard, n_size,
                 k_size, variant, counted, lead, 0, CFG, CUT, TALL, HAS_BIAS, STORE, PROGRESS, TRACE),
            ),
            (
                consume,
                (ring, staging, wide_desc, out_desc, out_ptr, bias_ptr, work, channel, board, trace, m_shard, n_size,
                 k_size, variant, counted, lead, 1, CFG, CUT, TALL, HAS_BIAS, STORE, PROGRESS, TRACE),
            ),
            (
                produce,
                (ring, x_desc, gathered_desc, w_desc, split_desc, wide_desc, work, channel, trace, m_shard, n_size,
                 unit_rows, lead, CFG, CUT, TALL, STORE, PROGRESS, TRACE),
            ),
        ],
        [4, 1],
        [CFG.consumer_registers, CFG.producer_registers],
    )  # fmt: skip
