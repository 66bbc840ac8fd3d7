# SPDX-License-Identifier: Apache-2.0
"""Ranks that are late now and then: single late starts, counted against how often all others have them.

As in ``stragglers``: at least four among 512 blocks, more than chance explains (Poisson), and worth it. A rank that
writes a checkpoint is late for a good reason: that time is taken off. Pure.
"""

from collections import deque
from collections.abc import Sequence

from megascale_ops.diagnosis.skew.measure import Jump
from megascale_ops.diagnosis.statistics import false_alarms

LEAST_JUMPS, JUMP_WINDOW = 4, 512
# After so few blocks it is not known what is usual.
_LEAST_BLOCKS = 16


class LateStarts:
    """The single late starts of all ranks, and the ranks named for them."""

    def __init__(self) -> None:
        self.blocks = 0
        self.named: dict[int, int] = {}  # rank -> blocks seen then
        self._jumps: dict[int, deque[Jump]] = {}
        self._newest: dict[int, int] = {}  # rank -> the block of its newest, counted or not
        self._of_all = 0
        self._excused: dict[int, deque[tuple[int, float]]] = {}

    def excuse(self, rank: int, seconds: float) -> None:
        """Note that a rank was late for a good reason."""
        self._excused.setdefault(rank, deque(maxlen=64)).append((self.blocks, seconds))

    def add(
        self, jumps: Sequence[Jump], blocks: int, *, ranks: int, block_s: float, a_day: float, worth: float
    ) -> None:
        """Take one pass in, and keep the names true.

        Args:
            jumps: of the pass.
            blocks: how many the pass has.
            ranks: how many there are.
            block_s: how long a block is.
            a_day: how many false names are granted.
            worth: the least share of the time that is worth a name.
        """
        touched = set()
        for jump in sorted(jumps, key=lambda jump: jump.block):
            at = self.blocks + jump.block
            held = self._jumps.setdefault(jump.rank, deque(maxlen=32))
            seen = self._newest.get(jump.rank)
            self._newest[jump.rank] = at
            # One after the other is no "now and then": the cumulative sums see that.
            if seen is None or at - seen > 1:
                held.append(jump._replace(block=at))
                self._of_all += 1
                touched.add(jump.rank)
        self.blocks += blocks
        for rank in touched:
            if rank not in self.named and self._too_often(rank, ranks, block_s, a_day):
                lost = self.lost(rank, block_s)
                if lost >= worth:
                    self.named[rank] = self.blocks
        for rank in list(self.named):
            held = self._jumps[rank]
            if self.blocks - held[-1].block > max(20, self.window(rank)):
                del self.named[rank]
                held.clear()

    def _too_often(self, rank: int, ranks: int, block_s: float, a_day: float) -> bool:
        held = self._jumps[rank]
        while held and held[0].block <= self.blocks - JUMP_WINDOW:
            held.popleft()
        if len(held) < LEAST_JUMPS or self.blocks < _LEAST_BLOCKS:
            return False
        window = min(self.blocks, JUMP_WINDOW)
        rate = (self._of_all - len(held) + 1) / (self.blocks * max(1, ranks - 1))
        windows_a_day = ranks * 86_400.0 / max(window * block_s, 1e-6)
        return false_alarms.chance_of_at_least(len(held), rate * window) * windows_a_day < a_day

    def lost(self, rank: int, block_s: float) -> float:
        """Return the share of the time that a rank's single late starts cost, without checkpoints."""
        held = self._jumps[rank]
        excused_s = sum(seconds for at, seconds in self._excused.get(rank, ()) if at >= held[0].block - 1)
        lost_s = sum(jump.excess_s * jump.weight for jump in held) - excused_s
        return min(1.0, max(0.0, lost_s) / (self.window(rank) * block_s))

    def window(self, rank: int) -> float:
        """Return over how many blocks a rank's late starts spread, one gap more than lies between them."""
        held = self._jumps[rank]
        return max(1.0, (self.blocks - held[0].block) * len(held) / max(1, len(held) - 1))

    def of(self, rank: int) -> tuple[int, float, float]:
        """Return since which block a rank is late now and then, one late start in how many, and their mean in s."""
        held = self._jumps[rank]
        return held[0].block, self.window(rank) / len(held), sum(jump.excess_s for jump in held) / len(held)
