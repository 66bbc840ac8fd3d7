# SPDX-License-Identifier: Apache-2.0
"""torch's own worker server on a unix socket: stacks and flight recorder over HTTP, answered by a C++ thread.

It answers in 0.1 to 0.4 ms even while the GIL is held, and not at all when the process is stopped: both are evidence.
``POST /handler/dump_traceback``, ``/handler/fr_trace_json``, ``/handler/ping``.

A request for stacks while the interpreter ends would kill the rank: the answering thread waits for the GIL, is ended
inside C++, and the process aborts ("terminate called without an active exception"; three of 25 that were asked all the
time). So before that the socket is removed, and open connections are waited for.
"""

import atexit
import os
import time
from pathlib import Path

from megascale_ops.recorder.recording.config import RankSettings
from megascale_ops.recorder.recording.recording import Recording

_LONGEST_PATH = 107  # sun_path of <sys/un.h> has 108 bytes with its NUL
# 2 s: an answer takes a millisecond, on a machine under full load a hundred times that.
_LEAVE_S = 2.0
_LOOK_S = 0.002
_LISTENS = "01"  # the state of a unix socket in /proc/net/unix; 02 and 03 are connections
_kept: list[object] = []


def start(recording: Recording, settings: RankSettings) -> None:
    """Start the server at ``<box dir>/<rank>.sock`` and note its path in the box.

    Raises:
        OSError: the path is too long for a socket, or an old socket cannot be removed.
    """
    from torch import _C

    server_type = getattr(getattr(_C, "_distributed_c10d", None), "_WorkerServer", None)
    if server_type is None:
        return
    path = settings.box_dir / f"{settings.rank}.sock"
    if len(os.fsencode(path)) > _LONGEST_PATH:
        raise OSError(f"{path} is too long for a socket ({_LONGEST_PATH} bytes): choose a shorter box root or job name")
    path.unlink(missing_ok=True)
    server = _start_silently(server_type, path)
    # Stopping it at exit prints two warnings into the script's stderr; it is never stopped and ends with the process.
    _keep_for_ever(server)
    recording.box.set_worker_server(str(path))
    atexit.register(_close, recording, path)


def _start_silently(server_type: type, path: Path) -> object:
    """Start it with stderr elsewhere for the 0.2 ms it takes: it greets with a warning that is not the script's."""
    kept = os.dup(2)
    nowhere = os.open(os.devnull, os.O_WRONLY | os.O_CLOEXEC)
    try:
        os.dup2(nowhere, 2)
        return server_type(str(path))
    finally:
        os.dup2(kept, 2)
        os.close(kept)
        os.close(nowhere)


def _keep_for_ever(server: object) -> None:
    """Hold one reference that no shutdown of the interpreter gives back."""
    import ctypes

    _kept.append(server)
    ctypes.pythonapi.Py_IncRef(ctypes.py_object(server))


def _close(recording: Recording, path: Path) -> None:
    """Refuse new connections and wait until the open ones are closed; a forked child leaves that to its parent."""
    if not recording.live:
        return
    path.unlink(missing_ok=True)
    end_s = time.monotonic() + _LEAVE_S
    empty = 0
    while empty < 2 and time.monotonic() < end_s:
        time.sleep(_LOOK_S)  # releases the GIL, which an open request may need
        empty = 0 if _is_asked(path) else empty + 1


def _is_asked(path: Path) -> bool:
    """Return whether a client is connected to the server, or about to be."""
    try:
        lines = Path("/proc/net/unix").read_text(errors="replace").splitlines()
    except OSError:  # unknown: two looks are better than none
        return False
    return any(line.endswith(f" {path}") and line.split(None, 6)[5] != _LISTENS for line in lines)
