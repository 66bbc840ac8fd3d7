# SPDX-License-Identifier: Apache-2.0
"""GEMM + reduce-scatter with Hopper's warp specialisation: the same operator as `gemm_rs_kernel`, faster.

Roles as in `hopper_gemm.py`, with two differences that a profile asked for (4 H200, M 8192, K 7168, N 8192: of 163 us
over the product alone, 73 went into reading partials and 72 into sending tiles):

- **Tiles are sent slowly, by a warp of their own.** All multiprocessors finish a wave of tiles at the same time. Sent
  at once, its 8.6 MB keep the NVLink port busy for 23 us, and the loads of the next tiles queue behind them. So
  consumers leave a finished tile in shared memory, and the *sender*, one warp, sends it by quarters of columns while
  the next tile is being multiplied, waits until it has arrived, and announces it.
- **Partials come through the ring.** For a tile of our own rows the producer waits for the peers' flags, when it has
  fetched the last K block, and then fetches their partials into the same slots, a quarter of the columns of up to three
  peers at a time, or two quarters of a lone peer's; a consumer adds them in the order of ranks.

`gemm_rs_kernel`, in plain Triton, is the twin that the emulator runs.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    tma,
)

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
    next_slot,
    reinterpreted,
    store_split_partial,
    tma_load,
    tma_store,
    unit_of_work,
)
from megascale_kernels.device.layout import COMMUNICATE, COMPUTE, EPOCH
from megascale_kernels.device.primitives import peer_tile_notify, peer_tile_wait
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
    fence_before_tma,
    finish_launch,
    flag_of,
    now_ns,
    open_channel,
    publish_launch,
)
from megascale_kernels.gemm_rs.triton_kernel import descriptor_of
from megascale_kernels.planning.tile_order import channel_of_tile, grouped, scatter_owner, scatter_stretch, staging_slot

ASM_NAP = gl.constexpr("nanosleep.u32 500; mov.u32 $0, 0;")
# Nothing that changes with a shape is specialised: a new shape then runs at once, without a compiler.
RUNTIME = (
    "slot", "rank", "signature", "deadline_us", "flags", "channels", "variant", "pace_ns", "m_shard", "n_size",
    "k_size", "group_m", "whole_tiles", "split",
    "blocks_m", "blocks_n", "blocks_k", "units",
)  # fmt: skip


@gluon.jit
def place_of(work, channel, tile):
    """In which step of the scatter a tile is, whose rows it holds, and its block within that shard."""
    above, height, inner = scatter_stretch(tile, work.blocks_m, work.blocks_n, work.group_m, channel.world_size)
    block, block_n = grouped(inner, height, work.blocks_n, work.group_m)
    block += above
    step = block // work.blocks_m
    return step, scatter_owner(step, channel.rank, channel.world_size), block % work.blocks_m, block_n


@gluon.jit
def produce(ring, x_desc, w_desc, split_desc, partial_desc, work, channel, trace, m_shard, CFG: gl.constexpr,
            CUT: gl.constexpr, PROGRESS: gl.constexpr, TRACE: gl.constexpr):  # fmt: skip
    """Keep the ring full: the K blocks of every tile and, for our own rows, the partials of the peers."""
    slot = 0
    phase = 1  # no slot is filled yet: the first lap finds every slot empty
    code = 0
    events = ring_of(trace, gl.program_id(0), COMMUNICATE)
    cursor = open_ring(channel, events, TRACE)
    for unit in range(gl.program_id(0), end_of_units(work, CUT), gl.num_programs(0)):
        tile, first, last, place, before = unit_of_work(work, unit, CUT)
        _, owner, block_m, block_n = place_of(work, channel, tile)
        row = block_m * CFG.block_m
        column = block_n * CFG.block_n
        show_tile(channel, COMMUNICATE, tile, PROGRESS)
        slot, phase = fetch(ring, x_desc, owner * m_shard + row, w_desc, column, first, last, slot, phase, CFG)
        if CUT != WHOLE:
            if (last == work.blocks_k) & (before > 0):
                slot, phase, code = fetch_split_partials(
                    ring, split_desc, channel, tile, place, before, code, slot, phase, CFG
                )
        if (owner == channel.rank) & (last == work.blocks_k):
            index = channel_of_tile(block_m, block_n, work.blocks_n)
            cursor = mark(events, cursor, WAIT_BEGIN, index, owner, TRACE)
            code = await_partials(channel, tile, index, code)
            cursor = mark(events, cursor, WAIT_END, index, owner, TRACE)
            if CFG.quarters_a_slot > 1:
                slot, phase = fetch_pairs(ring, partial_desc, channel, row, column, m_shard, slot, phase, CFG)
            else:
                slot, phase = fetch_partials(ring, partial_desc, channel, row, column, m_shard, slot, phase, CFG)
    show_done(channel, COMMUNICATE, PROGRESS)
    close_ring(events, cursor, COMMUNICATE, channel.operator, TRACE)


@gluon.jit
def await_partials(channel, tile, block, code):
    """Wait for every peer's flag of one tile: a glance at all of them first, then one after the other."""
    lanes = gl.arange(0, 32, layout=gl.BlockedLayout([1], [32], [1], [0]))
    wanted = lanes < channel.world_size - 1
    flags = flag_of(channel, channel.control, (channel.rank + 1 + lanes) % channel.world_size, block)
    seen = gl.atomic_add(flags, gl.zeros_like(lanes), mask=wanted, sem="acquire", scope="sys")
    missing = gl.max(gl.where(wanted & (seen != channel.stamp), 1, 0), axis=0)
    if missing != 0:
        for step in range(1, channel.world_size):
            if code == 0:
                source = (channel.rank + step) % channel.world_size
                code = peer_tile_wait(channel, block, source, COMMUNICATE, tile)
    fence_before_tma()
    return code


