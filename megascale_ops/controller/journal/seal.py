# SPDX-License-Identifier: Apache-2.0
"""A checksum in every row of the journal, so that no flipped bit is taken for something that happened.

A flip inside a number leaves valid JSON: a round 3 that reads 7. SQLite keeps no checksum of its pages (its write-ahead
log alone has them), so each body carries the CRC-32 of itself and of its row's key, as the last member of its object:

    {"job":"demo","round":3}  ->  {"job":"demo","round":3,"crc32":"5ab0c4d1"}

A program that knows nothing of it reads the body as ever, since unknown members are skipped, and what such a program
writes has no seal and is taken as it is. A broken seal is distinguished from a missing one by how much of it is left.
"""

import zlib

_FIRST, _LAST = b',"crc32":"', b'"}'
_DIGITS = 8
_LENGTH = len(_FIRST) + _DIGITS + len(_LAST)
# 9 of the 12 fixed characters: what ends like this by chance agrees in the brace and a quote or two.
_STILL_A_SEAL = 9


class DamagedRowError(ValueError):
    """A row is not what was written; the message gives the evidence."""


def seal(key: str, body: bytes) -> bytes:
    """Return the body with its checksum; what is no JSON object, or an empty one, stays as it is."""
    if len(body) <= len(b"{}") or not (body.startswith(b"{") and body.endswith(b"}")):
        return body
    return body[:-1] + _FIRST + _sum(key, body) + _LAST


def unseal(key: str, raw: object) -> bytes:
    """Return the body as it was given to ``seal``.

    Raises:
        DamagedRowError: it is not what was written.
    """
    if isinstance(raw, str):
        raw = raw.encode()
    if not isinstance(raw, bytes):
        raise DamagedRowError("it holds no text")
    tail = raw[-_LENGTH:]
    if tail.startswith(_FIRST) and tail.endswith(_LAST):
        body = raw[:-_LENGTH] + b"}"
        if tail[len(_FIRST) : -len(_LAST)] != _sum(key, body):
            raise DamagedRowError("its checksum does not fit")
        return body
    if len(tail) == _LENGTH and _agreement(tail) >= _STILL_A_SEAL:
        raise DamagedRowError("its checksum is damaged")
    return raw


def is_sealed(raw: bytes) -> bool:
    """Return whether a body carries a checksum, right or wrong."""
    return raw[-_LENGTH:].startswith(_FIRST) and raw.endswith(_LAST)


def _sum(key: str, body: bytes) -> bytes:
    return b"%08x" % zlib.crc32(body, zlib.crc32(key.encode()))


def _agreement(tail: bytes) -> int:
    fixed = [*range(len(_FIRST)), *range(_LENGTH - len(_LAST), _LENGTH)]
    wanted = _FIRST + b"0" * _DIGITS + _LAST
    return sum(tail[place] == wanted[place] for place in fixed)
