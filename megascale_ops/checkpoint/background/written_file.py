# SPDX-License-Identifier: Apache-2.0
"""Write a part of the host buffer to a file and digest it on the way, each in a thread of its own.

Both leave Python's lock while they work, so the digest costs time only where storage is faster.
The digest is of memory, not of what the file gives back: a write that went wrong is found by the next verification.
"""

import os
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from megascale_ops.checkpoint.manifest import FileEntry
from megascale_ops.checkpoint.trust.file_digests import FileDigest

# 8 MB: between two of them an order is heard.
_CHUNK_BYTES = 8 << 20
# 256 MB: so much at most waits in the page cache, where it would crowd out what the training reads, and a disk that is
# slow is seen to move.
_SYNCED_BYTES = 256 << 20


def write_file(
    path: Path, data: memoryview, algorithm: str, pool: ThreadPoolExecutor, heard: Callable[[], None]
) -> FileEntry:
    """Write a file and sync it.

    Args:
        path: where.
        data: its bytes.
        algorithm: of the digest.
        pool: of one thread at least.
        heard: called between chunks; what it raises ends the writing.

    Raises:
        OSError: the file system refuses.
    """
    digest = FileDigest(algorithm)
    with path.open("wb", buffering=0) as file:
        for start in range(0, len(data), _CHUNK_BYTES):
            heard()
            chunk = data[start : start + _CHUNK_BYTES]
            digested = pool.submit(digest.update, chunk)
            try:
                _write_all(file.fileno(), chunk)
            finally:
                digested.result()
            if (start + len(chunk)) % _SYNCED_BYTES == 0:
                os.fdatasync(file.fileno())
        os.fsync(file.fileno())
    return FileEntry(path.name, len(data), digest.text())


def _write_all(handle: int, data: memoryview) -> None:
    """Written in full: a single write takes at most 2 GiB, and Lustre has been seen to take less than it was given."""
    while len(data):
        data = data[os.write(handle, data) :]
