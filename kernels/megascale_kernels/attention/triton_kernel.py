# SPDX-License-Identifier: Apache-2.0
"""Attention, forward: out = softmax(scale q k^T) v, with k and v of all ranks and this rank's queries.

TileLink (2503.20313, section 7.4) overlaps the gather of K and V by copy engines with flash attention. Every rank
pushes its K and V into its peers' gather buffers in units of `unit_rows` tokens, each announced by a flag. A tile is
one block of queries of one head. It begins with the keys of its own rank, read where they lie, and goes on to the
parts of the others in the order in which they arrive; before a part it waits for the units that it is going to read. A
part that the mask hides is neither visited nor waited for. The softmax is computed as the keys come (Milakov and
Gimelshein, 1805.02867), so their order matters for the last bits alone, and it is always the same.

Scores are kept in base 2 (`scale_log2` = scale log2 e). Blocks that every query of the tile sees whole take a loop
without masks; only the others, at most a few for each part, compare positions.

The descriptors have three axes, [parts, tokens of a part, heads * head_dim]: the TMA unit clips the last block of each
part by itself, so a block never holds tokens of the next part, which may not have arrived.

Besides the output the kernel stores the logarithm (base 2) of each row's sum, which backward needs; it is +inf for a
query that sees no key, whose output is 0. A launch ends only after all units of all peers are there. That is what lets
a slot be reused two launches later, also where the mask hides a peer's keys from us.
"""

import triton
import triton.language as tl

from megascale_kernels.ag_gemm.triton_kernel import await_rows
from megascale_kernels.attention.ranges import (
    chunk_of,
    first_key,
    last_key,
    place_of_tile,
    source_of,
    span_of_blocks,
    to_and_fro,
)
from megascale_kernels.device.layout import COMPUTE, EPOCH, OPERATORS
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

ATTENTION = OPERATORS.index("attention")
RUNTIME = (
    "slot", "rank", "signature", "deadline_us", "flags", "channels", "variant", "counted", "batch", "q_heads", "group",
    "unit_rows", "chunk_rows", "world_size",
)  # fmt: skip


@triton.jit(do_not_specialize=RUNTIME)
def attention_kernel(
    q_desc, k_desc, v_desc, gathered_k_desc, gathered_v_desc, out_desc, lse_ptr, order_ptr, begin_ptr, end_ptr,
    control, peers, status, board, trace,
    flags, channels, slot, rank, world_size, signature, deadline_us, variant, counted,
    batch, chunk_rows, q_heads, group, unit_rows, scale_log2,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, HEAD_DIM: tl.constexpr, HALVES: tl.constexpr, CAUSAL: tl.constexpr,
    VARLEN: tl.constexpr, AWAIT: tl.constexpr, OPERATOR: tl.constexpr, PROGRESS: tl.constexpr, TRACE: tl.constexpr,
):  # fmt: skip
    """One launch: tiles in the order of falling length, as `order_ptr` has them."""
    cta = tl.program_id(0)
    ctas = tl.num_programs(0)
    channel = open_channel(
        tl.load(control + EPOCH) + 1, control, peers, status, board, flags, channels, slot, rank, world_size,
        signature, OPERATOR, deadline_us,
    )  # fmt: skip
    q_blocks = blocks(chunk_rows, BLOCK_M)
    tiles = q_blocks * HALVES * q_heads * batch
    rows = batch * HALVES * chunk_rows
    begin_launch(channel, board, ctas, tiles, rows, q_heads * HEAD_DIM, group, variant, PROGRESS)
    ring = ring_of(trace, cta, COMPUTE)
    cursor = open_ring(channel, ring, TRACE)
    code = 0
    place = cta
    while place < tiles:
        tile = tl.load(order_ptr + to_and_fro(place, ctas, tiles))
        show_tile(channel, COMPUTE, place, PROGRESS)
        cursor = mark(ring, cursor, TILE_BEGIN, place, rank, TRACE)
        block, half, head, entry = place_of_tile(tile, q_blocks, q_heads, HALVES)
        code, cursor = attend(
            channel, q_desc, k_desc, v_desc, gathered_k_desc, gathered_v_desc, out_desc, lse_ptr, begin_ptr, end_ptr,
            ring, cursor, place, block * BLOCK_M, half, head, entry, batch, chunk_rows, group, unit_rows, rows,
            scale_log2, BLOCK_M, BLOCK_N, HEAD_DIM, HALVES, CAUSAL, VARLEN, AWAIT, TRACE,
        )  # fmt: skip
        cursor = mark(ring, cursor, TILE_END, place, rank, TRACE)
        place = tl.where(code == 0, place + ctas, tiles)
    await_all(channel, rows, unit_rows, code, tiles, COMPUTE, AWAIT)
    show_done(channel, COMPUTE, PROGRESS)
    close_ring(ring, cursor, COMPUTE, channel.operator, TRACE)
    finish_launch(channel, ctas, counted)


