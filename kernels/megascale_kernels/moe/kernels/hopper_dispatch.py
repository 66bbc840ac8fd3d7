# SPDX-License-Identifier: Apache-2.0
"""MoE layer 0 with Hopper's warp specialisation: the same layer as `dispatch_kernel`, faster.

Roles as in `device/hopper_gemm.py`. The *producer* is a warpgroup here: its threads copy the gathered rows of A into
the ring by asynchronous copies of 16 bytes (Hopper's TMA cannot gather), and TMA brings B, gate and up of the same
columns in one box. A slot is full when TMA's bytes are there and every thread's copies have arrived. Only the producer
waits for peers. The consumers multiply 256 columns of the weight at once, take SwiGLU of their two halves in registers
and store 128 columns of h; for a backward also the halves themselves.

In the backward (`CFG.halves` 1) tokens are gradients of outputs, the weight is w_out read the other way round, [H, I]
of each expert, and all 256 columns are stored as they are.

`dispatch_kernel`, in plain Triton, is the twin that the emulator runs.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import async_copy
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    tma,
    warpgroup_mma,
    warpgroup_mma_wait,
)

from megascale_kernels.device.hopper_gemm import (
    Ring,
    column_slices,
    next_slot,
    reinterpreted,
    store_slice,
    tma_load,
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
from megascale_kernels.device.signals import finish_launch, follow_launch, open_channel, publish_launch
from megascale_kernels.moe.kernels.dispatch_kernel import (
    BY_DEVICE,
    ROW_TILES,
    await_all_begun,
    await_own_copies,
    say_begun,
)
from megascale_kernels.moe.kernels.sending import send_some
from megascale_kernels.moe.kernels.walk import (
    await_units,
    dispatch_place,
    look_up,
    rows_of_unit,
    tile_of,
    turns_of,
    unit_at,
    units_of,
    whole_tiles,
)
from megascale_kernels.planning.tile_order import blocks

RUNTIME = (
    "slot", "rank", "signature", "deadline_us", "flags", "channels", "variant", "counted", "data_bytes",
    "tokens", "experts", "pitch", "unit_tokens", "units", "group_m", "shift", "cuts", "inner",
)  # fmt: skip
PRODUCER_WARPS = gl.constexpr(4)
PRODUCER_THREADS = gl.constexpr(128)


@gluon.jit
def make_gathering_ring(dtype: gl.constexpr, CFG: gl.constexpr):
    """As `make_ring`; a slot is filled by TMA, which one thread announces, and by every thread of the producer."""
    a = gl.allocate_shared_memory(dtype, [CFG.slots * CFG.across_m, CFG.rows, CFG.block_k], CFG.operand_layout)
    b = gl.allocate_shared_memory(dtype, [CFG.slots] + CFG.b_block, CFG.b_layout)
    full = gl.allocate_shared_memory(gl.int64, [CFG.slots, 1], mbarrier.MBarrierLayout())
    empty = gl.allocate_shared_memory(gl.int64, [CFG.slots, 1], mbarrier.MBarrierLayout())
    slots: gl.constexpr = CFG.slots
    for i in gl.static_range(slots):
        mbarrier.init(full.index(i), count=1 + PRODUCER_THREADS)
        mbarrier.init(empty.index(i), count=CFG.consumers)
    fence_async_shared()
    return Ring(a, b, full, empty)


@gluon.jit
def tokens_of(rows, row, valid, ROWS: gl.constexpr, layout: gl.constexpr):
    """The tokens of a unit: of its upper and its lower half, of its first row and of its last one."""
    at = gl.arange(0, ROWS, layout=gl.SliceLayout(1, layout))
    upper = gl.load(rows + row + at)
    lower = gl.load(rows + row + ROWS + at, mask=ROWS + at < valid, other=-1)
    return upper, lower, gl.load(rows + row), gl.load(rows + row + valid - 1)


@gluon.jit
def rows_at(token, first, x_ptr, gathered_ptr, rank, pitch, hidden):
    """Where rows lie: our own tokens where the caller has them, the peers' where they arrived; padding is the first."""
    token = gl.where(token < 0, first, token)
    mine = token // pitch == rank
    own_ptr = x_ptr + (token - rank * pitch).to(gl.int64) * hidden
    return gl.where(mine, own_ptr, gathered_ptr + token.to(gl.int64) * hidden)