@gluon.jit
def box_of(ring, slot, place: gl.constexpr, me: gl.constexpr, CFG: gl.constexpr):
    """Where in a slot a consumer's piece at `place`, a peer or a quarter, lies: the first over A, the others over B."""
    if place == 0:
        return ring.a.index(slot * CFG.across_m + me)
    else:  # noqa: RET505 - Triton decides at compile time which branch exists
        pieces: gl.constexpr = CFG.columns // CFG.rows
        room: gl.constexpr = ring.b.shape[0] * pieces
        over_b = reinterpreted(ring.b, ring.b.dtype, [room, CFG.rows, CFG.store_columns], CFG.store_layout)
        return over_b.index(slot * pieces + (place - 1) * CFG.across_m + me)


@gluon.jit
def fetch_partials(ring, partial_desc, channel, row, column, m_shard, slot, phase, CFG: gl.constexpr):
    """Fetch the peers' partials of a tile: a slot holds a quarter of the columns, as many peers' as it has room for.

    They come in the order of ranks, and each consumer has boxes of its own. Few full slots and not many small ones:
    the consumers have nothing else to do meanwhile, and a fetch takes longer to arrive than to be added.
    """
    slices: gl.constexpr = CFG.columns // CFG.store_columns
    across_n: gl.constexpr = CFG.across_n
    across_m: gl.constexpr = CFG.across_m
    places: gl.constexpr = CFG.partials_a_slot
    gl.static_assert(across_n == 1)
    others = channel.world_size - 1
    for quarter in range(slices):
        for first in range(0, others, places):
            full = ring.full.index(slot)
            mbarrier.wait(ring.empty.index(slot), phase)
            box: gl.constexpr = CFG.box_bytes
            # The number of bytes is a constant of the instruction.
            if others - first >= places:
                mbarrier.expect(full, places * box)
            else:
                for count in gl.static_range(1, places):
                    if others - first == count:
                        mbarrier.expect(full, count * box)
            for place in gl.static_range(places):
                if first + place < others:
                    source = first + place + gl.where(first + place >= channel.rank, 1, 0)
                    above = staging_slot(source, channel.rank, channel.world_size) * m_shard
                    for i in gl.static_range(across_m):
                        at = [above + row + i * CFG.rows, column + quarter * CFG.store_columns]
                        tma_load(partial_desc, at, full, box_of(ring, slot, place, i, CFG))
            slot, phase = next_slot(slot, phase, CFG.slots)
    return slot, phase


