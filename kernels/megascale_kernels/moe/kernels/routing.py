# SPDX-License-Identifier: Apache-2.0
"""From every rank's choice of experts to the tables of this rank's experts, in one launch and without the host.

A counting sort over ranks and experts. Every program (the last, which tells peers and the copy stream of the launch,
only where there is a block for it)

1. sends its blocks of our tokens' experts and gates to all ranks, our own among them, and notifies them;
2. counts the pairs of each of our experts in its blocks of all ranks' tokens, as each arrives;
3. meets the others of this rank; then each knows all counts, hence where every expert's and every block's rows begin;
4. writes the rows of its blocks, and the row tiles of its experts.

Each pair's place is a sum of counts, so tables are the same, bit for bit, however programs were scheduled. The order of
blocks is the order in which we read ranks: our own first.

What tables mean: `tables.py`. An expert below zero, or beyond the last one, does not exist: its pair was dropped.
"""

import triton
import triton.language as tl

from megascale_kernels.device.layout import COMMUNICATE, COMPUTE, EPOCH, MET, OPERATORS
from megascale_kernels.device.primitives import consumer_tile_wait, peer_tile_notify, producer_tile_notify
from megascale_kernels.device.progress import head_board, show_done, show_tile
from megascale_kernels.device.signals import finish_launch, follow_launch, open_channel, peer_words, publish_launch
from megascale_kernels.moe import tables
from megascale_kernels.moe.kernels.walk import whole_tiles
from megascale_kernels.planning.tile_order import blocks

MOE_ROUTE = OPERATORS.index("moe_route")
RUNTIME = (
    "slot", "rank", "signature", "deadline_us", "flags", "channels", "tokens", "pitch", "first_expert", "lead_rows",
    "half_rows", "cuts", "columns", "programs", "routes_words",
)  # fmt: skip

ROW_TILES = tl.constexpr(tables.ROW_TILES)
LEAD_TILES = tl.constexpr(tables.LEAD_TILES)
ARRIVALS = tl.constexpr(tables.ARRIVALS)
TOKENS_OF = tl.constexpr(tables.TOKENS_OF)
STAGES = tl.constexpr(tables.STAGES)
COUNTERS = tl.constexpr(4 * tables.MOST_CHUNKS)  # of layer 1's stages and of its jobs, which follow them
TILE_WORDS = tl.constexpr(tables.TILE_WORDS)
HEADER_WORDS = tl.constexpr(tables.HEADER_WORDS)
# Flags of a source rank: 0 says that all its programs have counted (our own rank's alone), 1 + p that program p sent.
COUNTED = tl.constexpr(0)
SENT = tl.constexpr(1)
COUNTED_CELLS = tl.constexpr(8192)  # of the table of counts, read together
SLOTS_AT_ONCE = tl.constexpr(64)  # row tiles, and rows of padding, that are written together


