# SPDX-License-Identifier: Apache-2.0
"""Write a trace into a file of bounded size, so that it is either whole or not there.

The timeline is written window by window beside the file and renamed at the end. When the limit is passed, the picture
is made smaller and written anew: first with as many of the newest steps as had room, then with fewer ranks, the most
important of them kept. So what is left out is always the old or the unimportant, and it is said.
"""

from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Protocol

import msgspec

from megascale_ops.errors import MegascaleError, UsageError
from megascale_ops.schema.folding import named
from megascale_ops.trace import chrome, perfetto
from megascale_ops.trace.rank_plan import TAIL
from megascale_ops.trace.timeline import Timeline
from megascale_ops.whole_file import open_beside

# Windows differ in size: of those that had room nine tenths surely have.
_SHRINK = 0.9


class TraceWriter(Protocol):
    """Turns a timeline into bytes; opening, each window, closing."""

    slices: int
    arrows: int

    def opening(self) -> bytes:
        """Return the beginning of the file."""

    def window(self, window: int) -> Iterator[bytes]:
        """Yield the events of one window."""

    def closing(self) -> bytes:
        """Return the end of the file."""


class Format(msgspec.Struct, frozen=True):
    """A file format."""

    writer: Callable[[Timeline], TraceWriter]
    suffix: str


FORMATS = {
    "perfetto": Format(perfetto.PerfettoWriter, perfetto.SUFFIX),
    "chrome": Format(chrome.ChromeWriter, chrome.SUFFIX),
}


class Written(msgspec.Struct, frozen=True):
    """What stands in the file."""

    path: str
    format: str
    size_bytes: int
    ranks: tuple[int, ...]
    first_step: int  # -1: no finished step is in it
    last_step: int
    slices: int
    arrows: int
    left_out: tuple[str, ...]


class _FullError(Exception):
    """The limit was passed after so many whole windows."""

    def __init__(self, windows: int) -> None:
        super().__init__(windows)
        self.windows = windows


def write(
    path: Path,
    format_name: str,
    draw: Callable[[Sequence[int], int], Timeline],
    ranks: Sequence[int],
    last: int,
    limit_bytes: int,
    check: Callable[[], None] = lambda: None,
) -> Written:
    """Write a trace of at most ``limit_bytes``.

    Args:
        path: The file; one that exists is replaced.
        format_name: A key of ``FORMATS``.
        draw: Makes the timeline of some ranks and of the last so many steps.
        ranks: The ranks to draw, the most important first; at least one.
        last: How many steps to draw.
        limit_bytes: What the file may have.
        check: Called before each step; what it raises ends the writing, and nothing is left behind.

    Raises:
        UsageError: there is no such folder, the file can't be written, or something else has its name.
        MegascaleError: not even one step of one rank fits.
    """
    kept, steps = list(ranks), last
    try:
        while True:
            timeline = draw(kept, steps)
            try:
                written = _write_once(path, format_name, timeline, limit_bytes, check)
                break
            except _FullError as full:
                shown = sum(window != TAIL for window in timeline.windows)
                if shown > 1:
                    steps = max(1, min(shown - 1, int(full.windows * _SHRINK)))
                elif len(kept) > 1:
                    kept = kept[: len(kept) // 2]
                else:
                    raise MegascaleError(
                        f"one step of one rank takes more than {limit_bytes:,} bytes: give a larger --limit-mb"
                    ) from None
    except OSError as error:
        raise UsageError(f"{path} can't be written: {error.strerror or error}") from error
    left_out = []
    if steps != last:
        left_out.append(f"all but the last {steps:,} of {last:,} steps, to stay below {limit_bytes / 1e6:,.0f} MB")
    if len(kept) != len(ranks):
        left_out.append(f"{named(ranks[len(kept) :])}, to stay below {limit_bytes / 1e6:,.0f} MB")
    if timeline.arrows.left_out:
        left_out.append(f"{timeline.arrows.left_out:,} arrows that cannot be: the clocks are too far apart")
    return msgspec.structs.replace(written, left_out=tuple(left_out))


def _write_once(
    path: Path, format_name: str, timeline: Timeline, limit_bytes: int, check: Callable[[], None]
) -> Written:
    """Write the whole timeline.

    Raises:
        _FullError: it does not fit.
        OSError: the file can't be written.
    """
    writer = FORMATS[format_name].writer(timeline)
    steps = [window for window in timeline.windows if window != TAIL]
    room = len(writer.closing())
    with open_beside(path, follow=True) as file:
        size = file.write(writer.opening())
        for done, window in enumerate(timeline.windows):
            check()
            for piece in writer.window(window):
                size += file.write(piece)
                if size > limit_bytes - room:
                    raise _FullError(done)
        size += file.write(writer.closing())
    return Written(
        path=str(path),
        format=format_name,
        size_bytes=size,
        ranks=tuple(plan.rank for plan in timeline.plans),
        first_step=min(steps, default=-1),
        last_step=max(steps, default=-1),
        slices=writer.slices,
        arrows=writer.arrows,
        left_out=(),
    )