@gluon.jit
def fetch_pairs(ring, partial_desc, channel, row, column, m_shard, slot, phase, CFG: gl.constexpr):
    """Fetch a lone peer's partial of a tile: a slot holds two quarters of the columns."""
    slices: gl.constexpr = CFG.columns // CFG.store_columns
    across_n: gl.constexpr = CFG.across_n
    across_m: gl.constexpr = CFG.across_m
    quarters: gl.constexpr = CFG.quarters_a_slot
    gl.static_assert(across_n == 1)
    source = 1 - channel.rank
    above = staging_slot(source, channel.rank, 2) * m_shard + row
    for first in range(0, slices, quarters):
        full = ring.full.index(slot)
        mbarrier.wait(ring.empty.index(slot), phase)
        mbarrier.expect(full, quarters * CFG.box_bytes)
        for place in gl.static_range(quarters):
            for i in gl.static_range(across_m):
                at = [above + i * CFG.rows, column + (first + place) * CFG.store_columns]
                tma_load(partial_desc, at, full, box_of(ring, slot, place, i, CFG))
        slot, phase = next_slot(slot, phase, CFG.slots)
    return slot, phase


@gluon.jit
def nap_until(due_ns):
    """Let the other warps have the multiprocessor until then."""
    while now_ns() < due_ns:
        gl.inline_asm_elementwise(ASM_NAP, "=r", [], dtype=gl.int32, is_pure=False, pack=1)


@gluon.jit
def send(staging, kept, sent, peer_descs, work, channel, pace_ns, CFG: gl.constexpr, CUT: gl.constexpr):
    """Role of the sender: carry every finished tile of other ranks' rows to its owner, and announce it."""
    quarters: gl.constexpr = CFG.store_buffers
    consumers: gl.constexpr = CFG.consumers
    phase = 0
    for unit in range(gl.program_id(0), end_of_units(work, CUT), gl.num_programs(0)):
        tile, _, last, _, _ = unit_of_work(work, unit, CUT)
        step, owner, block_m, block_n = place_of(work, channel, tile)
        if (owner != channel.rank) & (last == work.blocks_k):
            peer_desc = descriptor_of(peer_descs, step)
            mbarrier.wait(kept, phase)
            phase ^= 1
            begun_ns = now_ns()
            for quarter in range(quarters):
                nap_until(begun_ns + quarter * pace_ns)
                for me in gl.static_range(consumers):
                    row = block_m * CFG.block_m + (me % CFG.across_m) * CFG.rows
                    column = block_n * CFG.block_n + (me % CFG.across_n) * CFG.columns + quarter * CFG.store_columns
                    tma_store(peer_desc, [row, column], staging.index(me * quarters + quarter))
            tma.store_wait(0)
            mbarrier.arrive(sent)
            drain_tma_stores()
            peer_tile_notify(channel, channel_of_tile(block_m, block_n, work.blocks_n), owner)


@gluon.jit
def keep(acc, staging, kept, dtype: gl.constexpr, ME: gl.constexpr, CFG: gl.constexpr):
    """Round a finished tile and leave it in shared memory for the sender."""
    quarters: gl.constexpr = CFG.store_buffers
    tma.store_wait(0)  # the tile before may have been our own (mixed rows), and on its way out from the same buffers
    slices = column_slices(acc, quarters)
    for i in gl.static_range(quarters):
        staging.index(ME * CFG.store_buffers + i).store(slices[i].to(dtype))
    fence_async_shared()
    mbarrier.arrive(kept)


