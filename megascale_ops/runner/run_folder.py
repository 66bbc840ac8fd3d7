# SPDX-License-Identifier: Apache-2.0
"""The run folder belongs to its owner alone: journal, output, evidence and the controller's token.

What we make has mode 0700 or 0600. A folder that was there already keeps its own mode when the user has named it, since
access by others is their choice; what we left in it before others may no longer read. The ranks run with the
user's umask: what a script writes, checkpoints above all, is as open as the user wants it.
"""

import logging
import os
import shutil
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

from megascale_ops.errors import UsageError
from megascale_ops.runner.preflight import prepare_folder
from megascale_ops.schema.recording.entries import FOLDER as RECORDINGS
from megascale_ops.schema.wording import shortened

log = logging.getLogger(__name__)

PRIVATE_UMASK = 0o077
_FOR_OTHERS = 0o077
# 480 bytes: SQLite opens no file whose path has more than 511, and its log beside it is "journal.db-wal".
_LONGEST_NAME = 480
# What earlier runs in this folder may have left readable; the checkpoints are the script's.
_OURS = (
    *("journal.db*", "controller.*", "agent.log", "logs", "logs-*", "incidents", "profiles", "history", "history-*"),
    RECORDINGS,
)


def prepare_run_folder(path: Path, *, is_named: bool) -> Path:
    """Make the run folder, or protect what is written into an existing one from other users.

    Args:
        path: the folder.
        is_named: the user has named it, so its own mode stays, with a log line when others may enter it.

    Raises:
        UsageError: it can't be made or written to.
    """
    _check_name(path)
    existed = path.exists()
    prepare_folder(path.parent, "folder", "--run-dir")
    if not existed:
        with suppress(OSError):  # reported by the first write into it
            path.mkdir(mode=0o700, exist_ok=True)
    prepare_folder(path, "run folder", "--run-dir")
    mode = path.stat().st_mode & 0o777
    if not mode & _FOR_OTHERS:
        return path
    for pattern in _OURS:
        for left in path.glob(pattern):
            _close(left)
    if not is_named:
        _close(path)
    elif existed:
        log.info("others may enter the run folder %s (mode %04o), but read nothing that this run writes", path, mode)
    return path


def _check_name(path: Path) -> None:
    """Refuse a folder that can't be told in a message, or in which SQLite opens no journal."""
    try:
        length = len(str(path).encode())
    except UnicodeEncodeError:
        raise UsageError(
            f"the run folder {path} can't be used: its name is not in UTF-8; give another --run-dir"
        ) from None
    if length > _LONGEST_NAME:
        raise UsageError(
            f"the run folder can't be used: its path has {length} bytes, and no journal can be kept at more than "
            f"{_LONGEST_NAME}; give a shorter --run-dir ({shortened(str(path))})"
        )


def keep_newest(folder: Path, most: int) -> int:
    """Remove all but the newest folders of a folder, by when they were last written to; return how many went.

    What can't be removed is left: another node's runner that shares the folder may be removing it, too.

    Args:
        folder: such as ``incidents`` of a run folder.
        most: how many stay; 0: all.
    """
    if most <= 0:
        return 0
    found: list[tuple[float, Path]] = []
    with suppress(OSError):
        found = [(entry.stat().st_mtime, entry) for entry in folder.iterdir() if not entry.is_symlink()]
    old = [path for _, path in sorted(found, key=lambda one: one[0], reverse=True)[most:] if path.is_dir()]
    for path in old:
        shutil.rmtree(path, ignore_errors=True)
    return len(old)


def narrow_umask() -> tuple[int, Callable[[], int]]:
    """Let this process and its companions write for the owner only; return the umask before, and how to go back."""
    before = os.umask(PRIVATE_UMASK)
    return before, lambda: os.umask(before)


def _close(path: Path) -> None:
    """Take the rights of others from what is ours."""
    with suppress(OSError):
        if not path.is_symlink():
            path.chmod(path.stat().st_mode & 0o700)
