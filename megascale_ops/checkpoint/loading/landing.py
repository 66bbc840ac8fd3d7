# SPDX-License-Identifier: Apache-2.0
"""Where bytes of a file go: the parts of tensors that this rank asked for, filled piece by piece.

A tensor that lies in memory as it lies in the file is filled in place, on whatever device. One that does not (another
type, a slice of columns) is put together beside and copied once it is whole.
"""

from bisect import bisect_right
from collections.abc import Iterator, Sequence
from typing import NamedTuple

import torch

from megascale_ops.checkpoint import plan
from megascale_ops.checkpoint.dcp_storage import is_lazy

# 64 kB: below it a call for each tensor costs more than a copy.
_LARGE_BYTES = 64 << 10


class Piece(NamedTuple):
    """A part of a file, and the memory that it is read right into; None: it is to be ``put``."""

    start: int
    stop: int
    memory: memoryview | None


class Landing:
    """Rows of a chunk, or bytes, that go into a tensor.

    Args:
        chunk: as it lies in its file.
        dtype: of its elements.
        offsets: the first element that is wanted, by dimension, within the chunk.
        lengths: how many of them.
        target: what they go into; as many elements.
    """

    def __init__(
        self,
        chunk: plan.Chunk,
        dtype: torch.dtype,
        offsets: Sequence[int],
        lengths: Sequence[int],
        target: torch.Tensor,
    ) -> None:
        rows = (*chunk.sizes, 1)[0]
        row_bytes = chunk.length // rows if rows else 0
        first, count = (*offsets, 0)[0], (*lengths, 1)[0]
        self.start = chunk.start + first * row_bytes
        self.stop = self.start + count * row_bytes
        self._target = target
        self._shape, self._dtype = (count, *chunk.sizes[1:]), dtype
        self._columns = tuple(zip(offsets[1:], lengths[1:], strict=True))
        is_whole = tuple(lengths[1:]) == tuple(chunk.sizes[1:])
        fits = is_whole and target.dtype == dtype and target.is_contiguous() and not is_lazy(target)
        self._into: torch.Tensor | None = bytes_of(target) if fits else None
        self._beside: torch.Tensor | None = None
        self._left_bytes = self.stop - self.start

    @property
    def is_on_gpu(self) -> bool:
        """Whether the tensor is."""
        return self._target.device.type == "cuda"

    @property
    def is_in_host_memory(self) -> bool:
        """Whether the bytes go to memory of the host, as they are."""
        return self._into is not None and self._into.device.type == "cpu"

    def memory(self) -> memoryview:
        """That memory."""
        assert self._into is not None, "asked for where there is some"
        return self._into.numpy().data

    def put(self, at: int, piece: torch.Tensor) -> None:
        """Take bytes of the file, from ``at`` on; those of others are left alone."""
        start, stop = max(at, self.start), min(at + piece.numel(), self.stop)
        if start >= stop:
            return
        if self._into is None:
            self._beside = torch.empty(self._shape, dtype=self._dtype, device=piece.device)
            self._into = bytes_of(self._beside)
        self._into[start - self.start : stop - self.start].copy_(piece[start - at : stop - at])
        self._left_bytes -= stop - start
        if not self._left_bytes and self._beside is not None:
            part = self._beside
            for dim, (offset, length) in enumerate(self._columns, start=1):
                part = part.narrow(dim, offset, length)
            self._target.copy_(part.reshape(self._target.shape))
            self._beside = self._into = None


class LandingField:
    """All landings of one file."""

    def __init__(self, landings: Sequence[Landing]) -> None:
        self._landings = sorted(landings, key=lambda each: (each.start, each.stop))
        self._starts = [each.start for each in self._landings]
        # Landings may overlap (one chunk for two tensors); how far back one may begin that still reaches to a place.
        self._longest = max((each.stop - each.start for each in self._landings), default=0)

    @property
    def is_on_gpu(self) -> bool:
        """Whether any bytes go to a GPU."""
        return any(each.is_on_gpu for each in self._landings)

    @property
    def is_in_host_memory(self) -> bool:
        """Whether all bytes go to memory of the host, as they are."""
        return all(each.is_in_host_memory for each in self._landings)

    def pieces(self) -> Iterator[Piece]:
        """The memory of each large tensor that no other one shares its bytes with, in the order of the file."""
        reached = 0
        for number, each in enumerate(self._landings):
            behind = self._starts[number + 1] if number + 1 < len(self._starts) else each.stop
            if each.stop - each.start >= _LARGE_BYTES and reached <= each.start and each.stop <= behind:
                yield Piece(each.start, each.stop, each.memory())
            reached = max(reached, each.stop)

    def put(self, at: int, piece: torch.Tensor) -> None:
        """Give bytes of the file to all that wait for them."""
        behind = bisect_right(self._starts, at + piece.numel() - 1)
        first = bisect_right(self._starts, at - self._longest)
        for landing in self._landings[first:behind]:
            landing.put(at, piece)


def bytes_of(tensor: torch.Tensor) -> torch.Tensor:
    """The elements of a contiguous tensor as bytes, on its device. Of one element it may have any stride."""
    return tensor.as_strided((tensor.numel(),), (1,)).view(torch.uint8)