@gluon.jit
def reduce_and_store(ring, acc, staging, out_desc, bias_ptr, channel, slot, phase, row, column, n_size,
                     ME: gl.constexpr, CFG: gl.constexpr, HAS_BIAS: gl.constexpr):  # fmt: skip
    """Add the partials in the order of ranks, in fp32, our own among them, and store the result by quarters."""
    quarters: gl.constexpr = CFG.store_buffers
    slices = column_slices(acc, quarters)
    layout: gl.constexpr = slices[0].type.layout
    places: gl.constexpr = CFG.partials_a_slot
    shared: gl.constexpr = CFG.quarters_a_slot
    others = channel.world_size - 1
    for i in gl.static_range(quarters):
        total = gl.zeros_like(slices[i])
        if shared > 1:
            if i % shared == 0:
                mbarrier.wait(ring.full.index(slot), phase)
            # Of two ranks: a sum of two has no order.
            total += slices[i] + box_of(ring, slot, i % shared, ME % CFG.across_m, CFG).load(layout).to(gl.float32)
            if i % shared == shared - 1:
                mbarrier.arrive(ring.empty.index(slot))
                slot, phase = next_slot(slot, phase, CFG.slots)
        else:
            for first in range(0, others, places):
                mbarrier.wait(ring.full.index(slot), phase)
                for place in gl.static_range(places):
                    if first + place < others:
                        if first + place == channel.rank:
                            total += slices[i]
                        total += box_of(ring, slot, place, ME % CFG.across_m, CFG).load(layout).to(gl.float32)
                mbarrier.arrive(ring.empty.index(slot))
                slot, phase = next_slot(slot, phase, CFG.slots)
            if channel.rank == others:
                total += slices[i]
        at = column + i * CFG.store_columns
        if HAS_BIAS:
            total = add_bias_slice(total, bias_ptr, at, n_size)
        buffer = staging.index(ME * CFG.store_buffers + i)
        tma.store_wait(CFG.store_buffers - 1)
        buffer.store(total.to(out_desc.dtype))
        fence_async_shared()
        tma_store(out_desc, [row, at], buffer)
    return slot, phase


@gluon.jit
def consume(ring, staging, kept, sent, out_desc, bias_ptr, work, channel, board, trace, m_shard, n_size, k_size,
            variant, ME: gl.constexpr, CFG: gl.constexpr, CUT: gl.constexpr, HAS_BIAS: gl.constexpr,
            PROGRESS: gl.constexpr, TRACE: gl.constexpr):  # fmt: skip
    """Multiply this consumer's share of every tile; leave it to the sender, or add what the others sent."""
    cta = gl.program_id(0)
    ctas = gl.num_programs(0)
    last_consumer: gl.constexpr = CFG.consumers - 1
    speaks: gl.constexpr = ME == 0
    shows: gl.constexpr = PROGRESS and speaks
    traces: gl.constexpr = TRACE and speaks
    if ME == last_consumer:
        if cta == ctas - 1:
            tiles = work.blocks_m * work.blocks_n * channel.world_size
            head_board(channel, board, ctas, tiles, m_shard, n_size, k_size, PROGRESS)
            publish_launch(channel, m_shard, n_size, k_size, variant)
    events = ring_of(trace, cta, COMPUTE)
    cursor = open_ring(channel, events, traces)
    slot = 0
    phase = 0
    sending = 0  # whether the sender still has our tile
    sent_phase = 0
    for unit in range(cta, end_of_units(work, CUT), ctas):
        tile, first, last, place, before = unit_of_work(work, unit, CUT)
        _, owner, block_m, block_n = place_of(work, channel, tile)
        row = block_m * CFG.block_m + (ME % CFG.across_m) * CFG.rows
        column = block_n * CFG.block_n + (ME % CFG.across_n) * CFG.columns
        show_tile(channel, COMPUTE, tile, shows)
        cursor = mark(events, cursor, TILE_BEGIN, tile, owner, traces)
        acc, slot, phase = multiply(ring, slot, phase, first, last, ME, CFG)
        whole = True
        if CUT != WHOLE:
            if last < work.blocks_k:
                store_split_partial(channel, acc, work, place, ME, CFG)
                whole = False
            else:
                acc, slot, phase = add_split_partials(ring, acc, before, slot, phase, ME, CFG)
        if whole:
            if sending != 0:
                mbarrier.wait(sent, sent_phase)
                sent_phase ^= 1
                sending = 0
            if owner != channel.rank:
                keep(acc, staging, kept, out_desc.dtype, ME, CFG)
                sending = 1
                cursor = mark(events, cursor, NOTIFY, channel_of_tile(block_m, block_n, work.blocks_n), owner, traces)
            else:
                slot, phase = reduce_and_store(ring, acc, staging, out_desc, bias_ptr, channel, slot, phase, row,
                                               column, n_size, ME, CFG, HAS_BIAS)  # fmt: skip
        cursor = mark(events, cursor, TILE_END, tile, owner, traces)
    tma.store_wait(0)
    show_done(channel, COMPUTE, shows)
    close_ring(events, cursor, COMPUTE, channel.operator, traces)
    finish_launch(channel, ctas * CFG.consumers, 0)