@triton.jit
def begin_launch(channel, board, ctas, tiles, rows, columns, group, variant, PROGRESS: tl.constexpr):
    """Say what this launch is, on the board and to the peers; one program does it."""
    if tl.program_id(0) == ctas - 1:
        head_board(channel, board, ctas, tiles, rows, columns, columns // group, PROGRESS)
        publish_launch(channel, rows, columns, columns // group, variant)


@triton.jit
def await_all(channel, rows, unit_rows, code, tile, role, AWAIT: tl.constexpr):
    """Wait for whatever the tiles have not waited for: after this no copy of this launch is under way to us.

    One program does it, the last.
    """
    if AWAIT:
        if tl.program_id(0) == tl.num_programs(0) - 1:
            for step in range(1, channel.world_size):
                if code == 0:
                    source = (channel.rank + step) % channel.world_size
                    code = await_rows(channel, source, 0, rows, unit_rows, role, tile)


@triton.jit
def await_part(channel, source, entry, half, begin, end, chunk_rows, unit_rows, tile, code, HALVES: tl.constexpr,
               AWAIT: tl.constexpr):  # fmt: skip
    """Wait for the tokens [begin, end) of a part, if it is a peer's and any are wanted."""
    return await_part_by(channel, source, entry, half, begin, end, chunk_rows, unit_rows, tile, code, COMPUTE, HALVES,
                         AWAIT)  # fmt: skip


@triton.jit
def await_part_by(channel, source, entry, half, begin, end, chunk_rows, unit_rows, tile, code, role,
                  HALVES: tl.constexpr, AWAIT: tl.constexpr):  # fmt: skip
    """`await_part` of a role of the program."""
    if AWAIT:
        if (source != channel.rank) & (begin < end) & (code == 0):
            first = (entry * HALVES + half) * chunk_rows
            code = await_rows(channel, source, first + begin, first + end, unit_rows, role, tile)
    return code


@triton.jit
def attend(channel, q_desc, k_desc, v_desc, gathered_k_desc, gathered_v_desc, out_desc, lse_ptr, begin_ptr, end_ptr,
           ring, cursor, tile, row, half, head, entry, batch, chunk_rows, group, unit_rows, rows, scale_log2,
           BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, HEAD_DIM: tl.constexpr, HALVES: tl.constexpr,
           CAUSAL: tl.constexpr, VARLEN: tl.constexpr, AWAIT: tl.constexpr, TRACE: tl.constexpr):  # fmt: skip
    """One tile: BLOCK_M queries of one head against the keys of all ranks."""
    world_size = channel.world_size
    sequence = world_size * HALVES * chunk_rows
    start = chunk_of(channel.rank, half, world_size) * chunk_rows
    top = start + row
    bottom = start + tl.minimum(row + BLOCK_M, chunk_rows) - 1
    positions = tl.minimum(top + tl.arange(0, BLOCK_M), bottom)
    lows = first_key(positions, begin_ptr, VARLEN)
    highs = last_key(positions, sequence, end_ptr, CAUSAL, VARLEN)
    low, low_of_last = first_key(top, begin_ptr, VARLEN), first_key(bottom, begin_ptr, VARLEN)
    high = last_key(bottom, sequence, end_ptr, CAUSAL, VARLEN)
    high_of_first = last_key(top, sequence, end_ptr, CAUSAL, VARLEN)

    q = q_desc.load([entry * HALVES + half, row, head * HEAD_DIM]).reshape(BLOCK_M, HEAD_DIM)
    acc = tl.zeros((BLOCK_M, HEAD_DIM), dtype=tl.float32)
    top_score = tl.full((BLOCK_M,), float("-inf"), dtype=tl.float32)
    total = tl.zeros((BLOCK_M,), dtype=tl.float32)
    column = head // group * HEAD_DIM
    code = 0
    for part in range(world_size * HALVES):
        source = source_of(part, channel.rank, world_size, HALVES)
        there = part % HALVES
        begins = chunk_of(source, there, world_size) * chunk_rows
        first, last, full_first, full_last = span_of_blocks(
            low, high, low_of_last, high_of_first, begins, chunk_rows, BLOCK_N
        )
        cursor = mark(ring, cursor, WAIT_BEGIN, tile, source, TRACE)
        end = tl.minimum(last * BLOCK_N, chunk_rows)
        begin = first * BLOCK_N
        code = await_part(channel, source, entry, there, begin, end, chunk_rows, unit_rows, tile, code, HALVES, AWAIT)
        cursor = mark(ring, cursor, WAIT_END, tile, source, TRACE)
        k_rows, v_rows = k_desc, v_desc
        box = entry * HALVES + there
        if source != channel.rank:
            k_rows, v_rows = gathered_k_desc, gathered_v_desc
            box = (source * batch + entry) * HALVES + there
        # After a wait that gave up nothing is read: the launch is lost, and the host says why.
        whole = tl.where(code == 0, full_last - full_first, 0)
        masked = tl.where(code == 0, last - first - (full_last - full_first), 0)
        acc, top_score, total = over_blocks(
            q, k_rows, v_rows, box, column, full_first, whole, 0, 0, begins, lows, highs, chunk_rows, acc, top_score,
            total, scale_log2, BLOCK_N, HEAD_DIM, MASKED=False,
        )  # fmt: skip
        acc, top_score, total = over_blocks(
            q, k_rows, v_rows, box, column, first, masked, full_first - first, full_last - full_first, begins, lows,
            highs, chunk_rows, acc, top_score, total, scale_log2, BLOCK_N, HEAD_DIM, MASKED=True,
        )  # fmt: skip
    seen = total > 0
    acc = acc * tl.where(seen, 1.0 / tl.where(seen, total, 1.0), 0.0)[:, None]
    out = acc.to(out_desc.dtype).reshape(1, BLOCK_M, HEAD_DIM)
    out_desc.store([entry * HALVES + half, row, head * HEAD_DIM], out)
    lse = tl.where(seen, top_score + tl.log2(tl.where(seen, total, 1.0)), float("inf"))
    inside = row + tl.arange(0, BLOCK_M)
    at = head.to(tl.int64) * rows + (entry * HALVES + half) * chunk_rows + inside
    tl.store(lse_ptr + at, lse, mask=inside < chunk_rows)
    return code, cursor


@triton.jit
def over_blocks(q, k_rows, v_rows, box, column, first, count, gap_at, gap, begins, lows, highs, chunk_rows, acc,
                top_score, total, scale_log2, BLOCK_N: tl.constexpr, HEAD_DIM: tl.constexpr,
                MASKED: tl.constexpr):  # fmt: skip
    """`count` blocks of keys from `first` on, `gap` blocks left out after `gap_at` of them."""
    for turn in range(count):
        row = (first + turn + tl.where(turn >= gap_at, gap, 0)) * BLOCK_N
        k = k_rows.load([box, row, column]).reshape(BLOCK_N, HEAD_DIM)
        scores = tl.dot(q, k.T)
        if MASKED:
            inside = row + tl.arange(0, BLOCK_N)
            keys = begins + inside
            visible = (keys[None, :] >= lows[:, None]) & (keys[None, :] < highs[:, None])
            scores = tl.where(visible & (inside < chunk_rows)[None, :], scores, float("-inf"))
        highest = tl.maximum(top_score, tl.max(scores, 1) * scale_log2)
        shift = highest
        if MASKED:  # a row that has seen nothing yet must not subtract -inf from -inf
            shift = tl.where(highest == float("-inf"), 0.0, highest)
        weights = tl.exp2(scores * scale_log2 - shift[:, None])
        fade = tl.exp2(top_score - shift)
        total = total * fade + tl.sum(weights, 1)
        acc = acc * fade[:, None]
        v = v_rows.load([box, row, column]).reshape(BLOCK_N, HEAD_DIM)
        acc = tl.dot(weights.to(v.dtype), v, acc)
        top_score = highest
    return acc, top_score, total
