# SPDX-License-Identifier: Apache-2.0
"""One copy of a rank's state in host memory, made once and used by every save; its writer process maps the same pages.

The memory has no name: it is an anonymous file (``memfd_create``) whose descriptor the writer process inherits. So
nothing is left in ``/dev/shm`` however the processes end, and the size of that file system, 64 MB in many containers,
is no limit. It grows when a state has grown, which only happens between saves, and never holds two copies.
"""

import mmap
import os
from contextlib import suppress
from typing import Any

import torch

from megascale_ops.checkpoint import storage
from megascale_ops.errors import CheckpointError

# 4 MB: numbers in a structure get longer from save to save, which must not move gigabytes.
_SPARE_BYTES = 4 << 20
# cudaHostRegisterPortable: pinned for every device of the process.
_PORTABLE = 1


class HostBuffer:
    """The memory. Tensors that look into it are taken anew after every ``reserve``."""

    def __init__(self) -> None:
        self.descriptor = -1  # of the memory, once there is any
        self.size_bytes = 0
        self._bytes = torch.empty(0, dtype=torch.uint8)
        self._is_pinned = False

    def reserve(self, size_bytes: int, *, pinned: bool) -> None:
        """Have at least so much memory.

        Args:
            size_bytes: how much.
            pinned: register it with CUDA, for copies that the host does not wait for. Where CUDA refuses, they wait.

        Raises:
            CheckpointError: there is not so much memory.
            OSError: the system gives out no memory in this way.
        """
        if self.descriptor < 0:
            self.descriptor = os.memfd_create("megascale-checkpoint", os.MFD_CLOEXEC)
        if size_bytes > self.size_bytes:
            self._let_go()
            size_bytes += _SPARE_BYTES + -size_bytes % _SPARE_BYTES
            try:
                os.posix_fallocate(self.descriptor, 0, size_bytes)  # or its lack would be a SIGBUS later
            except OSError as exc:
                with suppress(OSError):
                    os.ftruncate(self.descriptor, 0)
                self.size_bytes = 0
                gigabytes = size_bytes / 1e9
                raise CheckpointError(
                    f"there is no memory for a copy of this rank's state ({gigabytes:.1f} GB): {storage.describe(exc)}"
                ) from exc
            mapped = mmap.mmap(self.descriptor, size_bytes, flags=mmap.MAP_SHARED | mmap.MAP_POPULATE)
            mapped.madvise(mmap.MADV_DONTFORK)  # workers of a data loader would keep it alive
            self._bytes = torch.frombuffer(mapped, dtype=torch.uint8)
            self.size_bytes = size_bytes
        if pinned and not self._is_pinned and self.size_bytes:
            self._is_pinned = _register(self._bytes)

    def part(self, start: int, length: int) -> torch.Tensor:
        """So many bytes from ``start``, as a tensor of bytes that looks into the buffer."""
        return self._bytes[start : start + length]

    @property
    def is_pinned(self) -> bool:
        """Whether CUDA copies to it without the host."""
        return self._is_pinned

    def close(self) -> None:
        """Give the memory back."""
        if self.descriptor >= 0:
            self._let_go()
            os.close(self.descriptor)
            self.descriptor, self.size_bytes = -1, 0

    def _let_go(self) -> None:
        if self._is_pinned:
            self._is_pinned = False
            _cudart().cudaHostUnregister(self._bytes.data_ptr())
        self._bytes = torch.empty(0, dtype=torch.uint8)  # the mapping goes with the last tensor that looks into it


def _register(memory: torch.Tensor) -> bool:
    status = _cudart().cudaHostRegister(memory.data_ptr(), memory.numel(), _PORTABLE)
    return int(status) == 0


def _cudart() -> Any:  # noqa: ANN401  torch gives it no type
    return torch.cuda.cudart()  # type: ignore[no-untyped-call]  # same