@gluon.jit(do_not_specialize=RUNTIME)
def hopper_gemm_rs_kernel(
    x_desc, w_desc, split_desc, partial_desc, out_desc, peer1, peer2, peer3, peer4, peer5, peer6, peer7, bias_ptr,
    control, peers, status, board, trace, partials,
    flags, channels, slot, rank, world_size, signature, deadline_us, variant, pace_ns,
    m_shard, n_size, k_size, blocks_m, blocks_n, blocks_k, group_m, whole_tiles, split, units,
    CFG: gl.constexpr, CUT: gl.constexpr, HAS_BIAS: gl.constexpr, OPERATOR: gl.constexpr,
    PROGRESS: gl.constexpr, TRACE: gl.constexpr,
):  # fmt: skip
    """Entry point: build the ring, then part into roles. One program per multiprocessor."""
    channel = open_channel(
        gl.load(control + EPOCH) + 1, control, peers, status, board, flags, channels, slot, rank, world_size,
        signature, OPERATOR, deadline_us,
    )  # fmt: skip
    work = Work(blocks_m, blocks_n, blocks_k, group_m, whole_tiles, split, units, partials)
    peer_descs = (peer1, peer2, peer3, peer4, peer5, peer6, peer7)
    ring = make_ring(x_desc, w_desc, CFG)
    staging = gl.allocate_shared_memory(
        x_desc.dtype, [CFG.consumers * CFG.store_buffers, CFG.rows, CFG.store_columns], CFG.store_layout
    )
    kept = gl.allocate_shared_memory(gl.int64, [1], mbarrier.MBarrierLayout())
    sent = gl.allocate_shared_memory(gl.int64, [1], mbarrier.MBarrierLayout())
    mbarrier.init(kept, count=CFG.consumers)
    mbarrier.init(sent, count=1)
    fence_async_shared()
    gl.static_assert(CFG.consumers == 2)
    gl.warp_specialize(
        [
            (
                consume,
                (ring, staging, kept, sent, out_desc, bias_ptr, work, channel, board, trace, m_shard, n_size, k_size,
                 variant, 0, CFG, CUT, HAS_BIAS, PROGRESS, TRACE),
            ),
            (
                consume,
                (ring, staging, kept, sent, out_desc, bias_ptr, work, channel, board, trace, m_shard, n_size, k_size,
                 variant, 1, CFG, CUT, HAS_BIAS, PROGRESS, TRACE),
            ),
            (
                produce,
                (ring, x_desc, w_desc, split_desc, partial_desc, work, channel, trace, m_shard, CFG, CUT, PROGRESS,
                 TRACE),
            ),
            (send, (staging, kept, sent, peer_descs, work, channel, pace_ns, CFG, CUT)),
        ],
        [4, 1, 1],
        [CFG.consumer_registers, CFG.producer_registers, CFG.producer_registers],
    )  # fmt: skip
