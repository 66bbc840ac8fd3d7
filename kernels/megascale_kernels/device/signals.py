# SPDX-License-Identifier: Apache-2.0
"""Flags between ranks: publish, wait with a deadline, give up together.

The memory model in three sentences (PTX ISA, "Memory Consistency Model"). A *release* at system scope makes
everything that the thread, and those it synchronised with by a barrier, wrote before it visible to a thread that
*acquires* the flag. Data that the TMA unit wrote is ordered only after `cp.async.bulk.wait_group` **without**
`.read`: the `.read` form, which Triton emits after its own TMA stores, means merely that shared memory may be reused.
Data that the TMA unit is going to read after an acquire needs a proxy fence in between, because the acquire
orders the generic proxy only.

Every wait here has a deadline and watches the abort word. When the deadline passes, one CTA writes the fault
record (which CTA waited for what), raises the abort word of every rank, and **returns**: no trap, the CUDA context
lives.

Decisions inside a wait must be the same in all threads of a CTA, or warps would part at the next barrier. Atomics
are: one thread executes them and their result is broadcast. The clock is not, so a CTA votes on it by an atomic.
"""

from typing import Any, NamedTuple

import triton
import triton.language as tl

from megascale_kernels.device.layout import (
    ABORT,
    ABORTED,
    ARRIVED,
    CLAIM,
    DATA_ALIGNMENT,
    EPOCH,
    EXITS,
    EXPIRED,
    GAVE_UP,
    HELLO,
    HELLO_LINE,
    LINE,
    MAX_RANKS,
    MISMATCH,
    PUSHES,
    ROLE_WORDS,
    STRANGER,
    VOTES,
    WAITING,
)

# A poll of a flag in device memory takes about half a microsecond; the slow path is entered twice a millisecond.
POLLS_PER_LOOK = tl.constexpr(1024)
STAMP_SHIFT = tl.constexpr(12)  # layout.SIGNATURE_BITS
STAMP_EPOCHS = tl.constexpr(0xFFFFF)
HELLO_SLOT = tl.constexpr(MAX_RANKS * 32)

# The assembly used anywhere in this package, by name: the emulator gives each a meaning in Python.
ASM_GLOBALTIMER = tl.constexpr("mov.u64 $0, %globaltimer;")
ASM_SM = tl.constexpr("mov.u32 $0, %smid;")
ASM_FENCE_PROXY = tl.constexpr("fence.proxy.async.global; mov.u32 $0, 0;")
ASM_BULK_WAIT = tl.constexpr("cp.async.bulk.wait_group 0; fence.proxy.async.global; mov.u32 $0, 0;")
ASM_LAUNCH_WAIT = tl.constexpr("griddepcontrol.wait; mov.u32 $0, 0;")


class Channel(NamedTuple):
    """What a CTA needs to talk to its peers (TileLink's BlockChannel: ranks, barriers, and here the deadline).

    Attributes:
        control: this rank's symmetric words (int32 pointer).
        peers: table of every rank's symmetric base address (int64 pointer).
        status: host memory that mirrors the fault record (int32 pointer).
        progress: this CTA's line of the progress board (int32 pointer).
        flags: offset of this slot's flags, in words.
        channels: flags per source rank.
        slot: which of the two slots this launch uses.
        rank: this rank.
        world_size: ranks in the group.
        stamp: what a flag of this launch holds.
        operator: which operator runs (index into `layout.OPERATORS`).
        deadline_us: how long one wait may take.
    """

    control: Any
    peers: Any
    status: Any
    progress: Any
    flags: Any
    channels: Any
    slot: Any
    rank: Any
    world_size: Any
    stamp: Any
    operator: Any
    deadline_us: Any


@triton.jit
def now_ns():
    """Nanoseconds of the GPU's clock; every thread reads its own."""
    return tl.inline_asm_elementwise(ASM_GLOBALTIMER, "=l", [], dtype=tl.int64, is_pure=False, pack=1)


@triton.jit
def sm_number():
    """The streaming multiprocessor this CTA runs on."""
    return tl.inline_asm_elementwise(ASM_SM, "=r", [], dtype=tl.int32, is_pure=False, pack=1)


@triton.jit
def fence_before_tma():
    """Order what was acquired before what the TMA unit reads next (generic proxy to async proxy)."""
    tl.inline_asm_elementwise(ASM_FENCE_PROXY, "=r", [], dtype=tl.int32, is_pure=False, pack=1)


@triton.jit
def drain_tma_stores():
    """Wait until this CTA's TMA stores are written, not merely read from shared memory."""
    tl.inline_asm_elementwise(ASM_BULK_WAIT, "=r", [], dtype=tl.int32, is_pure=False, pack=1)


