# SPDX-License-Identifier: Apache-2.0
"""What a kernel leaves behind while it runs: one progress word per tile, and, when asked, a trace.

Progress costs one plain store per tile and role. A trace event is 16 bytes in a ring that belongs to one CTA alone, so
it needs no atomics; the cursor travels in a register.

    event = time (low, high word), kind and peer (kind << 16 | peer), tile

A launch event has the launch number where others have a tile, and the operator where others have a peer.
"""

import triton
import triton.language as tl

from megascale_kernels.device.layout import PROGRESS_MAGIC, ROLE_WORDS
from megascale_kernels.device.signals import now_ns, sm_number
from megascale_kernels.progress import board_format

TILE_BEGIN = tl.constexpr(board_format.TILE_BEGIN)
WAIT_BEGIN = tl.constexpr(board_format.WAIT_BEGIN)
WAIT_END = tl.constexpr(board_format.WAIT_END)
TILE_END = tl.constexpr(board_format.TILE_END)
NOTIFY = tl.constexpr(board_format.NOTIFY)
LAUNCH_BEGIN = tl.constexpr(board_format.LAUNCH_BEGIN)

EVENT_WORDS = tl.constexpr(board_format.EVENT_WORDS)
# Each role of a CTA has a ring: a header (cursor, SM, role, operator), then the events.
RING_EVENTS = tl.constexpr(board_format.RING_EVENTS)
RING_WORDS = board_format.RING_WORDS
CURSOR_LIMIT = tl.constexpr(1 << 30)  # days of tracing; beyond it the cursor starts again, still on a full ring
MAGIC = tl.constexpr(PROGRESS_MAGIC)


@triton.jit
def head_board(channel, board, ctas, tiles, m, n, k, PROGRESS: tl.constexpr):
    """Write the header of the progress board: what this launch is (one CTA does it)."""
    if PROGRESS:
        tl.store(board + 1, channel.rank)
        tl.store(board + 2, channel.world_size)
        tl.store(board + 3, channel.operator)
        tl.store(board + 4, (channel.stamp >> 12) & 0xFFFFF)
        tl.store(board + 5, ctas)
        tl.store(board + 6, tiles)
        tl.store(board + 7, m)
        tl.store(board + 8, n)
        tl.store(board + 9, k)
        tl.store(board + 10, channel.slot)
        tl.store(board, MAGIC)


@triton.jit
def show_tile(channel, role, tile, PROGRESS: tl.constexpr):
    """The tile in hand: launch number and tile in one word, so that a reader never mixes two launches."""
    if PROGRESS:
        epoch = (channel.stamp >> 12) & 0xFFF
        tl.store(channel.progress + role * ROLE_WORDS, (epoch << 20) | (tile + 1))


@triton.jit
def show_done(channel, role, PROGRESS: tl.constexpr):
    """This role of this CTA has finished its part of the launch; the state word keeps how its last wait ended."""
    if PROGRESS:
        epoch = (channel.stamp >> 12) & 0xFFF
        tl.store(channel.progress + role * ROLE_WORDS, (epoch << 20) | 0xFFFFF)
        tl.store(channel.progress + role * ROLE_WORDS + 9, sm_number())


@triton.jit
def ring_of(trace, cta, role):
    """The ring of one role of one CTA."""
    return trace + (cta * 2 + role) * (1 + RING_EVENTS) * EVENT_WORDS


@triton.jit
def open_ring(channel, ring, TRACE: tl.constexpr):
    """Go on where the launch before ended: a ring keeps its last events of whatever launch; returns the cursor."""
    cursor = 0
    if TRACE:
        cursor = tl.load(ring)
        cursor = tl.where(cursor < CURSOR_LIMIT, cursor, cursor % RING_EVENTS + RING_EVENTS)
        tl.store(ring + 1, sm_number())
        cursor = mark(ring, cursor, LAUNCH_BEGIN, (channel.stamp >> 12) & 0xFFFFF, channel.operator, TRACE)
    return cursor


@triton.jit
def mark(ring, cursor, kind, tile, peer, TRACE: tl.constexpr):
    """Record an event; returns the cursor of the next one."""
    if TRACE:
        time_ns = now_ns()
        event = ring + (1 + cursor % RING_EVENTS) * EVENT_WORDS
        tl.store(event, (time_ns & 0xFFFFFFFF).to(tl.int32))
        tl.store(event + 1, (time_ns >> 32).to(tl.int32))
        tl.store(event + 2, (kind << 16) | peer)
        tl.store(event + 3, tile)
        cursor += 1
    return cursor


@triton.jit
def close_ring(ring, cursor, role, operator, TRACE: tl.constexpr):
    """Write the ring's header; without it (a killed kernel) the events are found by their times."""
    if TRACE:
        tl.store(ring, cursor)
        tl.store(ring + 1, sm_number())
        tl.store(ring + 2, role)
        tl.store(ring + 3, operator)
