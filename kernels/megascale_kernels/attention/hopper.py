# SPDX-License-Identifier: Apache-2.0
"""Attention, forward, with Hopper's warp specialisation: the same operator as `triton_kernel.attention_kernel`.

A program has two *consumers*, warpgroups of four warps with 64 queries each, and a *producer*, one warp that has the
TMA unit fill two rings of slots, one of K and one of V, and that alone waits for peers. The consumers notice a wait
only when the rings run dry, and nothing is drained where one rank's keys end and another's begin.

A consumer works on two blocks at a time, as FlashAttention-3 does within a warpgroup (2407.08608, section 3.2): while
the tensor cores multiply the scores of the next block and the weights of this one, it waits for the former only, and
computes their softmax while the latter is still under way.

Blocks that need a mask are few and come where no pipeline is lost: those of our own keys first (under a causal mask the
diagonal), those of the peers, which exist only where blocks do not divide a chunk, last. `triton_kernel.py`, in plain
Triton, is the twin that the emulator runs; packed sequences have it alone.

After a wait gave up the producer goes on turning the rings; what comes of it is refused by the host.
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

from megascale_kernels.attention.ranges import (
    chunk_of,
    last_key,
    place_of_tile,
    source_of,
    span_of_blocks,
    to_and_fro,
)
from megascale_kernels.attention.triton_kernel import RUNTIME, await_all, await_part_by, begin_launch
from megascale_kernels.device.hopper_gemm import next_slot, reinterpreted, tma_load, tma_store
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


def _meet(barrier: int) -> gl.constexpr:
    return gl.constexpr(
        "{ .reg .pred p, q; setp.ge.f32 p, $2, 0f00000000; setp.ge.and.f32 p, $3, 0f00000000, p; "
        f"bar.red.and.pred q, {barrier}, 128, p; mov.b32 $0, $2; mov.b32 $1, $3; }}"
    )


# Triton takes the first few of the sixteen barriers of a program.
MEET_FIRST, MEET_SECOND = _meet(14), _meet(15)


@aggregate
class Rings:
    """Shared memory between producer and consumers: queries and output of a tile, slots of K and V, and barriers."""

    q: gl.shared_memory_descriptor
    out: gl.shared_memory_descriptor
    k: gl.shared_memory_descriptor
    v: gl.shared_memory_descriptor
    q_full: gl.shared_memory_descriptor
    q_empty: gl.shared_memory_descriptor
    k_full: gl.shared_memory_descriptor
    k_empty: gl.shared_memory_descriptor
    v_full: gl.shared_memory_descriptor
    v_empty: gl.shared_memory_descriptor

    @gluon.constexpr_function
    def __init__(self, q, out, k, v, q_full, q_empty, k_full, k_empty, v_full, v_empty) -> None:
        self.q = q
        self.out = out
        self.k = k
        self.v = v
        self.q_full = q_full
        self.q_empty = q_empty
        self.k_full = k_full
        self.k_empty = k_empty
        self.v_full = v_full
        self.v_empty = v_empty


@gluon.jit
def make_barriers(COUNT: gl.constexpr, ARRIVALS: gl.constexpr):
    """Barriers that each wait for so many arrivals."""
    made = gl.allocate_shared_memory(gl.int64, [COUNT, 1], mbarrier.MBarrierLayout())
    for i in gl.static_range(COUNT):
        mbarrier.init(made.index(i), count=ARRIVALS)
    return made


@gluon.jit
def make_rings(dtype: gl.constexpr, CFG: gl.constexpr):
    """Allocate everything in shared memory; before the roles part."""
    q = gl.allocate_shared_memory(dtype, [CFG.consumers, CFG.rows, CFG.head_dim], CFG.flat)
    out = gl.allocate_shared_memory(dtype, [CFG.consumers, CFG.rows, CFG.head_dim], CFG.flat)
    k = gl.allocate_shared_memory(dtype, [CFG.slots, CFG.block_n, CFG.head_dim], CFG.flat)
    v = gl.allocate_shared_memory(dtype, [CFG.slots, CFG.block_n, CFG.head_dim], CFG.flat)
    rings = Rings(
        q, out, k, v, make_barriers(1, 1), make_barriers(1, CFG.consumers), make_barriers(CFG.slots, 1),
        make_barriers(CFG.slots, CFG.consumers), make_barriers(CFG.slots, 1), make_barriers(CFG.slots, CFG.consumers),
    )  # fmt: skip
    fence_async_shared()
    return rings


@gluon.jit
def as_boxes(buffer, COUNT: gl.constexpr, ROWS: gl.constexpr, CFG: gl.constexpr):
    """Slots as the TMA unit sees them, one part deep."""
    return reinterpreted(buffer, buffer.dtype, [COUNT, 1, ROWS, CFG.head_dim], CFG.boxed)


# --- producer ----------------------------------------------------------------------------------------------------


@gluon.jit
def fetch_blocks(rings, k_desc, v_desc, box, column, first, count, gap_at, gap, slot, phase, CFG: gl.constexpr):
    """`count` blocks of K and V from `first` on, `gap` blocks left out after `gap_at` of them, into the rings."""
    k_boxes = as_boxes(rings.k, CFG.slots, CFG.block_n, CFG)
    v_boxes = as_boxes(rings.v, CFG.slots, CFG.block_n, CFG)
    for turn in range(count):
        row = (first + turn + gl.where(turn >= gap_at, gap, 0)) * CFG.block_n
        k_full = rings.k_full.index(slot)
        mbarrier.wait(rings.k_empty.index(slot), phase)
        mbarrier.expect(k_full, CFG.block_bytes)
        tma_load(k_desc, [box, row, column], k_full, k_boxes.index(slot))
        v_full = rings.v_full.index(slot)
        mbarrier.wait(rings.v_empty.index(slot), phase)
        mbarrier.expect(v_full, CFG.block_bytes)
        tma_load(v_desc, [box, row, column], v_full, v_boxes.index(slot))
        slot, phase = next_slot(slot, phase, CFG.slots)
    return slot, phase


@gluon.jit
def span_of_part(channel, part, top, bottom, chunk_rows, CFG: gl.constexpr, HALVES: gl.constexpr,
                 CAUSAL: gl.constexpr):  # fmt: skip
    """Whose a part is, which half, where it begins, and its blocks for the queries [top, bottom] (`span_of_blocks`)."""
    world_size = channel.world_size
    sequence = world_size * HALVES * chunk_rows
    source = source_of(part, channel.rank, world_size, HALVES)
    half = part % HALVES
    begins = chunk_of(source, half, world_size) * chunk_rows
    high = last_key(bottom, sequence, chunk_rows, CAUSAL, VARLEN=False)
    high_of_first = last_key(top, sequence, chunk_rows, CAUSAL, VARLEN=False)
    first, last, full_first, full_last = span_of_blocks(
        begins * 0, high, begins * 0, high_of_first, begins, chunk_rows, CFG.block_n
    )
    return source, half, begins, first, last, full_first, full_last


@gluon.jit
def fetch_part(rings, k_desc, v_desc, gathered_k_desc, gathered_v_desc, channel, events, cursor, place, turn, entry,
               top, bottom, column, batch, chunk_rows, unit_rows, slot, phase, code, CFG: gl.constexpr,
               HALVES: gl.constexpr, CAUSAL: gl.constexpr, AWAIT: gl.constexpr, TRACE: gl.constexpr):  # fmt: skip
    """What a tile takes of a part at its turn: our own masked blocks, all whole ones, the peers' masked ones."""
    parts = channel.world_size * HALVES
    own_masked = turn < HALVES
    part = gl.where(own_masked, turn, (turn - HALVES) % parts)
    is_masked = own_masked | (turn >= HALVES + parts)
    source, there, _, first, last, full_first, full_last = span_of_part(
        channel, part, top, bottom, chunk_rows, CFG, HALVES, CAUSAL
    )
    whole = full_last - full_first
    masked = gl.where(own_masked | (source != channel.rank), last - first - whole, 0)
    count = gl.where(is_masked, masked, whole)
    k_rows, v_rows = k_desc, v_desc
    box = entry * HALVES + there
    if source != channel.rank:
        k_rows, v_rows = gathered_k_desc, gathered_v_desc
        box = (source * batch + entry) * HALVES + there
        cursor = mark(events, cursor, WAIT_BEGIN, place, source, TRACE)
        begin = first * CFG.block_n
        end = gl.where(count > 0, gl.minimum(last * CFG.block_n, chunk_rows), begin)
        code = await_part_by(channel, source, entry, there, begin, end, chunk_rows, unit_rows, place, code, COMMUNICATE,
                             HALVES, AWAIT)  # fmt: skip
        cursor = mark(events, cursor, WAIT_END, place, source, TRACE)
    begin = gl.where(is_masked, first, full_first)
    gap_at = gl.where(is_masked, full_first - first, 0)
    gap = gl.where(is_masked, whole, 0)
    slot, phase = fetch_blocks(rings, k_rows, v_rows, box, column, begin, count, gap_at, gap, slot, phase, CFG)
    return slot, phase, code, cursor


