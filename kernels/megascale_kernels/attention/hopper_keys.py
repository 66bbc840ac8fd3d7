# SPDX-License-Identifier: Apache-2.0
"""Gradients of k and v with Hopper's warp specialisation: `backward_kernels.key_gradients_kernel`, faster.

Roles as in `hopper.py`. A tile keeps k and v, for which the producer waits if they are a peer's; blocks of q and dout
come, of all query heads that share the keys. Blocks that need a mask are taken one after the other, then all whole
ones in one loop, whatever head and half of the sequence they belong to: a block's weights are computed while the block
before is added. The accumulators dk and dv leave too few registers for more: the product dout v^T of a block begins
only when those sums have ended.

What plain Triton says in `backward_kernels.py` is the twin that the emulator runs; packed sequences have it alone.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    mbarrier,
    tma,
    warpgroup_mma,
    warpgroup_mma_wait,
)

from megascale_kernels.attention.backward_kernels import RUNTIME
from megascale_kernels.attention.hopper import meet_with
from megascale_kernels.attention.hopper_rings import begin_product, fetch_pairs, fetch_tile, make_rings, store_tile
from megascale_kernels.attention.ranges import chunk_of, place_of_key_tile, source_of, span_of_blocks, to_and_fro
from megascale_kernels.attention.triton_kernel import await_all, await_part_by, begin_launch
from megascale_kernels.device.hopper_gemm import next_slot
from megascale_kernels.device.layout import COMMUNICATE, COMPUTE, EPOCH
from megascale_kernels.device.progress import (
    TILE_BEGIN,
    TILE_END,
    WAIT_BEGIN,
    WAIT_END,
    close_ring,
    mark,
    open_ring,
    ring_of,
    show_done,
    show_tile,
)
from megascale_kernels.device.signals import finish_launch, open_channel
from megascale_kernels.planning.tile_order import blocks


@gluon.jit
def queries_of_half(channel, ours, top, bottom, chunk_rows, CFG: gl.constexpr, HALVES: gl.constexpr,
                    CAUSAL: gl.constexpr):  # fmt: skip
    """Where a half of our queries begins, and its blocks for the keys [top, bottom] (`span_of_blocks`)."""
    sequence = channel.world_size * HALVES * chunk_rows
    begins = chunk_of(channel.rank, ours, channel.world_size) * chunk_rows
    low, low_of_last = top * 0, top * 0
    if CAUSAL:
        low, low_of_last = top, bottom
    first, last, full_first, full_last = span_of_blocks(
        low, sequence, low_of_last, sequence, begins, chunk_rows, CFG.block_n
    )
    return begins, first, last, full_first, full_last


@gluon.jit
def produce_queries(rings, q_desc, dout_desc, k_desc, v_desc, gathered_k_desc, gathered_v_desc, order_ptr, channel,
                    trace, tiles, k_blocks, batch, chunk_rows, q_heads, group, unit_rows, counted, CFG: gl.constexpr,
                    HALVES: gl.constexpr, CAUSAL: gl.constexpr, AWAIT: gl.constexpr, PROGRESS: gl.constexpr,
                    TRACE: gl.constexpr):  # fmt: skip
    """Producer of the pass over keys: it waits for a tile's keys; queries are our own."""
    cta = gl.program_id(0)
    ctas = gl.num_programs(0)
    events = ring_of(trace, cta, COMMUNICATE)
    cursor = open_ring(channel, events, TRACE)
    slot = 0
    phase = 1
    tile_phase = 1
    code = 0
    parts = channel.world_size * HALVES
    for place in range(cta, tiles, ctas):
        tile = gl.load(order_ptr + to_and_fro(place, ctas, tiles))
        show_tile(channel, COMMUNICATE, place, PROGRESS)
        block, part, head, entry = place_of_key_tile(tile, k_blocks, parts, q_heads // group)
        source = source_of(part, channel.rank, channel.world_size, HALVES)
        half = part % HALVES
        row = block * CFG.block_m
        end = gl.minimum(row + CFG.block_m, chunk_rows)
        k_rows, v_rows = k_desc, v_desc
        box = entry * HALVES + half
        if source != channel.rank:
            k_rows, v_rows = gathered_k_desc, gathered_v_desc
            box = (source * batch + entry) * HALVES + half
            cursor = mark(events, cursor, WAIT_BEGIN, place, source, TRACE)
            code = await_part_by(channel, source, entry, half, row, end, chunk_rows, unit_rows, place, code,
                                 COMMUNICATE, HALVES, AWAIT)  # fmt: skip
            cursor = mark(events, cursor, WAIT_END, place, source, TRACE)
        fetch_tile(rings, k_rows, v_rows, box, row, head * CFG.head_dim, tile_phase, CFG)
        tile_phase = tile_phase ^ 1
        top = chunk_of(source, half, channel.world_size) * chunk_rows + row
        bottom = top + end - row - 1
        turns = group * HALVES
        for turn in range(2 * turns):
            is_masked = turn < turns
            ours = turn % HALVES
            q_head = head * group + turn % turns // HALVES
            _, first, last, full_first, full_last = queries_of_half(
                channel, ours, top, bottom, chunk_rows, CFG, HALVES, CAUSAL
            )
            whole = full_last - full_first
            slot, phase = fetch_pairs(
                rings, q_desc, dout_desc, entry * HALVES + ours, q_head * CFG.head_dim,
                gl.where(is_masked, first, full_first), gl.where(is_masked, last - first - whole, whole),
                gl.where(is_masked, full_first - first, 0), gl.where(is_masked, whole, 0), slot, phase, CFG,
            )  # fmt: skip
    await_all(channel, batch * HALVES * chunk_rows, unit_rows, code, tiles, COMMUNICATE, AWAIT)
    show_done(channel, COMMUNICATE, PROGRESS)
    close_ring(events, cursor, COMMUNICATE, channel.operator, TRACE)
    finish_launch(channel, ctas * (CFG.consumers + 1), counted)


@gluon.jit
def rows_of(sums_ptr, at, inside, chunk_rows, other):
    """A number for each query of a block."""
    return gl.load(sums_ptr + at + inside, mask=inside < chunk_rows, other=other)


@gluon.jit
def begin_sums(rings, weights, dscores, dk, dv, slot):
    """Start what a block of queries adds to the gradients of k and v."""
    sums_v = warpgroup_mma(weights, rings.come_too.index(slot), dv, is_async=True)
    sums_k = warpgroup_mma(dscores, rings.come.index(slot), dk, is_async=True)
    return sums_k, sums_v


@gluon.jit
def over_queries_masked(rings, k, v, dk, dv, lse_ptr, delta_ptr, at, keys, begins, first, count, gap_at, gap,
                        chunk_rows, scale_log2, slot, phase, CFG: gl.constexpr, CAUSAL: gl.constexpr):  # fmt: skip
    """Blocks of queries of which some see only some of the keys, one after the other."""
    for turn in range(count):
        row = (first + turn + gl.where(turn >= gap_at, gap, 0)) * CFG.block_n
        inside = row + gl.arange(0, CFG.block_n, layout=gl.SliceLayout(0, CFG.scores))
        lse = rows_of(lse_ptr, at, inside, chunk_rows, float("inf"))
        delta = rows_of(delta_ptr, at, inside, chunk_rows, 0.0)
        token = begin_product(k, rings.come, rings.full, slot, phase, CFG)
        token_too = begin_product(v, rings.come_too, rings.full_too, slot, phase, CFG)
        scores, dweights = warpgroup_mma_wait(0, deps=(token, token_too))
        weights = gl.exp2(scores * scale_log2 - lse[None, :])
        if CAUSAL:
            weights = gl.where((begins + inside)[None, :] >= keys[:, None], weights, 0.0)
        dscores = weights * (dweights - delta[None, :])
        operand = gl.convert_layout(weights.to(rings.come.dtype), CFG.weights)
        operand_too = gl.convert_layout(dscores.to(rings.come.dtype), CFG.weights)
        sums_k, sums_v = begin_sums(rings, operand, operand_too, dk, dv, slot)
        dk, dv, operand, operand_too = warpgroup_mma_wait(0, deps=(sums_k, sums_v, operand, operand_too))
        mbarrier.arrive(rings.empty.index(slot))
        slot, phase = next_slot(slot, phase, CFG.slots)
    return dk, dv, slot, phase


@gluon.jit
def whole_block(turn, first_0, count_0, first_1, count_1):
    """(head within the group, half, block) of the `turn`-th whole block of all heads."""
    each = gl.maximum(count_0 + count_1, 1)
    rest = turn % each
    half = (rest >= count_0).to(gl.int32)
    return turn // each, half, gl.where(half == 0, first_0 + rest, first_1 + rest - count_0)


@gluon.jit
def over_queries_whole(rings, k, v, dk, dv, lse_ptr, delta_ptr, at, rows, chunk_rows, first_0, count_0, first_1,
                       count_1, heads, scale_log2, slot, phase, ME: gl.constexpr, CFG: gl.constexpr):  # fmt: skip
    """Blocks of queries that all see all of the keys: a block's weights are computed while the one before is added."""
    count = heads * (count_0 + count_1)
    columns = gl.arange(0, CFG.block_n, layout=gl.SliceLayout(0, CFG.scores))
    if count > 0:
        head, half, block = whole_block(0, first_0, count_0, first_1, count_1)
        place = at + head.to(gl.int64) * rows + half * chunk_rows + block * CFG.block_n
        lse = gl.load(lse_ptr + place + columns)
        delta = gl.load(delta_ptr + place + columns)
        token = begin_product(k, rings.come, rings.full, slot, phase, CFG)
        token_too = begin_product(v, rings.come_too, rings.full_too, slot, phase, CFG)
        scores, dweights = warpgroup_mma_wait(0, deps=(token, token_too))
        weights = gl.exp2(scores * scale_log2 - lse[None, :])
        operand = gl.convert_layout(weights.to(rings.come.dtype), CFG.weights)
        dscores = weights * (dweights - delta[None, :])
        operand_too = gl.convert_layout(dscores.to(rings.come.dtype), CFG.weights)
        for turn in range(1, count):
            head, half, block = whole_block(turn, first_0, count_0, first_1, count_1)
            place = at + head.to(gl.int64) * rows + half * chunk_rows + block * CFG.block_n
            lse = gl.load(lse_ptr + place + columns)
            following_slot, following_phase = next_slot(slot, phase, CFG.slots)
            token = begin_product(k, rings.come, rings.full, following_slot, following_phase, CFG)
            sums_k, sums_v = begin_sums(rings, operand, operand_too, dk, dv, slot)
            scores = warpgroup_mma_wait(2, deps=(token,))
            weights = gl.exp2(scores * scale_log2 - lse[None, :])
            held = meet_with(gl.max(weights, 1), ME)  # the wait must not come before (`meet_with`)
            dk, dv, operand, operand_too, held = warpgroup_mma_wait(
                0, deps=(sums_k, sums_v, operand, operand_too, held)
            )  # fmt: skip
            mbarrier.arrive(rings.empty.index(slot))
            token_too = begin_product(v, rings.come_too, rings.full_too, following_slot, following_phase, CFG)
            delta = gl.load(delta_ptr + place + columns)
            dweights = warpgroup_mma_wait(0, deps=(token_too,))
            dscores = weights * (dweights - delta[None, :])
            operand = gl.convert_layout(weights.to(rings.come.dtype), CFG.weights)
            operand_too = gl.convert_layout(dscores.to(rings.come.dtype), CFG.weights)
            slot = following_slot
            phase = following_phase
        sums_k, sums_v = begin_sums(rings, operand, operand_too, dk, dv, slot)
        dk, dv, operand, operand_too = warpgroup_mma_wait(0, deps=(sums_k, sums_v, operand, operand_too))
        mbarrier.arrive(rings.empty.index(slot))
        slot, phase = next_slot(slot, phase, CFG.slots)
    return dk, dv, slot, phase


@gluon.jit
def over_queries(rings, channel, k, v, dk, dv, lse_ptr, delta_ptr, keys, top, bottom, rows, chunk_rows, head, entry,
                 group, scale_log2, slot, phase, ME: gl.constexpr, CFG: gl.constexpr, HALVES: gl.constexpr,
                 CAUSAL: gl.constexpr):  # fmt: skip
    """All queries that see keys of a tile: masked blocks of each head and half, then all whole ones."""
    for turn in range(group * HALVES):
        ours = turn % HALVES
        q_head = head * group + turn // HALVES
        begins, first, last, full_first, full_last = queries_of_half(
            channel, ours, top, bottom, chunk_rows, CFG, HALVES, CAUSAL
        )
        at = q_head.to(gl.int64) * rows + (entry * HALVES + ours) * chunk_rows
        dk, dv, slot, phase = over_queries_masked(
            rings, k, v, dk, dv, lse_ptr, delta_ptr, at, keys, begins, first,
            last - first - (full_last - full_first), full_first - first, full_last - full_first, chunk_rows,
            scale_log2, slot, phase, CFG, CAUSAL,
        )  # fmt: skip
    _, _, _, first_0, last_0 = queries_of_half(channel, 0, top, bottom, chunk_rows, CFG, HALVES, CAUSAL)
    first_1 = first_0 * 0
    last_1 = first_0 * 0
    if HALVES == 2:
        _, _, _, first_1, last_1 = queries_of_half(channel, 1, top, bottom, chunk_rows, CFG, HALVES, CAUSAL)
    at = (head * group).to(gl.int64) * rows + entry * HALVES * chunk_rows
    dk, dv, slot, phase = over_queries_whole(
        rings, k, v, dk, dv, lse_ptr, delta_ptr, at, rows, chunk_rows, first_0, last_0 - first_0, first_1,
        last_1 - first_1, group, scale_log2, slot, phase, ME, CFG,
    )  # fmt: skip
    return dk, dv, slot, phase


@gluon.jit
def consume_queries(rings, partial_desc, lse_ptr, delta_ptr, order_ptr, channel, board, trace, tiles, k_blocks, batch,
                    chunk_rows, q_heads, group, variant, counted, scale, scale_log2, ME: gl.constexpr,
                    CFG: gl.constexpr, HALVES: gl.constexpr, CAUSAL: gl.constexpr, PROGRESS: gl.constexpr,
                    TRACE: gl.constexpr):  # fmt: skip
    """Consumer of the pass over keys."""
    m_size: gl.constexpr = CFG.rows
    head_dim: gl.constexpr = CFG.head_dim
    out_layout: gl.constexpr = CFG.out
    row_layout: gl.constexpr = gl.SliceLayout(1, CFG.scores)
    cta = gl.program_id(0)
    ctas = gl.num_programs(0)
    rows = batch * HALVES * chunk_rows
    last_consumer: gl.constexpr = CFG.consumers - 1
    if last_consumer == ME:
        begin_launch(channel, board, ctas, tiles, rows, q_heads * CFG.head_dim, group, variant, PROGRESS)
    speaks: gl.constexpr = ME == 0
    shows: gl.constexpr = PROGRESS and speaks
    traces: gl.constexpr = TRACE and speaks
    events = ring_of(trace, cta, COMPUTE)
    cursor = open_ring(channel, events, traces)
    slot = 0
    phase = 0
    tile_phase = 0
    parts = channel.world_size * HALVES
    k = rings.kept.index(ME)
    v = rings.kept_too.index(ME)
    for place in range(cta, tiles, ctas):
        tile = gl.load(order_ptr + to_and_fro(place, ctas, tiles))
        block, part, head, entry = place_of_key_tile(tile, k_blocks, parts, q_heads // group)
        source = source_of(part, channel.rank, channel.world_size, HALVES)
        half = part % HALVES
        show_tile(channel, COMPUTE, place, shows)
        cursor = mark(events, cursor, TILE_BEGIN, place, source, traces)
        row = block * CFG.block_m
        top = chunk_of(source, half, channel.world_size) * chunk_rows + row
        bottom = top + gl.minimum(row + CFG.block_m, chunk_rows) - row - 1
        keys = top + ME * CFG.rows + gl.arange(0, CFG.rows, layout=row_layout)
        dk = gl.zeros((m_size, head_dim), gl.float32, out_layout)
        dv = gl.zeros((m_size, head_dim), gl.float32, out_layout)
        mbarrier.wait(rings.tile_full.index(0), tile_phase)
        tile_phase = tile_phase ^ 1
        dk, dv, slot, phase = over_queries(
            rings, channel, k, v, dk, dv, lse_ptr, delta_ptr, keys, top, bottom, rows, chunk_rows, head, entry, group,
            scale_log2, slot, phase, ME, CFG, HALVES, CAUSAL,
        )  # fmt: skip
        mbarrier.arrive(rings.tile_empty.index(0))
        here = 2 * source * batch * HALVES + entry * HALVES + half
        store_tile(rings, partial_desc, dk * scale, here, row + ME * CFG.rows, head * CFG.head_dim, ME, CFG)
        store_tile(
            rings, partial_desc, dv, here + batch * HALVES, row + ME * CFG.rows, head * CFG.head_dim, ME, CFG
        )  # fmt: skip
        cursor = mark(events, cursor, TILE_END, place, source, traces)
    tma.store_wait(0)
    show_done(channel, COMPUTE, shows)
    close_ring(events, cursor, COMPUTE, channel.operator, traces)
    finish_launch(channel, ctas * (CFG.consumers + 1), counted)


@gluon.jit(do_not_specialize=RUNTIME)
def hopper_key_gradients_kernel(
    q_desc, dout_desc, k_desc, v_desc, gathered_k_desc, gathered_v_desc, partial_desc, lse_ptr, delta_ptr, order_ptr,
    control, peers, status, board, trace,
    flags, channels, slot, rank, world_size, signature, deadline_us, variant, counted,
    batch, chunk_rows, q_heads, group, unit_rows, scale, scale_log2,
    CFG: gl.constexpr, HALVES: gl.constexpr, CAUSAL: gl.constexpr, AWAIT: gl.constexpr, OPERATOR: gl.constexpr,
    PROGRESS: gl.constexpr, TRACE: gl.constexpr,
):  # fmt: skip
    """Entry point of the pass over keys: build the rings, then part into roles."""
    channel = open_channel(
        gl.load(control + EPOCH) + 1, control, peers, status, board, flags, channels, slot, rank, world_size,
        signature, OPERATOR, deadline_us,
    )  # fmt: skip
    k_blocks = blocks(chunk_rows, CFG.block_m)
    tiles = k_blocks * world_size * HALVES * (q_heads // group) * batch
    rings = make_rings(q_desc.dtype, CFG)
    gl.static_assert(CFG.consumers == 2)
    gl.warp_specialize(
        [
            (
                consume_queries,
                (rings, partial_desc, lse_ptr, delta_ptr, order_ptr, channel, board, trace, tiles, k_blocks, batch,
                 chunk_rows, q_heads, group, variant, counted, scale, scale_log2, 0, CFG, HALVES, CAUSAL, PROGRESS,
                 TRACE),
            ),
            (
                consume_queries,
                (rings, partial_desc, lse_ptr, delta_ptr, order_ptr, channel, board, trace, tiles, k_blocks, batch,
                 chunk_rows, q_heads, group, variant, counted, scale, scale_log2, 1, CFG, HALVES, CAUSAL, PROGRESS,
                 TRACE),
            ),
            (
                produce_queries,
                (rings, q_desc, dout_desc, k_desc, v_desc, gathered_k_desc, gathered_v_desc, order_ptr, channel, trace,
                 tiles, k_blocks, batch, chunk_rows, q_heads, group, unit_rows, counted, CFG, HALVES, CAUSAL, AWAIT,
                 PROGRESS, TRACE),
            ),
        ],
        [4, 1],
        [CFG.consumer_registers, CFG.producer_registers],
    )  # fmt: skip
