# SPDX-License-Identifier: Apache-2.0
"""Write stretches of memory to a store, several files at a time, and digest them on the way.

Each file is written by a thread of its own, in blocks, which is all that a thread can be asked to stop between. The
caller's thread waits for them, so that it hears of an end of the save while a store hangs: a thread that hangs is left
behind, and what it had begun is never closed, so nothing of it appears.
"""

import threading
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import Any, NamedTuple

from megascale_ops.checkpoint.manifest import FileEntry
from megascale_ops.checkpoint.storage import describe
from megascale_ops.checkpoint.tiers.filesystems import Store
from megascale_ops.checkpoint.trust.file_digests import FileDigest

# 4 files at a time: a single stream to a store is bound by its answers.
_AT_ONCE = 4
# 8 MB: between two of them the end of the save is noticed.
_BLOCK_BYTES = 8 << 20
# 120 s without a block that was taken: a part of 16 MB at 5 MB/s takes 3 s, its library's retries a minute.
_STALLED_S = 120.0
_LOOK_S = 0.1


class _StoppedError(Exception):
    """The save is over; nothing more is written."""


class _Upload(NamedTuple):
    name: str
    path: str
    data: memoryview


class _Uploads:
    """The files of one rank on their way; shared by the threads that write them."""

    def __init__(self, store: Store, files: Sequence[_Upload], algorithm: str) -> None:
        self.entries: list[FileEntry] = []
        self.moved_bytes = 0
        self.failure: BaseException | None = None
        self.over = threading.Event()
        self._store, self._algorithm = store, algorithm
        self._left, self._running = list(files), 0
        self._is_stopped = False
        self._busy = threading.Lock()

    def start(self) -> None:
        """Begin with the first few."""
        self._running = min(_AT_ONCE, len(self._left))
        if not self._running:
            self.over.set()
        for number in range(self._running):
            # Daemons: the process ends though one of them hangs.
            threading.Thread(target=self._work, name=f"checkpoint-upload-{number}", daemon=True).start()

    def stop(self) -> None:
        """Have no block written after those that are under way."""
        self._is_stopped = True

    def _work(self) -> None:
        try:
            while (one := self._next()) is not None:
                entry = self._write(one)
                with self._busy:
                    self.entries.append(entry)
        except _StoppedError:
            pass
        except BaseException as exc:  # noqa: BLE001  whatever the library raises; raised by the caller's thread
            self.failure = self.failure or exc
            self.stop()
        with self._busy:
            self._running -= 1
            if not self._running or self.failure is not None:
                self.over.set()

    def _next(self) -> _Upload | None:
        with self._busy:
            return self._left.pop(0) if self._left and not self._is_stopped else None

    def _write(self, one: _Upload) -> FileEntry:
        digest = FileDigest(self._algorithm)
        file = self._store.opened_to_write(one.path, len(one.data))
        try:
            for start in range(0, len(one.data), _BLOCK_BYTES):
                block = one.data[start : start + _BLOCK_BYTES]
                self._require_going()
                digest.update(block)
                file.write(block)
                self.moved_bytes += len(block)
            self._require_going()
            file.close()
        except BaseException:
            _drop(file)
            raise
        self.moved_bytes += 1  # an empty file, too, has moved something
        return FileEntry(one.name, len(one.data), digest.text())

    def _require_going(self) -> None:
        if self._is_stopped:
            raise _StoppedError


def upload_all(
    store: Store, files: Sequence[tuple[str, str, memoryview]], algorithm: str, heard: Callable[[int], None]
) -> list[FileEntry]:
    """Write files.

    Args:
        store: where to.
        files: of each its name, its path in the store and its bytes.
        algorithm: of their digests.
        heard: called ten times a second, with how many bytes have moved since; what it raises ends the writing.

    Raises:
        OSError: the store refuses, or takes nothing any more.
    """
    uploads, moved_bytes, moved_s = _Uploads(store, [_Upload(*each) for each in files], algorithm), 0, time.monotonic()
    uploads.start()
    try:
        while not uploads.over.wait(_LOOK_S):
            count = uploads.moved_bytes - moved_bytes
            if count:
                moved_bytes, moved_s = moved_bytes + count, time.monotonic()
            elif time.monotonic() - moved_s > _STALLED_S:
                raise TimeoutError(f"writing to {store.url}: nothing was taken for {_STALLED_S:.0f} s")
            heard(count)
    finally:
        uploads.stop()
    error = uploads.failure
    if error is not None:
        if isinstance(error, OSError):
            raise OSError(f"writing to {store.url}: {describe(error)}") from error
        first_line = str(error).strip().partition("\n")[0] or type(error).__name__
        raise OSError(f"writing to {store.url}: {type(error).__name__}: {first_line}") from error
    return uploads.entries


def _drop(file: Any) -> None:  # noqa: ANN401  fsspec gives it no type
    """Have nothing of a file appear, where its file system can; else it is a file of a save that has no seal."""
    with suppress(Exception):  # not all of them can, and all raise something else
        file.discard()
    with suppress(Exception):  # or its end as an object would close it, and so finish it
        file.closed = True