@gluon.jit
def produce(rings, q_desc, k_desc, v_desc, gathered_k_desc, gathered_v_desc, order_ptr, channel, trace, tiles, q_blocks,
            batch, chunk_rows, q_heads, group, unit_rows, counted, CFG: gl.constexpr, HALVES: gl.constexpr,
            CAUSAL: gl.constexpr, AWAIT: gl.constexpr, PROGRESS: gl.constexpr, TRACE: gl.constexpr):  # fmt: skip
    """Keep the rings full; wait for a part before its first block."""
    cta = gl.program_id(0)
    ctas = gl.num_programs(0)
    events = ring_of(trace, cta, COMMUNICATE)
    cursor = open_ring(channel, events, TRACE)
    q_boxes = as_boxes(rings.q, CFG.consumers, CFG.rows, CFG)
    consumers: gl.constexpr = CFG.consumers
    slot = 0
    phase = 1  # no slot is filled yet: the first lap finds every slot empty
    q_phase = 1
    code = 0
    parts = channel.world_size * HALVES
    for place in range(cta, tiles, ctas):
        tile = gl.load(order_ptr + to_and_fro(place, ctas, tiles))
        show_tile(channel, COMMUNICATE, place, PROGRESS)
        block, half, head, entry = place_of_tile(tile, q_blocks, q_heads, HALVES)
        row = block * CFG.block_m
        q_full = rings.q_full.index(0)
        mbarrier.wait(rings.q_empty.index(0), q_phase)
        mbarrier.expect(q_full, CFG.q_bytes)
        for i in gl.static_range(consumers):
            at = row + i * CFG.rows
            tma_load(q_desc, [entry * HALVES + half, at, head * CFG.head_dim], q_full, q_boxes.index(i))
        q_phase = q_phase ^ 1
        start = chunk_of(channel.rank, half, channel.world_size) * chunk_rows
        top = start + row
        bottom = start + gl.minimum(row + CFG.block_m, chunk_rows) - 1
        column = head // group * CFG.head_dim
        for turn in range(2 * parts + HALVES):
            slot, phase, code, cursor = fetch_part(
                rings, k_desc, v_desc, gathered_k_desc, gathered_v_desc, channel, events, cursor, place, turn, entry,
                top, bottom, column, batch, chunk_rows, unit_rows, slot, phase, code, CFG, HALVES, CAUSAL, AWAIT, TRACE,
            )  # fmt: skip
    await_all(channel, batch * HALVES * chunk_rows, unit_rows, code, tiles, COMMUNICATE, AWAIT)
    show_done(channel, COMMUNICATE, PROGRESS)
    close_ring(events, cursor, COMMUNICATE, channel.operator, TRACE)
    finish_launch(channel, ctas * (CFG.consumers + 1), counted)


