# SPDX-License-Identifier: Apache-2.0
"""Progress boards and trace rings as kernels write them, in plain Python."""

from collections.abc import Iterable

from megascale_kernels.progress.board_format import (
    ALL_TILES_DONE,
    GROUP_WORD,
    HOST_WORD,
    LINE,
    MEMBERS_WORD,
    OPERATORS,
    PROGRESS_MAGIC,
    PROGRESS_WORDS,
    RING_EVENTS,
    RING_WORDS,
    ROLE_WORDS,
    WAITING,
)

SIGNATURE = 0x123


class FakeBoard:
    """What `record.head_board`, `show_tile`, `show_done` and `signals._note_wait` store."""

    def __init__(
        self,
        operator: str = "ag_gemm",
        launch: int = 41,
        *,
        rank: int = 0,
        world_size: int = 4,
        ctas: int = 4,
        tiles: int = 16,
        sizes: tuple[int, int, int] = (2048, 7168, 8192),
    ) -> None:
        self.words = [0] * PROGRESS_WORDS
        self.launch = launch
        number = OPERATORS.index(operator)
        self.words[:11] = [PROGRESS_MAGIC, rank, world_size, number, launch, ctas, tiles, *sizes, launch % 2]

    def host(self, pid: int, started: int, copied_s: int = 0) -> None:
        """Fill the words of the host."""
        self.words[HOST_WORD : HOST_WORD + 3] = [pid, started, copied_s]

    def introduce(self, group: int, members: tuple[int, ...]) -> None:
        """Say whose workspace it is, as its host does."""
        self.words[GROUP_WORD] = group
        self.words[MEMBERS_WORD : MEMBERS_WORD + len(members)] = [rank + 1 for rank in members]

    def tile(self, cta: int, tile: int, *, role: int = 0, launch: int | None = None) -> None:
        """Take a tile in hand."""
        epoch = (self.launch if launch is None else launch) & 0xFFF
        self.words[self._at(cta, role)] = epoch << 20 | (tile + 1)

    def done(self, cta: int, *, role: int = 0, launch: int | None = None, sm: int = 7) -> None:
        """End a role."""
        self.tile(cta, ALL_TILES_DONE - 1, role=role, launch=launch)
        self.words[self._at(cta, role) + 9] = sm

    def wait(
        self,
        cta: int,
        tile: int,
        peer: int,
        channel: int,
        *,
        role: int = 0,
        state: int = WAITING,
        launch: int | None = None,
        seen: int = 0,
        since_ns: int = 0,
    ) -> None:
        """Wait for a flag that shows launch `seen`."""
        at = self._at(cta, role)
        stamp = (self.launch if launch is None else launch) << 12 | SIGNATURE
        shown = seen << 12 | SIGNATURE if seen else 0
        low, high = since_ns & 0xFFFFFFFF, since_ns >> 32
        self.words[at + 1 : at + 9] = [state, tile, peer, channel, stamp, shown, low, high]

    def _at(self, cta: int, role: int) -> int:
        return (1 + cta) * LINE + role * ROLE_WORDS


class FakeRing:
    """What `record.open_ring`, `mark` and `close_ring` store in the ring of one role of one CTA."""

    def __init__(self) -> None:
        self.words = [0] * RING_WORDS
        self.cursor = 0

    def mark(self, time_ns: int, kind: int, tile: int, peer: int) -> None:
        """Record an event."""
        at = (1 + self.cursor % RING_EVENTS) * 4
        self.words[at : at + 4] = [signed(time_ns), signed(time_ns >> 32), kind << 16 | peer, tile]
        self.cursor += 1

    def marks(self, events: Iterable[tuple[int, int, int, int]]) -> "FakeRing":
        """Record events."""
        for event in events:
            self.mark(*event)
        return self

    def close(self, role: int = 0, operator: str = "gemm_rs", sm: int = 7) -> "FakeRing":
        """End the CTA."""
        self.words[:4] = [self.cursor, sm, role, OPERATORS.index(operator)]
        return self


def signed(number: int) -> int:
    """The low 32 bits as a kernel's int32."""
    low = number & 0xFFFFFFFF
    return low - (1 << 32) if low >> 31 else low
