# SPDX-License-Identifier: Apache-2.0
"""How the output of several ranks shares one terminal, pipe or file. Pure: one writer's bytes in, bytes to write out.

Output is handed on as it was written, also what does not end with a newline: a prompt, a progress bar that returns
to the begin of its line. So the last line may belong to one writer. What follows from the same writer continues it;
output of another one breaks it first. A pipe is given a newline for that, and every byte that was written. On a
terminal a bar is wiped away (its writer draws it again a moment later), a prompt is kept, and while one bar is being
drawn those of other ranks wait: drawn in turn on one line, none could be read.
"""

import re
from typing import NamedTuple

# 1 s: a bar moves ten times a second; one that has not moved for so long does not keep others from the line.
_BAR_HOLD_S = 1.0
_TOKENS = re.compile(rb"\r\n|\r|\n|[^\r\n]+")
_WIPE = b"\r\x1b[K"


class _Line(NamedTuple):
    """What stands on the last line."""

    owner: object = None  # the source of its text; None: it is empty
    is_returned: bool = False  # the owner went back to the line's begin and will write over it
    is_bar: bool = False


class ScreenLine:
    """The last line of one output.

    Args:
        columns: Width of the terminal; 0: this is no terminal.
    """

    def __init__(self, columns: int = 0) -> None:
        self._columns = columns
        self._line = _Line()
        self._drawn_s = 0.0
        self._waiting: dict[object, bytes] = {}  # the newest picture of each bar that is not being drawn

    def show(self, writer: object, prefix: bytes, words: bytes, now_s: float) -> bytes:
        """Return what must be written for ``writer`` to have said ``words`` now."""
        waited = self._waiting.pop(writer, b"")
        if waited and not words.startswith(b"\r"):
            words = waited + words
        if self._must_wait(writer, words, now_s):
            self._waiting[writer] = words[words.rindex(b"\r") :]
            return b""
        if b"\r" not in words:
            shown = self._lines(writer, prefix, words)
        else:
            shown = b"".join(self._token(writer, prefix, token) for token in _TOKENS.findall(words))
        self._drawn_s = now_s
        return shown

    def _must_wait(self, writer: object, words: bytes, now_s: float) -> bool:
        others = self._line.is_bar and self._line.owner not in (None, writer)
        is_picture = b"\r" in words and b"\n" not in words
        return bool(self._columns) and others and is_picture and now_s - self._drawn_s < _BAR_HOLD_S

    def _lines(self, writer: object, prefix: bytes, words: bytes) -> bytes:
        """Words without a carriage return: all whole lines in one piece, for a rank may print 40 MB."""
        whole, newline, rest = words.rpartition(b"\n")
        shown = b""
        if newline:
            first, more, others = whole.partition(b"\n")
            shown = self._text(writer, prefix, first) if first else b""
            shown += self._newline(writer, prefix)
            if more:
                shown += prefix + others.replace(b"\n", b"\n" + prefix) + b"\n"
        return shown + self._text(writer, prefix, rest) if rest else shown

    def _token(self, writer: object, prefix: bytes, token: bytes) -> bytes:
        if token == b"\r":
            broken = b"" if self._line.owner in (None, writer) else self._break()
            self._line = _Line(writer, is_returned=True, is_bar=True)
            return broken + b"\r"
        if token in (b"\n", b"\r\n"):
            return self._newline(writer, prefix, token)
        return self._text(writer, prefix, token)

    def _text(self, writer: object, prefix: bytes, text: bytes) -> bytes:
        line = self._line
        if line.owner == writer and not line.is_returned:
            return text
        broken = b"" if line.owner in (None, writer) else self._break()
        if self._line.is_returned and self._columns and prefix:
            text = self._fit(text, len(prefix))
        self._line = _Line(writer, is_bar=line.is_bar and line.owner == writer)
        return broken + prefix + text

    def _newline(self, writer: object, prefix: bytes, newline: bytes = b"\n") -> bytes:
        owner = self._line.owner
        begun = b"" if owner == writer else (self._break() if owner is not None else b"") + prefix
        self._line = _Line()
        return begun + newline

    def _break(self) -> bytes:
        """End another writer's line."""
        if self._line.owner is None:
            return b""
        wiped = self._line.is_bar and bool(self._columns)
        self._line = _Line(self._line.owner)
        return _WIPE if wiped else b"\n"

    def _fit(self, text: bytes, taken: int) -> bytes:
        """Cut a bar so that it and its prefix stay on one line: one that wraps is no bar any more."""
        room = max(1, self._columns - taken - 1)
        if len(text) <= room or b"\x1b" in text:
            return text
        return text.decode(errors="replace")[:room].encode()
