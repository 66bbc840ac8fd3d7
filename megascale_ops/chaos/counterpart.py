# SPDX-License-Identifier: Apache-2.0
"""The other side of a wait: a slow server, a feeder of a pipe, the holder of a lock, a debugger.

What a rank waits for is seldom its own child: it stands on another machine. So each counterpart leaves its starter at
once (it is forked away, in a session of its own) and ends by itself some time after its work is done. ``start`` brings
one up from inside a rank; the new process is a bare Python without site packages, that no recorder enters.

Of the environment it keeps the mark of its trial alone, by which ``leftovers`` ends it with the rest.
"""

import argparse
import ctypes
import fcntl
import http.server
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from urllib.parse import urlsplit

# ptrace(2): requests that let a tracer stop a process without a signal that others see.
_SEIZE, _INTERRUPT, _DETACH = 0x4206, 0x4207, 17
# 0.5 s: as rarely as a slow line moves, and far below any patience.
PIECE_S = 0.5
# 1 MB/s for an upload: a part of 2 MB takes two seconds.
UPLOAD_CHUNK, UPLOAD_PAUSE_S = 1 << 16, 0.06
# 120 s: a rank on a machine with ten busy processes may come so late; a counterpart left over then ends.
SPARE_S = 120.0
MARK = "MEGASCALE_CHAOS"  # as in `leftovers`, which a bare Python can't import


def start(role: str, *arguments: str | float) -> str:
    """Start a counterpart, ready when this returns; return its address (``http://...``, a server's) or "".

    Raises:
        OSError: it could not be started.
    """
    command = [sys.executable, "-I", "-S", __file__, role, *map(str, arguments)]
    environ = {name: os.environ[name] for name in ("PATH", MARK) if name in os.environ}
    done = subprocess.run(command, env=environ, capture_output=True, text=True, timeout=60, check=False)
    if done.returncode:
        raise OSError(f"the counterpart {role} did not start: {done.stderr.strip()}")
    return done.stdout.strip()


def _leave(seconds: float) -> None:
    """Detach from the starter and its pipes, and end after a limit: the rank that it plays for may be dead."""
    sys.stdout.flush()
    if os.fork():
        os._exit(0)
    os.setsid()
    signal.alarm(int(2.0 * seconds + SPARE_S))
    nothing = os.open(os.devnull, os.O_RDWR)
    for stream in (0, 1, 2):
        os.dup2(nothing, stream)


class _Server(http.server.BaseHTTPRequestHandler):
    """Answers as slowly as the path asks: /silent/SECONDS, /trickle/SECONDS; a PUT is taken at 1 MB/s; /never."""

    protocol_version = "HTTP/1.1"

    def do_GET(self) -> None:
        """Answer late, in trickles, or never."""
        _, how, *rest = urlsplit(self.path).path.split("/")
        seconds = float(rest[0]) if rest else 0.0
        if how == "never":
            time.sleep(1e6)
        if how == "silent":
            time.sleep(seconds)
            self._say(b"ok")
            return
        pieces = max(1, int(seconds / PIECE_S))
        self.send_response(200)
        self.send_header("Content-Length", str(1024 * pieces))
        self.end_headers()
        for _ in range(pieces):
            time.sleep(PIECE_S)
            self.wfile.write(bytes(1024))

    def do_POST(self) -> None:
        """Read the body, then answer as a GET does; an upload gets its number."""
        self.rfile.read(int(self.headers.get("Content-Length", "0")))
        if "uploads" in self.path:
            self._say(b"<InitiateMultipartUploadResult><UploadId>1</UploadId></InitiateMultipartUploadResult>")
        elif "uploadId" in self.path:
            self._say(b"<CompleteMultipartUploadResult/>")
        else:
            self.do_GET()

    def do_PUT(self) -> None:
        """Take a part of an upload at the pace of a slow line."""
        left = int(self.headers["Content-Length"])
        while left > 0:
            left -= len(self.rfile.read(min(left, UPLOAD_CHUNK)))
            time.sleep(UPLOAD_PAUSE_S)
        self._say(b"")

    def _say(self, body: bytes) -> None:
        self.send_response(200)
        self.send_header("Content-Length", str(len(body)))
        self.send_header("ETag", '"1"')
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *_: object) -> None:
        """Log nothing."""


