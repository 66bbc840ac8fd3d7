# SPDX-License-Identifier: Apache-2.0
"""Attention, backward: the probabilities are computed again from the rows' sums, once by keys and once by queries.

With P = exp2(scale_log2 q k^T - lse), dP = dout v^T, delta = the row sums of dout * out and dS = P * (dP - delta)
(Dao, 2307.08691, algorithm 2):

    dv = P^T dout        dk = scale dS^T q        dq = scale dS k

`key_gradients_kernel` gathers K and V anew, as the forward does, and computes for the keys of *every* rank what this
rank's queries contribute to their gradients; a tile is a block of keys of one head, over all query heads that share it.
Each rank's share is rounded to the type of k and goes to its owner (`partial_sums.py`). `query_gradients_kernel`
follows it on the stream, so all K and V are there; it waits for no peer. No sum depends on who was fast: there are no
atomics.
"""

import triton
import triton.language as tl

from megascale_kernels.attention.ranges import (
    chunk_of,
    first_key,
    first_query,
    last_key,
    last_query,
    place_of_key_tile,
    place_of_tile,
    source_of,
    span_of_blocks,
    to_and_fro,
)
from megascale_kernels.attention.triton_kernel import await_all, await_part, begin_launch
from megascale_kernels.device.layout import COMPUTE, EPOCH, OPERATORS
from megascale_kernels.device.progress import (
    TILE_BEGIN,
    TILE_END,
    close_ring,
    mark,
    open_ring,
    ring_of,
    show_done,
    show_tile,
)
from megascale_kernels.device.signals import finish_launch, open_channel
from megascale_kernels.planning.tile_order import blocks

ATTENTION_BACKWARD = OPERATORS.index("attention_backward")
RUNTIME = (
    "slot", "rank", "signature", "deadline_us", "flags", "channels", "variant", "counted", "batch", "q_heads", "group",
    "unit_rows", "chunk_rows", "world_size",
)  # fmt: skip


@triton.jit(do_not_specialize=("rows",))
def row_sums_kernel(out_ptr, dout_ptr, delta_ptr, rows, columns, BLOCK: tl.constexpr, HEAD_DIM: tl.constexpr):
    """delta[head, row] = the sum of dout * out over a head, in fp32."""
    row = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    head = tl.program_id(1)
    at = row.to(tl.int64)[:, None] * columns + head * HEAD_DIM + tl.arange(0, HEAD_DIM)[None, :]
    inside = (row < rows)[:, None]
    out = tl.load(out_ptr + at, mask=inside, other=0.0).to(tl.float32)
    dout = tl.load(dout_ptr + at, mask=inside, other=0.0).to(tl.float32)
    tl.store(delta_ptr + head.to(tl.int64) * rows + row, tl.sum(out * dout, 1), mask=row < rows)