# --- consumers ---------------------------------------------------------------------------------------------------


@gluon.jit
def no_scores(CFG: gl.constexpr):
    """Registers for the scores of a block."""
    rows: gl.constexpr = CFG.rows
    keys: gl.constexpr = CFG.block_n
    layout: gl.constexpr = CFG.scores
    return gl.zeros((rows, keys), gl.float32, layout)


@gluon.jit
def begin_scores(rings, q, registers, slot, phase):
    """Start the product of the queries and a block of keys, as soon as it is there; what `registers` hold is lost."""
    mbarrier.wait(rings.k_full.index(slot), phase)
    return warpgroup_mma(q, rings.k.index(slot).permute((1, 0)), registers, use_acc=False, is_async=True)


@gluon.jit
def begin_sums(rings, weights, acc, slot, phase):
    """Start to add weights @ values to the accumulator, as soon as the values are there."""
    mbarrier.wait(rings.v_full.index(slot), phase)
    return warpgroup_mma(weights, rings.v.index(slot), acc, is_async=True)


@gluon.jit
def soften(scores, top, total, scale_log2, MASKED: gl.constexpr):
    """One step of the softmax: weights of a block, and how much all before it fade."""
    highest = gl.maximum(top, gl.max(scores, 1) * scale_log2)
    shift = highest
    if MASKED:  # a row that has seen nothing yet must not subtract -inf from -inf
        shift = gl.where(highest == float("-inf"), 0.0, highest)
    weights = gl.exp2(scores * scale_log2 - shift[:, None])
    fade = gl.exp2(top - shift)
    return weights, fade, highest, total * fade + gl.sum(weights, 1)


