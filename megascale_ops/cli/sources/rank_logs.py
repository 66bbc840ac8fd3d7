# SPDX-License-Identifier: Apache-2.0
"""What ranks printed, in the files of a run folder: ``logs/[NODE/]round-N/rank-R/{stdout,stderr}.log``."""

import os
import re
import time
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import NamedTuple

import click

from megascale_ops.cli.sources.locate import Wanted, run_folders
from megascale_ops.cli.sources.runs import is_run_folder, lives_here, may_live, runs_in
from megascale_ops.errors import MegascaleError, UsageError
from megascale_ops.link.whereabouts import state_root
from megascale_ops.suggest import unknown

_FOLDER = re.compile(
    r"(?:(?P<node>[^/]+)/)?round-(?P<round>[0-9]+)/rank-(?P<rank>[0-9]+)/(?P<stream>stdout|stderr)\.log"
)
# 64 KiB at a time from the end of a file: a tail of some lines reads one of them, whatever the file's size.
_CHUNK_BYTES = 1 << 16
# 0.25 s: a person does not notice, and looking whether files have grown costs a stat each.
_POLL_S = 0.25
# 8: looks without new lines between two tests whether the run still lives.
_LOOKS_PER_QUESTION = 8
# A minute of them.
_LOOKS_UNSEEN = 240
# 4 MiB of a file at a time: a rank that prints without end must not take all memory.
_MOST_BYTES = 1 << 22


class LogFile(NamedTuple):
    """The output of one rank in one round."""

    round: int
    rank: int
    stream: str
    node: str
    path: Path

    def matches(self, pattern: re.Pattern[str], end: int | None = None) -> Iterator[tuple[int, str]]:
        """Yield every line that matches, with its number from 1, as far as byte ``end``."""
        try:
            with self.path.open("rb") as file:
                for number, line in enumerate(file, 1):
                    if end is not None and file.tell() > end:
                        return
                    text = line.decode("utf-8", "replace").rstrip("\r\n")
                    if pattern.search(text):
                        yield number, text
        except OSError as error:
            raise MegascaleError(f"{self.path} can't be read: {error.strerror}") from error


def parse_rank_list(text: str) -> frozenset[int]:
    """Read ranks as in ``0,3`` or ``0-3,8``; none of them means all.

    Raises:
        UsageError: it is no such list.
    """
    ranks: set[int] = set()
    for part in text.split(",") if text else ():
        match = re.fullmatch(r"([0-9]{1,6})(?:-([0-9]{1,6}))?", part.strip())
        if match is None or int(match[2] or match[1]) < int(match[1]):
            raise UsageError(f"--rank {text!r} can't be read: give ranks as in 0,3 or 0-3")
        ranks.update(range(int(match[1]), int(match[2] or match[1]) + 1))
    return frozenset(ranks)


def find_folder(wanted: Wanted) -> Path:
    """Return the run folder that is meant, the newest run's when none is named.

    Raises:
        UsageError: there is none of this name; the nearest is named.
    """
    for folder in run_folders(wanted):
        if is_run_folder(folder):
            return folder
    known = [folder.name for folder in run_folders(Wanted()) if is_run_folder(folder)]
    if wanted.job:
        raise UsageError(f"{unknown('job', wanted.job, known)} (`megascale-ops jobs` lists the runs of this machine)")
    if wanted.run_dir:
        raise UsageError(f"no run has left anything in {wanted.run_dir}: --run-dir takes the folder of a run")
    raise UsageError(f"no run has left a folder in {state_root()}: `megascale-ops run -- SCRIPT` starts one")


def log_files(folder: Path, ranks: Iterable[int], streams: Iterable[str]) -> list[LogFile]:
    """Return the files of these ranks (of all when none is named), by round, rank and stream."""
    root, wanted, kinds = folder / "logs", frozenset(ranks), frozenset(streams)
    found = []
    for path in [*root.glob("round-*/rank-*/std*.log"), *root.glob("*/round-*/rank-*/std*.log")]:
        match = _FOLDER.fullmatch(path.relative_to(root).as_posix())
        if match is not None and match["stream"] in kinds and (not wanted or int(match["rank"]) in wanted):
            found.append(LogFile(int(match["round"]), int(match["rank"]), match["stream"], match["node"] or "", path))
    return sorted(found)


