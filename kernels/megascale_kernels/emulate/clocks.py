# SPDX-License-Identifier: Apache-2.0
"""What each program knows of the others: vector clocks with three entries per program.

A release publishes what the releasing *thread* has done, so a program's accesses fall into three classes that become
publishable at different moments, and each class has an entry of its own in every clock:

    ORDERED   scalars and atomics, by the thread that also releases: at once
    SPREAD    blocks, by all threads of the CTA: after a barrier
    BULK      stores of the TMA unit: after `cp.async.bulk.wait_group`

Each class counts *epochs*. A clock holds, per class of each program, the last epoch that is known to be complete; an
access is ordered before each program whose clock has reached its epoch. The TMA unit reads and writes by another proxy:
it knows what its program knew at its last proxy fence, `seen_by_tma`.
"""

import numpy as np
from numpy.typing import NDArray

from megascale_kernels.emulate.events import Who

ORDERED, SPREAD, BULK = range(3)
CLASSES = 3
CTA, GPU, SYS = range(3)

Clock = NDArray[np.int64]


def joined(one: Clock, other: Clock) -> Clock:
    """The union of what two clocks know: the maximum of each entry."""
    if one.size < other.size:
        one, other = other, one
    result = one.copy()
    np.maximum(result[: other.size], other, out=result[: other.size])
    return result


class Strand:
    """A program of a kernel, or a host operation: something whose accesses follow each other.

    Attributes:
        who: its name.
        first: index of its first entry in every clock.
        seen: what it knows.
        seen_by_tma: what its TMA operations know.
        epochs: the running epoch of each of its classes.
        fences: how many proxy fences it has executed.
    """

    def __init__(self, who: Who, number: int, strands: int, inherited: Clock) -> None:
        self.who = who
        self.first = number * CLASSES
        self.seen = joined(np.zeros(strands * CLASSES, dtype=np.int64), inherited)
        self.seen_by_tma = self.seen.copy()
        self.epochs = [1] * CLASSES
        self.fences = 0

    def complete(self, kind: int) -> None:
        """All accesses of a class so far are publishable."""
        self.seen[self.first + kind] = self.epochs[kind]
        self.epochs[kind] += 1

    def barrier(self) -> None:
        """All threads of the CTA have come this far."""
        self.complete(SPREAD)

    def fence(self) -> None:
        """The TMA unit learns what the threads know."""
        self.seen_by_tma = self.seen.copy()
        self.fences += 1

    def drain(self) -> None:
        """TMA stores so far are written."""
        self.complete(BULK)

    def end(self) -> None:
        """The end of a kernel completes everything."""
        for kind in range(CLASSES):
            self.complete(kind)


class Flags:
    """What the releases of each address have published.

    A read-modify-write continues the release sequence of those before it (PTX and C++ alike), so releases of one
    address add up; a plain store ends the sequence.
    """

    def __init__(self) -> None:
        self._released: dict[int, dict[tuple[int, int], Clock]] = {}

    def release(self, strand: Strand, address: int, scope: int) -> None:
        """Publish what a strand has completed."""
        strand.complete(ORDERED)
        by_scope = self._released.setdefault(address, {})
        key = (scope, strand.who.rank)
        earlier = by_scope.get(key)
        by_scope[key] = strand.seen.copy() if earlier is None else joined(strand.seen, earlier)

    def acquire(self, strand: Strand, address: int, scope: int) -> None:
        """Learn what was released at an address, as far as both scopes include both sides."""
        for (released_scope, rank), clock in self._released.get(address, {}).items():
            narrower = min(scope, released_scope)
            if narrower == SYS or (narrower == GPU and rank == strand.who.rank):
                strand.seen = joined(strand.seen, clock)

    def overwrite(self, lo: int, hi: int) -> None:
        """Plain stores end the release sequences of what they touch."""
        if hi - lo <= 8:
            self._released.pop(lo, None)
            return
        for address in [address for address in self._released if lo <= address < hi]:
            del self._released[address]
