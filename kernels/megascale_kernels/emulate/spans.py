# SPDX-License-Identifier: Apache-2.0
"""Which bytes an access touches: sorted runs, exact to the byte."""

from typing import Any

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

Bytes = NDArray[np.int64]
# A tile's addresses are the same runs each time, wherever it begins; so many kinds of them are kept.
MOST_PATTERNS = 4096
_patterns: dict[tuple[int, bytes], tuple[int, "_Runs"]] = {}


class _Runs:
    """Runs of bytes, counted from the first of all.

    Attributes:
        starts: first byte of each run.
        ends: first byte behind each run.
        stop: first byte behind all.
        text: the same for the same runs only.
    """

    __slots__ = ("ends", "starts", "stop", "text")

    def __init__(self, starts: Bytes, ends: Bytes) -> None:
        self.starts = starts
        self.ends = ends
        self.stop = int(ends[-1])
        self.text = starts.tobytes() + ends.tobytes() if starts.size > 1 else b""


class Span:
    """Disjoint runs of bytes in ascending order.

    Attributes:
        lo: first byte of all.
        hi: first byte behind all.
    """

    __slots__ = ("_runs", "hi", "lo")

    def __init__(self, lo: int, hi: int, runs: _Runs | None = None) -> None:
        self.lo = lo
        self.hi = hi
        self._runs = runs  # None is one run

    @property
    def starts(self) -> Bytes:
        """First byte of each run."""
        return np.asarray([self.lo], dtype=np.int64) if self._runs is None else self._runs.starts + self.lo

    @property
    def ends(self) -> Bytes:
        """First byte behind each run."""
        return np.asarray([self.hi], dtype=np.int64) if self._runs is None else self._runs.ends + self.lo

    @property
    def key(self) -> tuple[int, int, bytes]:
        """The same for the same bytes only."""
        return self.lo, self.hi, b"" if self._runs is None else self._runs.text

    def part(self, keep: NDArray[np.bool_]) -> "Span":
        """Some of the runs."""
        starts, ends = self.starts[keep], self.ends[keep]
        lo = int(starts[0])
        return Span(lo, int(ends[-1]), _Runs(starts - lo, ends - lo))


def span_of(addresses: NDArray[Any], width: int) -> Span:
    """The bytes of elements of `width` bytes at some addresses (at least one, in any order)."""
    if addresses.size == 1:
        only = int(addresses.item())
        return Span(only, only + width)
    flat = addresses.astype(np.int64).ravel()
    first = int(flat[0])
    flat -= first
    key = (width, flat.tobytes())
    known = _patterns.get(key)
    if known is None:
        if len(_patterns) == MOST_PATTERNS:
            _patterns.clear()
        known = _patterns[key] = _runs(flat, width)
    lo = first + known[0]
    return Span(lo, lo + known[1].stop, known[1])


def _runs(flat: Bytes, width: int) -> tuple[int, _Runs]:
    """Where the runs of elements begin, counted from the first element, and the runs."""
    steps = np.diff(flat)
    if (steps <= 0).any():
        flat = np.unique(flat)
        steps = np.diff(flat)
    gaps = np.flatnonzero(steps > width)
    starts = flat[np.concatenate(([0], gaps + 1))]
    ends = flat[np.concatenate((gaps, [flat.size - 1]))] + width
    lo = int(starts[0])
    return lo, _Runs(starts - lo, ends - lo)


def span_of_tensor(tensor: Tensor) -> Span:
    """The bytes of a (strided) tensor with at least one element."""
    width = tensor.element_size()
    address = tensor.data_ptr()
    if tensor.is_contiguous():
        return Span(address, address + tensor.numel() * width)
    offsets = np.asarray([address], dtype=np.int64)
    for size, stride in zip(tensor.shape, tensor.stride(), strict=True):
        offsets = np.add.outer(offsets, np.arange(size, dtype=np.int64) * (stride * width)).ravel()
    return span_of(offsets, width)


def first_common(one: Span, other: Span) -> int | None:
    """The first byte that both touch, if any."""
    follows = np.searchsorted(other.ends, one.starts, side="right")
    inside = follows < other.ends.size
    candidates = np.minimum(follows, other.ends.size - 1)
    meets = np.flatnonzero(inside & (other.starts[candidates] < one.ends))
    if not meets.size:
        return None
    run = int(meets[0])
    return int(max(one.starts[run], other.starts[candidates[run]]))
