# SPDX-License-Identifier: Apache-2.0
"""What launchers, loggers and printers of tracebacks put before a line, taken away: a line reads the same from all.

Some prefixes are known by their form (torch's rank, mpirun's tag, Ray's actor, an address, a time). Any other one is
learnt where a traceback begins: what stands before "Traceback (most recent call last):" stands before each of its
lines, with other numbers in it where it holds a time or a count.

Loggers of JSON and of key=value pairs fold a traceback into one line; it is unfolded.

Two printers draw around a traceback: Python's around groups of exceptions, rich with its boxes. Both are drawn off.

Pure: lines in, lines out.
"""

import re
from collections.abc import Iterable

TRACEBACK_BEGINS = "Traceback (most recent call last):"
_BEGINS = TRACEBACK_BEGINS[:-1]  # rich writes it without its colon
LOGURUS = '> File "'  # loguru's arrow before the frame in which it caught what was raised
COLOURS = re.compile(r"\x1b\[[\d;]*[mK]")  # FORCE_COLOR, with which Python 3.13 paints tracebacks into files too
# torch, mpirun --tag-output, Ray, srun --label, pdsh, kubectl --prefix and operators; a time as loggers and shippers
# write it. A tag of mpirun ends with its colon: what spaces follow are the line's own where it is indented.
_KNOWN = re.compile(
    r"^(?:\[(?:rank|default)\d+\]:\s?|\[\d+,\d+\]<std(?:err|out)>:(?: (?=\S))?"
    r"|\(\w{1,40}(?:, rank=\d+,)? pid=\d+[^)]{0,60}\) ?|\d{1,6}: |\d{1,3}(?:\.\d{1,3}){3}: |\[pod/[^\]]{1,120}\] "
    r"|\d{4}-\d\d-\d\d[T ]\d\d:\d\d:\d\d(?:[.,]\d{1,9})?(?:Z|[+-]\d\d:?\d\d)?(?: \||:)? )+"
)
# 120 characters: the longest seen is a host's full name with a pod's and a stream's.
_LONGEST = 120
_NUMBER = re.compile(r"\d+")
# Of Python's frame around a group of exceptions: "  | ", "  + Exception Group ", "  +-+-------- 1 --------".
_GROUP_LINE = re.compile(r"^ {1,60}\| ?")
_GROUP_BEGINS = re.compile(r"^ {1,60}\+ (?=Exception Group Traceback)")
_GROUP_RULE = re.compile(r"^ {1,60}\+[-+]{2,}.{0,12}-{8,}$")
# Of rich's boxes: the upper edge holds the title, the lower one ends it, and frames are "/app/train.py:13 in run".
_BOX_BEGINS = re.compile(r"^[╭┌+][─-]{1,200} ?Traceback \(most recent call last\)")
_BOX_LINE = re.compile(r"^[│|] ?(.*?)\s*[│|]?$")
_BOX_ENDS = re.compile(r"^[╰└+][─-]{8,}")
_BOX_FRAME = re.compile(r"(\S+):(\d+) in (\S+)")


# A traceback inside a quoted value: its line ends are a backslash and an n, its quotes are escaped.
_FOLDED = re.compile(r"(?:Exception Group )?Traceback \(most recent call last\):(?=\\n)")
_QUOTE_ENDS = re.compile(r'(?<!\\)"')


def unfolded(line: str) -> list[str]:
    """Return the lines that a logger folded into one, what stands before a traceback first; the line itself if none."""
    begins = _FOLDED.search(line) if "\\n" in line else None
    if begins is None:
        return [line]
    ends = _QUOTE_ENDS.search(line, begins.start())
    text = line[begins.start() : ends.start() if ends is not None else len(line)]
    return [line[: begins.start()], *text.replace('\\"', '"').split("\\n")]


def strip_prefix(line: str) -> str:
    """Take colours and launchers' ``[rank3]: `` away, so that a line reads the same from one rank and from many."""
    if line[:1] not in "[(0123456789\x1b":
        return line
    return _KNOWN.sub("", COLOURS.sub("", line))


class Prefixes:
    """Takes prefixes away line by line; one that it has learnt stays known until another traceback has another."""

    def __init__(self) -> None:
        self._learnt: re.Pattern[str] | None = None
        self._in_box = False
        self._in_group = False

    def bare(self, line: str) -> str:
        """Return a line without what stands before it, and without what is drawn around it."""
        line = COLOURS.sub("", line) if "\x1b" in line else line
        is_plain = self._learnt is None and not self._in_box and not self._in_group
        if is_plain and _BEGINS not in line:
            return strip_prefix(line)
        return self._drawn_off(self._unlearnt(line))

    def _unlearnt(self, line: str) -> str:
        bare = strip_prefix(line)
        at = line.find(TRACEBACK_BEGINS)
        is_known = bare == line[at:] or _GROUP_BEGINS.match(bare) is not None or line[:at].isspace()
        if 0 < at <= _LONGEST and not is_known and not self._in_group:
            before = line[:at].rstrip()
            shape = r"\d+".join(re.escape(piece) for piece in _NUMBER.split(before))
            self._learnt = re.compile(f"^{shape} ?" if line[at - 1] == " " else f"^{shape}")
        found = self._learnt.match(line) if self._learnt is not None else None
        return bare if found is None else line[found.end() :]

    def _drawn_off(self, line: str) -> str:
        if _BOX_BEGINS.match(line):
            self._in_box = True
            return TRACEBACK_BEGINS
        if self._in_box:
            return self._boxed(line)
        if _GROUP_BEGINS.match(line):
            self._in_group = True
            return _GROUP_BEGINS.sub("", line).removeprefix("Exception Group ")
        if not self._in_group:
            return line
        if _GROUP_RULE.match(line):
            return ""
        self._in_group = _GROUP_LINE.match(line) is not None
        return _GROUP_LINE.sub("", line)

    def _boxed(self, line: str) -> str:
        if _BOX_ENDS.match(line):
            self._in_box = False
            return "  "
        found = _BOX_LINE.match(line)
        if found is None:
            self._in_box = False
            return line
        frame = _BOX_FRAME.fullmatch(found[1].strip())
        return f'  File "{frame[1]}", line {frame[2]}, in {frame[3]}' if frame is not None else f"  {found[1]}"


def without_prefixes(lines: Iterable[str]) -> list[str]:
    """Return lines of one output without what stands before them; rules of drawn frames are left out."""
    prefixes = Prefixes()
    flat = (piece for line in lines for piece in unfolded(line))
    return [bare for line in flat if (bare := prefixes.bare(line)) or not line.endswith("---")]