@triton.jit(do_not_specialize=RUNTIME)
def route_kernel(
    ids_ptr, gates_ptr, head, counts, begins, rows, pair_row, pair_gate, tiles,
    control, peers, status, board, trace,  # noqa: ARG001 - it has no trace, and what opens a channel has one
    flags, channels, slot, rank, world_size, signature, deadline_us, routes_words,
    tokens, pitch, first_expert, lead_rows, half_rows, cuts, columns, programs,
    TOP_K: tl.constexpr, MOST_HERE: tl.constexpr, EXPERTS: tl.constexpr, PADDED: tl.constexpr,
    TILE_ROWS: tl.constexpr, TOKENS: tl.constexpr, PAIRS: tl.constexpr, OPERATOR: tl.constexpr, PROGRESS: tl.constexpr,
    FOLLOWS: tl.constexpr,
):  # fmt: skip
    """One launch: `TOKENS` tokens a block, `PAIRS` pairs at once; every program must be resident."""
    cta = tl.program_id(0)
    ctas = tl.num_programs(0)
    if FOLLOWS:
        follow_launch()
    epoch = tl.load(control + EPOCH) + 1
    channel = open_channel(
        epoch, control, peers, status, board, flags, channels, slot, rank, world_size,
        signature, OPERATOR, deadline_us,
    )  # fmt: skip
    workers = routers(world_size, pitch, TOKENS)
    if cta == ctas - 1:
        head_board(channel, board, ctas, world_size, pitch, PADDED, TOP_K, PROGRESS)
        publish_launch(channel, pitch, EXPERTS, TOP_K, TILE_ROWS)
        tl.store(head + STAGES + tl.arange(0, COUNTERS), tl.zeros((COUNTERS,), dtype=tl.int32))
    if cta >= workers:
        let_copies_begin(channel, epoch)
    else:
        send(channel, ids_ptr, gates_ptr, routes_words, tokens, pitch, workers, TOP_K, TOKENS, PAIRS, PROGRESS)
        if cta == ctas - 1:
            let_copies_begin(channel, epoch)
        code = count(channel, head, counts, routes_words, pitch, first_expert, workers, TOP_K, EXPERTS, PADDED, TOKENS,
                     PAIRS, PROGRESS)  # fmt: skip
        if code == 0:
            code = meet_programs(channel, head, workers)
        if code == 0:
            place(channel, head, counts, begins, rows, pair_row, pair_gate, tiles, routes_words, pitch, first_expert,
                  lead_rows, half_rows, cuts, columns, programs, workers, TOP_K, MOST_HERE, EXPERTS, PADDED, TILE_ROWS,
                  TOKENS, PAIRS)  # fmt: skip
    show_done(channel, COMPUTE, PROGRESS)
    show_done(channel, COMMUNICATE, PROGRESS)
    finish_launch(channel, ctas, 0)


@triton.jit
def routers(world_size, pitch, TOKENS: tl.constexpr):
    """How many programs route: where there is no block for the last one, which tells of the launch, all others."""
    ctas = tl.num_programs(0)
    return tl.where((blocks(pitch, TOKENS) * world_size < ctas) & (ctas > 1), ctas - 1, ctas)


@triton.jit
def region_of(words, routes_words, source, pitch, TOP_K: tl.constexpr):
    """Where within some rank's words the routing of `source` lies: header, experts, gates."""
    region = words + routes_words + source * (HEADER_WORDS + 2 * pitch * TOP_K)
    return region, region + HEADER_WORDS, region + HEADER_WORDS + pitch * TOP_K


@triton.jit
def send(channel, ids_ptr, gates_ptr, routes_words, tokens, pitch, workers, TOP_K: tl.constexpr, TOKENS: tl.constexpr,
         PAIRS: tl.constexpr, PROGRESS: tl.constexpr):  # fmt: skip
    """Step 1: this program's blocks of our tokens, to every rank, and how many tokens we have."""
    cta = tl.program_id(0)
    show_tile(channel, COMMUNICATE, cta, PROGRESS)
    for step in range(channel.world_size):
        peer = (channel.rank + step) % channel.world_size
        header, ids, gates = region_of(peer_words(channel, peer), routes_words, channel.rank, pitch, TOP_K)
        tl.store(header + cta, tokens)
        for block in range(cta, blocks(tokens, TOKENS), workers):
            first = block * TOKENS * TOP_K
            end = min((block + 1) * TOKENS, tokens) * TOP_K
            for at in range(first, end, PAIRS):
                here = at + tl.arange(0, PAIRS)
                mask = here < end
                tl.store(ids + here, tl.load(ids_ptr + here, mask=mask), mask=mask)
                gate = tl.load(gates_ptr + here, mask=mask)
                tl.store(gates + here, gate.to(tl.int32, bitcast=True), mask=mask)
    # One after the other they would each wait until the stores before them have arrived.
    for step in range(channel.world_size):
        peer_tile_notify(channel, SENT + cta, (channel.rank + step) % channel.world_size)


@triton.jit
def let_copies_begin(channel, epoch):
    """Tell this rank's copy stream that the next launch's copies may come, which travel while this one counts.

    Every peer has begun this launch, hence ended the one before, the last that used the slot of the next. Told in any
    case: the copy stream waits without a deadline, and where a peer is missing this launch has given up.
    """
    code = 0
    for step in range(1, channel.world_size):
        if code == 0:
            code = consumer_tile_wait(channel, SENT, (channel.rank + step) % channel.world_size, COMMUNICATE, 0)
    tl.debug_barrier()
    tl.atomic_xchg(channel.control + MET, epoch, sem="release", scope="sys")


