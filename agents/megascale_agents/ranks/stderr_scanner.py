# SPDX-License-Identifier: Apache-2.0
"""Read a rank's stderr as it grows, keep its end, and notice last words.

A log is read at most once, in pieces of bounded size; a rank that writes faster than that (a debug build in a loop)
is not followed line by line: the scanner goes on near the end and counts what it passed over. A truncated file is
read from its start again, and a file replaced under the same name (log rotation) is followed to the new one.
"""

import contextlib
import os
from collections import deque
from collections.abc import Callable
from typing import NamedTuple

import msgspec

from megascale_agents.ownership import files
from megascale_agents.ownership.rights import Owner, myself
from megascale_ops.diagnosis.exits.last_words import STALE_LINES, LineReader, weight_of
from megascale_ops.diagnosis.exits.word_rows import CAUSE, Row
from megascale_ops.schema.progress import LastWords

KEPT_LINES = 200
# 1,000 characters hold any message that a person reads; 200 such lines of 8 ranks are 1.6 MB.
_LINE_CHARACTERS = 1000
# The bound of schema.progress.LastWords, in bytes: 64 ranks with 8 kinds each stay below MAX_BODY_BYTES.
_WORDS_BYTES = 300
# 256 KiB a look, ten looks a second: 2.5 MB/s for each rank, at 1 % of a core for each MB/s.
_READ_BYTES = 256 * 1024
# Two looks behind: go on with the last piece, where the last words are.
_MOST_BEHIND_BYTES = 2 * _READ_BYTES
_LINE_BYTES = 100  # of a usual line: skipped bytes count as lines in the age of last words
# A rank's words: one line for each kind, the kinds it used; 8 bound a heartbeat.
_KEPT_WORDS = 8


class Look(NamedTuple):
    """What one look at a log brought."""

    matched: tuple[str, ...] = ()  # names of patterns, one for each matching line
    new_cause: bool = False  # a kind of last words that is no consequence was seen for the first time
    skipped_bytes: int = 0


NOTHING_NEW = Look()


class _Position:
    """How far a log was read; of another file, or of one that was cut, nothing was."""

    __slots__ = ("offset", "reader", "rest")

    def __init__(self) -> None:
        self.offset = 0
        self.rest = b""  # a line whose end is not written yet
        self.reader = LineReader()


class LogScanner:
    """Follows one log file; a file that is not there yet is waited for without complaint, a pipe is none.

    Args:
        path: Where it is.
        owner: With whose rights it is opened; ours when not given.
        steps_seen: Returns how many steps the rank has finished, -1 where that is not known.
    """

    def __init__(self, path: str, owner: Owner | None = None, steps_seen: Callable[[], int] = lambda: -1) -> None:
        self.path = path
        self._steps_seen = steps_seen
        self._owner = owner or myself()
        self._is_file = True
        self.lines: deque[str] = deque(maxlen=KEPT_LINES)
        self._words: dict[str, LastWords] = {}
        self._read_at: dict[str, int] = {}  # the weight of the lines that were read before each of them
        self._lines_read = 0
        self._fd = -1
        self._inode = 0
        self._at = _Position()

    @property
    def last_words(self) -> tuple[LastWords, ...]:
        """One line for each kind of last words, in the order in which the kinds first appeared."""
        for name, word in self._words.items():
            if not word.stale and self._lines_read - self._read_at[name] > STALE_LINES:
                self._words[name] = msgspec.structs.replace(word, stale=True)
        return tuple(self._words.values())

    def tail(self) -> list[str]:
        """The newest lines, at most ``KEPT_LINES``, including one whose end is not written yet."""
        return [*self.lines, _text(self._at.rest)][-KEPT_LINES:] if self._at.rest else list(self.lines)

    def poll_stderr(self) -> Look:
        """Read what is new.

        Raises:
            OSError: when the file can't be read.
        """
        if self._fd < 0 and not self._open():
            return NOTHING_NEW
        size = os.lseek(self._fd, 0, os.SEEK_END)  # where the file ends, at a quarter of what fstat costs
        if size == self._at.offset:
            return NOTHING_NEW
        if size < self._at.offset:
            self._at = _Position()
        skipped = 0
        if size - self._at.offset > _MOST_BEHIND_BYTES:
            skipped = size - _READ_BYTES - self._at.offset
            self._at.offset += skipped
            self._lines_read += skipped // _LINE_BYTES
            self._at.rest = b""
        # Only what is there: a buffer of 256 KiB is mapped and unmapped for each line.
        data = os.pread(self._fd, min(_READ_BYTES, size - self._at.offset), self._at.offset)
        self._at.offset += len(data)
        return self._take(data)._replace(skipped_bytes=skipped)

    def follow(self) -> None:
        """Go to the file that now has the name, if it is another one; cheap enough for once a second."""
        self._is_file = True  # there may be one now
        if self._fd < 0:
            return
        try:
            inode = files.inode_of(self.path, self._owner)
        except OSError:
            return
        if inode != self._inode:
            self.close()

    def close(self) -> None:
        """Let go of the file; lines and words stay."""
        if self._fd >= 0:
            with contextlib.suppress(OSError):
                os.close(self._fd)
        self._fd = -1
        self._at = _Position()

    def _open(self) -> bool:
        if not self.path or not self._is_file:
            return False
        try:
            self._fd = files.opened(self.path, self._owner, is_private=False)
        except FileNotFoundError:
            return False
        except files.NotAFileError:
            self._is_file = False  # a pipe or a terminal: it has no end to be read, and the next look may wait
            return False
        self._inode = os.fstat(self._fd).st_ino
        return True

    def _take(self, data: bytes) -> Look:
        """Cut new bytes into lines and judge each whole one."""
        pieces = (self._at.rest + data).split(b"\n")
        self._at.rest = _shortened(pieces.pop())
        matched: list[str] = []
        new_cause = False
        for piece in pieces:
            line = _text(piece)
            self.lines.append(line)
            row = self._at.reader.read(line)
            if row is not None:
                matched.append(row.name)
                new_cause |= self._keep(row, line) and row.role == CAUSE
            elif self._words:
                self._lines_read += weight_of(line)
        return Look(tuple(matched), new_cause)

    def _keep(self, row: Row, line: str) -> bool:
        """Remember the newest line of each kind; return whether the kind is new."""
        is_new = row.name not in self._words
        if is_new and len(self._words) >= _KEPT_WORDS:
            old = next((word.pattern for word in self.last_words if word.stale), None)
            if old is None:
                return False
            del self._words[old]
        self._words[row.name] = LastWords(row.name, row.fault, _plain(line), self._steps_seen())
        self._read_at[row.name] = self._lines_read
        return is_new


def _visible(piece: bytes) -> bytes:
    """Return what stands there last: a progress bar draws over itself with carriage returns."""
    return piece.rstrip(b"\r").rpartition(b"\r")[2]


def _text(piece: bytes) -> str:
    return _visible(piece).decode("utf-8", "replace")[:_LINE_CHARACTERS]


def _shortened(piece: bytes) -> bytes:
    """Bound a line whose end is not written yet, without changing what will be read of it."""
    ending = b"\r" if piece.endswith(b"\r") else b""
    return _visible(piece)[: 4 * _LINE_CHARACTERS] + ending


def _plain(line: str) -> str:
    """Shorten a line and take out what a terminal would act on; in JSON each such byte would become six."""
    shown = "".join(character if character.isprintable() else " " for character in line[:_WORDS_BYTES])
    return shown.encode()[:_WORDS_BYTES].decode(errors="ignore")
