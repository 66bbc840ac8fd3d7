# SPDX-License-Identifier: Apache-2.0
"""What a rank printed, for the page: the end of one file, what came since, or the lines that hold a text.

Only the controller that a run has brought up for itself reads files, and only those of that run's folder, which its own
command line named: a shared controller has another user's rights, and any runner that joins could name any folder. It
answers with what to type instead.

Nothing of a request is part of a path: rank and round are numbers, the stream is one of two words, folders of nodes are
those that are there. Each step of the way is opened without following links, and the file has to be an ordinary one of
this user's. At most 4 MiB of it are read, in a thread, for four requests at a time.
"""

import asyncio
import contextlib
import os
import re
import stat
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import BinaryIO

import msgspec

from megascale_ops.controller.server.operations import LogQuery
from megascale_ops.errors import NotFoundError, RefusedError
from megascale_ops.schema.runs import LogPart

# 256 KiB: some thousand lines, more than a person scrolls through; what came before is searched, or read in the file.
TAIL_BYTES = 1 << 18
# 4 MiB: a search of 10 ms. Beyond it `megascale-ops logs --grep` reads the whole file.
SEARCH_BYTES = 1 << 22
# 2,000 characters: a longer line is a dump of numbers.
MOST_LINE = 2000
# 5 s: a disk that takes longer is away; the page says so.
PATIENCE_S = 5.0
# 4 at a time: threads that wait for a disk that is away are no more than these.
MOST_AT_ONCE = 4
# 256 folders of nodes are looked through; a run with an own controller has a few.
MOST_NODES = 256
# The newest 100 rounds: `megascale-ops logs --round` reads older ones.
MOST_ROUNDS = 100
_ROUND = re.compile(r"round-([0-9]{1,9})")
_FOLDER = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC
# Without waiting: a pipe that lies there in place of a file has no writer.
_FILE = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC


class RankLogs:
    """The files of one run.

    Args:
        folder: the run folder; None where files of others might be read: then none is.
    """

    def __init__(self, folder: Path | None) -> None:
        self._folder = folder
        self._reading = 0

    async def read(self, job: str, jobs: int, query: LogQuery) -> LogPart:
        """Return a part of what a rank printed; ``jobs`` says how many this controller serves.

        Raises:
            RefusedError: this controller reads no logs, is busy with others, or the disk does not answer.
            NotFoundError: the rank has left no such file.
        """
        if self._folder is None or jobs > 1:
            raise RefusedError(
                f"this controller is not a single run's own, and reads no files of it: type `megascale-ops logs {job} "
                f"--rank {query.rank}` on a node that sees the run folder"
            )
        if self._reading >= MOST_AT_ONCE:
            raise RefusedError(f"{MOST_AT_ONCE} logs are being read already: ask again in a few seconds")
        folder = self._folder
        self._reading += 1
        answer = _in_thread(lambda: _read(folder / "logs", query), self._done)
        try:
            async with asyncio.timeout(PATIENCE_S):
                return await answer
        except TimeoutError as error:
            raise RefusedError(f"the disk of {folder} did not answer within {PATIENCE_S:.0f} s") from error

    def _done(self) -> None:
        self._reading -= 1


def _in_thread(work: Callable[[], LogPart], done: Callable[[], None]) -> "asyncio.Future[LogPart]":
    """Do ``work`` in a thread that keeps nothing from ending, ``done`` afterwards in the loop."""
    events = asyncio.get_running_loop()
    answer: asyncio.Future[LogPart] = events.create_future()

    def finish(part: LogPart | None, error: Exception | None) -> None:
        done()
        if answer.done():
            return
        if error is not None:
            answer.set_exception(error)
        elif part is not None:
            answer.set_result(part)

    def run() -> None:
        part, error = None, None
        try:
            part = work()
        except Exception as caught:  # noqa: BLE001  handed to who waits, whatever it is
            error = caught
        with contextlib.suppress(RuntimeError):  # the loop has ended meanwhile
            events.call_soon_threadsafe(finish, part, error)

    threading.Thread(target=run, name="rank-logs", daemon=True).start()
    return answer


def _read(root: Path, query: LogQuery) -> LogPart:
    """Return the part that is asked for."""
    rounds: list[int] = []
    found = None
    for number, nodes in sorted(_rounds(root), reverse=True)[:MOST_ROUNDS]:
        handle = _opened(root, (*nodes, f"round-{number}", f"rank-{query.rank}"), f"{query.stream}.log")
        if handle is None:
            continue
        with os.fdopen(handle, "rb") as file:
            rounds.append(number)
            if found is None and query.round in (number, -1):
                found = _part(file, number, query)
    if found is None:
        where = f" in round {query.round}" if query.round >= 0 else ""
        raise NotFoundError(f"rank {query.rank} has left no {query.stream} in this run's folder{where}")
    return msgspec.structs.replace(found, rounds=tuple(rounds))


def _rounds(root: Path) -> Iterator[tuple[int, tuple[str, ...]]]:
    """Yield every round that is there, with the folder of its node where the run has several."""
    nodes: list[tuple[str, ...]] = [()]
    for name in _names(root, ()):
        if match := _ROUND.fullmatch(name):
            yield int(match[1]), ()
        elif len(nodes) <= MOST_NODES:
            nodes.append((name,))
    for node in nodes[1:]:
        for name in _names(root, node):
            if match := _ROUND.fullmatch(name):
                yield int(match[1]), node


def _names(root: Path, steps: tuple[str, ...]) -> list[str]:
    """Return what is in a folder below ``root``; nothing where it is none."""
    handle = _folder(root, steps)
    if handle is None:
        return []
    try:
        return os.listdir(handle)  # noqa: PTH208  by its handle, not by its name
    finally:
        os.close(handle)


def _folder(root: Path, steps: tuple[str, ...]) -> int | None:
    """Open a folder below ``root`` without following links; None where it is none."""
    try:
        handle = os.open(root, _FOLDER)
    except OSError:
        return None
    for step in steps:
        try:
            below = os.open(step, _FOLDER, dir_fd=handle)
        except OSError:
            return None
        finally:
            os.close(handle)
        handle = below
    return handle


def _opened(root: Path, steps: tuple[str, ...], name: str) -> int | None:
    """Open an ordinary file of this user below ``root``; None where there is none."""
    folder = _folder(root, steps)
    if folder is None:
        return None
    try:
        handle = os.open(name, _FILE, dir_fd=folder)
    except OSError:
        return None
    finally:
        os.close(folder)
    facts = os.fstat(handle)
    if stat.S_ISREG(facts.st_mode) and facts.st_uid == os.geteuid():
        return handle
    os.close(handle)
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
