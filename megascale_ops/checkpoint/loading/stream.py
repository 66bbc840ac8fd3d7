# SPDX-License-Identifier: Apache-2.0
"""One file of a checkpoint, read from front to back in blocks and digested as it passes.

What is loaded is what was digested: the same bytes in the same memory, so nothing can change between the two, and no
file is read twice. Where no other rank waits for blocks of a file, and its tensors lie in the memory of the host as
they lie in the file, it is read right into them, in a thread of its own. Else blocks are handed out, and the next one
is read while the ones before are being sent and copied.

A file that can't be read, or from which nothing comes any more, goes on giving blocks, of whatever stands in the
buffer: the other ranks wait for them, and hear at the end what was wrong.
"""

from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator
from contextlib import ExitStack
from queue import SimpleQueue
from typing import TYPE_CHECKING

import torch

from megascale_ops.checkpoint import storage
from megascale_ops.checkpoint.loading.landing import LandingField, Piece
from megascale_ops.checkpoint.loading.reading import LateError, ReadingThreads
from megascale_ops.checkpoint.loading.sources import Opened, Source
from megascale_ops.checkpoint.manifest import FileEntry, FileSeen
from megascale_ops.checkpoint.trust.file_digests import FileDigest

if TYPE_CHECKING:
    from concurrent.futures import Future

# 8 MB: what lies between large tensors is small; a store is asked for so much at once.
_BESIDE_BYTES = 8 << 20


class FileStream(ABC):
    """What both kinds share.

    Args:
        source: where the file is.
        entry: what the manifest says of it.
        threads: read it.
    """

    def __init__(self, source: Source, entry: FileEntry, threads: ReadingThreads) -> None:
        self._source, self._entry, self._threads = source, entry, threads
        self.is_late = False
        """Whether nothing came any more: what was being read into is not to be used, for that may still come."""
        self._digest = FileDigest(entry.digest)
        self._stack = ExitStack()
        self._file: Opened | None = None
        self._seen: FileSeen | None = None  # what is wrong, as soon as it is known
        self.read_bytes = 0

    @abstractmethod
    def take(self) -> torch.Tensor | None:
        """The next block, once it was read; None: its bytes are where they belong."""

    def close(self) -> FileSeen:
        """What was seen of the file, once all blocks were taken."""
        if self.is_late:  # a thread is still at it, which closes it if it ever comes back
            return FileSeen(self._entry.name, error=f"nothing was read for {self._threads.patience_s:.0f} s")
        self._stack.close()
        return self._seen or FileSeen(self._entry.name, self.read_bytes, self._digest.text())

    def _await(self, work: "Future[None]") -> None:
        if not self.is_late:
            try:
                self._threads.await_read(work.result)
            except LateError:
                self.is_late = True

    def _fill(self, view: memoryview) -> bool:
        """Read what comes next and digest it; whether all is well so far."""
        if self._seen is None:
            try:
                self._read(view)
            except FileNotFoundError:
                self._seen = FileSeen(self._entry.name)
            except OSError as exc:
                self._seen = FileSeen(self._entry.name, error=storage.describe(exc))
        return self._seen is None

    def _read(self, view: memoryview) -> None:
        if self._file is None:
            self._file = self._stack.enter_context(self._source.opened(self._entry.name))
            if self._file.size_bytes != self._entry.size_bytes:
                self._seen = FileSeen(self._entry.name, self._file.size_bytes)
                return
        rest = view
        while len(rest) and not self.is_late:
            count = self._file.read_into(rest)
            if not count:
                self._seen = FileSeen(self._entry.name, self.read_bytes)  # cut short while it was read
                return
            self._threads.moved()
            self._digest.update(rest[:count])
            rest = rest[count:]
            self.read_bytes += count