@triton.jit
def follow_launch():
    """Wait for the launch before on this stream, which this one follows without a gap (programmatic dependent launch).

    A kernel that is launched so (`launching.ready`, `follows`) takes its multiprocessors when all programs of the
    launch before have left them, while what they wrote last is still on its way. Every program comes here before it
    touches memory, and before its warps part into roles: what it may do earlier is to make barriers in shared memory.
    From here on the launch before has ended and all that it wrote is visible, and, since that one waited here for the
    one before itself in each of its programs, so is all that came earlier on the stream. Peers' writes are ordered by
    flags alone, as everywhere, and what a peer is told that we have begun is told behind this.

    Programs that wait for each other or for peers lose nothing to the next launch, of which none comes before they have
    all ended. It could come earlier, as soon as each of them has said so (`griddepcontrol.launch_dependents`): safe as
    well, but its programs then lie where places became free, neighbours far apart, and tiles that share a weight took
    4 to 9 % longer (moe_follows_variants_2gpu_h200.txt).

    Launched otherwise, as in captured graphs, it does nothing.
    """
    tl.inline_asm_elementwise(ASM_LAUNCH_WAIT, "=r", [], dtype=tl.int32, is_pure=False, pack=1)


@triton.jit
def make_stamp(epoch, signature):
    """The value that flags of launch `epoch` hold: twenty bits of launch number, twelve of signature."""
    return ((epoch & STAMP_EPOCHS) << STAMP_SHIFT) | signature


@triton.jit
def open_channel(epoch, control, peers, status, board, flags, channels, slot, rank, world_size, signature, OPERATOR,
                 deadline_us):  # fmt: skip
    """The channel of this CTA in launch `epoch`, from a kernel's arguments."""
    line = line_of(board, tl.program_id(0))
    stamp = make_stamp(epoch, signature)
    return Channel(
        control, peers, status, line, flags, channels, slot, rank, world_size, stamp, OPERATOR, deadline_us
    )  # fmt: skip


@triton.jit
def peer_words(channel, peer):
    """The symmetric words of another rank (int32 pointer)."""
    return tl.load(channel.peers + peer).to(tl.pointer_type(tl.int32))


@triton.jit
def peer_data(channel, peer, offset_bytes, like_ptr):
    """What lies so many bytes into the memory of a rank, as a pointer to what `like_ptr` points to.

    Data begin at multiples of 16 bytes there (`layout.data`). That is said to the compiler: it can't know what an
    address that was loaded divides by, and loads and stores two bytes a thread at a time, which takes a peer's memory
    several times as long.
    """
    base = (tl.load(channel.peers + peer) + offset_bytes).to(tl.pointer_type(like_ptr.dtype.element_ty))
    return tl.multiple_of(base, DATA_ALIGNMENT)


@triton.jit
def flag_of(channel, words, source, index):
    """Where flag `index` of `source` lies within the symmetric words of some rank."""
    return words + channel.flags + source * channel.channels + index


@triton.jit
def publish(channel, flag_ptr):
    """Release: everything this CTA wrote before is visible to a reader that sees the stamp."""
    tl.debug_barrier()
    tl.atomic_xchg(flag_ptr, channel.stamp, sem="release", scope="sys")


@triton.jit
def wait_for(channel, flag_ptr, role, tile, peer, index):
    """Acquire: return 0 once the flag holds this launch's stamp, else why the CTA must leave (`layout.EXPIRED`...)."""
    code = 0
    seen = tl.atomic_add(flag_ptr, 0, sem="acquire", scope="sys")
    if seen != channel.stamp:
        code = _wait_slowly(channel, flag_ptr, role, tile, peer, index)
    fence_before_tma()
    return code


@triton.jit
def _wait_slowly(channel, flag_ptr, role, tile, peer, index):
    begun_ns = now_ns()
    line = channel.progress + role * ROLE_WORDS
    seen = tl.atomic_add(flag_ptr, 0, sem="acquire", scope="sys")
    polls = 1
    code = 0
    while (seen != channel.stamp) & (code == 0):
        seen = tl.atomic_add(flag_ptr, 0, sem="acquire", scope="sys")
        polls += 1
        if polls % POLLS_PER_LOOK == 0:
            if polls == POLLS_PER_LOOK:
                _note_wait(channel, line, tile, peer, index, begun_ns)
            tl.store(line + 6, seen)
            code = _look_around(channel, seen, role, peer, begun_ns)
    if polls >= POLLS_PER_LOOK:
        tl.store(line + 1, tl.where(code == 0, ARRIVED, GAVE_UP))
    if code != 0:
        _give_up(channel, code, role, tile, peer, index, seen, begun_ns)
    return code