@triton.jit(do_not_specialize=RUNTIME)
def key_gradients_kernel(
    q_desc, dout_desc, k_desc, v_desc, gathered_k_desc, gathered_v_desc, partial_desc, lse_ptr, delta_ptr, order_ptr,
    begin_ptr, end_ptr,
    control, peers, status, board, trace,
    flags, channels, slot, rank, world_size, signature, deadline_us, variant, counted,
    batch, chunk_rows, q_heads, group, unit_rows, scale, scale_log2,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, HEAD_DIM: tl.constexpr, HALVES: tl.constexpr, CAUSAL: tl.constexpr,
    VARLEN: tl.constexpr, AWAIT: tl.constexpr, OPERATOR: tl.constexpr, PROGRESS: tl.constexpr, TRACE: tl.constexpr,
):  # fmt: skip
    """One launch: every tile of keys of all ranks, our own keys first."""
    cta = tl.program_id(0)
    ctas = tl.num_programs(0)
    channel = open_channel(
        tl.load(control + EPOCH) + 1, control, peers, status, board, flags, channels, slot, rank, world_size,
        signature, OPERATOR, deadline_us,
    )  # fmt: skip
    k_blocks = blocks(chunk_rows, BLOCK_N)
    kv_heads = q_heads // group
    parts = world_size * HALVES
    tiles = k_blocks * parts * kv_heads * batch
    rows = batch * HALVES * chunk_rows
    begin_launch(channel, board, ctas, tiles, rows, q_heads * HEAD_DIM, group, variant, PROGRESS)
    ring = ring_of(trace, cta, COMPUTE)
    cursor = open_ring(channel, ring, TRACE)
    code = 0
    place = cta
    while place < tiles:
        tile = tl.load(order_ptr + to_and_fro(place, ctas, tiles))
        block, part, head, entry = place_of_key_tile(tile, k_blocks, parts, kv_heads)
        source = source_of(part, rank, world_size, HALVES)
        half = part % HALVES
        show_tile(channel, COMPUTE, place, PROGRESS)
        cursor = mark(ring, cursor, TILE_BEGIN, place, source, TRACE)
        row = block * BLOCK_N
        end = tl.minimum(row + BLOCK_N, chunk_rows)
        code = await_part(channel, source, entry, half, row, end, chunk_rows, unit_rows, place, code, HALVES, AWAIT)
        if code == 0:
            k_rows, v_rows = k_desc, v_desc
            box = entry * HALVES + half
            if source != rank:
                k_rows, v_rows = gathered_k_desc, gathered_v_desc
                box = (source * batch + entry) * HALVES + half
            k = k_rows.load([box, row, head * HEAD_DIM]).reshape(BLOCK_N, HEAD_DIM)
            v = v_rows.load([box, row, head * HEAD_DIM]).reshape(BLOCK_N, HEAD_DIM)
            dk, dv = gather_gradients(
                channel, q_desc, dout_desc, k, v, lse_ptr, delta_ptr, begin_ptr, end_ptr, source, half, row, head,
                entry, chunk_rows, group, rows, scale_log2, BLOCK_M, BLOCK_N, HEAD_DIM, HALVES, CAUSAL, VARLEN,
            )  # fmt: skip
            here = 2 * source * batch * HALVES + entry * HALVES + half
            dk = (dk * scale).to(partial_desc.dtype).reshape(1, BLOCK_N, HEAD_DIM)
            partial_desc.store([here, row, head * HEAD_DIM], dk)
            dv = dv.to(partial_desc.dtype).reshape(1, BLOCK_N, HEAD_DIM)
            partial_desc.store([here + batch * HALVES, row, head * HEAD_DIM], dv)
        cursor = mark(ring, cursor, TILE_END, place, source, TRACE)
        place = tl.where(code == 0, place + ctas, tiles)
    await_all(channel, rows, unit_rows, code, tiles, COMPUTE, AWAIT)
    show_done(channel, COMPUTE, PROGRESS)
    close_ring(ring, cursor, COMPUTE, channel.operator, TRACE)
    finish_launch(channel, ctas, counted)


