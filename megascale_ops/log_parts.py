# SPDX-License-Identifier: Apache-2.0
"""A part of what a rank printed: the end of one file, what came since, or the lines that hold a text.

    <folder>/[NODE/]round-N/rank-R/{stdout,stderr}.log

Nothing of a request is part of a path: rank and round are numbers, the stream is one of two words, folders of nodes are
those that are there. Each step of the way is opened without following links, and the file has to be an ordinary one of
one user. At most 4 MiB of it are read, whatever its size. The controller of a single run reads so, and so does the
agent of each node; it is for the caller to hold the folder open, in a thread that may wait for a disk that is away.
"""

import os
import re
import stat
from collections.abc import Iterator
from typing import BinaryIO

import msgspec

from megascale_ops.schema.runs import MOST_LINE, MOST_ROUNDS, NEWEST, LogPart, LogQuery

# 256 KiB: some thousand lines, more than a person scrolls through; what came before is searched, or read in the file.
TAIL_BYTES = 1 << 18
# 4 MiB: a search of 10 ms. Beyond it `megascale-ops logs --grep` on the node reads the whole file.
SEARCH_BYTES = 1 << 22
# 256 folders of nodes are looked through; a run whose nodes share a disk, and that has one controller, has a few.
MOST_NODES = 256
_ROUND = re.compile(r"round-([0-9]{1,9})")
_FOLDER = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC
_PLACE = os.O_PATH | os.O_NOFOLLOW | os.O_CLOEXEC
_FILE = os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC


def read_part(folder: int, query: LogQuery, uid: int) -> LogPart | None:
    """Return what is asked for; None where the rank has left no such file.

    Args:
        folder: handle of the folder that has the rounds, or the folders of nodes that have them.
        query: which lines of which rank.
        uid: whose the file has to be.
    """
    rounds: list[int] = []
    found = None
    for number, nodes in sorted(_rounds(folder), reverse=True)[:MOST_ROUNDS]:
        handle = _opened(folder, (*nodes, f"round-{number}", f"rank-{query.rank}"), f"{query.stream}.log", uid)
        if handle is None:
            continue
        with os.fdopen(handle, "rb") as file:
            rounds.append(number)
            if found is None and query.round in (number, NEWEST):
                found = _part(file, number, query)
    return msgspec.structs.replace(found, rounds=tuple(rounds)) if found is not None else None


def _rounds(folder: int) -> Iterator[tuple[int, tuple[str, ...]]]:
    """Yield every round that is there, with the folder of its node where there are several."""
    nodes: list[str] = []
    for name in _names(folder, ()):
        if match := _ROUND.fullmatch(name):
            yield int(match[1]), ()
        elif len(nodes) < MOST_NODES:
            nodes.append(name)
    for node in nodes:
        for name in _names(folder, (node,)):
            if match := _ROUND.fullmatch(name):
                yield int(match[1]), (node,)


def _names(folder: int, steps: tuple[str, ...]) -> list[str]:
    """Return what is in a folder; nothing where it is none."""
    handle = _below(folder, steps)
    if handle is None:
        return []
    try:
        return os.listdir(handle)  # noqa: PTH208  by its handle, not by its name
    except OSError:
        return []
    finally:
        os.close(handle)


def _below(folder: int, steps: tuple[str, ...]) -> int | None:
    """Open a folder below another without following links; None where it is none."""
    handle = os.dup(folder)
    for step in steps:
        try:
            below = os.open(step, _FOLDER, dir_fd=handle)
        except OSError:
            return None
        finally:
            os.close(handle)
        handle = below
    return handle


def _opened(folder: int, steps: tuple[str, ...], name: str, uid: int) -> int | None:
    """Open an ordinary file of a user; None where there is none. It is looked at before it is opened for reading."""
    holder = _below(folder, steps)
    if holder is None:
        return None
    try:
        place = os.open(name, _PLACE, dir_fd=holder)
    except OSError:
        return None
    finally:
        os.close(holder)
    try:
        facts = os.fstat(place)
        if stat.S_ISREG(facts.st_mode) and facts.st_uid == uid:
            return os.open(f"/proc/self/fd/{place}", _FILE)
    except OSError:
        return None
    finally:
        os.close(place)
    return None


def _part(file: BinaryIO, number: int, query: LogQuery) -> LogPart:
    """Return lines of an open file: what came after a place, the last that hold a text, or just the last."""
    size = file.seek(0, os.SEEK_END)
    most = SEARCH_BYTES if query.grep else TAIL_BYTES
    # A file that is shorter than what was read of it was begun anew.
    after = query.after if query.after <= size else 0
    start = max(after, size - most)
    file.seek(start)
    data = file.read(most)
    first = data.find(b"\n") + 1 if start > after else 0  # it begins in the middle of a line
    # A line without an end comes whole next time, unless it is too long to wait for its end.
    until = data.rfind(b"\n") + 1
    if until <= first and len(data) - first > MOST_LINE:
        until = len(data)
    lines = [line[:MOST_LINE] for line in data[first:until].decode("utf-8", "replace").split("\n")]
    if not lines[-1]:
        lines.pop()
    wanted = query.grep.lower()
    held = [line for line in lines if wanted in line.lower()] if wanted else lines
    shown = held[-query.lines :]
    return LogPart(
        query.rank,
        number,
        query.stream,
        tuple(shown),
        end=start + max(first, until),
        is_cut=start > after or len(shown) < len(held),
        is_anew=after < query.after,
    )


def nothing_of(query: LogQuery) -> str:
    """Return the beginning of a sentence about a rank without such a file; where it was looked for comes behind it."""
    return f"rank {query.rank} has left no {query.stream}" + (f" in round {query.round}" if query.round >= 0 else "")


def shortened(part: LogPart, most_bytes: int) -> LogPart:
    """Return a part whose lines, as JSON, take no more than so many bytes: the newest of them."""
    left = most_bytes
    for kept, line in enumerate(reversed(part.lines)):
        left -= len(msgspec.json.encode(line)) + 1
        if left < 0:
            return msgspec.structs.replace(part, lines=part.lines[len(part.lines) - kept :], is_cut=True)
    return part
