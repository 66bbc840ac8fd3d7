# SPDX-License-Identifier: Apache-2.0
"""Hear what a port says that took a connection and gave no answer in HTTP: an SSH server, TLS, anything.

It is asked by hand, over connections of its own and without a token: libraries tell of such a port that it closed, or
quote a parser. First it may speak by itself, then it is asked in HTTP, then a TLS handshake is begun.
"""

import socket
import time
from urllib.parse import urlsplit

# 0.2 s: what speaks first does so at once.
_FIRST_S = 0.2
_MOST_BYTES = 256
_ASK = b"GET / HTTP/1.1\r\nHost: %s\r\nConnection: close\r\n\r\n"
# A TLS 1.2 ClientHello (RFC 5246, 7.4.1.2) with one cipher suite and no extensions: any TLS server answers it, be it
# with an alert.
_HELLO = b"\x16\x03\x01\x00\x2d\x01\x00\x00\x29\x03\x03" + bytes(32) + b"\x00\x00\x02\xc0\x2f\x01\x00"


def first_words(url: str, patience_s: float) -> bytes | None:
    """Return the first bytes that an address says; b"": it closes without any, None: no program listens.

    Args:
        url: ``http://HOST:PORT`` or https; it was checked.
        patience_s: for all of it.
    """
    parts = urlsplit(url)
    place = parts.hostname or "", parts.port or (443 if parts.scheme == "https" else 80)
    until_s = time.monotonic() + patience_s
    said: bytes | None = None
    for words in (_ASK % place[0].encode(errors="replace"), _HELLO):
        try:
            with socket.create_connection(place, timeout=_left(until_s)) as talk:
                said = _heard(talk, words, until_s)
        except OSError:
            return said
        if said:
            return said
    return said


def _heard(talk: socket.socket, words: bytes, until_s: float) -> bytes:
    talk.settimeout(min(_FIRST_S, _left(until_s)))
    try:
        return talk.recv(_MOST_BYTES)
    except TimeoutError:
        pass
    except OSError:
        return b""
    try:
        talk.settimeout(_left(until_s))
        talk.sendall(words)
        return talk.recv(_MOST_BYTES)
    except OSError:
        return b""


def _left(until_s: float) -> float:
    """Return how long may be waited; never 0, which would mean for ever or not at all."""
    return max(until_s - time.monotonic(), 0.01)
