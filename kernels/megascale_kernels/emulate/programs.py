# SPDX-License-Identifier: Apache-2.0
"""A program that runs: where it is, what it waits for, what it knows."""

import sys
from typing import TYPE_CHECKING, Any, NamedTuple

from megascale_kernels.emulate.errors import EmulationError
from megascale_kernels.emulate.rewrite import KERNEL_FILES

if TYPE_CHECKING:
    from types import CodeType, FrameType

    from megascale_kernels.emulate.clocks import Strand
    from megascale_kernels.emulate.fibers import Fiber


Trail = tuple[tuple["CodeType", int], ...]


class Wait(NamedTuple):
    """What a program inside `signals.wait_for` waits for."""

    address: int
    tile: int
    peer: int
    channel: int
    needed: int


class Program:
    """A program that runs, or a host operation.

    Attributes:
        strand: what it knows of the others.
        fiber: what the scheduler knows of it.
        place: its index in the grid.
        grid: size of the grid.
        wait: the wait it is in.
        accesses: to memory, so far.
    """

    def __init__(self, strand: "Strand", place: tuple[int, int, int], grid: tuple[int, int, int]) -> None:
        self.strand = strand
        self.place = place
        self.grid = grid
        self.fiber: Fiber | None = None
        self.wait: Wait | None = None
        self.polls: dict[int, tuple[Any, int]] = {}
        self.accesses = 0
        self.last_read: int | None = None
        self.previous_read: int | None = None

    def moves(self) -> None:
        """An access begins: forget the last but one."""
        self.accesses += 1
        self.previous_read, self.last_read = self.last_read, None

    def follow(self) -> None:
        """The launch before has ended, as it may not have before this: `signals.follow_launch`.

        Raises:
            EmulationError: memory has been touched, which that launch may still have been writing or reading.
        """
        if self.accesses:
            raise EmulationError(
                f"{self.strand.who}: {self.accesses} accesses to memory come before the wait for the launch before"
            )


def trail() -> Trail:
    """Where in the kernels' source an access comes from, outermost first; `lines_of` has the lines.

    Nearly none of them is ever asked for, and to tell a line Python reads through a table.
    """
    places = []
    frame: FrameType | None = sys._getframe(1)  # noqa: SLF001 (inspect.stack reads source files: a thousand times slower)
    while frame is not None:
        code = frame.f_code
        if code.co_filename in KERNEL_FILES:
            places.append((code, frame.f_lasti))
        frame = frame.f_back
    places.reverse()
    return tuple(places)


def lines_of(places: Trail) -> tuple[tuple[str, int], ...]:
    """The same as files and lines."""
    return tuple((code.co_filename, _line_of(code, at)) for code, at in places)


def _line_of(code: "CodeType", at: int) -> int:
    lines = (line for start, end, line in code.co_lines() if start <= at < end and line is not None)
    return next(lines, code.co_firstlineno)
