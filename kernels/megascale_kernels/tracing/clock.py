# SPDX-License-Identifier: Apache-2.0
"""Bring the clocks of several GPUs to one: `%globaltimer` counts nanoseconds on each, from a start of its own.

Ping-pong (Cristian, "Probabilistic clock synchronization", 1989): rank A notes its time, asks, B answers with its own
time, A notes its time again. B read its clock between A's two readings, so B's clock minus A's lies between
`answered - received` and `answered - asked`. Every exchange gives such an interval, and the truth lies in all of them:
their intersection is never wider than the fastest exchange, and its half is a bound of the error, not an estimate.
"""

from collections.abc import Callable, Iterable, Sequence
from typing import NamedTuple


class Exchange(NamedTuple):
    """One ping-pong, nanoseconds.

    Attributes:
        asked_ns: when the question left, on the asker's clock.
        answered_ns: when it was answered, on the other's clock.
        received_ns: when the answer was there, on the asker's clock.
    """

    asked_ns: int
    answered_ns: int
    received_ns: int


class Offset(NamedTuple):
    """A clock against the reference clock, nanoseconds.

    Attributes:
        offset_ns: what it shows more than the reference.
        error_ns: bound of the error.
    """

    offset_ns: int = 0
    error_ns: int = 0


def offset_of(exchanges: Iterable[Exchange]) -> Offset:
    """The other's clock minus the asker's.

    Clocks that drift while they are measured may leave no common interval; the fastest exchange counts then.

    Raises:
        ValueError: no exchange, or one that ended before it began.
    """
    found = list(exchanges)
    if not found or any(one.received_ns < one.asked_ns for one in found):
        raise ValueError("the offset of a clock needs exchanges, none of which ends before it begins")
    low = max(one.answered_ns - one.received_ns for one in found)
    high = min(one.answered_ns - one.asked_ns for one in found)
    if low > high:
        fastest = min(found, key=lambda one: one.received_ns - one.asked_ns)
        low, high = fastest.answered_ns - fastest.received_ns, fastest.answered_ns - fastest.asked_ns
    return Offset((low + high) // 2, (high - low + 1) // 2)


def align(ping: Callable[[int], Exchange], ranks: Sequence[int], rounds: int = 64) -> dict[int, Offset]:
    """Measure the clocks of `ranks` against that of the first.

    Args:
        ping: asks a rank from the first one, once.
        ranks: all of them.
        rounds: exchanges per rank; the fastest few decide.
    """
    offsets = {rank: offset_of(ping(rank) for _ in range(rounds)) for rank in ranks[1:]}
    return {ranks[0]: Offset(), **offsets} if ranks else {}