def _serve(seconds: float) -> None:
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), _Server) as server:
        print(f"http://127.0.0.1:{server.server_port}")  # noqa: T201  read by the starter
        _leave(seconds)
        server.serve_forever()


def _serve_later(seconds: float) -> None:
    """Print an address at which nothing listens before ``seconds`` have passed."""
    with socket.create_server(("127.0.0.1", 0)) as probe:
        port = probe.getsockname()[1]
    print(f"http://127.0.0.1:{port}")  # noqa: T201  read by the starter
    _leave(seconds)
    time.sleep(seconds)
    with http.server.HTTPServer(("127.0.0.1", port), _Server) as server:
        server.timeout = SPARE_S
        server.handle_request()


def _feed(path: str, seconds: float) -> None:
    """Write a little into a pipe again and again."""
    _leave(seconds)
    with Path(path).open("wb", buffering=0) as out:
        end = time.monotonic() + seconds
        while time.monotonic() < end:
            out.write(bytes(1024))
            time.sleep(PIECE_S)


def _say_late(path: str, seconds: float, line: str) -> None:
    """Open a pipe at once, and write one line into it late."""
    _leave(seconds)
    with Path(path).open("w", encoding="utf-8") as out:
        time.sleep(seconds)
        out.write(line + "\n")


def _hold_open(path: str, seconds: float) -> None:
    """Open a pipe and write nothing."""
    _leave(seconds)
    with Path(path).open("wb"):
        time.sleep(seconds)


def _grow(path: str, seconds: float) -> None:
    """Let a file grow, and mark its end, so that a reader sees that it is whole."""
    with Path(path).open("wb", buffering=0) as out:
        _leave(seconds)
        end = time.monotonic() + seconds
        while time.monotonic() < end:
            out.write(bytes(1024))
            time.sleep(PIECE_S)
        out.write(b"end")


def _hold_file(path: str, seconds: float) -> None:
    """Own a lock that is a file, and remove it late."""
    Path(path).touch(exist_ok=False)
    _leave(seconds)
    time.sleep(seconds)
    Path(path).unlink()


def _hold_flock(path: str, seconds: float) -> None:
    """Own a lock of the kernel, and let go of it late."""
    with Path(path).open("wb") as held:
        fcntl.flock(held, fcntl.LOCK_EX)
        _leave(seconds)
        time.sleep(seconds)


def debug(pid: int, seconds: float) -> None:
    """Stop every thread of a process as a debugger does (state t), then let go of it.

    Raises:
        OSError: the system does not allow it.
    """
    libc = ctypes.CDLL(None, use_errno=True)
    threads = [int(thread.name) for thread in (Path("/proc") / str(pid) / "task").iterdir()]
    for number in threads:
        if libc.ptrace(_SEIZE, number, None, None) < 0:
            raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))
        libc.ptrace(_INTERRUPT, number, None, None)
    time.sleep(seconds)
    for number in threads:
        os.waitpid(number, 0x40000000)  # __WALL: threads too
        libc.ptrace(_DETACH, number, None, None)


def _debug(pid: str, seconds: float, done: str) -> None:
    """Debug a process for ``seconds``, and create ``done`` afterwards."""
    _leave(seconds)
    time.sleep(PIECE_S)
    try:
        debug(int(pid), seconds)
    finally:
        Path(done).touch()


ROLES: dict[str, Callable[..., None]] = {
    "serve": lambda seconds: _serve(float(seconds)),
    "serve_later": lambda seconds: _serve_later(float(seconds)),
    "feed": lambda path, seconds: _feed(path, float(seconds)),
    "say_late": lambda path, seconds, line: _say_late(path, float(seconds), line),
    "hold_open": lambda path, seconds: _hold_open(path, float(seconds)),
    "grow": lambda path, seconds: _grow(path, float(seconds)),
    "hold_file": lambda path, seconds: _hold_file(path, float(seconds)),
    "hold_flock": lambda path, seconds: _hold_flock(path, float(seconds)),
    "debug": lambda pid, seconds, done: _debug(pid, float(seconds), done),
}


def main() -> None:
    """Play one role."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("role", choices=ROLES)
    parser.add_argument("arguments", nargs="*")
    asked = parser.parse_args()
    ROLES[asked.role](*asked.arguments)


if __name__ == "__main__":
    main()
