# SPDX-License-Identifier: Apache-2.0
"""``megascale-ops logs``: what ranks printed, by rank and round, searched, and followed while they run.

Reads the files in the run folder of this node, where every round has a folder of its own: a restart deletes nothing.
"""

import re
from typing import TYPE_CHECKING

import click

from megascale_ops.cli.sources.locate import Wanted
from megascale_ops.cli.terminal.interrupt import ctrl_c_ends
from megascale_ops.cli.terminal.options import job_argument, job_option, log_options

if TYPE_CHECKING:
    from pathlib import Path

    from megascale_ops.cli.sources.rank_logs import Follower, LogFile

# 20 lines of each: a traceback fits, and eight ranks are two screens.
DEFAULT_LINES = 20


@click.command
@job_argument
@job_option
@click.option("--rank", "ranks", metavar="N,...", default="", help="Only these ranks, e.g. 0,3 or 0-3.")
@click.option("--round", "round_", type=click.IntRange(1), help="Only this round.  [the newest; with --grep: all]")
@click.option("--stream", type=click.Choice(["both", "stdout", "stderr"]), default="both", help="Which output.  [both]")
@click.option(
    "--lines", "-n", type=click.IntRange(0), default=DEFAULT_LINES, show_default=True, help="The last N of each."
)
@click.option("--grep", metavar="REGEX", help="All lines that match, each with its round, rank and number.")
@click.option(
    "--follow", "-f", is_flag=True, help="Go on with what is printed, in later rounds, too, until the run ends."
)
@click.option("--run-dir", type=click.Path(), help="Folder of a run started with `run --run-dir`.")
@log_options
def logs(
    job: str | None,
    ranks: str,
    round_: int | None,
    stream: str,
    lines: int,
    grep: str | None,
    run_dir: str | None,
    *,
    follow: bool,
) -> None:
    """Show what the ranks of JOB (the newest run when none is named) printed on this node."""
    from megascale_ops.cli.sources.rank_logs import (
        Follower,
        find_folder,
        follow_logs,
        log_files,
        parse_rank_list,
        tail,
    )

    pattern = _pattern(grep)
    folder = find_folder(Wanted(job=job or "", run_dir=run_dir or ""))
    wanted = parse_rank_list(ranks)
    streams = ("stdout", "stderr") if stream == "both" else (stream,)
    follower = (
        Follower(folder, wanted, streams) if follow else None
    )  # first: nothing is missed, and nothing shown twice
    files = log_files(folder, wanted, streams)
    if not files:
        raise click.UsageError(_nothing(folder, ranks))
    if round_ is not None and round_ not in {file.round for file in files}:
        raise click.UsageError(
            f"there is no round {round_} in {folder}: the newest is {max(file.round for file in files)}"
        )
    newest = max(file.round for file in files)
    if pattern is not None:
        for file in files:
            if round_ in (None, file.round):
                for number, line in file.matches(pattern, _end(follower, file)):
                    click.echo(f"round {file.round} rank {file.rank} {file.stream}:{number}: {line}")
    else:
        for file in files:
            text = tail(file.path, lines, _end(follower, file)) if file.round == (round_ or newest) else ""
            if text:
                click.echo(f"==> rank {file.rank}, round {file.round}, {file.stream} <==\n{text}")
    if follower is not None:
        with ctrl_c_ends(0):
            follow_logs(follower, folder, pattern)


def _end(follower: "Follower | None", file: "LogFile") -> int | None:
    """Return how far a file is shown before it is followed; None: all of it."""
    return follower.end_of(file) if follower is not None else None


def _pattern(grep: str | None) -> re.Pattern[str] | None:
    try:
        return re.compile(grep) if grep is not None else None
    except re.error as error:
        raise click.UsageError(f"--grep {grep!r} is no regular expression: {error}") from error


def _nothing(folder: "Path", ranks: str) -> str:
    what = f"rank {ranks}" if ranks else "a rank"
    return f"no output of {what} is kept in {folder}: output of other nodes is in their own run folders"
