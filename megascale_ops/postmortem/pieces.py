# SPDX-License-Identifier: Apache-2.0
"""From files and folders to what each rank left, and to which rank it is that left it.

A file's rank stands in its name, in its folder (torchrun: ``attempt_0/3/stderr.log``), before its lines (``[rank3]:``
of torch, ``[default3]:`` of torchrun, ``3: `` of srun, ``[1,3]<stderr>:`` of mpirun), or in the command that a stack
begins with. Numbers that come twice in different folders are local ranks of nodes, in the order of the nodes' names.
What is a dump, a stack or a log is told by what is in it, never by its name.
"""

import re
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import NamedTuple

from megascale_ops import foreign
from megascale_ops.errors import UsageError

# 16 MB: as much of a flight recorder's dump as the agent reads; of a log the end counts.
MOST_BYTES = 16 * 1024 * 1024
# 16,384 files: a rank each of a job of 12,288 with room.
MOST_FILES = 16_384

_NAMED = (
    re.compile(r"(?:global|world)[_\-.]?rank[_\-.=]?(\d{1,6})", re.IGNORECASE),
    re.compile(r"(?<!local[_\-.])(?<!local)(?<!node[_\-.])rank[_\-. =]{0,2}(\d{1,6})", re.IGNORECASE),
    re.compile(r"(?:^|[_\-.])r(\d{1,6})(?=[_\-.]|$)"),
    re.compile(r"(?:local[_\-.]?rank|task|proc|worker|gpu|device)[_\-.=]?(\d{1,6})", re.IGNORECASE),
    re.compile(r"(?:trace|dump|stacks?)[_\-.]?(\d{1,4})(?=[_\-.]|$)", re.IGNORECASE),
    re.compile(r"^(\d{1,4})(?=[_\-.]|$)"),
    re.compile(r"(?:^|[_\-.])(\d{1,4})$"),
)
_ENDINGS = re.compile(r"\.(?:txt|log|out|err|stderr|stdout|stacks?|json|dump|pickle|pkl|bt|gdb|trace|pyspy|py-spy)+$")
_FOLDER = re.compile(r"^(?:(?:rank|local_rank|worker|task)[_\-.]?)?(\d{1,6})$", re.IGNORECASE)
_LINES = (
    re.compile(r"^\[rank(\d{1,6})\]: ?"),
    re.compile(r"^\[default(\d{1,6})\]: ?"),
    re.compile(r"^\[\d{1,6},(\d{1,6})\]<std(?:err|out)>: ?"),
    re.compile(r"^ {0,5}(\d{1,6}): "),
)
_OF_COMMAND = re.compile(r"(?<!local.)(?<!node.)\brank[= ](\d{1,6})\b|\bRANK=(\d{1,6})\b")
# torch before 2.3 says it within the line alone, as the place within a group.
_OF_WATCHDOG = re.compile(r"\[(?:PG [^\]]{0,120})?Rank (\d{1,6})\]")
_NODE = re.compile(r"(?:^|[_\-./])((?:node|host|worker|n|gpu-?node)[_\-]?\d{1,6})(?=[_\-./]|$)", re.IGNORECASE)
# How a pickle, an object of JSON and a list of them begin; a log may begin with "[rank0]:" or a date.
_OTHER = re.compile(rb"\x80|\s*\{|\s*\[\s*[\[{\]]")
# 0.9 of all lines: a number and a colon before a few is no launcher's.
_MOST_LINES = 0.9


class Piece(NamedTuple):
    """What one file holds of one rank; ``rank`` is -1 where nothing tells it."""

    path: Path
    rank: int
    data: bytes

    @property
    def text(self) -> str:
        """The data as text."""
        return self.data.decode("utf-8", "replace").replace("\r\n", "\n")


class Gathered(NamedTuple):
    """All pieces, and sentences about what could not be read or was guessed."""

    pieces: tuple[Piece, ...]
    notes: tuple[str, ...]


def find(paths: Sequence[Path]) -> list[Path]:
    """Return the files among paths and below folders, each once, in the order of their names.

    Raises:
        UsageError: a path that does not exist, or more files than a job leaves.
    """
    found: dict[Path, None] = {}
    for path in paths:
        if not path.exists():
            raise UsageError(f"there is nothing at {path}: give a file or a folder")
        inside = path.rglob("*") if path.is_dir() else [path]
        for one in sorted(inside, key=_order):
            if not one.is_dir() and not one.name.startswith("."):
                found[one] = None
            if len(found) > MOST_FILES:
                raise UsageError(f"{path} holds more than {MOST_FILES} files: give the folder of one job")
    return list(found)


