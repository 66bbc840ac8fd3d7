# SPDX-License-Identifier: Apache-2.0
"""Keep an exception's traceback in memory as well, beside the black box: the log may be on a full disk, or closed.

Python passes over what its last words can't be written to, so a rank whose log takes nothing ends without one. The file
``<box dir>/<rank>.words`` has the process's number and the end of the traceback; the runner reads it where the log
lacks it. It is written by a process that dies of an exception, and by no other.

Loaded before the script's first line: nothing here needs pathlib or traceback.
"""

import os
import sys
from types import TracebackType

from megascale_ops.recorder.hook_guard import guarded
from megascale_ops.schema import environment

# What a verdict reads of a rank's stderr.
_MOST_CHARACTERS = 4000


def keep_last_words(rank: int) -> None:
    """Put a hook in front of the one that is there."""
    before = sys.excepthook
    folder, me = os.environ[environment.BOX_DIR], os.getpid()

    def keep(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
        if os.getpid() == me:  # a fork of the rank is none
            _write(f"{folder}/{rank}.words", f"{me}\n{_described(kind, error, trace)}")

    kept = guarded("keeping the last words", keep)

    def hook(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
        before(kind, error, trace)
        kept(kind, error, trace)

    sys.excepthook = hook


def _described(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> str:
    import traceback

    return "".join(traceback.format_exception(kind, error, trace))[-_MOST_CHARACTERS:]


def _write(path: str, text: str) -> None:
    flags = os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC | os.O_NOFOLLOW
    try:
        handle = os.open(path, flags, 0o600)
    except OSError:
        return  # there is no room here either, and no place to say so
    with open(handle, "wb") as file:  # noqa: PTH123  a handle
        file.write(text.encode("utf-8", "backslashreplace"))
