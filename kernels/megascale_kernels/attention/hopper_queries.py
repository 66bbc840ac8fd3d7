# SPDX-License-Identifier: Apache-2.0
"""The gradient of q with Hopper's warp specialisation: `backward_kernels.query_gradients_kernel`, faster.

Roles as in `hopper.py`. A tile keeps q and dout; blocks of K and V come. Blocks that need a mask are taken one after
the other, then all whole ones in one loop: while the two products of block j + 1 run, dq takes what block j gives.

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
from megascale_kernels.attention.hopper import meet_with, span_of_part
from megascale_kernels.attention.hopper_rings import begin_product, fetch_pairs, fetch_tile, make_rings, store_tile
from megascale_kernels.attention.ranges import chunk_of, place_of_tile, to_and_fro
from megascale_kernels.device.hopper_gemm import next_slot
from megascale_kernels.device.signals import open_channel
from megascale_kernels.planning.tile_order import blocks


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
    """Entry point of the pass over queries; it waits for no peer and is no launch of its own."""
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