def gather(files: Iterable[Path]) -> Gathered:
    """Read files, and tell whose they are."""
    pieces: list[Piece] = []
    notes: list[str] = []
    for path in files:
        try:
            data = _end_of(path)
        except OSError as error:
            notes.append(f"{path} can't be read: {error.strerror or error}")
            continue
        if data.strip():
            pieces += _split(path, data)
    ranked, more = _with_nodes(pieces)
    return Gathered(tuple(ranked), (*notes, *more))


def rank_of(path: Path) -> int:
    """Return the rank that a name tells, -1 where it tells none."""
    name = path.name
    while (shorter := _ENDINGS.sub("", name)) != name:
        name = shorter
    for form in _NAMED[:3]:
        if found := form.search(name):
            return int(found[1])
    if (folder := _FOLDER.match(path.parent.name)) and not re.search(r"\d", name):
        return int(folder[1])
    without_node = _NODE.sub("_", name)
    for form in _NAMED[3:]:
        if found := form.search(without_node):
            return int(found[1])
    return int(folder[1]) if folder else -1


def without_prefix(text: str) -> str:
    """Return a text without what a launcher has put before each line."""
    for form in _LINES[:3]:
        text = re.sub(form.pattern, "", text, flags=re.MULTILINE)
    lines = text.splitlines()
    marked = sum(_LINES[3].match(line) is not None for line in lines)
    return "\n".join(_LINES[3].sub("", line) for line in lines) if marked > _MOST_LINES * len(lines) else text


def _end_of(path: Path) -> bytes:
    with foreign.opened(path, follow=True), path.open("rb") as file:
        size = file.seek(0, 2)
        file.seek(max(0, size - MOST_BYTES))
        return file.read(MOST_BYTES)


def _split(path: Path, data: bytes) -> list[Piece]:
    """Cut a log of several ranks apart, by what stands before its lines."""
    named = rank_of(path)
    text = "" if _OTHER.match(data) else data.decode("utf-8", "replace")
    by_rank = _by_prefix(text)
    ranks = sorted(rank for rank in by_rank if rank >= 0)
    if len(ranks) > 1:  # what no rank has printed is the launcher's
        return [Piece(path, rank, "\n".join(by_rank[rank]).encode()) for rank in by_rank if "".join(by_rank[rank])]
    if named < 0 and ranks:
        named = ranks[0]
    if named < 0 and text:
        told = _OF_COMMAND.search(text[:4096])
        named = int(told[1] or told[2]) if told is not None else -1
    if named < 0 and text:
        spoke: dict[int, list[str]] = {}
        for line in text.splitlines():
            if found := _OF_WATCHDOG.search(line):
                spoke.setdefault(int(found[1]), []).append(line)
        if len(spoke) > 1:
            return [Piece(path, rank, "\n".join(lines).encode()) for rank, lines in sorted(spoke.items())]
    return [Piece(path, named, data)]


def _by_prefix(text: str) -> dict[int, list[str]]:
    """Return the lines of each rank, and by -1 of none, where a launcher has marked them; empty where none has."""
    lines = text.splitlines()
    for at, form in enumerate(_LINES):
        marked = [(form.match(line), line) for line in lines]
        count = sum(found is not None for found, _ in marked)
        if not count or (at == len(_LINES) - 1 and count < _MOST_LINES * len(lines)):
            continue
        by_rank: dict[int, list[str]] = {}
        for found, line in marked:
            by_rank.setdefault(int(found[1]) if found is not None else -1, []).append(line)
        return by_rank
    return {}


def _with_nodes(pieces: Sequence[Piece]) -> tuple[list[Piece], list[str]]:
    """Number local ranks through, where the same ones come from several nodes."""
    homes: dict[int, set[str]] = {}
    for piece in pieces:
        if piece.rank >= 0:
            homes.setdefault(piece.rank, set()).add(_home(piece.path))
    nodes = sorted({home for found in homes.values() for home in found}, key=lambda name: _order(Path(name)))
    is_local = len(nodes) > 1 and all(len(found) == len(nodes) for found in homes.values())
    if not is_local or "" in nodes:
        return list(pieces), []
    per_node = max(homes) + 1
    numbered = [
        piece._replace(rank=nodes.index(_home(piece.path)) * per_node + piece.rank) if piece.rank >= 0 else piece
        for piece in pieces
    ]
    return numbered, [f"ranks are numbered by node and local rank, {per_node} on each of {', '.join(nodes[:4])}"]


def _home(path: Path) -> str:
    """Return the node that a path names, "" for none."""
    found = _NODE.search(path.name) or _NODE.search(str(path.parent))
    return found[1].lower() if found else ""


def _order(path: Path) -> list[tuple[int, str]]:
    """Return a key by which names sort as people count."""
    parts = re.split(r"(\d{1,12})", str(path))
    return [(int(part), "") if part.isdigit() else (-1, part) for part in parts]
