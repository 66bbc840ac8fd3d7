# SPDX-License-Identifier: Apache-2.0
"""What may answer at an address that is no controller's: a proxy's page, half an answer, JSON of something else."""

import contextlib
import os
import socket
from typing import NoReturn

_OK = b"HTTP/1.1 200 OK\r\nContent-Type: %s\r\nContent-Length: %d\r\n\r\n"
_JSON = b"application/json"


def _whole(body: bytes, kind: bytes = _JSON) -> bytes:
    return _OK % (kind, len(body)) + body


# By what is wrong: all that is sent to each request.
BODIES = {
    "html": _whole(b"<html><h1>nginx</h1></html>", b"text/html"),
    "cut": _OK % (_JSON, 999) + b"{",
    "null": _whole(b"null"),
    "list": _whole(b'[1,{"a":null}]'),
    "deep": _whole(b"[" * 200_000),
    "odd": _whole(b'{"jobs":[{"job":7}],"incidents":{},"nodes":null,"version":99,"status":"success","data":[]}'),
    "moved": b"HTTP/1.1 302 Found\r\nLocation: http://127.0.0.1:9/\r\nContent-Length: 0\r\n\r\n",
    "refuses": b"HTTP/1.1 401 Unauthorized\r\nContent-Length: 0\r\n\r\n",
    "breaks": b"HTTP/1.1 500 Oops\r\nContent-Length: 4\r\n\r\nOops",
    "nothing": b"",
    "noise": bytes(range(256)),
}


def answer_wrongly(door: socket.socket, kind: str) -> NoReturn:
    """Answer whatever is asked with the same, and close; end with the process."""
    try:
        while True:
            with contextlib.suppress(OSError):
                asking, _ = door.accept()
                with asking:
                    asking.settimeout(2)
                    asking.recv(65_536)
                    asking.sendall(BODIES[kind])
    finally:
        os._exit(1)
