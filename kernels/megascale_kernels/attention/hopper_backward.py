# SPDX-License-Identifier: Apache-2.0
"""Attention, backward, with Hopper's warp specialisation: the two passes of `backward_kernels.py`, faster.

Roles as in `hopper.py`: a producer and two consumers, each with 64 rows of a tile. Either pass has two stages: blocks
that need a mask, one after the other, then all whole ones in one loop whose products overlap what is computed between
them, whatever half of the sequence, head or rank they belong to.

    queries   64 queries a consumer; blocks of keys. While the products of block j + 1 run, dq takes what block j gives.
    keys      64 keys a consumer; blocks of queries, of all query heads that share the keys. The accumulators dk and dv
              leave too few registers for two blocks, so the second product of a block begins when the sums have ended.

What plain Triton says in `backward_kernels.py` is the twin that the emulator runs; packed sequences have it alone.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    tma,
    warpgroup_mma,
    warpgroup_mma_wait,
)
from triton.language.core import _aggregate as aggregate

from megascale_kernels.attention.backward_kernels import RUNTIME
from megascale_kernels.attention.hopper import as_boxes, make_barriers, meet_with, span_of_part
from megascale_kernels.attention.ranges import chunk_of, place_of_tile, source_of, span_of_blocks, to_and_fro
from megascale_kernels.attention.triton_kernel import await_all_by, await_part_by
from megascale_kernels.device.hopper_gemm import next_slot, tma_load, tma_store
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
from megascale_kernels.planning.tile_order import blocks


@aggregate
class Rings:
    """Shared memory between producer and consumers: two operands that a tile keeps, slots of two that come, barriers.

    In the pass over queries a tile keeps q and dout, and k and v come; in the pass over keys it is the other way round.
    """

    kept: gl.shared_memory_descriptor
    kept_too: gl.shared_memory_descriptor
    come: gl.shared_memory_descriptor
    come_too: gl.shared_memory_descriptor
    out: gl.shared_memory_descriptor
    tile_full: gl.shared_memory_descriptor
    tile_empty: gl.shared_memory_descriptor
    full: gl.shared_memory_descriptor
    full_too: gl.shared_memory_descriptor
    empty: gl.shared_memory_descriptor

    @gluon.constexpr_function
    def __init__(
        self, kept, kept_too, come, come_too, out, tile_full, tile_empty, full, full_too, empty
    ) -> None:  # fmt: skip
        self.kept = kept
        self.kept_too = kept_too
        self.come = come
        self.come_too = come_too
        self.out = out
        self.tile_full = tile_full
        self.tile_empty = tile_empty
        self.full = full
        self.full_too = full_too
        self.empty = empty


@gluon.jit
def make_rings(dtype: gl.constexpr, CFG: gl.constexpr):
    """Allocate everything in shared memory; before the roles part."""
    rings = Rings(
        gl.allocate_shared_memory(dtype, [CFG.consumers, CFG.rows, CFG.head_dim], CFG.flat),
        gl.allocate_shared_memory(dtype, [CFG.consumers, CFG.rows, CFG.head_dim], CFG.flat),
        gl.allocate_shared_memory(dtype, [CFG.slots, CFG.block_n, CFG.head_dim], CFG.flat),
        gl.allocate_shared_memory(dtype, [CFG.slots, CFG.block_n, CFG.head_dim], CFG.flat),
        gl.allocate_shared_memory(dtype, [CFG.consumers, CFG.rows, CFG.head_dim], CFG.flat),
        make_barriers(1, 1), make_barriers(1, CFG.consumers), make_barriers(CFG.slots, 1), make_barriers(CFG.slots, 1),
        make_barriers(CFG.slots, CFG.consumers),
    )  # fmt: skip
    fence_async_shared()
    return rings


@gluon.jit
def fetch_tile(rings, desc, desc_too, box, row, column, tile_phase, CFG: gl.constexpr):
    """The two operands that a tile keeps."""
    consumers: gl.constexpr = CFG.consumers
    first = as_boxes(rings.kept, CFG.consumers, CFG.rows, CFG)
    second = as_boxes(rings.kept_too, CFG.consumers, CFG.rows, CFG)
    full = rings.tile_full.index(0)
    mbarrier.wait(rings.tile_empty.index(0), tile_phase)
    mbarrier.expect(full, 2 * CFG.q_bytes)
    for i in gl.static_range(consumers):
        tma_load(desc, [box, row + i * CFG.rows, column], full, first.index(i))
        tma_load(desc_too, [box, row + i * CFG.rows, column], full, second.index(i))


@gluon.jit
def fetch_pairs(rings, desc, desc_too, box, column, first, count, gap_at, gap, slot, phase, CFG: gl.constexpr):
    """`count` blocks of the two operands that come, `gap` blocks left out after `gap_at` of them."""
    boxes = as_boxes(rings.come, CFG.slots, CFG.block_n, CFG)
    boxes_too = as_boxes(rings.come_too, CFG.slots, CFG.block_n, CFG)
    for turn in range(count):
        row = (first + turn + gl.where(turn >= gap_at, gap, 0)) * CFG.block_n
        mbarrier.wait(rings.empty.index(slot), phase)
        mbarrier.expect(rings.full.index(slot), CFG.block_bytes)
        tma_load(desc, [box, row, column], rings.full.index(slot), boxes.index(slot))
        mbarrier.expect(rings.full_too.index(slot), CFG.block_bytes)
        tma_load(desc_too, [box, row, column], rings.full_too.index(slot), boxes_too.index(slot))
        slot, phase = next_slot(slot, phase, CFG.slots)
    return slot, phase


@gluon.jit
def no_products(CFG: gl.constexpr):
    """Registers for a product of a tile's rows and a block's."""
    rows: gl.constexpr = CFG.rows
    columns: gl.constexpr = CFG.block_n
    layout: gl.constexpr = CFG.scores
    return gl.zeros((rows, columns), gl.float32, layout)


@gluon.jit
def begin_product(kept, come, full, slot, phase, CFG: gl.constexpr):
    """Start the product of what a tile keeps and the transpose of what came."""
    mbarrier.wait(full.index(slot), phase)
    return warpgroup_mma(kept, come.index(slot).permute((1, 0)), no_products(CFG), use_acc=False, is_async=True)


@gluon.jit
def store_tile(rings, desc, acc, box, row, column, ME: gl.constexpr, CFG: gl.constexpr):
    """Round a gradient and store it by TMA, which clips what lies behind the chunk."""
    tma.store_wait(0)
    rings.out.index(ME).store(acc.to(desc.dtype))
    fence_async_shared()
    tma_store(desc, [box, row, column], as_boxes(rings.out, CFG.consumers, CFG.rows, CFG).index(ME))


# --- gradient of q ---------------------------------------------------------------------------------------------------


@gluon.jit
def produce_keys(rings, q_desc, dout_desc, k_desc, v_desc, gathered_k_desc, gathered_v_desc, order_ptr, channel, tiles,
                 q_blocks, batch, chunk_rows, q_heads, group, CFG: gl.constexpr, HALVES: gl.constexpr,
                 CAUSAL: gl.constexpr):  # fmt: skip
    """Producer of the pass over queries; K and V of all ranks are there."""
    cta = gl.program_id(0)
    ctas = gl.num_programs(0)
    slot = 0
    phase = 1
    tile_phase = 1
    parts = channel.world_size * HALVES
    for place in range(cta, tiles, ctas):
        tile = gl.load(order_ptr + to_and_fro(place, ctas, tiles))
        block, half, head, entry = place_of_tile(tile, q_blocks, q_heads, HALVES)
        row = block * CFG.block_m
        fetch_tile(rings, q_desc, dout_desc, entry * HALVES + half, row, head * CFG.head_dim, tile_phase, CFG)
        tile_phase = tile_phase ^ 1
        start = chunk_of(channel.rank, half, channel.world_size) * chunk_rows
        top = start + row
        bottom = start + gl.minimum(row + CFG.block_m, chunk_rows) - 1
        column = head // group * CFG.head_dim
        for turn in range(2 * parts):
            is_masked = turn < parts
            source, there, _, first, last, full_first, full_last = span_of_part(
                channel, turn % parts, top, bottom, chunk_rows, CFG, HALVES, CAUSAL
            )
            whole = full_last - full_first
            k_rows, v_rows = k_desc, v_desc
            box = entry * HALVES + there
            if source != channel.rank:
                k_rows, v_rows = gathered_k_desc, gathered_v_desc
                box = (source * batch + entry) * HALVES + there
            slot, phase = fetch_pairs(
                rings, k_rows, v_rows, box, column, gl.where(is_masked, first, full_first),
                gl.where(is_masked, last - first - whole, whole), gl.where(is_masked, full_first - first, 0),
                gl.where(is_masked, whole, 0), slot, phase, CFG,
            )  # fmt: skip


@gluon.jit
def score_gradients(scores, dweights, lse, delta, scale_log2):
    """Gradients of the scores of a block of keys, rows of queries."""
    weights = gl.exp2(scores * scale_log2 - lse[:, None])
    return weights * (dweights - delta[:, None])


@gluon.jit
def over_keys_whole(rings, q, dout, dq, lse, delta, count, scale_log2, slot, phase, ME: gl.constexpr,
                    CFG: gl.constexpr):  # fmt: skip
    """Blocks that all queries see: while block j + 1 is multiplied dq takes what block j gives."""
    if count > 0:
        token = begin_product(q, rings.come, rings.full, slot, phase, CFG)
        token_too = begin_product(dout, rings.come_too, rings.full_too, slot, phase, CFG)
        scores, dweights = warpgroup_mma_wait(0, deps=(token, token_too))
        dscores = score_gradients(scores, dweights, lse, delta, scale_log2)
        operand = gl.convert_layout(dscores.to(rings.come.dtype), CFG.weights)
        for _ in range(1, count):
            following_slot, following_phase = next_slot(slot, phase, CFG.slots)
            token = begin_product(q, rings.come, rings.full, following_slot, following_phase, CFG)
            token_too = begin_product(dout, rings.come_too, rings.full_too, following_slot, following_phase, CFG)
            sums = warpgroup_mma(operand, rings.come.index(slot), dq, is_async=True)
            scores, dweights = warpgroup_mma_wait(1, deps=(token, token_too))
            dscores = score_gradients(scores, dweights, lse, delta, scale_log2)
            following = gl.convert_layout(dscores.to(rings.come.dtype), CFG.weights)
            held = meet_with(gl.max(gl.abs(dscores), 1), ME)  # the wait must not come before (`meet_with`)
            dq, operand, held = warpgroup_mma_wait(0, deps=(sums, operand, held))
            mbarrier.arrive(rings.empty.index(slot))
            operand = following
            slot = following_slot
            phase = following_phase
        sums = warpgroup_mma(operand, rings.come.index(slot), dq, is_async=True)
        dq, operand = warpgroup_mma_wait(0, deps=(sums, operand))
        mbarrier.arrive(rings.empty.index(slot))
        slot, phase = next_slot(slot, phase, CFG.slots)
    return dq, slot, phase


@gluon.jit
def over_keys_masked(rings, q, dout, dq, lse, delta, queries, begins, first, count, gap_at, gap, chunk_rows, scale_log2,
                     slot, phase, CFG: gl.constexpr, CAUSAL: gl.constexpr):  # fmt: skip
    """Blocks of which some queries see only some keys, one after the other."""
    for turn in range(count):
        row = (first + turn + gl.where(turn >= gap_at, gap, 0)) * CFG.block_n
        token = begin_product(q, rings.come, rings.full, slot, phase, CFG)
        token_too = begin_product(dout, rings.come_too, rings.full_too, slot, phase, CFG)
        scores, dweights = warpgroup_mma_wait(0, deps=(token, token_too))
        inside = row + gl.arange(0, CFG.block_n, layout=gl.SliceLayout(0, CFG.scores))
        visible = (inside < chunk_rows)[None, :] & (queries >= 0)[:, None]
        if CAUSAL:
            visible = visible & ((begins + inside)[None, :] <= queries[:, None])
        scores = gl.where(visible, scores, float("-inf"))
        dscores = score_gradients(scores, dweights, lse, delta, scale_log2)
        operand = gl.convert_layout(dscores.to(rings.come.dtype), CFG.weights)
        sums = warpgroup_mma(operand, rings.come.index(slot), dq, is_async=True)
        dq, operand = warpgroup_mma_wait(0, deps=(sums, operand))
        mbarrier.arrive(rings.empty.index(slot))
        slot, phase = next_slot(slot, phase, CFG.slots)
    return dq, slot, phase


@gluon.jit
def consume_keys(rings, dq_desc, lse_ptr, delta_ptr, order_ptr, channel, tiles, q_blocks, batch, chunk_rows, q_heads,
                 scale, scale_log2, ME: gl.constexpr, CFG: gl.constexpr, HALVES: gl.constexpr,
                 CAUSAL: gl.constexpr):  # fmt: skip
    """Consumer of the pass over queries."""
    m_size: gl.constexpr = CFG.rows
    head_dim: gl.constexpr = CFG.head_dim
    out_layout: gl.constexpr = CFG.out
    row_layout: gl.constexpr = gl.SliceLayout(1, CFG.scores)
    cta = gl.program_id(0)
    ctas = gl.num_programs(0)
    slot = 0
    phase = 0
    tile_phase = 0
    parts = channel.world_size * HALVES
    q = rings.kept.index(ME)
    dout = rings.kept_too.index(ME)
    for place in range(cta, tiles, ctas):
        tile = gl.load(order_ptr + to_and_fro(place, ctas, tiles))
        block, half, head, entry = place_of_tile(tile, q_blocks, q_heads, HALVES)
        row = block * CFG.block_m
        start = chunk_of(channel.rank, half, channel.world_size) * chunk_rows
        top = start + row
        bottom = start + gl.minimum(row + CFG.block_m, chunk_rows) - 1
        inside = row + ME * CFG.rows + gl.arange(0, CFG.rows, layout=row_layout)
        at = head.to(gl.int64) * (batch * HALVES * chunk_rows) + (entry * HALVES + half) * chunk_rows + inside
        lse = gl.load(lse_ptr + at, mask=inside < chunk_rows, other=float("inf"))
        delta = gl.load(delta_ptr + at, mask=inside < chunk_rows, other=0.0)
        dq = gl.zeros((m_size, head_dim), gl.float32, out_layout)
        mbarrier.wait(rings.tile_full.index(0), tile_phase)
        tile_phase = tile_phase ^ 1
        whole = slot * 0
        for part in range(parts):
            _, _, begins, first, last, full_first, full_last = span_of_part(
                channel, part, top, bottom, chunk_rows, CFG, HALVES, CAUSAL
            )
            whole += full_last - full_first
            dq, slot, phase = over_keys_masked(
                rings, q, dout, dq, lse, delta, start + inside, begins, first, last - first - (full_last - full_first),
                full_first - first, full_last - full_first, chunk_rows, scale_log2, slot, phase, CFG, CAUSAL,
            )  # fmt: skip
        dq, slot, phase = over_keys_whole(
            rings, q, dout, dq, lse, delta, whole, scale_log2, slot, phase, ME, CFG
        )  # fmt: skip
        mbarrier.arrive(rings.tile_empty.index(0))
        store_tile(rings, dq_desc, dq * scale, entry * HALVES + half, row + ME * CFG.rows, head * CFG.head_dim, ME, CFG)
    tma.store_wait(0)


@gluon.jit(do_not_specialize=RUNTIME)
def hopper_query_gradients_kernel(
    q_desc, dout_desc, k_desc, v_desc, gathered_k_desc, gathered_v_desc, dq_desc, lse_ptr, delta_ptr, order_ptr,
    control, peers, status, board, trace,
    flags, channels, slot, rank, world_size, signature, deadline_us, variant, counted,
    batch, chunk_rows, q_heads, group, unit_rows, scale, scale_log2,
    CFG: gl.constexpr, HALVES: gl.constexpr, CAUSAL: gl.constexpr, OPERATOR: gl.constexpr,
):  # fmt: skip
    """Entry point of the pass over queries; it waits for nobody and is no launch of its own."""
    channel = open_channel(
        0, control, peers, status, board, flags, channels, slot, rank, world_size, signature, OPERATOR, deadline_us
    )  # fmt: skip
    q_blocks = blocks(chunk_rows, CFG.block_m)
    tiles = q_blocks * HALVES * q_heads * batch
    rings = make_rings(q_desc.dtype, CFG)
    gl.static_assert(CFG.consumers == 2)
    gl.warp_specialize(
        [
            (
                consume_keys,
                (rings, dq_desc, lse_ptr, delta_ptr, order_ptr, channel, tiles, q_blocks, batch, chunk_rows, q_heads,
                 scale, scale_log2, 0, CFG, HALVES, CAUSAL),
            ),
            (
                consume_keys,
                (rings, dq_desc, lse_ptr, delta_ptr, order_ptr, channel, tiles, q_blocks, batch, chunk_rows, q_heads,
                 scale, scale_log2, 1, CFG, HALVES, CAUSAL),
            ),
            (
                produce_keys,
                (rings, q_desc, dout_desc, k_desc, v_desc, gathered_k_desc, gathered_v_desc, order_ptr, channel, tiles,
                 q_blocks, batch, chunk_rows, q_heads, group, CFG, HALVES, CAUSAL),
            ),
        ],
        [4, 1],
        [CFG.consumer_registers, CFG.producer_registers],
    )  # fmt: skip


# --- gradients of k and v --------------------------------------------------------------------------------------------


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
def key_tile(tile, k_blocks, parts, kv_heads):
    """(block, part, head, batch) of a tile of keys."""
    rest = tile // k_blocks
    return tile % k_blocks, rest % parts, rest // parts % kv_heads, rest // parts // kv_heads


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
        block, part, head, entry = key_tile(tile, k_blocks, parts, q_heads // group)
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
    if AWAIT:
        if cta == ctas - 1:
            code = await_all_by(channel, batch * HALVES * chunk_rows, unit_rows, code, tiles, COMMUNICATE)
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
        if cta == ctas - 1:
            columns = q_heads * CFG.head_dim
            head_board(channel, board, ctas, tiles, rows, columns, columns // group, PROGRESS)
            publish_launch(channel, rows, columns, columns // group, variant)
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
        block, part, head, entry = key_tile(tile, k_blocks, parts, q_heads // group)
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
