# SPDX-License-Identifier: Apache-2.0
"""One file of a checkpoint, read from front to back in blocks and digested as it passes.

What is loaded is what was digested: the same bytes in the same buffer, so nothing can change between the two, and no
file is read twice. The next block is read while the ones before are being sent and copied.

A file that can't be read goes on giving blocks, of whatever stands in the buffer: the other ranks wait for them, and
hear at the end what was wrong.
"""

import hashlib
from concurrent.futures import Executor, Future
from contextlib import ExitStack

import torch

from megascale_ops.checkpoint import storage
from megascale_ops.checkpoint.loading.sources import Opened, Source
from megascale_ops.checkpoint.manifest import FileEntry, FileSeen


class FileStream:
    """The blocks of one file; each is good until the one after the next is taken.

    Args:
        source: where it is.
        entry: what the manifest says of it.
        block_bytes: of all blocks but the last.
        executor: reads ahead.
        pinned: whether blocks are copied to a GPU, for which memory that is locked is faster.
    """

    def __init__(
        self, source: Source, entry: FileEntry, block_bytes: int, executor: Executor, *, pinned: bool = False
    ) -> None:
        self._source, self._entry, self._block_bytes, self._executor = source, entry, block_bytes, executor
        size = min(block_bytes, entry.size_bytes)
        self._buffers = [torch.empty(size, dtype=torch.uint8, pin_memory=pinned) for _ in range(2)]
        self._sha256 = hashlib.sha256()
        self._stack = ExitStack()
        self._file: Opened | None = None
        self._seen: FileSeen | None = None  # what is wrong, as soon as it is known
        self._taken = 0
        self.read_bytes = 0
        self._ahead: Future[torch.Tensor] | None = executor.submit(self._read, 0)  # last: it uses all of the above

    def take(self) -> torch.Tensor:
        """The next block, bytes in the memory of the host."""
        assert self._ahead is not None, "a block is taken once"
        block = self._ahead.result()
        self._taken += 1
        is_more = self._taken * self._block_bytes < self._entry.size_bytes
        self._ahead = self._executor.submit(self._read, self._taken) if is_more else None
        return block

    def close(self) -> FileSeen:
        """What was seen of the file, once all blocks were taken."""
        if self._ahead is not None:
            self._ahead.result()
        self._stack.close()
        return self._seen or FileSeen(self._entry.name, self.read_bytes, self._sha256.hexdigest())

    def _read(self, number: int) -> torch.Tensor:
        """In the executor; one block after the other, each into the buffer that is not in use."""
        left = self._entry.size_bytes - number * self._block_bytes
        block = self._buffers[number % 2][: min(left, self._block_bytes)]
        if self._seen is None:
            try:
                self._fill(block.numpy().data)
            except FileNotFoundError:
                self._seen = FileSeen(self._entry.name)
            except OSError as exc:
                self._seen = FileSeen(self._entry.name, error=storage.describe(exc))
        return block

    def _fill(self, view: memoryview) -> None:
        if self._file is None:
            self._file = self._stack.enter_context(self._source.opened(self._entry.name))
            if self._file.size_bytes != self._entry.size_bytes:
                self._seen = FileSeen(self._entry.name, self._file.size_bytes)
                return
        rest = view
        while len(rest):
            count = self._file.read_into(rest)
            if not count:
                self._seen = FileSeen(self._entry.name, self.read_bytes)  # cut short while it was read
                return
            rest = rest[count:]
            self.read_bytes += count
        self._sha256.update(view)