@gluon.jit
def faded(acc, fade, CFG: gl.constexpr):
    """The accumulator in terms of the new maximum."""
    return acc * gl.convert_layout(fade, gl.SliceLayout(1, CFG.out))[:, None]


@gluon.jit
def as_operand(weights, dtype: gl.constexpr, CFG: gl.constexpr):
    """Weights as the second product takes them: rounded, in the registers where they are."""
    return gl.convert_layout(weights.to(dtype), CFG.weights)


@gluon.jit
def over_masked(rings, q, acc, top, total, queries, begins, first, count, gap_at, gap, chunk_rows, scale_log2, slot,
                phase, CFG: gl.constexpr, CAUSAL: gl.constexpr):  # fmt: skip
    """Blocks of which some queries see only some keys, one after the other."""
    for turn in range(count):
        row = (first + turn + gl.where(turn >= gap_at, gap, 0)) * CFG.block_n
        token = begin_scores(rings, q, no_scores(CFG), slot, phase)
        scores = warpgroup_mma_wait(0, deps=(token,))
        mbarrier.arrive(rings.k_empty.index(slot))
        inside = row + gl.arange(0, CFG.block_n, layout=gl.SliceLayout(0, CFG.scores))
        visible = (inside < chunk_rows)[None, :] & (queries >= 0)[:, None]
        if CAUSAL:
            visible = visible & ((begins + inside)[None, :] <= queries[:, None])
        scores = gl.where(visible, scores, float("-inf"))
        weights, fade, top, total = soften(scores, top, total, scale_log2, MASKED=True)
        operand = as_operand(weights, rings.v.dtype, CFG)
        sums = begin_sums(rings, operand, faded(acc, fade, CFG), slot, phase)
        acc, operand = warpgroup_mma_wait(0, deps=(sums, operand))
        mbarrier.arrive(rings.v_empty.index(slot))
        slot, phase = next_slot(slot, phase, CFG.slots)
    return acc, top, total, slot, phase


@gluon.jit
def meet_with(total, ME: gl.constexpr):
    """Let the four warps of a consumer meet once their rows' sums are known; returns the sums.

    To the assembler nothing orders the softmax before the wait that follows it, and it moves the wait forward: nothing
    would be hidden. It does not move a wait across a barrier, and this barrier needs the sums.
    """
    asm: gl.constexpr = MEET_FIRST if ME == 0 else MEET_SECOND
    return gl.inline_asm_elementwise(asm, "=f,=f,f,f", [total], dtype=gl.float32, is_pure=False, pack=2)


@gluon.jit
def over_whole(rings, q, acc, top, total, count, scale_log2, slot, phase, ME: gl.constexpr, CFG: gl.constexpr):
    """Blocks that all queries see, two in hand: the softmax of a block while the values of the one before are added."""
    if count > 0:
        token = begin_scores(rings, q, no_scores(CFG), slot, phase)
        scores = warpgroup_mma_wait(0, deps=(token,))
        mbarrier.arrive(rings.k_empty.index(slot))
        weights, fade, top, total = soften(scores, top, total, scale_log2, MASKED=False)
        acc = faded(acc, fade, CFG)
        operand = as_operand(weights, rings.v.dtype, CFG)
        for _ in range(1, count):
            next_k, next_phase = next_slot(slot, phase, CFG.slots)
            token = begin_scores(rings, q, no_scores(CFG), next_k, next_phase)
            sums = begin_sums(rings, operand, acc, slot, phase)
            scores = warpgroup_mma_wait(1, deps=(token,))
            mbarrier.arrive(rings.k_empty.index(next_k))
            weights, fade, top, total = soften(scores, top, total, scale_log2, MASKED=False)
            total = meet_with(total, ME)
            following = as_operand(weights, rings.v.dtype, CFG)
            acc, operand = warpgroup_mma_wait(0, deps=(sums, operand))
            mbarrier.arrive(rings.v_empty.index(slot))
            acc = faded(acc, fade, CFG)
            operand = following
            slot = next_k
            phase = next_phase
        sums = begin_sums(rings, operand, acc, slot, phase)
        acc, operand = warpgroup_mma_wait(0, deps=(sums, operand))
        mbarrier.arrive(rings.v_empty.index(slot))
        slot, phase = next_slot(slot, phase, CFG.slots)
    return acc, top, total, slot, phase


