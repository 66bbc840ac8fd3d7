# SPDX-License-Identifier: Apache-2.0
"""Show what the ranks print: follow their log files from one thread and copy whole lines to the terminal.

Ranks write into files, so that their last words survive them; one thread follows all files of the current round.
Torch's own follower starts a thread for each file and holds up every restart by a tenth of a second while it ends.
"""

import sys
import threading
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import IO, NamedTuple, TextIO

# 0.05 s: a line shows up as soon as a person can see it.
_INTERVAL_S = 0.05
# 64 KiB a look: a rank that prints without end must not starve the others.
_CHUNK_BYTES = 65536


class Source(NamedTuple):
    """One file to follow: where its lines go and what stands before them."""

    path: str
    to_stderr: bool
    prefix: str


class _Followed:
    def __init__(self, source: Source) -> None:
        self.source = source
        self.file: IO[bytes] | None = None
        self.rest = b""

    def lines(self) -> list[bytes]:
        if self.file is None:
            with suppress(FileNotFoundError):
                self.file = Path(self.source.path).open("rb")  # noqa: SIM115  closed in close()
        if self.file is None:
            return []
        *whole, self.rest = (self.rest + self.file.read(_CHUNK_BYTES)).split(b"\n")
        return whole

    def close(self) -> None:
        if self.file is not None:
            self.file.close()


class Console:
    """Follows files until stopped; ``follow`` replaces the files of the round before, after reading them to the end."""

    def __init__(self, stdout: TextIO | None = None, stderr: TextIO | None = None) -> None:
        self._stdout = stdout or sys.stdout
        self._stderr = stderr or sys.stderr
        self._followed: list[_Followed] = []
        self._lock = threading.Lock()
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, name="console", daemon=True)
        self._thread.start()

    def follow(self, sources: Sequence[Source]) -> None:
        """Follow ``sources`` from now on."""
        with self._lock:
            self._drain()
            for followed in self._followed:
                followed.close()
            self._followed = [_Followed(source) for source in sources]

    def stop(self) -> None:
        """Print what is left and end the thread."""
        self._stop.set()
        self._thread.join(timeout=2.0)
        self.follow(())

    def _run(self) -> None:
        while not self._stop.wait(_INTERVAL_S):
            with self._lock:
                self._copy()

    def _copy(self) -> bool:
        copied = False
        for followed in self._followed:
            target = self._stderr if followed.source.to_stderr else self._stdout
            lines = followed.lines()
            if lines:
                copied = True
                text = "".join(f"{followed.source.prefix}{line.decode(errors='replace')}\n" for line in lines)
                with suppress(OSError, ValueError):  # a closed terminal must not stop training
                    target.write(text)
                    target.flush()
        return copied

    def _drain(self) -> None:
        # 16 chunks: at most 1 MiB of a dead rank's output for each file, then on to the next round.
        for _ in range(16):
            if not self._copy():
                break
        for followed in self._followed:
            if followed.rest:
                target = self._stderr if followed.source.to_stderr else self._stdout
                with suppress(OSError, ValueError):
                    target.write(f"{followed.source.prefix}{followed.rest.decode(errors='replace')}\n")
                    target.flush()
                followed.rest = b""
