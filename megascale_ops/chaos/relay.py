# SPDX-License-Identifier: Apache-2.0
"""A relay in user space between a node and its controller, which can be cut: a partition without root."""

import contextlib
import socket
import threading


class Relay:
    """Listens on a free loopback port and passes every byte on to ``target``; while cut, nothing passes."""

    def __init__(self, target: int) -> None:
        self._target = target
        self._listener = socket.create_server(("127.0.0.1", 0))
        self._passing = threading.Event()
        self._passing.set()
        self._open: set[socket.socket] = set()
        self._lock = threading.Lock()
        self.port = int(self._listener.getsockname()[1])
        threading.Thread(target=self._accept, daemon=True, name="relay").start()

    def cut(self) -> None:
        """Let nothing pass: packets vanish, as with a pulled cable; neither side gets an error."""
        self._passing.clear()

    def mend(self) -> None:
        """Let everything pass again."""
        self._passing.set()

    def close(self) -> None:
        """Close everything."""
        self.mend()
        with self._lock:
            left = [self._listener, *self._open]
            self._open.clear()
        for each in left:
            with contextlib.suppress(OSError):
                each.shutdown(socket.SHUT_RDWR)
            each.close()

    def _accept(self) -> None:
        while True:
            try:
                near, _ = self._listener.accept()
                far = socket.create_connection(("127.0.0.1", self._target), timeout=5.0)
            except OSError:
                if self._listener.fileno() < 0:
                    return
                continue
            far.settimeout(None)
            with self._lock:
                self._open |= {near, far}
            for source, sink in ((near, far), (far, near)):
                threading.Thread(target=self._pass, args=(source, sink), daemon=True, name="relay").start()

    def _pass(self, source: socket.socket, sink: socket.socket) -> None:
        with contextlib.suppress(OSError):
            while data := source.recv(65536):
                self._passing.wait()
                sink.sendall(data)
        with contextlib.suppress(OSError):
            sink.shutdown(socket.SHUT_WR)
