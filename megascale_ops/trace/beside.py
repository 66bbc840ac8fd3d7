# SPDX-License-Identifier: Apache-2.0
"""Write a file beside its place and rename it, so that it is either whole or not there."""

import contextlib
import os
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import BinaryIO

from megascale_ops.errors import UsageError

# 1 MiB: one system call for some ten thousand events of a trace.
_BUFFER_BYTES = 1 << 20


@contextlib.contextmanager
def open_beside(path: Path) -> Iterator[BinaryIO]:
    """Open a file that takes its place when all has gone well, and is gone otherwise; what was there stays until then.

    A link is followed. What is no regular file is refused: renamed over, root's ``/dev/null`` would become one.

    Raises:
        UsageError: there is a folder, a device or a pipe in its place.
        OSError: it can't be written there.
    """
    place = Path(os.path.realpath(path))
    if place.exists() and not place.is_file():
        what = "a folder" if place.is_dir() else "a device or a pipe"
        raise UsageError(f"{path} is {what}: give a file, which is written beside and renamed")
    handle, partial = tempfile.mkstemp(prefix=f".{place.name}.", suffix=".partial", dir=place.parent)
    try:
        with os.fdopen(handle, "wb", buffering=_BUFFER_BYTES) as file:
            yield file
        # mkstemp makes files for nobody else; these are to be shared as any other file that a user writes.
        umask = os.umask(0)
        os.umask(umask)
        Path(partial).chmod(0o666 & ~umask)
        Path(partial).replace(place)
    except BaseException:
        Path(partial).unlink(missing_ok=True)
        raise