@gluon.jit
def store_out(rings, out_desc, lse_ptr, acc, top, total, box, row, column, lse_row, chunk_rows, ME: gl.constexpr,
              CFG: gl.constexpr):  # fmt: skip
    """Divide by the rows' sums and store by TMA, which clips what lies behind the chunk; store the sums' logarithms."""
    seen = total > 0
    share = gl.where(seen, 1.0 / gl.where(seen, total, 1.0), 0.0)
    acc = acc * gl.convert_layout(share, gl.SliceLayout(1, CFG.out))[:, None]
    tma.store_wait(0)
    rings.out.index(ME).store(acc.to(out_desc.dtype))
    fence_async_shared()
    tma_store(out_desc, [box, row, column], as_boxes(rings.out, CFG.consumers, CFG.rows, CFG).index(ME))
    lse = gl.where(seen, top + gl.log2(gl.where(seen, total, 1.0)), float("inf"))
    inside = row + gl.arange(0, CFG.rows, layout=gl.SliceLayout(1, CFG.scores))
    gl.store(lse_ptr + lse_row + inside, lse, mask=inside < chunk_rows)


@gluon.jit
def attend(rings, channel, q, acc, top, total, queries, top_row, bottom_row, chunk_rows, scale_log2, slot, phase,
           ME: gl.constexpr, CFG: gl.constexpr, HALVES: gl.constexpr, CAUSAL: gl.constexpr):  # fmt: skip
    """All keys of a tile: our own masked blocks, all whole ones, the peers' masked ones."""
    parts = channel.world_size * HALVES
    whole = slot * 0
    for part in range(parts):
        _, _, begins, first, last, full_first, full_last = span_of_part(
            channel, part, top_row, bottom_row, chunk_rows, CFG, HALVES, CAUSAL
        )
        whole += full_last - full_first
        masked = gl.where(part < HALVES, last - first - (full_last - full_first), 0)
        acc, top, total, slot, phase = over_masked(
            rings, q, acc, top, total, queries, begins, first, masked, full_first - first, full_last - full_first,
            chunk_rows, scale_log2, slot, phase, CFG, CAUSAL,
        )  # fmt: skip
    acc, top, total, slot, phase = over_whole(rings, q, acc, top, total, whole, scale_log2, slot, phase, ME,
                                                CFG)  # fmt: skip
    for part in range(HALVES, parts):
        _, _, begins, first, last, full_first, full_last = span_of_part(
            channel, part, top_row, bottom_row, chunk_rows, CFG, HALVES, CAUSAL
        )
        acc, top, total, slot, phase = over_masked(
            rings, q, acc, top, total, queries, begins, first, last - first - (full_last - full_first),
            full_first - first, full_last - full_first, chunk_rows, scale_log2, slot, phase, CFG, CAUSAL,
        )  # fmt: skip
    return acc, top, total, slot, phase