@triton.jit
def pairs_of(ids, at, end, first_expert, EXPERTS: tl.constexpr, PADDED: tl.constexpr, PAIRS: tl.constexpr):
    """Pairs [at, at + `PAIRS`) below `end`, one row each, with a one in the column of its expert if that is ours."""
    expert = experts_of(ids, at + tl.arange(0, PAIRS), end, first_expert, EXPERTS)
    columns = tl.arange(0, PADDED)
    return (expert[:, None] == columns[None, :]).to(tl.int32)


@triton.jit
def count(channel, head, counts, routes_words, pitch, first_expert, workers, TOP_K: tl.constexpr, EXPERTS: tl.constexpr,
          PADDED: tl.constexpr, TOKENS: tl.constexpr, PAIRS: tl.constexpr, PROGRESS: tl.constexpr):  # fmt: skip
    """Step 2: pairs of each of our experts in this program's blocks, rank by rank, our own first."""
    of_rank = blocks(pitch, TOKENS)
    block = tl.program_id(0)
    code = 0
    while block < of_rank * channel.world_size:
        source = (channel.rank + block // of_rank) % channel.world_size
        inner = block % of_rank
        sender = inner % workers
        show_tile(channel, COMPUTE, block, PROGRESS)
        code = consumer_tile_wait(channel, SENT + sender, source, COMPUTE, block)
        if code == 0:
            header, ids, _ = region_of(channel.control, routes_words, source, pitch, TOP_K)
            tokens = tl.load(header + sender)
            if inner == 0:
                tl.store(head + TOKENS_OF + source, tokens)
            total = tl.zeros((PADDED,), dtype=tl.int32)
            end = min((inner + 1) * TOKENS, tokens) * TOP_K
            for at in range(inner * TOKENS * TOP_K, end, PAIRS):
                total += tl.sum(pairs_of(ids, at, end, first_expert, EXPERTS, PADDED, PAIRS), axis=0)
            tl.store(counts + block * PADDED + tl.arange(0, PADDED), total)
        block = tl.where(code == 0, block + workers, of_rank * channel.world_size)
    return code


@triton.jit
def meet_programs(channel, head, workers):
    """Step 3: the last of this rank's programs to come here tells the others."""
    tl.debug_barrier()
    come = tl.atomic_add(head + ARRIVALS, 1, sem="acq_rel", scope="gpu")
    if come == workers - 1:
        tl.atomic_xchg(head + ARRIVALS, 0, sem="relaxed", scope="gpu")
        producer_tile_notify(channel, COUNTED)
    return consumer_tile_wait(channel, COUNTED, channel.rank, COMPUTE, 0)


@triton.jit
def sum_counts(counts, block, of_rank, everything, PADDED: tl.constexpr):
    """Pairs of each expert in all blocks, in those of our own tokens, and in those before `block`."""
    experts = tl.arange(0, PADDED)
    total = tl.zeros((PADDED,), dtype=tl.int32)
    own = tl.zeros((PADDED,), dtype=tl.int32)
    before = tl.zeros((PADDED,), dtype=tl.int32)
    AT_ONCE: tl.constexpr = COUNTED_CELLS // PADDED
    for first in range(0, everything, AT_ONCE):
        here = first + tl.arange(0, AT_ONCE)
        part = tl.load(counts + here[:, None] * PADDED + experts[None, :], mask=(here < everything)[:, None], other=0)
        total += tl.sum(part, axis=0)
        own += tl.sum(tl.where((here < of_rank)[:, None], part, 0), axis=0)
        before += tl.sum(tl.where((here < block)[:, None], part, 0), axis=0)
    return total, own, before


@triton.jit
def place(channel, head, counts, begins, rows, pair_row, pair_gate, tiles, routes_words, pitch, first_expert, lead_rows,
          half_rows, cuts, columns, programs, workers, TOP_K: tl.constexpr, MOST_HERE: tl.constexpr,
          EXPERTS: tl.constexpr, PADDED: tl.constexpr, TILE_ROWS: tl.constexpr, TOKENS: tl.constexpr,
          PAIRS: tl.constexpr):  # fmt: skip
    """Step 4: where everything lies."""
    of_rank = blocks(pitch, TOKENS)
    everything = of_rank * channel.world_size
    is_first = 1
    for block in range(tl.program_id(0), tl.maximum(everything, tl.program_id(0) + 1), workers):
        total, own, before = sum_counts(counts, block, of_rank, everything, PADDED)
        height = blocks(total, TILE_ROWS)
        starts = (tl.cumsum(height, axis=0) - height) * TILE_ROWS
        if is_first == 1:
            list_tiles(head, tiles, rows, total, own, height, starts, lead_rows, half_rows, cuts, columns, programs,
                       workers, EXPERTS, PADDED, TILE_ROWS)  # fmt: skip
        is_first = 0
        if block < everything:
            tl.store(begins + block * PADDED + tl.arange(0, PADDED), starts + before)
            place_block(channel, block, starts + before, rows, pair_row, pair_gate, routes_words, pitch, first_expert,
                        workers, TOP_K, MOST_HERE, EXPERTS, PADDED, TOKENS, PAIRS)  # fmt: skip


@triton.jit
def experts_of(ids, here, end, first_expert, EXPERTS: tl.constexpr):
    """Which of our experts pairs chose; -1 for another rank's, a dropped pair's, and behind `end`."""
    expert = tl.load(ids + here, mask=here < end, other=-1) - first_expert
    return tl.where((expert >= 0) & (expert < EXPERTS) & (here < end), expert, -1)


@triton.jit
def place_block(channel, block, begin, rows, pair_row, pair_gate, routes_words, pitch, first_expert, workers,
                TOP_K: tl.constexpr, MOST_HERE: tl.constexpr, EXPERTS: tl.constexpr, PADDED: tl.constexpr,
                TOKENS: tl.constexpr, PAIRS: tl.constexpr):  # fmt: skip
    """The rows of a block's pairs: a pair follows the earlier pairs of its expert, `PAIRS` of which are compared.

    `begin` is where the block's rows of each expert begin.
    """
    of_rank = blocks(pitch, TOKENS)
    source = (channel.rank + block // of_rank) % channel.world_size
    inner = block % of_rank
    header, ids, gates = region_of(channel.control, routes_words, source, pitch, TOP_K)
    first = inner * TOKENS * TOP_K
    end = min((inner + 1) * TOKENS, tl.load(header + inner % workers)) * TOP_K
    for at in range(first, end, PAIRS):
        here = at + tl.arange(0, PAIRS)
        expert = experts_of(ids, here, end, first_expert, EXPERTS)
        ours = expert >= 0
        chose = (expert[:, None] == tl.arange(0, PADDED)[None, :]).to(tl.int32)
        precedes = (expert[None, :] == expert[:, None]) & (here[None, :] < here[:, None])
        row = tl.sum(chose * begin[None, :], axis=1) + tl.sum(precedes.to(tl.int32), axis=1)
        begin += tl.sum(chose, axis=0)
        tl.store(rows + row, source * pitch + here // TOP_K, mask=ours)
        slot = slot_of_pair(ids, here, end, ours, first_expert, TOP_K, EXPERTS)
        pair = (source * pitch + here // TOP_K) * MOST_HERE + slot
        has_place = (here < end) & (slot < MOST_HERE)
        tl.store(pair_row + pair, tl.where(ours, row, -1), mask=has_place)
        gate = tl.load(gates + here, mask=has_place)
        tl.store(pair_gate + pair, gate.to(tl.float32, bitcast=True), mask=has_place)


@triton.jit
def slot_of_pair(ids, here, end, ours, first_expert, TOP_K: tl.constexpr, EXPERTS: tl.constexpr):
    """Where a pair lies among its token's: ours first, in their order, then the others."""
    place = here % TOP_K
    before = tl.zeros_like(here)
    total = tl.zeros_like(here)
    for other in tl.static_range(TOP_K):
        is_ours = (experts_of(ids, here - place + other, end, first_expert, EXPERTS) >= 0).to(tl.int32)
        before += tl.where(other < place, is_ours, 0)
        total += is_ours
    return tl.where(ours, before, total + place - before)


@triton.jit
def list_tiles(head, tiles, rows, total, own, height, starts, lead_rows, half_rows, cuts, columns, programs,
               workers, EXPERTS: tl.constexpr, PADDED: tl.constexpr, TILE_ROWS: tl.constexpr):  # fmt: skip
    """Write the row tiles of every expert, the lead first, and the padding of its last one.

    Half ones that fill the last wave of layer 0, which has `columns` tiles of each and `programs` programs, come last,
    unless layer 0 `cuts` the tiles of that wave.
    """
    ours_alone = tl.where(own == total, height, own // TILE_ROWS)
    leads = (tl.cumsum(ours_alone, axis=0) - ours_alone) * TILE_ROWS < lead_rows
    lead = tl.where(leads, ours_alone, 0)
    row_tiles = tl.sum(height, axis=0)
    lead_tiles = tl.sum(lead, axis=0)
    half = ((height > lead) & (total - (height - 1) * TILE_ROWS <= half_rows)).to(tl.int32)
    halves = tl.sum(half, axis=0)
    filled = row_tiles * columns
    wanted = tl.where(whole_tiles(filled, programs, cuts) < filled, 0, blocks(filled % programs, columns))
    late = tl.where((wanted <= halves) & (halves - tl.cumsum(half, axis=0) < wanted), half, 0)
    rest = height - lead - late
    lead_first = tl.cumsum(lead, axis=0) - lead
    rest_first = lead_tiles + tl.cumsum(rest, axis=0) - rest
    late_first = row_tiles - tl.sum(late, axis=0) + tl.cumsum(late, axis=0) - late
    if tl.program_id(0) == 0:
        tl.store(head + ROW_TILES, row_tiles)
        tl.store(head + LEAD_TILES, lead_tiles)
    for expert in range(tl.program_id(0), EXPERTS, workers):
        row = of_expert(starts, expert, PADDED)
        end = row + of_expert(total, expert, PADDED)
        count = of_expert(lead, expert, PADDED)
        list_stretch(tiles, expert, row, end, of_expert(lead_first, expert, PADDED), count)
        row += count * TILE_ROWS
        count = of_expert(rest, expert, PADDED)
        list_stretch(tiles, expert, row, end, of_expert(rest_first, expert, PADDED), count)
        row += count * TILE_ROWS
        count = of_expert(late, expert, PADDED)
        list_stretch(tiles, expert, row, end, of_expert(late_first, expert, PADDED), count)
        padded = row + count * TILE_ROWS
        for at in range(end, padded, SLOTS_AT_ONCE):
            here = at + tl.arange(0, SLOTS_AT_ONCE)
            tl.store(rows + here, tl.full((SLOTS_AT_ONCE,), -1, dtype=tl.int32), mask=here < padded)


@triton.jit
def of_expert(values, expert, PADDED: tl.constexpr):
    """One of the values that there are of all experts."""
    return tl.sum(tl.where(tl.arange(0, PADDED) == expert, values, 0), axis=0)


@triton.jit
def list_stretch(tiles, expert, row, end, first, height):
    """Write `height` row tiles of an expert, from `row` on, into the list from `first` on."""
    for at in range(0, height, SLOTS_AT_ONCE):
        index = at + tl.arange(0, SLOTS_AT_ONCE)
        here = tiles + (first + index) * TILE_WORDS
        mask = index < height
        nothing = tl.zeros((SLOTS_AT_ONCE,), dtype=tl.int32)
        tl.store(here, nothing + expert, mask=mask)
        tl.store(here + 1, nothing + row, mask=mask)
        tl.store(here + 2, nothing + end, mask=mask)
        tl.store(here + 3, nothing + first, mask=mask)
        tl.store(here + 4, nothing + height, mask=mask)
