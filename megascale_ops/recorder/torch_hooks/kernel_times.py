# SPDX-License-Identifier: Apache-2.0
"""Thousands of a profiler's events as one row for each kernel. Pure.

On a GPU every kernel is an event of its own. On a CPU operators call operators, so what counts is an operator's *own*
time: its duration without the operators inside it on the same thread. ``aten::linear`` has hardly any, the ``aten::mm``
below it has it all.
"""

import zlib
from collections.abc import Iterable
from statistics import median
from typing import NamedTuple

from megascale_ops.schema.kernels import MOST_KERNELS, KernelTime

# 120 characters: two CUTLASS kernels differ near the front and at the end of their names.
_FRONT, _END = 80, 33


class Span(NamedTuple):
    """One event; ``thread`` is 0 on a GPU, where nothing nests."""

    name: str
    thread: int
    start_ns: int
    duration_ns: int


def summarise(spans: Iterable[Span], most: int = MOST_KERNELS) -> tuple[tuple[KernelTime, ...], int, float]:
    """Return the kernels that took longest in all, how many others there were, and microseconds of these others."""
    by_name: dict[str, list[int]] = {}
    for name, own_ns in own_times(spans):
        by_name.setdefault(name, []).append(own_ns)
    rows = [_row(name, sorted(times_ns)) for name, times_ns in by_name.items()]
    rows.sort(key=lambda row: (-row.total_us, row.name))
    left = rows[most:]
    return tuple(rows[:most]), len(left), round(sum(row.total_us for row in left), 1)


def _row(name: str, times_ns: list[int]) -> KernelTime:
    low_ns = times_ns[(len(times_ns) - 1) // 4]
    us = [round(each * 1e-3, 3) for each in (sum(times_ns), median(times_ns), low_ns)]
    return KernelTime(short(name), len(times_ns), *us)


def own_times(spans: Iterable[Span]) -> Iterable[tuple[str, int]]:
    """Yield each event's name with its own time in nanoseconds."""
    nested: dict[int, list[Span]] = {}
    for span in spans:
        if span.duration_ns < 0:
            continue
        if span.thread:
            nested.setdefault(span.thread, []).append(span)
        else:
            yield span.name, span.duration_ns
    for of_thread in nested.values():
        # Of two that begin together the longer one is outside.
        of_thread.sort(key=lambda span: (span.start_ns, -span.duration_ns))
        yield from _own_times_of_thread(of_thread)


def _own_times_of_thread(spans: list[Span]) -> Iterable[tuple[str, int]]:
    open_: list[tuple[Span, list[int]]] = []  # each with what its children take
    for span in spans:
        while open_ and _end(open_[-1][0]) <= span.start_ns:
            yield _closed(*open_.pop())
        if open_:
            open_[-1][1].append(span.duration_ns)
        open_.append((span, []))
    while open_:
        yield _closed(*open_.pop())


def _closed(span: Span, inside_ns: list[int]) -> tuple[str, int]:
    return span.name, max(0, span.duration_ns - sum(inside_ns))


def _end(span: Span) -> int:
    return span.start_ns + span.duration_ns


def short(name: str) -> str:
    """Return a kernel's name in at most 120 bytes of plain characters; one that is cut carries a mark of the whole."""
    plain = "".join(character if " " <= character <= "~" else "?" for character in name)
    if len(plain) <= _FRONT + _END + 7:
        return plain
    return f"{plain[:_FRONT]}..{plain[-_END:]}#{zlib.crc32(name.encode()) & 0xFFFF:04x}"
