# SPDX-License-Identifier: Apache-2.0
"""MoE layer 1 with Hopper's warp specialisation: the same layer as `combine_kernel`, faster.

Roles as in `device/hopper_gemm.py`, and one more: the *reducers*, two warps beside the producer, take jobs while the
consumers of the same program multiply. So adding up and sending cost no multiprocessor, only what they read and write.
The consumers take jobs too when they have no tile left.

In the backward (`CFG.b_is_nk` False) h is the gradient of gate and up side by side, and the weight is w_in read the
other way round, [2 I, H] of each expert.

`combine_kernel`, in plain Triton, is the twin that the emulator runs.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    warpgroup_mma,
    warpgroup_mma_wait,
)

from megascale_kernels.device.hopper_gemm import Ring, column_slices, make_ring, next_slot, store_slice, tma_load
from megascale_kernels.device.layout import COMMUNICATE, COMPUTE, EPOCH
from megascale_kernels.device.primitives import peer_tile_notify
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
from megascale_kernels.device.signals import finish_launch, follow_launch, open_channel, publish_launch
from megascale_kernels.moe.kernels.combine_kernel import (
    LEAD_TILES,
    ROW_TILES,
    SENT,
    TOKENS_OF,
    announce_empty_stages,
    await_rows,
    count_jobs,
    find_job,
    finish_tile,
    next_job,
    staging_of,
)
from megascale_kernels.moe.kernels.dispatch_kernel import await_all_begun, say_begun
from megascale_kernels.moe.kernels.hopper_dispatch import boxes_of_weight, k_blocks_of, pass_slots
from megascale_kernels.moe.kernels.walk import (
    combine_place,
    combine_slot,
    look_up,
    rows_of_unit,
    tile_of,
    tiles_of_stage,
    turns_of,
    unit_at,
    whole_tiles,
)
from megascale_kernels.planning.tile_order import blocks

RUNTIME = (
    "slot", "rank", "signature", "deadline_us", "flags", "channels", "variant", "pitch", "experts", "group_m",
    "staging_bytes", "chunk_blocks", "mixes", "shift", "cuts", "staggers", "inner",
)  # fmt: skip
REDUCER_WARPS = gl.constexpr(2)
PRODUCER_WARPS = gl.constexpr(1)
TOKENS = gl.constexpr(8)  # of a job


@gluon.jit
def what_to_do(head, hidden, cuts, CFG: gl.constexpr):
    """Row tiles, those of the lead, blocks of columns, tiles, and how many of these are whole units."""
    row_tiles = gl.load(head + ROW_TILES)
    blocks_n = blocks(hidden, CFG.block_n)
    count = row_tiles * blocks_n
    return row_tiles, gl.load(head + LEAD_TILES), blocks_n, count, whole_tiles(count, gl.num_programs(0), cuts)


@gluon.jit
def tile_at(tile, row_tiles, lead_tiles, blocks_n, chunk_blocks, tiles):
    """What the list says of a tile."""
    entry, chunk, width, at = combine_slot(tile, gl.maximum(row_tiles, 1), lead_tiles, blocks_n, chunk_blocks)
    expert, row, end_row, first, height = look_up(tiles, entry)
    return chunk, width, at, expert, row, end_row, first, height


@gluon.jit
def make_expert_ring(h_desc, CFG: gl.constexpr):
    """As `make_ring`, for a weight read the other way round, whose boxes have three axes."""
    a = gl.allocate_shared_memory(h_desc.dtype, [CFG.slots * CFG.across_m] + h_desc.block_type.shape, h_desc.layout)
    b = gl.allocate_shared_memory(h_desc.dtype, [CFG.slots] + CFG.b_block, CFG.b_layout)
    full = gl.allocate_shared_memory(gl.int64, [CFG.slots, 1], mbarrier.MBarrierLayout())
    empty = gl.allocate_shared_memory(gl.int64, [CFG.slots, 1], mbarrier.MBarrierLayout())
    slots: gl.constexpr = CFG.slots
    for i in gl.static_range(slots):
        mbarrier.init(full.index(i), count=1)
        mbarrier.init(empty.index(i), count=CFG.consumers)
    fence_async_shared()
    return Ring(a, b, full, empty)


@gluon.jit
def fetch_rows(ring, h_desc, row, valid, w_desc, expert, column, hidden, inner, slot, phase, CFG: gl.constexpr):
    """Every K block of a unit into the ring: the upper rows and, if any is valid, the lower ones, and the weight.

    Of a weight [experts, K, N] what lies beyond K is zero, not another expert's. Nothing where no row is valid.
    """
    gl.static_assert(CFG.across_m == 2 and CFG.across_n == 1)
    half_bytes: gl.constexpr = CFG.rows * CFG.block_k * 2
    slot_bytes: gl.constexpr = CFG.slot_bytes
    for block in range(k_blocks_of(valid, inner, CFG)):
        full = ring.full.index(slot)
        mbarrier.wait(ring.empty.index(slot), phase)
        # One of the two: what is expected is known when it is compiled.
        mbarrier.expect(full, slot_bytes, pred=valid > CFG.rows)
        mbarrier.expect(full, slot_bytes - half_bytes, pred=valid <= CFG.rows)
        k = block * CFG.block_k
        tma_load(h_desc, [row, k], full, ring.a.index(slot * 2))
        if valid > CFG.rows:
            tma_load(h_desc, [row + CFG.rows, k], full, ring.a.index(slot * 2 + 1))
        if CFG.b_is_nk:
            tma_load(w_desc, [expert * hidden + column, k], full, ring.b.index(slot))
        else:
            tma_load(w_desc, [expert, k, column], full, boxes_of_weight(ring, CFG).index(slot))
        slot, phase = next_slot(slot, phase, CFG.slots)
    return slot, phase


@gluon.jit
def produce(ring, h_desc, w_desc, head, tiles, hidden, inner, group_m, chunk_blocks, shift, cuts, CFG: gl.constexpr):
    """Keep the ring full."""
    slot = 0
    phase = 1  # no slot is filled yet: the first lap finds every slot empty
    row_tiles, lead_tiles, blocks_n, count, whole = what_to_do(head, hidden, cuts, CFG)
    cta = gl.program_id(0)
    ctas = gl.num_programs(0)
    unit = unit_at(0, cta, ctas, shift)
    chunk, width, at, expert, row, end_row, first, height = tile_at(
        tile_of(unit, count, whole), row_tiles, lead_tiles, blocks_n, chunk_blocks, tiles
    )  # fmt: skip
    for turn in range(turns_of(cta, ctas, 2 * count - whole, shift)):
        of_tile = expert
        tile_row, block_n, _ = combine_place(chunk, width, at, row_tiles, lead_tiles, chunk_blocks, group_m, row, first,
                                             height, CFG.block_m)  # fmt: skip
        tile_row, valid = rows_of_unit(unit, whole, tile_row, end_row, CFG.block_m)
        # The list is read ahead, while this unit is loaded.
        unit = unit_at(turn + 1, cta, ctas, shift)
        chunk, width, at, expert, row, end_row, first, height = tile_at(
            tile_of(unit, count, whole), row_tiles, lead_tiles, blocks_n, chunk_blocks, tiles
        )  # fmt: skip
        slot, phase = fetch_rows(ring, h_desc, tile_row, valid, w_desc, of_tile, block_n * CFG.block_n, hidden, inner,
                                 slot, phase, CFG)  # fmt: skip


@gluon.jit
def multiply_and_count(ring, slot, phase, early, count, channel, head, pending, row_tiles, lead_tiles, blocks_n,
                       chunk_blocks, ME: gl.constexpr, CFG: gl.constexpr):  # fmt: skip
    """As `hopper_gemm.multiply`, and count the tile before behind the first `early` of the `count` K blocks.

    Every element is summed in the same order whatever `early` is. Nothing is in flight while a tile is counted, so the
    accumulator may wait there; and what orders the count (`finish_tile`) is the same at any place behind the stores.
    """
    rows: gl.constexpr = CFG.rows
    columns: gl.constexpr = CFG.columns
    layout: gl.constexpr = CFG.acc_layout
    acc = gl.zeros((rows, columns), gl.float32, layout)
    begin = early * 0
    end = early + 0
    for part in range(2):
        previous = slot + 0
        for block in range(begin, end):
            a = ring.a.index(slot * CFG.across_m + ME)
            b = ring.b.index(slot)
            if CFG.b_is_nk:
                b = b.permute((1, 0))
            mbarrier.wait(ring.full.index(slot), phase)
            token = warpgroup_mma(a, b, acc, is_async=True)
            acc = warpgroup_mma_wait(1, deps=(token,))
            mbarrier.arrive(ring.empty.index(previous), pred=block > begin)
            previous = slot
            slot, phase = next_slot(slot, phase, CFG.slots)
        acc = warpgroup_mma_wait(0, deps=(acc,))
        mbarrier.arrive(ring.empty.index(previous), pred=end > begin)
        if part == 0:
            count_pending(channel, head, pending, row_tiles, lead_tiles, blocks_n, chunk_blocks, CFG)
        begin = end + 0
        end = count + 0
    return acc, slot, phase


@gluon.jit
def multiply_tiles(ring, staging, y_desc, head, tiles, channel, events, cursor, hidden, inner, group_m, chunk_blocks,
                   shift, cuts, staggers, ME: gl.constexpr, CFG: gl.constexpr, PROGRESS: gl.constexpr,
                   TRACE: gl.constexpr):  # fmt: skip
    """This consumer's half of every unit, counted while the next one is multiplied; returns the trace's cursor.

    A tile is counted by each consumer; one that is cut by each of the two programs that have a half of it, once. A
    count takes its round trip to the L2 cache, and the consumer multiplies nothing meanwhile. With `staggers` one
    consumer counts after a third of the next product and the other after two thirds: while one waits the other has the
    tensor cores, as far as the ring is filled. Without, both count when that product has ended, at the same time.
    """
    cta = gl.program_id(0)
    ctas = gl.num_programs(0)
    row_tiles, lead_tiles, blocks_n, count, whole = what_to_do(head, hidden, cuts, CFG)
    k_blocks = blocks(inner, CFG.block_k)
    early = gl.where(staggers != 0, k_blocks * (ME + 1) // (CFG.consumers + 1), k_blocks)
    slot = 0
    phase = 0
    pending = -1  # the stage of the tile that is stored but not counted
    unit = unit_at(0, cta, ctas, shift)
    tile = tile_of(unit, count, whole)
    chunk, width, at, _, row, end_row, first, height = tile_at(
        tile, row_tiles, lead_tiles, blocks_n, chunk_blocks, tiles
    )  # fmt: skip
    for turn in range(turns_of(cta, ctas, 2 * count - whole, shift)):
        tile_row, block_n, stage = combine_place(chunk, width, at, row_tiles, lead_tiles, chunk_blocks, group_m, row,
                                                 first, height, CFG.block_m)  # fmt: skip
        tile_row, valid = rows_of_unit(unit, whole, tile_row, end_row, CFG.block_m)
        counts = (unit < whole) | (ME == 0)
        # The list is read ahead: it arrives while this unit is multiplied.
        unit = unit_at(turn + 1, cta, ctas, shift)
        next_tile = tile_of(unit, count, whole)
        chunk, width, at, _, row, end_row, first, height = tile_at(
            next_tile, row_tiles, lead_tiles, blocks_n, chunk_blocks, tiles
        )  # fmt: skip
        show_tile(channel, COMPUTE, tile, PROGRESS)
        cursor = mark(events, cursor, TILE_BEGIN, tile, channel.rank, TRACE)
        if valid > ME * CFG.rows:
            acc, slot, phase = multiply_and_count(ring, slot, phase, early, k_blocks, channel, head, pending, row_tiles,
                                                  lead_tiles, blocks_n, chunk_blocks, ME, CFG)  # fmt: skip
            slices = column_slices(acc, CFG.columns // CFG.store_columns)
            for i in gl.static_range(CFG.columns // CFG.store_columns):
                store_slice(slices[i], staging, y_desc, tile_row + ME * CFG.rows, block_n * CFG.block_n, i, ME, CFG)
        else:
            slot, phase = pass_slots(ring, slot, phase, k_blocks_of(valid, inner, CFG), CFG)
            count_pending(channel, head, pending, row_tiles, lead_tiles, blocks_n, chunk_blocks, CFG)
        pending = gl.where(counts, stage, -1)
        cursor = mark(events, cursor, TILE_END, tile, channel.rank, TRACE)
        tile = next_tile
    count_pending(channel, head, pending, row_tiles, lead_tiles, blocks_n, chunk_blocks, CFG)
    return cursor


@gluon.jit
def count_pending(channel, head, pending, row_tiles, lead_tiles, blocks_n, chunk_blocks, CFG: gl.constexpr):
    """Count the tile before, whose stores have had a tile's time to arrive; -1 is none."""
    if pending >= 0:
        of_stage = tiles_of_stage(pending, row_tiles, lead_tiles, blocks_n, chunk_blocks)
        finish_tile(channel, head, pending, of_stage * CFG.consumers)


