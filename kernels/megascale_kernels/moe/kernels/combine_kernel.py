# SPDX-License-Identifier: Apache-2.0
"""MoE layer 1: grouped GEMM + top-k reduce + combine, out[t] = sum over t's experts of gate * (h w_down).

Multiplying programs walk the tiles (`walk.combine_tile`): rows of the peers' tokens first, the lead of our own last, in
one chunk of columns after the other. What they leave in y, one row per pair, is added up by *jobs*, each a block of
tokens of one rank and one chunk of columns. A job waits until the tiles that have its rows are done, adds a token's
rows in fp32 in the order of its experts' places, and sends **one row per token and rank** to the token's rank; a job of
our own tokens adds the ranks' rows in the order of ranks, its own term in fp32. The result is the same, bit for bit, in
every run. A token that has no expert on a rank costs no byte.

Jobs are taken from one queue, so that a program is free for whatever comes next: a few programs do nothing else, the
others join them when they have no tile left. Jobs wait for tiles and for the peers' earlier jobs, tiles for nothing.

In the backward the same kernel carries the gradients of tokens back to them: rows of the gradients of gate and up times
w_in, read the other way round, [2 I, H] of each expert, and gates of one.
"""

import triton
import triton.language as tl

from megascale_kernels.device.gemm import multiply, quarters
from megascale_kernels.device.layout import COMMUNICATE, COMPUTE, EPOCH, OPERATORS
from megascale_kernels.device.primitives import (
    consumer_tile_seen,
    consumer_tile_wait,
    peer_tile_notify,
    peer_tile_wait,
    producer_tile_notify,
)
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
    follow_launch,
    open_channel,
    peer_data,
    publish_launch,
)
from megascale_kernels.moe import tables
from megascale_kernels.moe.kernels.dispatch_kernel import await_all_begun, expert_block, say_begun
from megascale_kernels.moe.kernels.walk import (
    combine_place,
    combine_slot,
    look_up,
    tiles_of_stage,
    turns_of,
    unit_at,
)
from megascale_kernels.planning.tile_order import blocks

MOE_COMBINE = OPERATORS.index("moe_combine")
MOE_COMBINE_BACKWARD = OPERATORS.index("moe_combine_backward")
RUNTIME = (
    "slot", "rank", "signature", "deadline_us", "flags", "channels", "variant", "pitch", "experts", "group_m",
    "staging_bytes", "chunk_blocks", "mixes", "reducers", "shift",
)  # fmt: skip
ROW_TILES = tl.constexpr(tables.ROW_TILES)
LEAD_TILES = tl.constexpr(tables.LEAD_TILES)
JOBS = tl.constexpr(tables.JOBS)
TOKENS_OF = tl.constexpr(tables.TOKENS_OF)
STAGES = tl.constexpr(tables.STAGES)
# Our own rank's flags announce stages; a peer's, from the same number on, blocks of tokens and chunks.
STAGE_DONE = tl.constexpr(1)
SENT = tl.constexpr(1)


@triton.jit(do_not_specialize=RUNTIME)
def combine_kernel(
    h_desc, w_desc, y_desc, y_ptr, out_ptr, ids_ptr, head, pair_row, pair_gate, tiles,
    control, peers, status, board, trace,
    flags, channels, slot, rank, world_size, signature, deadline_us, staging_bytes, variant,
    pitch, experts, hidden, inner, group_m, chunk_blocks, mixes, reducers, shift,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, TOP_K: tl.constexpr,
    MOST_HERE: tl.constexpr, TOKENS: tl.constexpr, COLS: tl.constexpr, BACKWARD: tl.constexpr, OPERATOR: tl.constexpr,
    PROGRESS: tl.constexpr, TRACE: tl.constexpr,
    FOLLOWS: tl.constexpr,
):  # fmt: skip
    """One launch: the lowest `reducers` programs take jobs only, the others multiply first."""
    cta = tl.program_id(0)
    ctas = tl.num_programs(0)
    if FOLLOWS:
        follow_launch()
    channel = open_channel(
        tl.load(control + EPOCH) + 1, control, peers, status, board, flags, channels, slot, rank, world_size,
        signature, OPERATOR, deadline_us,
    )  # fmt: skip
    if cta == ctas - 1:
        head_board(channel, board, ctas, tl.load(head + ROW_TILES) * blocks(hidden, BLOCK_N), pitch, hidden, inner,
                   PROGRESS)  # fmt: skip
        publish_launch(channel, pitch, hidden, inner, variant)
        say_begun(channel)
        announce_empty_stages(channel, head, blocks(hidden, BLOCK_N), chunk_blocks)
    if cta >= reducers:
        multiply_tiles(channel, h_desc, w_desc, y_desc, y_ptr, head, tiles, hidden, inner, group_m, chunk_blocks,
                       ring_of(trace, cta, COMPUTE), cta - reducers, ctas - reducers, shift, BLOCK_M, BLOCK_N, BLOCK_K,
                       BACKWARD, PROGRESS, TRACE)  # fmt: skip
    take_jobs(channel, y_ptr, out_ptr, ids_ptr, head, pair_row, pair_gate, staging_bytes, pitch, experts, hidden,
              chunk_blocks, mixes & cta, ring_of(trace, cta, COMMUNICATE), BLOCK_N, TOP_K, MOST_HERE, TOKENS, COLS,
              PROGRESS, TRACE)  # fmt: skip
    if cta == ctas - 1:
        await_all_begun(channel)
    finish_launch(channel, ctas, 0)


