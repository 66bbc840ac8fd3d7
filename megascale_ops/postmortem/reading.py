# SPDX-License-Identifier: Apache-2.0
"""The end of a file as text: plain, compressed, of Windows; and whether it is one of a log at all.

Of a log the end counts, so at most 16 MB of it are kept whatever its size; a compressed one has to be unpacked from its
beginning, a megabyte at a time, and at most 4 GiB of it are. What is neither text nor a dump of the flight recorder (a
core, weights, a board's events) is left out.
"""

import bz2
import codecs
import gzip
import io
import lzma
import zlib
from pathlib import Path
from typing import NamedTuple

from megascale_ops import foreign

# 16 MB: as much of a flight recorder's dump as the agent reads; of a log the end counts.
MOST_BYTES = 16 * 1024 * 1024
# 4 GiB unpacked: half a minute of gzip.
_MOST_UNPACKED = 1 << 32
_CHUNK = 1 << 20
_PACKED = ((b"\x1f\x8b", gzip.open), (b"BZh", bz2.open), (b"\xfd7zXZ\x00", lzma.open))
_WIDE = ((codecs.BOM_UTF16_LE, "utf-16-le"), (codecs.BOM_UTF16_BE, "utf-16-be"))
_PICKLE = b"\x80"
_DUMPS = (_PICKLE, b"{")
# 1 % of the bytes: a log that was cut or mixed has some that are no text, and a sparse one ends with NULs.
_MOST_ODD = 0.01
_LOOKED_AT = 1 << 16


class Read(NamedTuple):
    """The end of a file, whether something came before it, and whether it is neither text nor a dump."""

    data: bytes
    is_cut: bool
    is_binary: bool


def read(path: Path, most: int = MOST_BYTES) -> Read:
    """Return the end of a file.

    Args:
        path: where it is.
        most: how many bytes of a log are kept; a dump is read whole, up to ``MOST_BYTES``.

    Raises:
        OSError: it can't be read, or what it holds can't be unpacked.
    """
    with foreign.opened(path, follow=True), path.open("rb") as file:
        begin = file.read(_LOOKED_AT)
        unpack = next((opened for magic, opened in _PACKED if begin.startswith(magic)), None)
        size = file.seek(0, 2)
        most = MOST_BYTES if begin.startswith(_DUMPS) else most
        file.seek(0 if unpack is not None else max(0, size - most))
        if unpack is None:
            data, is_cut = file.read(most), size > most
        else:
            with unpack(file, "rb") as unpacked:
                data, is_cut = _end_of(unpacked, most)
            begin = data[:_LOOKED_AT]
    for mark, name in _WIDE:
        if begin.startswith(mark):
            data = data.removeprefix(mark).decode(name, "replace").encode()
            begin = b""
    data = data.removeprefix(codecs.BOM_UTF8).replace(b"\0" * 8, b"")
    return Read(data, is_cut, not begin.startswith(_PICKLE) and _is_binary(data[-_LOOKED_AT:]))


def _end_of(unpacked: io.BufferedIOBase, most: int) -> tuple[bytes, bool]:
    """Return the end of an unpacked stream, and whether something came before it; of a cut file what could be had."""
    kept, total = b"", 0
    try:
        while total < _MOST_UNPACKED and (chunk := unpacked.read(_CHUNK)):
            total += len(chunk)
            kept = (kept + chunk)[-most:] if len(kept) >= 2 * most else kept + chunk
    except (EOFError, zlib.error, lzma.LZMAError):
        if not kept:
            raise OSError("it is packed and can't be unpacked") from None
    return kept[-most:], total > most


def _is_binary(data: bytes) -> bool:
    """Return whether bytes are no text: NULs and other control characters are, what is no UTF-8 in number is not."""
    odd = data.count(b"\0") + sum(data.count(bytes([code])) for code in (1, 2, 3, 4, 5, 6, 14, 15, 16, 17, 18))
    return bool(data) and odd > _MOST_ODD * len(data)