@gluon.jit
def boxes_of_weight(ring, CFG: gl.constexpr):
    """The slots of B as boxes of three axes: gate and up, columns, K; or one expert, K, columns."""
    if CFG.b_is_nk:
        shape: gl.constexpr = [CFG.slots, 2, CFG.columns // 2, CFG.block_k]
        return reinterpreted(ring.b, ring.b.dtype, shape, CFG.pair_layout)
    else:  # noqa: RET505 - Triton decides at compile time which branch exists
        turned: gl.constexpr = [CFG.slots, 1, CFG.block_k, CFG.columns]
        return reinterpreted(ring.b, ring.b.dtype, turned, CFG.matrix_layout)


@gluon.jit
def k_blocks_of(valid, depth, CFG: gl.constexpr):
    """K blocks of a unit: none where all its rows are padding."""
    return gl.where(valid > 0, blocks(depth, CFG.block_k), 0)


@gluon.jit
def fetch_gathered(ring, upper, lower, valid, w_desc, expert, column, hidden, slot, phase, layout: gl.constexpr,
                   CFG: gl.constexpr):  # fmt: skip
    """Every K block of a unit into the ring: the rows at `upper` and, if any is valid, at `lower`, and the weight.

    Nothing where no row is valid.
    """
    block_k: gl.constexpr = CFG.block_k
    in_block = gl.arange(0, block_k, layout=gl.SliceLayout(0, layout))
    boxes = boxes_of_weight(ring, CFG)
    for block in range(k_blocks_of(valid, hidden, CFG)):
        full = ring.full.index(slot)
        mbarrier.wait(ring.empty.index(slot), phase)
        mbarrier.expect(full, CFG.columns * CFG.block_k * 2)
        k = block * CFG.block_k
        if CFG.b_is_nk:
            tma_load(w_desc, [expert * 2, column, k], full, boxes.index(slot))
        else:
            tma_load(w_desc, [expert, k, column], full, boxes.index(slot))
        columns = k + in_block
        inside = (columns < hidden)[None, :]
        async_copy.async_copy_global_to_shared(ring.a.index(slot * 2), upper[:, None] + columns[None, :], mask=inside)
        if valid > CFG.rows:
            async_copy.async_copy_global_to_shared(
                ring.a.index(slot * 2 + 1), lower[:, None] + columns[None, :], mask=inside
            )
        async_copy.mbarrier_arrive(full, increment_count=False)
        slot, phase = next_slot(slot, phase, CFG.slots)
    return slot, phase


@gluon.jit
def unit_place(unit, tile, whole, blocks_n, group_m, row, end, first, height, TILE_ROWS: gl.constexpr):
    """As `dispatch_place`, of a unit."""
    begin, _, block_n = dispatch_place(tile, blocks_n, group_m, row, end, first, height, TILE_ROWS)
    begin, valid = rows_of_unit(unit, whole, begin, end, TILE_ROWS)
    return begin, valid, block_n


@gluon.jit
def produce(ring, x_ptr, ids_ptr, gathered_ptr, w_desc, head, rows, tiles, channel, trace, data_bytes, tokens, experts,
            pitch, unit_tokens, units, hidden, inner, group_m, shift, cuts, CFG: gl.constexpr, TOP_K: gl.constexpr,
            SELECTIVE: gl.constexpr, PROGRESS: gl.constexpr, TRACE: gl.constexpr):  # fmt: skip
    """Keep the ring full; wait for the peers' tokens before the first load of a tile that has some.

    `SELECTIVE`: before each tile send a job of our tokens, and all that are left before the first wait, or two ranks
    would wait for each other.
    """
    job = gl.program_id(0) + 0
    layout: gl.constexpr = gl.BlockedLayout([1, 8], [4, 8], [PRODUCER_WARPS, 1], [1, 0])
    half: gl.constexpr = CFG.rows
    block_m: gl.constexpr = CFG.block_m
    slot = 0
    phase = 1  # no slot is filled yet: the first lap finds every slot empty
    code = 0
    known = 0
    events = ring_of(trace, gl.program_id(0), COMMUNICATE)
    cursor = open_ring(channel, events, TRACE)
    blocks_n = blocks(inner, CFG.out_columns)
    count = gl.load(head + ROW_TILES) * blocks_n
    cta = gl.program_id(0)
    ctas = gl.num_programs(0)
    whole = whole_tiles(count, ctas, cuts)
    tile = tile_of(cta, count, whole)
    expert, row, end, first, height = look_up(tiles, tile // blocks_n)
    row, valid, block_n = unit_place(cta, tile, whole, blocks_n, group_m, row, end, first, height, block_m)
    upper, lower, token, last = tokens_of(rows, row, valid, half, layout)
    tile = tile_of(unit_at(1, cta, ctas, shift), count, whole)
    next_expert, row, end, first, height = look_up(tiles, tile // blocks_n)
    for turn in range(turns_of(cta, ctas, 2 * count - whole, shift)):
        # Tables are read ahead, a unit's tokens while the unit before is loaded: none is waited for.
        tile = tile_of(unit_at(turn, cta, ctas, shift), count, whole)
        following = unit_at(turn + 1, cta, ctas, shift)
        next_tile = tile_of(following, count, whole)
        row, next_valid, next_block = unit_place(following, next_tile, whole, blocks_n, group_m, row, end, first,
                                                 height, block_m)  # fmt: skip
        next_upper, next_lower, next_token, next_last = tokens_of(rows, row, next_valid, half, layout)
        later_tile = tile_of(unit_at(turn + 2, cta, ctas, shift), count, whole)
        later_expert, row, end, first, height = look_up(tiles, later_tile // blocks_n)
        show_tile(channel, COMMUNICATE, tile, PROGRESS)
        needed = units_of(last, channel.rank, channel.world_size, pitch, unit_tokens, units)
        if SELECTIVE:
            job = send_some(channel, x_ptr, ids_ptr, head, data_bytes, tokens, pitch, unit_tokens, units, hidden,
                            experts, job, needed > known, TOP_K, PRODUCER_WARPS)  # fmt: skip
        cursor = mark(events, cursor, WAIT_BEGIN, tile, channel.rank, TRACE)
        if code == 0:
            code, known = await_units(channel, known, needed, units, COMMUNICATE, tile)
        cursor = mark(events, cursor, WAIT_END, tile, channel.rank, TRACE)
        above = rows_at(upper, token, x_ptr, gathered_ptr, channel.rank, pitch, hidden)
        below = rows_at(lower, token, x_ptr, gathered_ptr, channel.rank, pitch, hidden)
        slot, phase = fetch_gathered(ring, above, below, valid, w_desc, expert, block_n * CFG.out_columns, hidden,
                                     slot, phase, layout, CFG)  # fmt: skip
        valid = next_valid
        upper, lower, token, last = next_upper, next_lower, next_token, next_last
        expert, block_n, next_expert = next_expert, next_block, later_expert
    if SELECTIVE:
        send_some(channel, x_ptr, ids_ptr, head, data_bytes, tokens, pitch, unit_tokens, units, hidden, experts, job,
                  pitch > 0, TOP_K, PRODUCER_WARPS)  # fmt: skip
    show_done(channel, COMMUNICATE, PROGRESS)
    close_ring(events, cursor, COMMUNICATE, channel.operator, TRACE)


@gluon.jit
def multiply_gathered(ring, slot, phase, count, ME: gl.constexpr, CFG: gl.constexpr):
    """Accumulate all K blocks of this consumer's part of the tile; one wgmma stays in flight."""
    rows: gl.constexpr = CFG.rows
    columns: gl.constexpr = CFG.columns
    layout: gl.constexpr = CFG.acc_layout
    acc = gl.zeros((rows, columns), gl.float32, layout)
    previous = slot + 0
    for block in range(count):
        a = ring.a.index(slot * CFG.across_m + ME)
        b = ring.b.index(slot)
        if CFG.b_is_nk:
            b = b.permute((1, 0))
        mbarrier.wait(ring.full.index(slot), phase)
        fence_async_shared()  # the threads' copies are ordinary writes, and wgmma reads by the async proxy
        token = warpgroup_mma(a, b, acc, is_async=True)
        acc = warpgroup_mma_wait(1, deps=(token,))
        mbarrier.arrive(ring.empty.index(previous), pred=block > 0)
        previous = slot
        slot, phase = next_slot(slot, phase, CFG.slots)
    acc = warpgroup_mma_wait(0, deps=(acc,))
    mbarrier.arrive(ring.empty.index(previous))
    return acc, slot, phase


@gluon.jit
def pass_slots(ring, slot, phase, count, CFG: gl.constexpr):
    """Hand back `count` slots unread: this consumer's rows are all padding."""
    for _ in range(count):
        mbarrier.wait(ring.full.index(slot), phase)
        mbarrier.arrive(ring.empty.index(slot))
        slot, phase = next_slot(slot, phase, CFG.slots)
    return slot, phase


@gluon.jit
def store_columns(part, staging, desc, row, column, ME: gl.constexpr, CFG: gl.constexpr):
    """Store columns of an accumulator, a staging buffer at a time."""
    count: gl.constexpr = part.shape[1] // CFG.store_columns
    slices = column_slices(part, count)
    for i in gl.static_range(count):
        store_slice(slices[i], staging, desc, row, column, i, ME, CFG)


@gluon.jit
def store_tile(acc, staging, h_desc, gate_desc, up_desc, row, column, ME: gl.constexpr, CFG: gl.constexpr,
               SAVES: gl.constexpr):  # fmt: skip
    """Store what a tile comes to."""
    if CFG.halves == 1:
        store_columns(acc, staging, h_desc, row, column, ME, CFG)
    else:
        gate, up = column_slices(acc, 2)
        if SAVES:
            store_columns(gate, staging, gate_desc, row, column, ME, CFG)
            store_columns(up, staging, up_desc, row, column, ME, CFG)
        h = gate / (1.0 + gl.exp(-gate)) * up
        store_columns(h, staging, h_desc, row, column, ME, CFG)


@gluon.jit
def consume(ring, staging, h_desc, gate_desc, up_desc, head, tiles, channel, board, trace, pitch, hidden, inner,
            group_m, shift, cuts, variant, counted, ME: gl.constexpr, CFG: gl.constexpr, SAVES: gl.constexpr,
            PROGRESS: gl.constexpr, TRACE: gl.constexpr):  # fmt: skip
    """Multiply this consumer's half of every unit and store what it comes to; the first has all rows of half a tile."""
    cta = gl.program_id(0)
    ctas = gl.num_programs(0)
    blocks_n = blocks(inner, CFG.out_columns)
    count = gl.load(head + ROW_TILES) * blocks_n
    last_consumer: gl.constexpr = CFG.consumers - 1
    speaks: gl.constexpr = ME == 0
    shows: gl.constexpr = PROGRESS and speaks
    traces: gl.constexpr = TRACE and speaks
    if last_consumer == ME:
        if cta == ctas - 1:
            head_board(channel, board, ctas, count, pitch, inner, hidden, PROGRESS)
            publish_launch(channel, pitch, inner, hidden, variant)
            say_begun(channel)
    slot = 0
    phase = 0
    events = ring_of(trace, cta, COMPUTE)
    cursor = open_ring(channel, events, traces)
    k_blocks = blocks(hidden, CFG.block_k)
    whole = whole_tiles(count, ctas, cuts)
    unit = unit_at(0, cta, ctas, shift)
    tile = tile_of(unit, count, whole)
    _, row, end, first, height = look_up(tiles, tile // blocks_n)
    for turn in range(turns_of(cta, ctas, 2 * count - whole, shift)):
        begin, valid, block_n = unit_place(unit, tile, whole, blocks_n, group_m, row, end, first, height, CFG.block_m)
        # The list is read ahead: it arrives while this unit is multiplied.
        unit = unit_at(turn + 1, cta, ctas, shift)
        next_tile = tile_of(unit, count, whole)
        _, row, end, first, height = look_up(tiles, next_tile // blocks_n)
        show_tile(channel, COMPUTE, tile, shows)
        cursor = mark(events, cursor, TILE_BEGIN, tile, channel.rank, traces)
        if valid > ME * CFG.rows:
            acc, slot, phase = multiply_gathered(ring, slot, phase, k_blocks, ME, CFG)
            store_tile(acc, staging, h_desc, gate_desc, up_desc, begin + ME * CFG.rows, block_n * CFG.out_columns, ME,
                       CFG, SAVES)  # fmt: skip
        else:
            slot, phase = pass_slots(ring, slot, phase, k_blocks_of(valid, hidden, CFG), CFG)
        cursor = mark(events, cursor, TILE_END, tile, channel.rank, traces)
        tile = next_tile
    tma.store_wait(0)
    if last_consumer == ME:
        if cta == ctas - 1:
            await_all_begun(channel)
            await_own_copies(channel, counted)
    show_done(channel, COMPUTE, shows)
    close_ring(events, cursor, COMPUTE, channel.operator, traces)
    finish_launch(channel, ctas * CFG.consumers, (counted == BY_DEVICE).to(gl.int32))


@gluon.jit(do_not_specialize=RUNTIME)
def hopper_dispatch_kernel(
    x_ptr, ids_ptr, gathered_ptr, w_desc, h_desc, gate_desc, up_desc, head, rows, tiles,
    control, peers, status, board, trace,
    flags, channels, slot, rank, world_size, signature, deadline_us, variant, counted,
    data_bytes, tokens, experts, pitch, unit_tokens, units, hidden, inner, group_m, shift, cuts,
    CFG: gl.constexpr, SAVES: gl.constexpr, TOP_K: gl.constexpr, SELECTIVE: gl.constexpr, OPERATOR: gl.constexpr,
    PROGRESS: gl.constexpr, TRACE: gl.constexpr, FOLLOWS: gl.constexpr,
):  # fmt: skip
    """Entry point: build the ring, then part into roles. One program per multiprocessor.

    `SAVES`: gate and up are stored as well, each by its own descriptor, for a backward. `SELECTIVE`: producers
    send what peers want, where no copy engine sends all.
    """
    ring = make_gathering_ring(h_desc.dtype, CFG)
    staging = gl.allocate_shared_memory(
        h_desc.dtype, [CFG.consumers * CFG.store_buffers, CFG.rows, CFG.store_columns], CFG.store_layout
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
                (ring, staging, h_desc, gate_desc, up_desc, head, tiles, channel, board, trace, pitch, hidden,
                 inner, group_m, shift, cuts, variant, counted, 0, CFG, SAVES, PROGRESS, TRACE),
            ),
            (
                consume,
                (ring, staging, h_desc, gate_desc, up_desc, head, tiles, channel, board, trace, pitch, hidden,
                 inner, group_m, shift, cuts, variant, counted, 1, CFG, SAVES, PROGRESS, TRACE),
            ),
            (
                produce,
                (ring, x_ptr, ids_ptr, gathered_ptr, w_desc, head, rows, tiles, channel, trace, data_bytes, tokens,
                 experts, pitch, unit_tokens, units, hidden, inner, group_m, shift, cuts, CFG, TOP_K, SELECTIVE,
                 PROGRESS, TRACE),
            ),
        ],
        [4, PRODUCER_WARPS],
        [CFG.consumer_registers, CFG.producer_registers],
    )  # fmt: skip