@triton.jit
def announce_empty_stages(channel, head, blocks_n, chunk_blocks):
    """Announce stages without a tile: no program will finish their last one."""
    row_tiles = tl.load(head + ROW_TILES)
    lead_tiles = tl.load(head + LEAD_TILES)
    for stage in range(2 * blocks(blocks_n, chunk_blocks)):
        if tiles_of_stage(stage, row_tiles, lead_tiles, blocks_n, chunk_blocks) == 0:
            producer_tile_notify(channel, STAGE_DONE + stage)


@triton.jit
def finish_tile(channel, head, stage, of_stage):
    """Count a tile of a stage, whose stores may still be on their way; the last one announces the stage."""
    drain_tma_stores()
    tl.debug_barrier()
    done = tl.atomic_add(head + STAGES + stage, 1, sem="acq_rel", scope="gpu")
    if done == of_stage - 1:
        producer_tile_notify(channel, STAGE_DONE + stage)


@triton.jit
def multiply_tiles(channel, h_desc, w_desc, y_desc, y_ptr, head, tiles, hidden, inner, group_m, chunk_blocks, ring,
                   worker, workers, shift, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
                   BACKWARD: tl.constexpr, PROGRESS: tl.constexpr, TRACE: tl.constexpr):  # fmt: skip
    """Role of a multiplying program: one tile of every wave of `workers`, counted while the next one is multiplied."""
    cursor = open_ring(channel, ring, TRACE)
    row_tiles = tl.load(head + ROW_TILES)
    lead_tiles = tl.load(head + LEAD_TILES)
    blocks_n = blocks(hidden, BLOCK_N)
    pending = -1  # the stage of the tile that is stored but not counted
    for turn in range(turns_of(worker, workers, row_tiles * blocks_n, shift)):
        tile = unit_at(turn, worker, workers, shift)
        slot, chunk, width, at = combine_slot(tile, row_tiles, lead_tiles, blocks_n, chunk_blocks)
        expert, row, _, first, height = look_up(tiles, slot)
        row, block_n, stage = combine_place(chunk, width, at, row_tiles, lead_tiles, chunk_blocks, group_m, row, first,
                                            height, BLOCK_M)  # fmt: skip
        show_tile(channel, COMPUTE, tile, PROGRESS)
        cursor = mark(ring, cursor, TILE_BEGIN, tile, channel.rank, TRACE)
        col = block_n * BLOCK_N
        if BACKWARD:
            acc = multiply_turned(h_desc, row, w_desc, expert * inner, col, inner, BLOCK_M, BLOCK_N, BLOCK_K)
        else:
            acc = multiply(h_desc, row, w_desc, expert * hidden + col, inner, BLOCK_M, BLOCK_N, BLOCK_K, W_IS_NK=True)
        if pending >= 0:
            finish_tile(channel, head, pending,
                        tiles_of_stage(pending, row_tiles, lead_tiles, blocks_n, chunk_blocks))  # fmt: skip
        parts = quarters(acc, BLOCK_M, BLOCK_N)
        for index in tl.static_range(4):
            y_desc.store([row, col + index * (BLOCK_N // 4)], parts[index].to(y_ptr.dtype.element_ty))
        pending = stage
        cursor = mark(ring, cursor, TILE_END, tile, channel.rank, TRACE)
    if pending >= 0:
        finish_tile(channel, head, pending, tiles_of_stage(pending, row_tiles, lead_tiles, blocks_n, chunk_blocks))
    show_done(channel, COMPUTE, PROGRESS)
    close_ring(ring, cursor, COMPUTE, channel.operator, TRACE)


@triton.jit
def multiply_turned(h_desc, row, w_desc, first, col, inner, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
                    BLOCK_K: tl.constexpr):  # fmt: skip
    """Rows of h times columns of an expert's weight [K, N], which begins at row `first`, in fp32."""
    acc = tl.zeros((BLOCK_M, BLOCK_N), dtype=tl.float32)
    for k in range(0, inner, BLOCK_K):
        acc = tl.dot(h_desc.load([row, k]), expert_block(w_desc, first, k, col, inner, BLOCK_K), acc)
    return acc


@triton.jit
def jobs_of(head, source, TOKENS: tl.constexpr):
    """Blocks of tokens of a rank."""
    return blocks(tl.load(head + TOKENS_OF + source), TOKENS)


@triton.jit
def count_jobs(channel, head, blocks_n, chunk_blocks, TOKENS: tl.constexpr):
    """Jobs of one chunk, those of our own tokens among them, and the chunks."""
    of_chunk = 0
    for source in range(channel.world_size):
        of_chunk += jobs_of(head, source, TOKENS)
    return of_chunk, jobs_of(head, channel.rank, TOKENS), blocks(blocks_n, chunk_blocks)


@triton.jit
def next_job(channel, head, sent, added, chunks, of_chunk, own, own_first):
    """Take a job of the first `chunks` chunks: of the peers' tokens where their rows are there, else of our own.

    Each chunk has two queues, of the peers' tokens and of ours. What peers wait for goes first; while its tiles are not
    done, what is left of our own tokens' earlier chunks is taken, with `own_first` also when they are. A chunk's own
    jobs are taken only when all of its peers' are: these wait for tiles alone, so ranks never wait for each other with
    all that they have. `sent` and `added` are how many chunks' jobs of the peers' and of our own tokens are all taken,
    as far as the caller knows.

    Returns:
        (job, or -1 when there is none; the two numbers as they are now).
    """
    job = -1
    while (job < 0) & ((sent < chunks) | (added < chunks)):
        peers = sent < chunks
        if peers & (added < sent):
            peers = (own_first == 0) & consumer_tile_seen(channel, STAGE_DONE + 2 * sent, channel.rank)
        ours = 1 - peers.to(tl.int32)
        chunk = tl.where(peers, sent, added)
        here = tl.where(peers, of_chunk - own, own)
        taken = here
        if here > 0:
            taken = tl.atomic_add(head + JOBS + 2 * chunk + ours, 1, sem="relaxed", scope="gpu")
        if taken < here:
            job = chunk * of_chunk + ours * (of_chunk - own) + taken
        else:
            sent += 1 - ours
            added += ours
    return job, sent, added


@triton.jit
def find_job(channel, head, inner, TOKENS: tl.constexpr):
    """The rank whose tokens a job of a chunk adds up, and which block of them: our own rank's come last."""
    owner = channel.rank + 0
    block = inner
    found = 0
    for step in range(1, channel.world_size + 1):
        source = (channel.rank + step) % channel.world_size
        here = jobs_of(head, source, TOKENS)
        if found == 0:
            owner = source
            if block < here:
                found = 1
            else:
                block -= here
    return owner, block


@triton.jit
def take_jobs(channel, y_ptr, out_ptr, ids_ptr, head, pair_row, pair_gate, staging_bytes, pitch, experts, hidden,
              chunk_blocks, own_first, ring, BLOCK_N: tl.constexpr, TOP_K: tl.constexpr, MOST_HERE: tl.constexpr,
              TOKENS: tl.constexpr, COLS: tl.constexpr, PROGRESS: tl.constexpr, TRACE: tl.constexpr):  # fmt: skip
    """Take jobs until there is none: the peers' tokens first, the nearest rank behind us first."""
    cursor = open_ring(channel, ring, TRACE)
    of_chunk, own, chunks = count_jobs(channel, head, blocks(hidden, BLOCK_N), chunk_blocks, TOKENS)
    job, sent, added = next_job(channel, head, chunks * 0, chunks * 0, chunks, of_chunk, own, own_first)
    while job >= 0:
        chunk = job // of_chunk
        owner, block = find_job(channel, head, job % of_chunk, TOKENS)
        show_tile(channel, COMMUNICATE, job, PROGRESS)
        cursor = mark(ring, cursor, WAIT_BEGIN, job, owner, TRACE)
        code = await_rows(channel, chunk, block, owner, pitch, job, COMMUNICATE, TOKENS)
        cursor = mark(ring, cursor, WAIT_END, job, owner, TRACE)
        if code == 0:
            reduce_block(channel, y_ptr, out_ptr, ids_ptr, head, pair_row, pair_gate, staging_bytes, pitch, experts,
                         hidden, owner, block, chunk * chunk_blocks * BLOCK_N,
                         min((chunk + 1) * chunk_blocks * BLOCK_N, hidden), TOP_K, MOST_HERE, TOKENS, COLS)  # fmt: skip
            if owner != channel.rank:
                peer_tile_notify(channel, SENT + chunk * blocks(pitch, TOKENS) + block, owner)
                cursor = mark(ring, cursor, NOTIFY, job, owner, TRACE)
            job, sent, added = next_job(channel, head, sent, added, chunks, of_chunk, own, own_first)
        else:
            job = -1
    show_done(channel, COMMUNICATE, PROGRESS)
    close_ring(ring, cursor, COMMUNICATE, channel.operator, TRACE)


@triton.jit
def await_rows(channel, chunk, block, owner, pitch, job, ROLE: tl.constexpr, TOKENS: tl.constexpr):
    """Wait for what a job adds up: our tiles, and for our own tokens the peers' rows."""
    code = consumer_tile_wait(channel, STAGE_DONE + 2 * chunk, channel.rank, ROLE, job)
    if owner == channel.rank:
        if code == 0:
            code = consumer_tile_wait(channel, STAGE_DONE + 2 * chunk + 1, channel.rank, ROLE, job)
        for step in range(1, channel.world_size):
            peer = (channel.rank + step) % channel.world_size
            if code == 0:
                code = peer_tile_wait(channel, SENT + chunk * blocks(pitch, TOKENS) + block, peer, ROLE, job)
    return code


@triton.jit
def staging_of(channel, target, source, y_ptr, staging_bytes, pitch, hidden):
    """Where on rank `target` the rows lie that rank `source` sends it."""
    base = peer_data(channel, target, staging_bytes, y_ptr)
    return base + source.to(tl.int64) * pitch * hidden


@triton.jit
def reduce_block(channel, y_ptr, out_ptr, ids_ptr, head, pair_row, pair_gate, staging_bytes, pitch, experts, hidden,
                 owner, block, first_col, end_col, TOP_K: tl.constexpr, MOST_HERE: tl.constexpr, TOKENS: tl.constexpr,
                 COLS: tl.constexpr):  # fmt: skip
    """Add up a block of tokens, `COLS` columns at a time, and send or store the sums."""
    token = block * TOKENS + tl.arange(0, TOKENS)
    there = token < tl.load(head + TOKENS_OF + owner)
    pair = (owner * pitch + token) * MOST_HERE
    has_row = tl.zeros((TOKENS,), dtype=tl.int32)
    for place in tl.static_range(MOST_HERE):
        has_row |= (tl.load(pair_row + pair + place, mask=there, other=-1) >= 0).to(tl.int32)
    for at in range(first_col, end_col, COLS):
        cols = at + tl.arange(0, COLS)
        inside = (cols < end_col)[None, :]
        total = tl.zeros((TOKENS, COLS), dtype=tl.float32)
        for place in tl.static_range(MOST_HERE):
            row = tl.load(pair_row + pair + place, mask=there, other=-1)
            gate = tl.load(pair_gate + pair + place, mask=there, other=0.0)
            part = tl.load(y_ptr + row.to(tl.int64)[:, None] * hidden + cols[None, :],
                           mask=(row >= 0)[:, None] & inside, other=0.0)  # fmt: skip
            total += tl.where(row >= 0, gate, 0.0)[:, None] * part.to(tl.float32)
        offset = token.to(tl.int64)[:, None] * hidden + cols[None, :]
        if owner != channel.rank:
            target = staging_of(channel, owner, channel.rank, y_ptr, staging_bytes, pitch, hidden)
            tl.store(target + offset, total.to(y_ptr.dtype.element_ty), mask=(has_row > 0)[:, None] & inside)
        else:
            total = add_ranks(channel, total, ids_ptr, y_ptr, staging_bytes, pitch, experts, hidden, token, there,
                              offset, inside, TOP_K, TOKENS, COLS)  # fmt: skip
            tl.store(out_ptr + offset, total.to(out_ptr.dtype.element_ty), mask=there[:, None] & inside)


@triton.jit
def add_ranks(channel, own, ids_ptr, y_ptr, staging_bytes, pitch, experts, hidden, token, there, offset, inside,
              TOP_K: tl.constexpr, TOKENS: tl.constexpr, COLS: tl.constexpr):  # fmt: skip
    """The sum over ranks in the order of ranks, in fp32; a rank sent nothing for a token that has no expert there."""
    total = tl.zeros((TOKENS, COLS), dtype=tl.float32)
    for source in range(channel.world_size):
        if source == channel.rank:
            total += own
        else:
            sent = tl.zeros((TOKENS,), dtype=tl.int32)
            for place in tl.static_range(TOP_K):
                expert = tl.load(ids_ptr + token * TOP_K + place, mask=there, other=-1)
                sent |= ((expert >= source * experts) & (expert < (source + 1) * experts)).to(tl.int32)
            staging = staging_of(channel, channel.rank, source, y_ptr, staging_bytes, pitch, hidden)
            total += tl.load(staging + offset, mask=(sent > 0)[:, None] & inside, other=0.0).to(tl.float32)
    return total
