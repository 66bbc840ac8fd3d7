# SPDX-License-Identifier: Apache-2.0
"""Were commits lost from the end of SQLite's write-ahead log?

The log carries checksums: SQLite uses it up to the first frame that does not fit, and ignores what follows.
That is right after a crash in the middle of a commit, and it is a loss when whole commits follow, or when the log's own
header is damaged. Both show in the log's file: frames that belong to it (by their salts) and lie behind the last one
used. That a log was cut off shows in the file beside it, in which its last user had noted its length.

The format is SQLite's (https://www.sqlite.org/fileformat2.html#walformat).
"""

import struct
from collections.abc import Sequence
from typing import NamedTuple

_HEADER = struct.Struct(">8I")
_FRAME = struct.Struct(">6I")
# The first fields of the shared file: its version, nothing, a count of changes, flags, and the last frame.
_SHARED = struct.Struct("=IIIxxxxI20s")
_IS_READY, _SHARED_SALTS, _SALTS = 12, slice(32, 40), slice(16, 24)
_MAGIC = (0x377F0682, 0x377F0683)


class _Frame(NamedTuple):
    commits: bool  # a transaction ends with it


def lost_commits(raw: bytes, shared: bytes, used: int) -> int:
    """Return how many commits a log has held that SQLite does not use; 1 where it is only known that there were some.

    Args:
        raw: the log's file, as it was before it was opened.
        shared: the file beside it that its last user shared with others, as it was; b"" for none.
        used: how many of its frames SQLite uses.
    """
    if len(raw) < _HEADER.size + _FRAME.size:
        return int(_had_frames(shared, None) > used)
    magic, _format, page_size, _count, *salts, sum_1, sum_2 = _HEADER.unpack_from(raw)
    order = "<" if magic == _MAGIC[0] else ">"
    if magic not in _MAGIC or _sum(raw[: _HEADER.size - 8], order) != (sum_1, sum_2):
        # The header is gone: the first frame identifies the log, and all of it is lost. Where that frame is gone
        # as well, nothing can be counted; a log that is longer than both has held something.
        page_size, salts = _page_size(raw), list(_FRAME.unpack_from(raw, _HEADER.size)[2:4])
        return sum(frame.commits for frame in _frames(raw, page_size, salts)) or 1 if page_size else 1
    frames = _frames(raw, page_size, salts) if page_size else []
    lost = sum(frame.commits for frame in frames[used:])
    return lost or int(_had_frames(shared, raw[_SALTS]) > used)


def _had_frames(shared: bytes, salts: bytes | None) -> int:
    """Return how many frames the log had when it was last used, as its user shared it; 0 when it was another log."""
    if len(shared) < _SHARED.size or not shared[_IS_READY] or salts not in (None, shared[_SHARED_SALTS]):
        return 0
    return int(_SHARED.unpack_from(shared)[3])


def _frames(raw: bytes, page_size: int, salts: Sequence[int]) -> list[_Frame]:
    """Return the frames of this log; half a damaged salt does not end them."""
    found = []
    step = _FRAME.size + page_size
    for place in range(_HEADER.size, len(raw) - step + 1, step):
        _page, size, salt_1, salt_2, _sum_1, _sum_2 = _FRAME.unpack_from(raw, place)
        if salt_1 != salts[0] and salt_2 != salts[1]:
            break  # left over from a log before
        found.append(_Frame(size > 0))
    return found


def _page_size(raw: bytes) -> int:
    """Return the page size of a log whose header is damaged: at which a second frame has the salts."""
    salts = _FRAME.unpack_from(raw, _HEADER.size)[2:4]
    for page_size in (1 << power for power in range(9, 17)):
        place = _HEADER.size + _FRAME.size + page_size
        if place == len(raw):
            return page_size
        if place + _FRAME.size <= len(raw) and _FRAME.unpack_from(raw, place)[2:4] == salts:
            return page_size
    return 0


def _sum(data: bytes, order: str) -> tuple[int, int]:
    """Return SQLite's checksum of ``data``."""
    first = second = 0
    words = struct.unpack(f"{order}{len(data) // 4}I", data)
    for at in range(0, len(words), 2):
        first = (first + words[at] + second) & 0xFFFFFFFF
        second = (second + words[at + 1] + first) & 0xFFFFFFFF
    return first, second