class BlockStream(FileStream):
    """Hands out blocks; each is good until the one after the next is taken.

    Args:
        source: where the file is.
        entry: what the manifest says of it.
        block_bytes: of all blocks but the last.
        threads: read ahead.
        pinned: whether blocks are copied to a GPU, for which memory that is locked is faster.
    """

    def __init__(
        self, source: Source, entry: FileEntry, block_bytes: int, threads: ReadingThreads, *, pinned: bool = False
    ) -> None:
        super().__init__(source, entry, threads)
        self._block_bytes = block_bytes
        size = min(block_bytes, entry.size_bytes)
        self._buffers = [torch.empty(size, dtype=torch.uint8, pin_memory=pinned) for _ in range(2)]
        self._taken = 0
        self._ahead = threads.submit(self._block, 0)  # last: it uses all of the above

    def take(self) -> torch.Tensor:
        """The next block, bytes in the memory of the host."""
        number, self._taken = self._taken, self._taken + 1
        self._await(self._ahead)
        is_more = self._taken * self._block_bytes < self._entry.size_bytes and not self.is_late
        if is_more:
            self._ahead = self._threads.submit(self._block, self._taken)
        return self._buffer(number)

    def close(self) -> FileSeen:
        """What was seen of the file."""
        self._await(self._ahead)
        return super().close()

    def _buffer(self, number: int) -> torch.Tensor:
        left = self._entry.size_bytes - number * self._block_bytes
        return self._buffers[number % 2][: min(left, self._block_bytes)]

    def _block(self, number: int) -> None:
        """In a thread; one block after the other, each into the buffer that is not in use."""
        self._fill(self._buffer(number).numpy().data)


class LandingStream(FileStream):
    """Reads a file right into the tensors that wait for it, as fast as it can; what it needs beside is one buffer.

    Args:
        source: where the file is.
        entry: what the manifest says of it.
        block_bytes: as ``take`` counts them.
        threads: one of them reads it.
        field: what waits for the file's bytes; all of it is on the host.
    """

    def __init__(
        self, source: Source, entry: FileEntry, block_bytes: int, threads: ReadingThreads, field: LandingField
    ) -> None:
        super().__init__(source, entry, threads)
        self._block_bytes, self._field = block_bytes, field
        self._done: SimpleQueue[None] = SimpleQueue()
        self._is_ended = False
        self._whole = threads.submit(self._run)

    def take(self) -> None:
        """Wait for the next block."""
        if not self.is_late:
            try:
                self._threads.await_read(lambda left_s: self._done.get(timeout=left_s))
            except LateError:
                self.is_late = True

    def close(self) -> FileSeen:
        """What was seen of the file."""
        self._is_ended = True
        self._await(self._whole)
        return super().close()

    def _run(self) -> None:
        """In a thread."""
        size, taken = self._entry.size_bytes, 0
        try:
            beside = torch.empty(min(_BESIDE_BYTES, size), dtype=torch.uint8)
            for piece in covering(self._field.pieces(), size):
                for start in range(piece.start, piece.stop, _BESIDE_BYTES):
                    stop = min(start + _BESIDE_BYTES, piece.stop)
                    self._land(piece, start, stop, beside)
                    while (taken + 1) * self._block_bytes <= stop:
                        taken += 1
                        self._done.put(None)
                    if self._seen is not None or self._is_ended or self.is_late:
                        return
        finally:
            for _ in range(taken, -(-size // self._block_bytes)):  # whatever happened, none waits for ever
                self._done.put(None)

    def _land(self, piece: Piece, start: int, stop: int, beside: torch.Tensor) -> None:
        if piece.memory is not None:
            self._fill(piece.memory[start - piece.start : stop - piece.start])
            return
        part = beside[: stop - start]
        if self._fill(part.numpy().data):
            self._field.put(start, part)


def covering(pieces: Iterable[Piece], size_bytes: int) -> Iterator[Piece]:
    """A whole file: these pieces, and what lies between them."""
    at = 0
    for piece in pieces:
        if piece.start > at:
            yield Piece(at, piece.start, None)
        yield piece
        at = piece.stop
    if at < size_bytes:
        yield Piece(at, size_bytes, None)
