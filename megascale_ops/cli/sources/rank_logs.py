# SPDX-License-Identifier: Apache-2.0
"""What ranks printed, in the files of a run folder: ``logs/[NODE/]round-N/rank-R/{stdout,stderr}.log``."""

import re
import time
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import NamedTuple

import click

from megascale_ops.cli.sources.locate import Wanted, run_folders
from megascale_ops.cli.sources.runs import is_live, is_run_folder
from megascale_ops.errors import MegascaleError, UsageError
from megascale_ops.suggest import unknown

_FOLDER = re.compile(
    r"(?:(?P<node>[^/]+)/)?round-(?P<round>[0-9]+)/rank-(?P<rank>[0-9]+)/(?P<stream>stdout|stderr)\.log"
)
# 64 KiB at a time from the end of a file: a tail of some lines reads one of them, whatever the file's size.
_CHUNK_BYTES = 1 << 16
# 0.25 s: a person does not notice, and looking whether files have grown costs a stat each.
_POLL_S = 0.25
# 8: looks without news between two questions whether the run still lives.
_LOOKS_PER_QUESTION = 8


class LogFile(NamedTuple):
    """The output of one rank in one round."""

    round: int
    rank: int
    stream: str
    node: str
    path: Path

    def matches(self, pattern: re.Pattern[str]) -> Iterator[tuple[int, str]]:
        """Yield every line that matches, with its number from 1."""
        try:
            with self.path.open(encoding="utf-8", errors="replace") as file:
                for number, line in enumerate(file, 1):
                    if pattern.search(line):
                        yield number, line.rstrip("\n")
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
    raise UsageError(f"no run has left a folder in {wanted.run_dir or 'the state folder'}: give --run-dir FOLDER")


def log_files(folder: Path, ranks: Iterable[int], streams: Iterable[str]) -> list[LogFile]:
    """Return the files of these ranks (of all when none is named), by round, rank and stream."""
    root, wanted, kinds = folder / "logs", frozenset(ranks), frozenset(streams)
    found = []
    for path in [*root.glob("round-*/rank-*/std*.log"), *root.glob("*/round-*/rank-*/std*.log")]:
        match = _FOLDER.fullmatch(path.relative_to(root).as_posix())
        if match is not None and match["stream"] in kinds and (not wanted or int(match["rank"]) in wanted):
            found.append(LogFile(int(match["round"]), int(match["rank"]), match["stream"], match["node"] or "", path))
    return sorted(found)


def tail(path: Path, lines: int) -> str:
    """Return the last lines of a file, without its last newline.

    Raises:
        MegascaleError: it can't be read.
    """
    if lines == 0:
        return ""
    try:
        with path.open("rb") as file:
            start = file.seek(0, 2)
            data = b""
            while start > 0 and data.count(b"\n") <= lines:
                size = min(_CHUNK_BYTES, start)
                start = file.seek(start - size)
                data = file.read(size) + data
    except OSError as error:
        raise MegascaleError(f"{path} can't be read: {error.strerror}") from error
    return "\n".join(data.decode("utf-8", "replace").splitlines()[-lines:])


class Follower:
    """Reads what is added to the files of a run folder, line by line; later files are read from their start."""

    def __init__(self, folder: Path, ranks: Iterable[int], streams: Iterable[str]) -> None:
        self._of = folder, frozenset(ranks), frozenset(streams)
        self._read = {file: file.path.stat().st_size for file in log_files(*self._of)}
        self._begun: dict[LogFile, bytes] = {}

    def fresh(self) -> Iterator[tuple[LogFile, str]]:
        """Yield every whole line that is new."""
        for file in log_files(*self._of):
            with file.path.open("rb") as source:
                source.seek(self._read.get(file, 0))
                data = self._begun.pop(file, b"") + source.read()
                self._read[file] = source.tell()
            *whole, begun = data.split(b"\n")
            if begun:
                self._begun[file] = begun
            for line in whole:
                yield file, line.decode("utf-8", "replace")


def follow_logs(
    folder: Path, ranks: Iterable[int], streams: Iterable[str], pattern: re.Pattern[str] | None = None
) -> None:
    """Print new lines with their rank until the run ends or Ctrl-C."""
    follower = Follower(folder, ranks, streams)
    idle = round_ = 0
    while True:
        news = list(follower.fresh())
        for file, line in news:
            if pattern is not None and not pattern.search(line):
                continue
            if file.round > round_:
                click.echo(f"--- round {file.round} ---", err=True)
                round_ = file.round
            click.echo(f"[{file.rank}] {line}")
        idle = 0 if news else idle + 1
        if idle and idle % _LOOKS_PER_QUESTION == 0 and not is_live(folder):
            return
        time.sleep(_POLL_S)
