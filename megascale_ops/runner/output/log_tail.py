# SPDX-License-Identifier: Apache-2.0
"""One log file of a rank that is being copied to an output: what of it shall be shown next.

Bytes are handed on as they are. The begin of a line is held back for a moment, so that a line which is written in two
pieces is shown as one; then it is shown as well, for it may be a prompt that waits for an answer.
"""

import codecs
import os
from contextlib import suppress
from pathlib import Path
from typing import IO, NamedTuple

from megascale_ops.runner.output.sink import Sink

# 64 KiB a look: a rank that prints without end must not starve the others, and no more than this waits in memory.
CHUNK_BYTES = 65536
# 0.1 s: a line that is written in two pieces is shown as one; a prompt has to wait that long.
_HOLD_S = 0.1


class Source(NamedTuple):
    """One file to follow: where its lines go and what stands before them."""

    path: str
    to_stderr: bool
    prefix: str


class LogTail:
    """One file that is being copied."""

    def __init__(self, source: Source, sink: Sink) -> None:
        self.source = source
        self.sink = sink
        self.prefix = source.prefix.encode()
        self.ending = False  # its round is over: what there is is all there will be
        self.done = False
        self._file: IO[bytes] | None = None
        self._held = b""  # the begin of a line, not shown yet
        self._held_s = 0.0
        decode = codecs.getincrementaldecoder("utf-8")("backslashreplace")
        self._decode = None if sink.encoding == "utf-8" else decode.decode

    def words(self, now_s: float) -> bytes:
        """Return what shall be shown next; b"" when there is nothing now."""
        fresh = self._read()
        if not fresh:
            self.done = self.ending
            held, self._held = (self._held, b"") if self.ending or now_s - self._held_s > _HOLD_S else (b"", self._held)
            return held
        fresh = self._held + self._recoded(fresh)
        end = fresh.rfind(b"\n") + 1
        # A bar is shown as it stands, and so is a line too long to wait for.
        if b"\r" in fresh[end:] or len(fresh) - end >= CHUNK_BYTES:
            end = len(fresh)
        self._held, self._held_s = fresh[end:], now_s
        return fresh[:end]

    def left(self) -> int:
        """Return how many bytes of the file have not been read."""
        with suppress(OSError):
            return Path(self.source.path).stat().st_size - (self._file.tell() if self._file else 0) + len(self._held)
        return 0

    def close(self) -> None:
        """Close the file."""
        if self._file is not None:
            self._file.close()

    def _read(self) -> bytes:
        with suppress(OSError):  # not there yet; or the disk under it is gone: nothing to show
            if self._file is None:
                self._file = Path(self.source.path).open("rb")  # noqa: SIM115  closed in close()
            fresh = self._file.read(CHUNK_BYTES)
            if not fresh and os.fstat(self._file.fileno()).st_size < self._file.tell():
                self._file.seek(0)  # the script has emptied its own log
            return fresh
        return b""

    def _recoded(self, fresh: bytes) -> bytes:
        """Escape what the terminal's encoding has no sign for; UTF-8 takes everything as it is."""
        if self._decode is None:
            return fresh
        return self._decode(fresh).encode(self.sink.encoding, "backslashreplace")
