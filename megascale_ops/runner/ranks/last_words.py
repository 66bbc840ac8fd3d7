# SPDX-License-Identifier: Apache-2.0
"""What a rank said last: the end of its log, or of what was kept in memory where the log did not take it.

A log on a disk that is full, over its quota, failing or mounted read-only loses a rank's last words, and so does a
script that closes its own stderr. The traceback then comes from memory (``recorder.recording.kept_words``), and what
is wrong with the log is said with it.
"""

import errno
import logging
import os
import secrets
from contextlib import suppress
from pathlib import Path

from megascale_ops import foreign
from megascale_ops.diagnosis.exits.last_words import end_of

log = logging.getLogger(__name__)

# 4,000 bytes: the sentence with which a library aborts, and what it prints of its stack.
_TAIL = 4000
# 32 KB: torch prints the stack of an abort up to three times, some 100 bytes to 200 a frame; frames are left out.
_STACKS_TAIL = 32_000
# 64 kB: 4,000 characters and a number.
_MOST_KEPT_BYTES = 1 << 16
# 8 KiB: two blocks, more than a traceback takes.
_PROBE = bytes(8192)
_OF_THE_DISK = frozenset({errno.ENOSPC, errno.EDQUOT, errno.EIO, errno.EROFS})
_FROM_MEMORY = "; what it said last was kept in memory"


def last_words(path: str, box_dir: str, rank: int, pid: int, code: int) -> str:
    """Return the end of what a rank that died by itself wrote, completed from memory.

    Args:
        path: its stderr's log; the agent reads it too, but a verdict does not wait for its next look.
        box_dir: folder of the black boxes.
        rank: its number.
        pid: its process: words of another one are of an earlier round.
        code: its exit status. Below 0, a signal ended it, and silence needs no explanation.
    """
    said = end_of(tail(path, _STACKS_TAIL), _TAIL)
    kept = end_of(_kept(Path(box_dir) / f"{rank}.words", pid), _TAIL)
    is_missing = bool(kept.strip()) and kept.strip().splitlines()[-1].strip() not in said
    if not is_missing and (said.strip() or code <= 0):
        return said
    note = ""
    if trouble := _trouble(path):
        note = f"(the log {path} took no more: {trouble})\n"
        log.warning("rank %d: its log %s took no more: %s%s", rank, path, trouble, _FROM_MEMORY if is_missing else "")
    return f"{said[-_TAIL // 4 :]}{note}{kept if is_missing else ''}"[-_TAIL:]


def tail(path: str, most_bytes: int) -> str:
    """Return the end of a file."""
    with suppress(OSError), Path(path).open("rb") as file:
        file.seek(0, os.SEEK_END)
        file.seek(max(0, file.tell() - most_bytes))
        return file.read().decode("utf-8", "replace")
    return ""


def _kept(path: Path, pid: int) -> str:
    """Return the traceback that a process has left in memory, "" where none of this number has."""
    try:
        number, _, text = foreign.read(path, _MOST_KEPT_BYTES).decode("utf-8", "replace").partition("\n")
    except OSError:
        return ""
    return text if number == str(pid) else ""


def _trouble(beside: str) -> str:
    """Return why nothing can be written beside a log, in the kernel's words; "": it can."""
    path = f"{beside}.{secrets.token_hex(4)}"
    try:
        handle = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
        try:
            written = os.write(handle, _PROBE)
            if written < len(_PROBE):
                os.write(handle, _PROBE[written:])  # a short write says that there is no room, the next one why
            os.fsync(handle)
        finally:
            os.close(handle)
            Path(path).unlink()
    except OSError as error:
        return f"[Errno {error.errno}] {error.strerror}" if error.errno in _OF_THE_DISK else ""
    return ""
