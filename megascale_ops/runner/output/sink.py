# SPDX-License-Identifier: Apache-2.0
"""One output of the runner (stdout or stderr), written to without ever waiting for its reader.

A pipe that is not read, a terminal that was halted with Ctrl-S: a plain write waits there for ever, and what waits in
a write hears no signal. Making the descriptor non-blocking would do it to all programs that share it, the shell
included. So pipes and terminals are opened a second time, by /proc/self/fd, with a mode of our own. Where that
can't be done (a socket, a terminal of another user) the kernel is asked first whether there is room, and little is
written at a time.
"""

import codecs
import errno
import os
import select
import stat
from contextlib import suppress

from megascale_ops.runner.output.screen_line import ScreenLine

# 4096: where a pipe has room at all it has room for that much (PIPE_BUF, pipe(7)).
_SLICE_BYTES = 4096
# 80: a terminal that reports no width, as in many containers.
_USUAL_COLUMNS = 80
# The reader will not return: its end of the pipe is closed, its terminal is gone, or the descriptor was never open.
_GONE = (errno.EPIPE, errno.EIO, errno.EBADF, errno.ENXIO, errno.ECONNRESET)


class Sink:
    """An output that takes what it can at once.

    Attributes:
        closed: Why nothing can be written any more; "" while it can.
        trouble: What the last write failed with and the next may not, such as a full disk; "" when it did not.
        pending: What has been prepared and not been taken yet.
    """

    def __init__(self, name: str, descriptor: int | None, encoding: str = "utf-8") -> None:
        self.name = name
        self.closed = ""
        self.trouble = ""
        self.pending = b""
        self.encoding = codecs.lookup(encoding or "utf-8").name
        self._descriptor = -1
        self._own = False
        self._is_file = False
        self.identity: tuple[int, int] | None = None
        try:
            if descriptor is None:
                raise OSError(errno.EBADF, os.strerror(errno.EBADF))  # noqa: TRY301  as if it had been looked at
            self._open(descriptor)
        except OSError as error:
            self.closed = os.strerror(error.errno or errno.EBADF)
        self.line = ScreenLine(self._columns())

    def _open(self, descriptor: int) -> None:
        found = os.fstat(descriptor)
        self.identity = (found.st_dev, found.st_ino)
        self._is_file = stat.S_ISREG(found.st_mode)
        self._descriptor = descriptor
        if stat.S_ISFIFO(found.st_mode) or stat.S_ISCHR(found.st_mode):
            mode = os.O_WRONLY | os.O_NONBLOCK | os.O_NOCTTY | os.O_CLOEXEC
            with suppress(OSError):
                self._descriptor, self._own = os.open(f"/proc/self/fd/{descriptor}", mode), True

    def _columns(self) -> int:
        """Return the width of a terminal; 0 where this is none."""
        if self.closed or not os.isatty(self._descriptor):
            return 0
        with suppress(OSError):
            return os.get_terminal_size(self._descriptor).columns or _USUAL_COLUMNS
        return _USUAL_COLUMNS

    def poll_ready(self, timeout_s: float) -> None:
        """Wait until something can be written, or so long."""
        poll = select.poll()
        poll.register(self._descriptor, select.POLLOUT)
        poll.poll(timeout_s * 1000)

    def push(self) -> int:
        """Write of what is pending as much as is taken now, and return how many bytes that was."""
        taken = 0
        while self.pending and not self.closed:
            count = self._write(self.pending)
            if not count:
                break
            taken += count
            self.pending = self.pending[count:]
        if self.closed:
            self.pending = b""
        return taken

    def _write(self, data: bytes) -> int:
        try:
            if self._own or self._is_file:
                count = os.write(self._descriptor, data)
            elif select.select([], [self._descriptor], [], 0)[1]:
                count = os.write(self._descriptor, data[:_SLICE_BYTES])
            else:
                return 0
        except BlockingIOError:
            return 0
        except OSError as error:
            self.trouble = os.strerror(error.errno or 0)
            if error.errno in _GONE:
                self.closed = self.trouble
            return 0
        self.trouble = ""
        return count

    def close(self) -> None:
        """Close what was opened for us; the runner's own descriptor stays."""
        if self._own:
            self._own = False
            with suppress(OSError):
                os.close(self._descriptor)
            self.closed = self.closed or "the run is over"