@gluon.jit
def pairs_of(pair_row, pair_gate, pair, there, MOST_HERE: gl.constexpr):
    """The rows in y and the gates of some tokens' pairs, a tensor a place; and whether a token has any row."""
    rows = ()  # tuples that grow at compile time
    gates = ()
    has_row = there & False
    for place in gl.static_range(MOST_HERE):
        row = gl.load(pair_row + pair + place, mask=there, other=-1)
        gate = gl.load(pair_gate + pair + place, mask=there, other=0.0)
        ours = row >= 0
        has_row = has_row | ours
        rows = rows + (row,)  # type: ignore[assignment] # it grows
        gates = gates + (gl.where(ours, gate, 0.0),)  # type: ignore[assignment] # it grows
    return rows, gates, has_row


@gluon.jit
def senders_of(ids_ptr, token, there, experts, world_size, TOP_K: gl.constexpr):
    """A bit for each rank that has an expert of a token: the others have sent nothing for it."""
    senders = there.to(gl.int32) * 0
    for place in gl.static_range(TOP_K):
        expert = gl.load(ids_ptr + token * TOP_K + place, mask=there, other=-1)
        exists = (expert >= 0) & (expert < experts * world_size)
        senders = senders | gl.where(exists, 1 << (gl.where(exists, expert, 0) // experts), 0)
    return senders


@gluon.jit
def add_up(y_ptr, rows, gates, cols, inside, hidden, MOST_HERE: gl.constexpr, ROWS: gl.constexpr,
           COLS: gl.constexpr, layout: gl.constexpr):  # fmt: skip
    """The sum of some tokens' rows in y, in fp32, in the order of places."""
    total = gl.zeros((ROWS, COLS), gl.float32, layout)
    for place in gl.static_range(MOST_HERE):
        row = rows[place]
        part = gl.load(y_ptr + row.to(gl.int64)[:, None] * hidden + cols[None, :],
                       mask=(row >= 0)[:, None] & inside[None, :], other=0.0)  # fmt: skip
        total += gates[place][:, None] * part.to(gl.float32)
    return total


@gluon.jit
def add_ranks(channel, own, senders, y_ptr, staging_bytes, pitch, hidden, offset, inside, ROWS: gl.constexpr,
              COLS: gl.constexpr, layout: gl.constexpr):  # fmt: skip
    """The sum over ranks in the order of ranks, in fp32."""
    total = gl.zeros((ROWS, COLS), gl.float32, layout)
    for source in range(channel.world_size):
        if source == channel.rank:
            total += own
        else:
            staging = staging_of(channel, channel.rank, source, y_ptr, staging_bytes, pitch, hidden)
            sent = ((senders >> source) & 1) > 0
            part = gl.load(staging + offset, mask=sent[:, None] & inside[None, :], other=0.0)
            total += part.to(gl.float32)
    return total


@gluon.jit
def tokens_of(block, first, WARPS: gl.constexpr, layout: gl.constexpr):
    """Tokens of a block, a token a warp, from its `first` on."""
    return block * TOKENS + first + gl.arange(0, WARPS, layout=gl.SliceLayout(1, layout))


@gluon.jit
def reduce_block(channel, y_ptr, out_ptr, ids_ptr, pair_row, pair_gate, staging_bytes, pitch, experts, hidden, owner,
                 block, tokens, pairs, first_col, end_col, TOP_K: gl.constexpr, MOST_HERE: gl.constexpr,
                 WARPS: gl.constexpr, COLS: gl.constexpr, layout: gl.constexpr):  # fmt: skip
    """Add up a block of tokens, a token a warp, and send or store the sums; `pairs` are those of the first tokens."""
    for first in range(0, TOKENS, WARPS):
        token = tokens_of(block, first, WARPS, layout)
        there = token < tokens
        rows, gates, has_row = pairs
        # What the next tokens add up is looked up while these are added up.
        later = tokens_of(block, first + WARPS, WARPS, layout)
        pairs = pairs_of(pair_row, pair_gate, (owner * pitch + later) * MOST_HERE,
                         (later < tokens) & (first + WARPS < TOKENS), MOST_HERE)  # fmt: skip
        if owner != channel.rank:
            target = staging_of(channel, owner, channel.rank, y_ptr, staging_bytes, pitch, hidden)
            for at in range(first_col, end_col, COLS):
                cols = at + gl.arange(0, COLS, layout=gl.SliceLayout(0, layout))
                inside = cols < end_col
                total = add_up(y_ptr, rows, gates, cols, inside, hidden, MOST_HERE, WARPS, COLS, layout)
                offset = token.to(gl.int64)[:, None] * hidden + cols[None, :]
                gl.store(target + offset, total.to(y_ptr.dtype.element_ty), mask=has_row[:, None] & inside[None, :])
        else:
            senders = senders_of(ids_ptr, token, there, experts, channel.world_size, TOP_K)
            for at in range(first_col, end_col, COLS):
                cols = at + gl.arange(0, COLS, layout=gl.SliceLayout(0, layout))
                inside = cols < end_col
                total = add_up(y_ptr, rows, gates, cols, inside, hidden, MOST_HERE, WARPS, COLS, layout)
                offset = token.to(gl.int64)[:, None] * hidden + cols[None, :]
                total = add_ranks(channel, total, senders, y_ptr, staging_bytes, pitch, hidden, offset, inside, WARPS,
                                  COLS, layout)  # fmt: skip
                gl.store(out_ptr + offset, total.to(y_ptr.dtype.element_ty), mask=there[:, None] & inside[None, :])


@gluon.jit
def take_jobs(channel, y_ptr, out_ptr, ids_ptr, head, pair_row, pair_gate, staging_bytes, pitch, experts, hidden,
              chunk_blocks, own_first, events, cursor, BLOCK_N: gl.constexpr, TOP_K: gl.constexpr,
              MOST_HERE: gl.constexpr, WARPS: gl.constexpr, COLS: gl.constexpr, ROLE: gl.constexpr, SHOWS: gl.constexpr,
              TRACE: gl.constexpr):  # fmt: skip
    """Take jobs until there is none, as in `combine_kernel`; returns the trace's cursor."""
    layout: gl.constexpr = gl.BlockedLayout([1, 8], [1, 32], [WARPS, 1], [1, 0])
    of_chunk, own, chunks = count_jobs(channel, head, blocks(hidden, BLOCK_N), chunk_blocks, TOKENS)
    # Beside the products a job takes three times as long: in the last chunk, for which all wait, those are left to the
    # consumers, which have nothing else to do by then.
    last: gl.constexpr = 1 if ROLE == COMMUNICATE else 0
    chunks -= last
    job, sent, added = next_job(channel, head, chunks * 0, chunks * 0, chunks, of_chunk, own, own_first)
    while job >= 0:
        chunk = job // of_chunk
        owner, block = find_job(channel, head, job % of_chunk, TOKENS)
        tokens = gl.load(head + TOKENS_OF + owner)
        token = tokens_of(block, 0, WARPS, layout)
        # The tables are there before what they lead to.
        pairs = pairs_of(pair_row, pair_gate, (owner * pitch + token) * MOST_HERE, token < tokens, MOST_HERE)
        show_tile(channel, ROLE, job, SHOWS)
        cursor = mark(events, cursor, WAIT_BEGIN, job, owner, TRACE)
        code = await_rows(channel, chunk, block, owner, pitch, job, ROLE, TOKENS)
        cursor = mark(events, cursor, WAIT_END, job, owner, TRACE)
        if code == 0:
            end_col = gl.minimum((chunk + 1) * chunk_blocks * BLOCK_N, hidden)
            reduce_block(channel, y_ptr, out_ptr, ids_ptr, pair_row, pair_gate, staging_bytes, pitch, experts, hidden,
                         owner, block, tokens, pairs, chunk * chunk_blocks * BLOCK_N, end_col, TOP_K, MOST_HERE, WARPS,
                         COLS, layout)  # fmt: skip
            if owner != channel.rank:
                peer_tile_notify(channel, SENT + chunk * blocks(pitch, TOKENS) + block, owner)
                cursor = mark(events, cursor, NOTIFY, job, owner, TRACE)
            job, sent, added = next_job(channel, head, sent, added, chunks, of_chunk, own, own_first)
        else:
            job = -1
    return cursor


@gluon.jit
def consume(ring, staging, y_desc, y_ptr, out_ptr, ids_ptr, head, pair_row, pair_gate, tiles, channel, board,
            trace, staging_bytes, variant, pitch, experts, hidden, inner, group_m, chunk_blocks, mixes, shift, cuts,
            staggers, ME: gl.constexpr, CFG: gl.constexpr, TOP_K: gl.constexpr, MOST_HERE: gl.constexpr,
            COLS: gl.constexpr, PROGRESS: gl.constexpr, TRACE: gl.constexpr):  # fmt: skip
    """Multiply, then take jobs. The first consumer tells of both: the board and the trace have one line for the two."""
    cta = gl.program_id(0)
    ctas = gl.num_programs(0)
    last_consumer: gl.constexpr = CFG.consumers - 1
    speaks: gl.constexpr = ME == 0
    shows: gl.constexpr = PROGRESS and speaks
    traces: gl.constexpr = TRACE and speaks
    if last_consumer == ME:
        if cta == ctas - 1:
            blocks_n = blocks(hidden, CFG.block_n)
            head_board(channel, board, ctas, gl.load(head + ROW_TILES) * blocks_n, pitch, hidden, inner, PROGRESS)
            publish_launch(channel, pitch, hidden, inner, variant)
            say_begun(channel)
            announce_empty_stages(channel, head, blocks_n, chunk_blocks)
    events = ring_of(trace, cta, COMPUTE)
    cursor = open_ring(channel, events, traces)
    cursor = multiply_tiles(ring, staging, y_desc, head, tiles, channel, events, cursor, hidden, inner, group_m,
                            chunk_blocks, shift, cuts, staggers, ME, CFG, shows, traces)  # fmt: skip
    cursor = take_jobs(channel, y_ptr, out_ptr, ids_ptr, head, pair_row, pair_gate, staging_bytes, pitch, experts,
                       hidden, chunk_blocks, mixes & ME, events, cursor, CFG.block_n, TOP_K, MOST_HERE, 4, COLS,
                       COMPUTE, shows, traces)  # fmt: skip
    show_done(channel, COMPUTE, shows)
    close_ring(events, cursor, COMPUTE, channel.operator, traces)
    if last_consumer == ME:
        if cta == ctas - 1:
            await_all_begun(channel)
    finish_launch(channel, ctas * (CFG.consumers + 1), 0)


@gluon.jit
def reduce(y_ptr, out_ptr, ids_ptr, head, pair_row, pair_gate, channel, trace, staging_bytes, pitch, experts, hidden,
           chunk_blocks, CFG: gl.constexpr, TOP_K: gl.constexpr, MOST_HERE: gl.constexpr, COLS: gl.constexpr,
           PROGRESS: gl.constexpr, TRACE: gl.constexpr):  # fmt: skip
    """Take jobs while the consumers multiply."""
    events = ring_of(trace, gl.program_id(0), COMMUNICATE)
    cursor = open_ring(channel, events, TRACE)
    cursor = take_jobs(channel, y_ptr, out_ptr, ids_ptr, head, pair_row, pair_gate, staging_bytes, pitch, experts,
                       hidden, chunk_blocks, 0, events, cursor, CFG.block_n, TOP_K, MOST_HERE, REDUCER_WARPS,
                       COLS, COMMUNICATE, PROGRESS, TRACE)  # fmt: skip
    show_done(channel, COMMUNICATE, PROGRESS)
    close_ring(events, cursor, COMMUNICATE, channel.operator, TRACE)
    finish_launch(channel, gl.num_programs(0) * (CFG.consumers + 1), 0)


@gluon.jit(do_not_specialize=RUNTIME)
def hopper_combine_kernel(
    h_desc, w_desc, y_desc, y_ptr, out_ptr, ids_ptr, head, pair_row, pair_gate, tiles,
    control, peers, status, board, trace,
    flags, channels, slot, rank, world_size, signature, deadline_us, staging_bytes, variant,
    pitch, experts, hidden, inner, group_m, chunk_blocks, mixes, shift, cuts, staggers,
    CFG: gl.constexpr, TOP_K: gl.constexpr, MOST_HERE: gl.constexpr, REDUCER_COLS: gl.constexpr,
    CONSUMER_COLS: gl.constexpr, OPERATOR: gl.constexpr, PROGRESS: gl.constexpr, TRACE: gl.constexpr,
    FOLLOWS: gl.constexpr,
):  # fmt: skip
    """Entry point: build the ring, then part into roles. One program per multiprocessor."""
    if CFG.b_is_nk:  # noqa: SIM108 - Triton decides at compile time which branch exists
        ring = make_ring(h_desc, w_desc, CFG)
    else:
        ring = make_expert_ring(h_desc, CFG)
    staging = gl.allocate_shared_memory(
        y_desc.dtype, [CFG.consumers * CFG.store_buffers, CFG.rows, CFG.store_columns], CFG.store_layout
    )
    gl.static_assert(CFG.consumers == 2)
    if FOLLOWS:
        follow_launch()
    channel = open_channel(
        gl.load(control + EPOCH) + 1, control, peers, status, board, flags, channels, slot, rank, world_size,
        signature, OPERATOR, deadline_us,
    )  # fmt: skip
    gl.warp_specialize(
        [
            (
                consume,
                (ring, staging, y_desc, y_ptr, out_ptr, ids_ptr, head, pair_row, pair_gate, tiles, channel,
                 board, trace, staging_bytes, variant, pitch, experts, hidden, inner, group_m, chunk_blocks,
                 mixes, shift, cuts, staggers, 0, CFG, TOP_K, MOST_HERE, CONSUMER_COLS, PROGRESS, TRACE),
            ),
            (
                consume,
                (ring, staging, y_desc, y_ptr, out_ptr, ids_ptr, head, pair_row, pair_gate, tiles, channel,
                 board, trace, staging_bytes, variant, pitch, experts, hidden, inner, group_m, chunk_blocks,
                 mixes, shift, cuts, staggers, 1, CFG, TOP_K, MOST_HERE, CONSUMER_COLS, PROGRESS, TRACE),
            ),
            (
                reduce,
                (y_ptr, out_ptr, ids_ptr, head, pair_row, pair_gate, channel, trace, staging_bytes, pitch, experts,
                 hidden, chunk_blocks, CFG, TOP_K, MOST_HERE, REDUCER_COLS, PROGRESS, TRACE),
            ),
            (
                produce,
                (ring, h_desc, w_desc, head, tiles, hidden, inner, group_m, chunk_blocks, shift, cuts, CFG),
            ),
        ],
        [4, REDUCER_WARPS, PRODUCER_WARPS],
        [CFG.consumer_registers, CFG.producer_registers, CFG.producer_registers],
    )  # fmt: skip
