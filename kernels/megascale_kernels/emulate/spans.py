# SPDX-License-Identifier: Apache-2.0
"""Which bytes an access touches: sorted runs, exact to the byte."""

from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

Bytes = NDArray[np.int64]
# A tile's addresses are the same runs each time, wherever it begins; so many kinds of them are kept.
MOST_PATTERNS = 4096
_patterns: dict[tuple[int, bytes], tuple[Bytes, Bytes]] = {}


class Span(NamedTuple):
    """Disjoint runs of bytes in ascending order.

    Attributes:
        starts: first byte of each run.
        ends: first byte behind each run.
    """

    starts: Bytes
    ends: Bytes

    @property
    def lo(self) -> int:
        """First byte of all."""
        return int(self.starts[0])

    @property
    def hi(self) -> int:
        """First byte behind all."""
        return int(self.ends[-1])

    @property
    def key(self) -> bytes:
        """The same for the same bytes only."""
        return self.starts.tobytes() + self.ends.tobytes()

    def part(self, keep: NDArray[np.bool_]) -> "Span":
        """Some of the runs."""
        return Span(self.starts[keep], self.ends[keep])


def span_of(addresses: NDArray[Any], width: int) -> Span:
    """The bytes of elements of `width` bytes at some addresses (at least one, in any order)."""
    flat = addresses.astype(np.int64).ravel()
    if flat.size == 1:
        return Span(flat, flat + width)
    first = flat[0]
    flat -= first
    key = (width, flat.tobytes())
    known = _patterns.get(key)
    if known is None:
        if len(_patterns) == MOST_PATTERNS:
            _patterns.clear()
        known = _patterns[key] = _runs(flat, width)
    return Span(known[0] + first, known[1] + first)


def _runs(flat: Bytes, width: int) -> tuple[Bytes, Bytes]:
    """First byte of each run of elements, and the first one behind it."""
    steps = np.diff(flat)
    if (steps <= 0).any():
        flat = np.unique(flat)
        steps = np.diff(flat)
    gaps = np.flatnonzero(steps > width)
    starts = flat[np.concatenate(([0], gaps + 1))]
    ends = flat[np.concatenate((gaps, [flat.size - 1]))] + width
    return starts, ends


def span_of_tensor(tensor: Tensor) -> Span:
    """The bytes of a (strided) tensor with at least one element."""
    width = tensor.element_size()
    address = np.asarray([tensor.data_ptr()], dtype=np.int64)
    if tensor.is_contiguous():
        return Span(address, address + tensor.numel() * width)
    offsets = address
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