def tail(path: Path, lines: int, end: int | None = None) -> str:
    """Return the last lines of a file, or of its first ``end`` bytes, without the last newline.

    Raises:
        MegascaleError: it can't be read.
    """
    if lines == 0:
        return ""
    try:
        with path.open("rb") as file:
            start = file.seek(0, os.SEEK_END) if end is None else end
            data = b""
            while start > 0 and data.count(b"\n") <= lines:
                size = min(_CHUNK_BYTES, start)
                start = file.seek(start - size)
                data = file.read(size) + data
    except OSError as error:
        raise MegascaleError(f"{path} can't be read: {error.strerror}") from error
    return "\n".join(data.decode("utf-8", "replace").splitlines()[-lines:])


class Follower:
    """Reads what is added to the files of a run folder, line by line; later files are read from their start.

    What was there when it was made is the caller's to show: up to ``end_of``, the end of a whole line.
    """

    def __init__(self, folder: Path, ranks: Iterable[int], streams: Iterable[str]) -> None:
        self._of = folder, frozenset(ranks), frozenset(streams)
        self._read = {file.path: _end_of_lines(file.path) for file in log_files(*self._of)}

    def end_of(self, file: LogFile) -> int:
        """Return how far a file was written when this began."""
        return self._read.get(file.path, 0)

    def fresh(self, *, ending: bool = False) -> Iterator[tuple[LogFile, str]]:
        """Yield every whole line that is new; ``ending``: also one that will have no end.

        A round that was set aside meanwhile is left out, and one that was begun anew is read from its start.
        """
        for file in log_files(*self._of):
            at = self._read.get(file.path, 0)
            try:
                with file.path.open("rb") as source:
                    if os.fstat(source.fileno()).st_size < at:
                        at = 0
                    source.seek(at)
                    data = source.read(_MOST_BYTES)
            except OSError:
                continue
            end = data.rfind(b"\n") + 1
            if ending or (not end and len(data) == _MOST_BYTES):  # a line that is too long to wait for its end
                end = len(data)
            self._read[file.path] = at + end
            for line in data[:end].splitlines():
                yield file, line.decode("utf-8", "replace")


def follow_logs(follower: Follower, folder: Path, pattern: re.Pattern[str] | None = None) -> None:
    """Print new lines with their rank until the run ends or Ctrl-C.

    A run that is not seen to live here may do so on another node: then its silence has to last a minute.
    """
    idle = round_ = 0
    was_seen = lives_here(folder) or not any(may_live(run, time.time()) for run in runs_in(folder, ask=False))
    is_over = False
    while True:
        news = list(follower.fresh(ending=is_over))
        for file, line in news:
            if pattern is not None and not pattern.search(line):
                continue
            if file.round > round_:
                click.echo(f"--- round {file.round} ---", err=True)
                round_ = file.round
            click.echo(f"[{file.rank}] {line}")
        if is_over:
            return
        idle = 0 if news else idle + 1
        if idle and idle % (_LOOKS_PER_QUESTION if was_seen else _LOOKS_UNSEEN) == 0:
            was_seen = lives_here(folder)
            is_over = not was_seen
        time.sleep(_POLL_S)


def _end_of_lines(path: Path) -> int:
    """Return where the last whole line of a file ends; 0 where it can't be read."""
    try:
        with path.open("rb") as file:
            at = file.seek(0, os.SEEK_END)
            while at > 0:
                size = min(_CHUNK_BYTES, at)
                at = file.seek(at - size)
                found = file.read(size).rfind(b"\n")
                if found >= 0:
                    return at + found + 1
    except OSError:
        return 0
    return 0