@triton.jit
def gather_gradients(channel, q_desc, dout_desc, k, v, lse_ptr, delta_ptr, begin_ptr, end_ptr, source, half, row, head,
                     entry, chunk_rows, group, rows, scale_log2, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
                     HEAD_DIM: tl.constexpr, HALVES: tl.constexpr, CAUSAL: tl.constexpr,
                     VARLEN: tl.constexpr):  # fmt: skip
    """What all our queries contribute to the gradients of BLOCK_N keys of one head: dk (without scale) and dv."""
    world_size = channel.world_size
    sequence = world_size * HALVES * chunk_rows
    start = chunk_of(source, half, world_size) * chunk_rows
    top = start + row
    bottom = start + tl.minimum(row + BLOCK_N, chunk_rows) - 1
    positions = tl.minimum(top + tl.arange(0, BLOCK_N), bottom)
    lows = first_query(positions, begin_ptr, CAUSAL, VARLEN)
    highs = last_query(positions, sequence, end_ptr, VARLEN)
    low = first_query(top, begin_ptr, CAUSAL, VARLEN)
    low_of_last = first_query(bottom, begin_ptr, CAUSAL, VARLEN)
    high = last_query(bottom, sequence, end_ptr, VARLEN)
    high_of_first = last_query(top, sequence, end_ptr, VARLEN)
    dk = tl.zeros((BLOCK_N, HEAD_DIM), dtype=tl.float32)
    dv = tl.zeros((BLOCK_N, HEAD_DIM), dtype=tl.float32)
    for turn in range(group * HALVES):
        q_head = head * group + turn // HALVES
        ours = turn % HALVES
        begins = chunk_of(channel.rank, ours, world_size) * chunk_rows
        first, last, full_first, full_last = span_of_blocks(
            low, high, low_of_last, high_of_first, begins, chunk_rows, BLOCK_M
        )
        box = entry * HALVES + ours
        sums = q_head.to(tl.int64) * rows + box * chunk_rows
        dk, dv = over_queries(
            q_desc, dout_desc, k, v, lse_ptr + sums, delta_ptr + sums, box, q_head * HEAD_DIM, full_first,
            full_last - full_first, 0, 0, begins, lows, highs, chunk_rows, dk, dv, scale_log2, BLOCK_M, HEAD_DIM,
            MASKED=False,
        )  # fmt: skip
        dk, dv = over_queries(
            q_desc, dout_desc, k, v, lse_ptr + sums, delta_ptr + sums, box, q_head * HEAD_DIM, first,
            last - first - (full_last - full_first), full_first - first, full_last - full_first, begins, lows, highs,
            chunk_rows, dk, dv, scale_log2, BLOCK_M, HEAD_DIM, MASKED=True,
        )  # fmt: skip
    return dk, dv


@triton.jit
def over_queries(q_desc, dout_desc, k, v, lse_ptr, delta_ptr, box, column, first, count, gap_at, gap, begins, lows,
                 highs, chunk_rows, dk, dv, scale_log2, BLOCK_M: tl.constexpr, HEAD_DIM: tl.constexpr,
                 MASKED: tl.constexpr):  # fmt: skip
    """`count` blocks of queries from `first` on, `gap` blocks left out after `gap_at` of them; all transposed."""
    for turn in range(count):
        row = (first + turn + tl.where(turn >= gap_at, gap, 0)) * BLOCK_M
        inside = row + tl.arange(0, BLOCK_M)
        q = q_desc.load([box, row, column]).reshape(BLOCK_M, HEAD_DIM)
        scores = tl.dot(k, q.T)
        lse = tl.load(lse_ptr + inside, mask=inside < chunk_rows, other=float("inf"))
        weights = tl.exp2(scores * scale_log2 - lse[None, :])
        if MASKED:
            queries = begins + inside
            visible = (queries[None, :] >= lows[:, None]) & (queries[None, :] < highs[:, None])
            weights = tl.where(visible, weights, 0.0)
        dout = dout_desc.load([box, row, column]).reshape(BLOCK_M, HEAD_DIM)
        dv = tl.dot(weights.to(dout.dtype), dout, dv)
        dweights = tl.dot(v, dout.T)
        delta = tl.load(delta_ptr + inside, mask=inside < chunk_rows, other=0.0)
        dscores = weights * (dweights - delta[None, :])
        dk = tl.dot(dscores.to(q.dtype), q, dk)
    return dk, dv


