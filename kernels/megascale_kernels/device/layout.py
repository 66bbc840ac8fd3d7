# SPDX-License-Identifier: Apache-2.0
"""The bytes that ranks share: one table of where everything lies in a workspace.

A workspace is one symmetric allocation per rank: the same offsets on every rank, so a peer's word is found
from the peer's base address alone. In order:

    control   what one rank's kernels keep for themselves, and the abort word that peers may raise
    hello     per slot and source rank: what that rank is running now (operator, sizes), to name a mismatch
    flags     per slot, source rank and channel: the stamp of the last launch whose data has arrived
    progress  per CTA one 128-byte line: the tile in hand, and the rank waited for
    data      two slots of gathered input (all-gather) or of partial results (reduce-scatter)

A *stamp* is what a flag holds: the launch number and a twelve-bit signature of the operator and its sizes.
It is never reset. A waiter compares for equality: consecutive launches use different slots, and no rank can be
two launches ahead of another (every operator ends only after every peer has begun it), so a flag holds either
an old stamp or exactly the one waited for. A peer that runs something else shows the right launch number with the
wrong signature, and is found at once instead of after the deadline.

All words are 32-bit integers; offsets below count words unless a name ends in bytes.
"""

from typing import NamedTuple

import triton.language as tl

from megascale_kernels.progress import board_format

MAX_RANKS = board_format.MAX_RANKS
MAX_CTAS = board_format.MAX_CTAS
SLOTS = 2
SIGNATURE_BITS = board_format.SIGNATURE_BITS

# Control. Words that peers poll or write have a 128-byte line of their own.
EPOCH = tl.constexpr(0)  # launches finished on the compute stream
PUSHES = tl.constexpr(1)  # launches whose copies have been announced (copy stream)
EXITS = tl.constexpr(2)  # CTAs of the running launch that are done
MET = tl.constexpr(3)  # the last launch that let copies begin: of every peer it knew that it had begun, or it gave up
ABORT = tl.constexpr(32)  # 0, or 1 + the rank that gave up first, and STRANGER if it had met another operator or sizes
CLAIM = tl.constexpr(64)  # the CTA that may write the fault record
VOTES = tl.constexpr(96)  # one word per CTA and role: turns one thread's opinion into that of all its threads
CONTROL_WORDS = 96 + 2 * MAX_CTAS + 32

# Hello: one 128-byte line per slot and source rank.
HELLO = tl.constexpr(CONTROL_WORDS)
HELLO_LINE = tl.constexpr(32)
HELLO_FIELDS = ("stamp", "operator", "m", "n", "k", "variant")
HELLO_WORDS = SLOTS * MAX_RANKS * 32
FLAGS_OFFSET = CONTROL_WORDS + HELLO_WORDS

# Fault record, also mirrored into host memory where the host reads it without asking the device.
FAULT_FIELDS = (
    "code",
    "cta",
    "role",
    "tile",
    "peer",
    "channel",
    "needed",
    "seen",
    "waited_us",
    "operator",
    "epoch",
    "raised_by",
)
FAULT_WORDS = 16
EXPIRED = tl.constexpr(1)  # the deadline passed
ABORTED = tl.constexpr(2)  # a peer gave up first
MISMATCH = tl.constexpr(3)  # the peer runs another operator or other sizes
STRANGER = tl.constexpr(0x100)  # in the abort word: not a deadline but a mismatch

# Progress: what these numbers mean is explained where people read them, in `progress/board_format.py`.
LINE = tl.constexpr(board_format.LINE)
ROLE_WORDS = tl.constexpr(board_format.ROLE_WORDS)
COMPUTE = tl.constexpr(board_format.COMPUTE)
COMMUNICATE = tl.constexpr(board_format.COMMUNICATE)
PROGRESS_WORDS = board_format.PROGRESS_WORDS
PROGRESS_FIELDS = board_format.PROGRESS_FIELDS
PROGRESS_MAGIC = board_format.PROGRESS_MAGIC
WAITING = tl.constexpr(board_format.WAITING)
ARRIVED = tl.constexpr(board_format.ARRIVED)
GAVE_UP = tl.constexpr(board_format.GAVE_UP)

OPERATORS = board_format.OPERATORS

PAGE_BYTES = 4096
DATA_ALIGNMENT = tl.constexpr(16)  # bytes that a thread loads or stores at once; slots of data begin on pages


class Layout(NamedTuple):
    """Where the regions of one workspace lie.

    Attributes:
        world_size: ranks in the group.
        channels: flags per slot and source rank.
        data_bytes: bytes of one data slot.
    """

    world_size: int
    channels: int
    data_bytes: int

    def flags(self, slot: int) -> int:
        """First flag of a slot, in words."""
        return FLAGS_OFFSET + slot * self.world_size * self.channels

    @property
    def progress(self) -> int:
        """First word of the progress board."""
        return self.flags(SLOTS)

    def data(self, slot: int) -> int:
        """First byte of a data slot."""
        words = self.progress + PROGRESS_WORDS
        first = -(-words * 4 // PAGE_BYTES) * PAGE_BYTES
        return first + slot * self.data_bytes

    @property
    def bytes(self) -> int:
        """Size of the whole allocation."""
        return self.data(SLOTS)


def layout(world_size: int, channels: int, data_bytes: int) -> Layout:
    """A layout whose flags of different ranks lie on different 128-byte lines and whose slots begin on pages."""
    return Layout(world_size, -(-channels // 32) * 32, -(-data_bytes // PAGE_BYTES) * PAGE_BYTES)


def signature(operator: int, m: int, n: int, k: int, variant: int) -> int:
    """Twelve bits that two ranks agree on when they run the same thing (FNV-1a, folded; never zero)."""
    folded = 2166136261
    for value in (operator, m, n, k, variant):
        for byte in int(value).to_bytes(8, "little"):
            folded = ((folded ^ byte) * 16777619) & 0xFFFFFFFF
    return (folded ^ folded >> SIGNATURE_BITS ^ folded >> 24) % 0xFFF + 1
