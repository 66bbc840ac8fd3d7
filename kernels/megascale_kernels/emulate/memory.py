# SPDX-License-Identifier: Apache-2.0
"""The memory that kernels may touch: every access outside it is an error, not a crash.

A region is the storage of one tensor. It keeps its tensor alive, so an address never means two things in one world.
"""

import bisect
from collections.abc import Callable, Iterator

import numpy as np
from torch import Tensor

from megascale_kernels.emulate.errors import EmulationError
from megascale_kernels.emulate.spans import Span


class Region:
    """The storage of one tensor.

    Attributes:
        name: what people call it.
        rank: the rank that owns it.
        start: its first byte.
        stop: the first byte behind it.
    """

    def __init__(self, tensor: Tensor, rank: int, name: str, places: Callable[[int], str] | None) -> None:
        storage = tensor.untyped_storage()
        self.tensor = tensor
        self.rank = rank
        self.name = name
        self.start = storage.data_ptr()
        self.stop = self.start + storage.nbytes()
        self._places = places

    def place(self, address: int) -> str:
        """What lies at an address, in words."""
        offset = address - self.start
        within = f"byte {offset}" if self._places is None else f"{self._places(offset)} (byte {offset})"
        return f"rank {self.rank} {self.name}: {within}"


class Memory:
    """All regions of a world."""

    def __init__(self) -> None:
        self._starts: list[int] = []
        self._regions: list[Region] = []

    def add(self, tensor: Tensor, rank: int, name: str, places: Callable[[int], str] | None = None) -> None:
        """Make a tensor's storage accessible; a storage that is already known keeps its first name."""
        if tensor.device.type != "cpu":
            raise EmulationError(f"{name} of rank {rank} lies on {tensor.device}: the emulator runs on CPU tensors")
        if tensor.untyped_storage().nbytes() == 0:
            return
        region = Region(tensor, rank, name, places)
        at = bisect.bisect_left(self._starts, region.start)
        if at == len(self._starts) or self._starts[at] != region.start:
            self._starts.insert(at, region.start)
            self._regions.insert(at, region)

    def find(self, address: int) -> Region | None:
        """The region an address lies in."""
        at = bisect.bisect_right(self._starts, address) - 1
        if at >= 0 and address < self._regions[at].stop:
            return self._regions[at]
        return None

    def parts(self, span: Span) -> Iterator[tuple[Region, Span]]:
        """A span region by region.

        Raises:
            EmulationError: some byte belongs to no region.
        """
        rest = span
        while True:
            region = self.find(rest.lo)
            if region is None:
                raise EmulationError(self._outside(rest.lo))
            if rest.hi <= region.stop:
                yield region, rest
                return
            inside = rest.starts < region.stop
            here = rest.part(inside)
            if here.hi > region.stop:
                raise EmulationError(self._outside(region.stop))
            yield region, here
            rest = rest.part(np.logical_not(inside))

    def place(self, address: int) -> str:
        """What lies at an address, in words."""
        region = self.find(address)
        return region.place(address) if region else self._outside(address)

    def _outside(self, address: int) -> str:
        at = bisect.bisect_right(self._starts, address) - 1
        if at < 0:
            return f"address {address:#x} lies outside of every tensor"
        region = self._regions[at]
        return (
            f"address {address:#x} lies outside of every tensor: {address - region.stop} bytes behind the end of "
            f"{region.name} of rank {region.rank}"
        )