@triton.jit(do_not_specialize=("batch", "q_heads", "group", "chunk_rows", "rank", "world_size"))
def query_gradients_kernel(
    q_desc, dout_desc, k_desc, v_desc, gathered_k_desc, gathered_v_desc, dq_desc, lse_ptr, delta_ptr, order_ptr,
    begin_ptr, end_ptr, rank, world_size, batch, chunk_rows, q_heads, group, scale, scale_log2,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, HEAD_DIM: tl.constexpr, HALVES: tl.constexpr, CAUSAL: tl.constexpr,
    VARLEN: tl.constexpr,
):  # fmt: skip
    """One program a tile of queries; K and V of all ranks are there."""
    q_blocks = blocks(chunk_rows, BLOCK_M)
    tile = tl.load(order_ptr + tl.program_id(0))
    block, half, head, entry = place_of_tile(tile, q_blocks, q_heads, HALVES)
    row = block * BLOCK_M
    sequence = world_size * HALVES * chunk_rows
    start = chunk_of(rank, half, world_size) * chunk_rows
    top = start + row
    bottom = start + tl.minimum(row + BLOCK_M, chunk_rows) - 1
    positions = tl.minimum(top + tl.arange(0, BLOCK_M), bottom)
    lows = first_key(positions, begin_ptr, VARLEN)
    highs = last_key(positions, sequence, end_ptr, CAUSAL, VARLEN)
    low, low_of_last = first_key(top, begin_ptr, VARLEN), first_key(bottom, begin_ptr, VARLEN)
    high = last_key(bottom, sequence, end_ptr, CAUSAL, VARLEN)
    high_of_first = last_key(top, sequence, end_ptr, CAUSAL, VARLEN)

    mine = entry * HALVES + half
    inside = row + tl.arange(0, BLOCK_M)
    at = head.to(tl.int64) * (batch * HALVES * chunk_rows) + mine * chunk_rows + inside
    lse = tl.load(lse_ptr + at, mask=inside < chunk_rows, other=float("inf"))
    delta = tl.load(delta_ptr + at, mask=inside < chunk_rows, other=0.0)
    q = q_desc.load([mine, row, head * HEAD_DIM]).reshape(BLOCK_M, HEAD_DIM)
    dout = dout_desc.load([mine, row, head * HEAD_DIM]).reshape(BLOCK_M, HEAD_DIM)
    dq = tl.zeros((BLOCK_M, HEAD_DIM), dtype=tl.float32)
    column = head // group * HEAD_DIM
    for part in range(world_size * HALVES):
        source = source_of(part, rank, world_size, HALVES)
        there = part % HALVES
        begins = chunk_of(source, there, world_size) * chunk_rows
        first, last, full_first, full_last = span_of_blocks(
            low, high, low_of_last, high_of_first, begins, chunk_rows, BLOCK_N
        )
        k_rows, v_rows = k_desc, v_desc
        box = entry * HALVES + there
        if source != rank:
            k_rows, v_rows = gathered_k_desc, gathered_v_desc
            box = (source * batch + entry) * HALVES + there
        dq = over_keys(
            q, dout, lse, delta, k_rows, v_rows, box, column, full_first, full_last - full_first, 0, 0, begins, lows,
            highs, chunk_rows, dq, scale_log2, BLOCK_N, HEAD_DIM, MASKED=False,
        )  # fmt: skip
        dq = over_keys(
            q, dout, lse, delta, k_rows, v_rows, box, column, first, last - first - (full_last - full_first),
            full_first - first, full_last - full_first, begins, lows, highs, chunk_rows, dq, scale_log2, BLOCK_N,
            HEAD_DIM, MASKED=True,
        )  # fmt: skip
    dq_desc.store([mine, row, head * HEAD_DIM], (dq * scale).to(dq_desc.dtype).reshape(1, BLOCK_M, HEAD_DIM))


@triton.jit
def over_keys(q, dout, lse, delta, k_rows, v_rows, box, column, first, count, gap_at, gap, begins, lows, highs,
              chunk_rows, dq, scale_log2, BLOCK_N: tl.constexpr, HEAD_DIM: tl.constexpr,
              MASKED: tl.constexpr):  # fmt: skip
    """`count` blocks of keys from `first` on, `gap` blocks left out after `gap_at` of them."""
    for turn in range(count):
        row = (first + turn + tl.where(turn >= gap_at, gap, 0)) * BLOCK_N
        k = k_rows.load([box, row, column]).reshape(BLOCK_N, HEAD_DIM)
        weights = tl.exp2(tl.dot(q, k.T) * scale_log2 - lse[:, None])
        if MASKED:
            inside = row + tl.arange(0, BLOCK_N)
            keys = begins + inside
            visible = (keys[None, :] >= lows[:, None]) & (keys[None, :] < highs[:, None])
            weights = tl.where(visible & (inside < chunk_rows)[None, :], weights, 0.0)
        v = v_rows.load([box, row, column]).reshape(BLOCK_N, HEAD_DIM)
        dweights = tl.dot(dout, v.T)
        dscores = weights * (dweights - delta[:, None])
        dq = tl.dot(dscores.to(k.dtype), k, dq)
    return dq