@triton.jit
def _note_wait(channel, line, tile, peer, index, begun_ns):
    tl.store(line + 2, tile)
    tl.store(line + 3, peer)
    tl.store(line + 4, index)
    tl.store(line + 5, channel.stamp)
    tl.store(line + 7, (begun_ns & 0xFFFFFFFF).to(tl.int32))
    tl.store(line + 8, (begun_ns >> 32).to(tl.int32))
    tl.store(line + 1, WAITING)


@triton.jit
def _look_around(channel, seen, role, peer, begun_ns):
    """Reasons to stop waiting, the surest first."""
    aborted = tl.atomic_add(channel.control + ABORT, 0, sem="acquire", scope="sys")
    hello = channel.control + HELLO + channel.slot * HELLO_SLOT + peer * HELLO_LINE
    greeting = tl.atomic_add(hello, 0, sem="acquire", scope="sys")
    vote_ptr = channel.control + VOTES + 2 * tl.program_id(0) + role
    # Our own rank owes us nothing but what it waits for itself: twice as patient, so that the peer is named.
    patience_us = tl.where(peer == channel.rank, 2, 1) * channel.deadline_us.to(tl.int64)
    late = (now_ns() - begun_ns) > patience_us * 1000
    tl.atomic_xchg(vote_ptr, late.to(tl.int32), sem="relaxed", scope="gpu")
    voted = tl.atomic_add(vote_ptr, 0, sem="relaxed", scope="gpu")
    code = 0
    if voted != 0:
        code = EXPIRED
    if _other_signature(channel.stamp, seen) | _other_signature(channel.stamp, greeting):
        code = MISMATCH
    if aborted != 0:
        code = ABORTED
    return code


@triton.jit
def _other_signature(stamp, seen):
    """The same launch, but not the same operator and sizes. A flag that was never written is no launch at all."""
    return (seen != stamp) & (seen != 0) & ((seen >> STAMP_SHIFT) == (stamp >> STAMP_SHIFT))


@triton.jit
def _give_up(channel, code, role, tile, peer, index, seen, begun_ns):
    """Write the fault record once per rank, then stop every rank."""
    raised_by = tl.atomic_add(channel.control + ABORT, 0, sem="acquire", scope="sys")
    claimed = tl.atomic_cas(channel.control + CLAIM, 0, 1, sem="acq_rel", scope="gpu")
    if claimed == 0:
        status = channel.status
        tl.store(status + 1, tl.program_id(0))
        tl.store(status + 2, role)
        tl.store(status + 3, tile)
        tl.store(status + 4, peer)
        tl.store(status + 5, index)
        tl.store(status + 6, channel.stamp)
        tl.store(status + 7, seen)
        tl.store(status + 8, ((now_ns() - begun_ns) // 1000).to(tl.int32))
        tl.store(status + 9, channel.operator)
        tl.store(status + 10, (channel.stamp >> STAMP_SHIFT) & STAMP_EPOCHS)
        tl.store(status + 11, raised_by)
        tl.debug_barrier()
        tl.atomic_xchg(status, code, sem="release", scope="sys")
        # A stopped CTA passes on the rank that stopped it, and why.
        reason = tl.where(code == MISMATCH, STRANGER, 0) + 1 + channel.rank
        word = tl.where(code == ABORTED, raised_by, reason)
        for other in range(channel.world_size):
            tl.atomic_cas(peer_words(channel, other) + ABORT, 0, word, sem="release", scope="sys")


@triton.jit
def publish_launch(channel, m, n, k, variant):
    """Publish to every peer what this rank runs (one CTA does it, at the start of a launch)."""
    for other in range(channel.world_size):
        line = peer_words(channel, other) + HELLO + channel.slot * HELLO_SLOT + channel.rank * HELLO_LINE
        tl.store(line + 1, channel.operator)
        tl.store(line + 2, m)
        tl.store(line + 3, n)
        tl.store(line + 4, k)
        tl.store(line + 5, variant)
        tl.debug_barrier()
        tl.atomic_xchg(line, channel.stamp, sem="release", scope="sys")


@triton.jit
def finish_launch(channel, ctas, counted):
    """Count this CTA (or warp-specialised role) out; the last of `ctas` makes the launch number advance.

    `counted`: this launch's copies are announced by a kernel on another stream, which counts launches itself.
    """
    gone = tl.atomic_add(channel.control + EXITS, 1, sem="acq_rel", scope="gpu")
    if gone == ctas - 1:
        tl.atomic_xchg(channel.control + EXITS, 0, sem="relaxed", scope="gpu")
        before = tl.atomic_add(channel.control + EPOCH, 1, sem="release", scope="gpu")
        if counted == 0:
            tl.store(channel.control + PUSHES, before + 1)


@triton.jit
def line_of(progress, cta):
    """The progress line of a CTA (the board begins with a header line)."""
    return progress + (1 + cta) * LINE
