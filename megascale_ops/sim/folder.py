# SPDX-License-Identifier: Apache-2.0
"""The folder that a simulation keeps its journal in, and those of simulations that were killed.

It lies in memory where there is such a file system: what it holds is gone with the simulation anyway. A simulation
holds its folder by a lock, which ends with the process however that ends; the next one removes what no process holds.
"""

import contextlib
import fcntl
import os
import shutil
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

PREFIX = "megascale-simulation-"
# Between a folder and its lock lie some microseconds; a younger one may not be locked yet.
LEAST_AGE_S = 60.0
_MEMORY = Path("/dev/shm")  # noqa: S108  a folder of its own is made there


@contextlib.contextmanager
def journal_folder(memory: Path = _MEMORY, now: float | None = None) -> Iterator[Path]:
    """Make a folder, hold it, and remove it at the end; first those that killed simulations of this user left.

    Args:
        memory: where; the system's folder for temporary files where that does not exist.
        now: Unix seconds, by which the age of what is left is told.
    """
    where = memory if memory.is_dir() else Path(tempfile.gettempdir())
    sweep(where, time.time() if now is None else now)
    with tempfile.TemporaryDirectory(prefix=PREFIX, dir=where, ignore_cleanup_errors=True) as name:
        handle = os.open(name, os.O_RDONLY | os.O_DIRECTORY)
        try:
            # Where a file system knows no locks nothing is swept either.
            with contextlib.suppress(OSError):
                fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
            yield Path(name)
        finally:
            os.close(handle)


def sweep(where: Path, now: float) -> int:
    """Remove folders of simulations that have ended without tidying; return how many."""
    swept = 0
    for path in where.glob(f"{PREFIX}*"):
        # What is gone meanwhile, another user's, a link or no folder is left alone.
        with contextlib.suppress(OSError):
            handle = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
            try:
                found = os.fstat(handle)
                if found.st_uid != os.getuid() or now - found.st_mtime < LEAST_AGE_S:
                    continue
                fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
                shutil.rmtree(path)
                swept += 1
            finally:
                os.close(handle)
    return swept
