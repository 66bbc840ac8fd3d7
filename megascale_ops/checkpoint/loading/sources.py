# SPDX-License-Identifier: Apache-2.0
"""Where the files of a checkpoint are opened: a folder here, and others elsewhere that answer alike."""

import os
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from typing import Protocol

from megascale_ops import foreign

# 1 MB: what a core has just read is still in its own cache when it is digested.
_PIECE_BYTES = 1 << 20


class Opened(Protocol):
    """One file, open to be read from front to back."""

    @property
    def size_bytes(self) -> int:
        """How large it is."""

    def read_into(self, view: memoryview) -> int:
        """Read what comes next, as much as fits or less; how many bytes, 0 at the end.

        Raises:
            OSError: it can't be read.
        """


class Source(Protocol):
    """The files of one checkpoint."""

    reads_pieces: bool = False
    """Whether a read of some kilobytes costs no more than its bytes; of a store each is a request."""

    @property
    def said(self) -> str:
        """How sentences name it."""

    def read(self, name: str, most_bytes: int) -> bytes:
        """All of a small file.

        Raises:
            FileNotFoundError: it is not there.
            OSError: it can't be read, or is larger than that.
        """

    def opened(self, name: str) -> AbstractContextManager[Opened]:
        """A file, closed at the end; opening it raises what ``read`` does."""

    def size_of(self, name: str) -> int:
        """Bytes of a file; -1 where there is none.

        Raises:
            OSError: what holds the files does not answer.
        """


class _OpenFile:
    def __init__(self, handle: int) -> None:
        self._handle = handle
        self._at = 0
        self.size_bytes = os.fstat(handle).st_size

    def read_into(self, view: memoryview) -> int:
        count = os.preadv(self._handle, [view[:_PIECE_BYTES]], self._at)
        self._at += count
        return count


class FolderSource(Source):
    """A folder that this process sees."""

    reads_pieces: bool = True

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    @property
    def said(self) -> str:
        """Its path."""
        return str(self.folder)

    def read(self, name: str, most_bytes: int) -> bytes:
        """All of a small file."""
        return foreign.read(self.folder / name, most_bytes)

    @contextmanager
    def opened(self, name: str) -> Iterator[Opened]:
        """A file; a link, a device or a FIFO is refused."""
        with foreign.opened(self.folder / name) as handle:
            yield _OpenFile(handle)

    def size_of(self, name: str) -> int:
        """Bytes of a file; -1 where there is none."""
        try:
            with foreign.opened(self.folder / name) as handle:
                return os.fstat(handle).st_size
        except OSError:
            return -1