@gluon.jit
def consume(rings, out_desc, lse_ptr, order_ptr, channel, board, trace, tiles, q_blocks, batch, chunk_rows, q_heads,
            group, variant, counted, scale_log2, ME: gl.constexpr, CFG: gl.constexpr, HALVES: gl.constexpr,
            CAUSAL: gl.constexpr, PROGRESS: gl.constexpr, TRACE: gl.constexpr):  # fmt: skip
    """Attend with this consumer's queries of every tile."""
    cta = gl.program_id(0)
    ctas = gl.num_programs(0)
    m_size: gl.constexpr = CFG.rows
    head_dim: gl.constexpr = CFG.head_dim
    out_layout: gl.constexpr = CFG.out
    row_layout: gl.constexpr = gl.SliceLayout(1, CFG.scores)
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
    q_phase = 0
    q = rings.q.index(ME)
    for place in range(cta, tiles, ctas):
        tile = gl.load(order_ptr + to_and_fro(place, ctas, tiles))
        show_tile(channel, COMPUTE, place, shows)
        cursor = mark(events, cursor, TILE_BEGIN, place, channel.rank, traces)
        block, half, head, entry = place_of_tile(tile, q_blocks, q_heads, HALVES)
        row = block * CFG.block_m
        start = chunk_of(channel.rank, half, channel.world_size) * chunk_rows
        top_row = start + row
        bottom_row = start + gl.minimum(row + CFG.block_m, chunk_rows) - 1
        queries = top_row + ME * CFG.rows + gl.arange(0, CFG.rows, layout=gl.SliceLayout(1, CFG.scores))
        acc = gl.zeros((m_size, head_dim), gl.float32, out_layout)
        top = gl.full((m_size,), float("-inf"), gl.float32, row_layout)
        total = gl.zeros((m_size,), gl.float32, row_layout)
        mbarrier.wait(rings.q_full.index(0), q_phase)
        q_phase = q_phase ^ 1
        acc, top, total, slot, phase = attend(
            rings, channel, q, acc, top, total, queries, top_row, bottom_row, chunk_rows, scale_log2, slot, phase, ME,
            CFG, HALVES, CAUSAL,
        )  # fmt: skip
        mbarrier.arrive(rings.q_empty.index(0))
        box = entry * HALVES + half
        lse_row = head.to(gl.int64) * rows + box * chunk_rows
        store_out(rings, out_desc, lse_ptr, acc, top, total, box, row + ME * CFG.rows, head * CFG.head_dim, lse_row,
                  chunk_rows, ME, CFG)  # fmt: skip
        cursor = mark(events, cursor, TILE_END, place, channel.rank, traces)
    tma.store_wait(0)
    show_done(channel, COMPUTE, shows)
    close_ring(events, cursor, COMPUTE, channel.operator, traces)
    finish_launch(channel, ctas * (CFG.consumers + 1), counted)


@gluon.jit(do_not_specialize=RUNTIME)
def hopper_attention_kernel(
    q_desc, k_desc, v_desc, gathered_k_desc, gathered_v_desc, out_desc, lse_ptr, order_ptr,
    control, peers, status, board, trace,
    flags, channels, slot, rank, world_size, signature, deadline_us, variant, counted,
    batch, chunk_rows, q_heads, group, unit_rows, scale_log2,
    CFG: gl.constexpr, HALVES: gl.constexpr, CAUSAL: gl.constexpr, AWAIT: gl.constexpr, OPERATOR: gl.constexpr,
    PROGRESS: gl.constexpr, TRACE: gl.constexpr,
):  # fmt: skip
    """Entry point: build the rings, then part into roles. One program per multiprocessor."""
    channel = open_channel(
        gl.load(control + EPOCH) + 1, control, peers, status, board, flags, channels, slot, rank, world_size,
        signature, OPERATOR, deadline_us,
    )  # fmt: skip
    q_blocks = blocks(chunk_rows, CFG.block_m)
    tiles = q_blocks * HALVES * q_heads * batch
    rings = make_rings(q_desc.dtype, CFG)
    gl.static_assert(CFG.consumers == 2)
    gl.warp_specialize(
        [
            (
                consume,
                (rings, out_desc, lse_ptr, order_ptr, channel, board, trace, tiles, q_blocks, batch, chunk_rows,
                 q_heads, group, variant, counted, scale_log2, 0, CFG, HALVES, CAUSAL, PROGRESS, TRACE),
            ),
            (
                consume,
                (rings, out_desc, lse_ptr, order_ptr, channel, board, trace, tiles, q_blocks, batch, chunk_rows,
                 q_heads, group, variant, counted, scale_log2, 1, CFG, HALVES, CAUSAL, PROGRESS, TRACE),
            ),
            (
                produce,
                (rings, q_desc, k_desc, v_desc, gathered_k_desc, gathered_v_desc, order_ptr, channel, trace, tiles,
                 q_blocks, batch, chunk_rows, q_heads, group, unit_rows, counted, CFG, HALVES, CAUSAL, AWAIT, PROGRESS,
                 TRACE),
            ),
        ],
        [4, 1],
        [CFG.consumer_registers, CFG.producer_registers],
    )  # fmt: skip
