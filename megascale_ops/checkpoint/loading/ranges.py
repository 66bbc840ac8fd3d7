# SPDX-License-Identifier: Apache-2.0
"""Ranges of bytes in a file: joined, cut to a block, counted. Pure.

A range is (first byte, byte behind the last). A list of ranges is sorted and its ranges do not touch.
"""

from collections.abc import Iterable, Sequence

Range = tuple[int, int]


def joined(ranges: Iterable[Range], gap: int = 0) -> tuple[Range, ...]:
    """All that some ranges cover, in order.

    Args:
        ranges: in any order, overlapping as they like; empty ones count nothing.
        gap: so many bytes between two ranges are taken along, to have one range of them.
    """
    found: list[Range] = []
    for start, stop in sorted(ranges):
        if start >= stop:
            continue
        if found and start <= found[-1][1] + gap:
            found[-1] = found[-1][0], max(found[-1][1], stop)
        else:
            found.append((start, stop))
    return tuple(found)


def cut(ranges: Sequence[Range], start: int, stop: int) -> list[Range]:
    """What of a list of ranges lies within one."""
    return [(max(a, start), min(b, stop)) for a, b in ranges if a < stop and b > start]


def count(ranges: Iterable[Range]) -> int:
    """How many bytes there are in a list of ranges."""
    return sum(stop - start for start, stop in ranges)
