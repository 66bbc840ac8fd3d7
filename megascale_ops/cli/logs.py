# SPDX-License-Identifier: Apache-2.0
"""``megascale-ops logs``: what ranks printed, by rank and round, searched, and followed while they run.

Reads the files in the run folder of this node, where every round has a folder of its own: a restart deletes nothing.
What is on other nodes is asked of the controller, whose agents read a bounded part of it.
"""

import os
import re
from typing import TYPE_CHECKING, NamedTuple

import click

from megascale_ops.cli.sources.locate import Wanted
from megascale_ops.cli.terminal.interrupt import ctrl_c_ends
from megascale_ops.cli.terminal.options import job_argument, job_option, log_options
from megascale_ops.errors import UsageError

if TYPE_CHECKING:
    from pathlib import Path

    from megascale_ops.cli.sources.rank_logs import Follower, LogFile

# 20 lines of each: a traceback fits, and eight ranks are two screens.
DEFAULT_LINES = 20


class Asked(NamedTuple):
    """Which lines of which outputs."""

    ranks: frozenset[int]
    streams: tuple[str, ...]
    round: int | None
    lines: int
    pattern: re.Pattern[str] | None
    follow: bool


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
@click.option("--controller", metavar="URL", help="Ask this controller, whose agents read what is on their nodes.")
@click.option("--token-file", type=click.Path(), help="File that holds the controller's token.")
@log_options
def logs(
    job: str | None,
    ranks: str,
    round_: int | None,
    stream: str,
    lines: int,
    grep: str | None,
    run_dir: str | None,
    controller: str | None,
    token_file: str | None,
    *,
    follow: bool,
) -> int:
    """Show what the ranks of JOB (the newest run when none is named) printed.

    Reads the run folder on this node. With --controller agents read it on every node: the last 256 KiB of each file,
    1,000 lines at most, and with --grep 4 MiB; --grep then looks into the newest ten rounds, and lines have no number.
    Where MEGASCALE_CONTROLLER is set, that controller is asked for ranks without output on this node.
    """
    from megascale_ops.cli.sources.rank_logs import parse_rank_list

    streams = ("stdout", "stderr") if stream == "both" else (stream,)
    asked = Asked(parse_rank_list(ranks), streams, round_, lines, _pattern(grep), follow)
    place = Wanted(controller or "", job or "", run_dir or "")
    elsewhere = controller or os.environ.get("MEGASCALE_CONTROLLER", "")
    if controller or (elsewhere and not run_dir and not _is_here(place, asked)):
        return _ask_agents(place._replace(controller=elsewhere), token_file, asked)
    _read_here(place, asked, ranks)
    return 0


def _read_here(place: Wanted, asked: Asked, ranks: str) -> None:
    """Show what is in the run folder of this node."""
    from megascale_ops.cli.sources.rank_logs import Follower, find_folder, follow_logs, log_files

    folder = find_folder(place)
    follower = (
        Follower(folder, asked.ranks, asked.streams) if asked.follow else None
    )  # first: nothing is missed, and nothing shown twice
    files = log_files(folder, asked.ranks, asked.streams)
    if not files:
        raise click.UsageError(_nothing(folder, ranks))
    newest = max(file.round for file in files)
    if asked.round is not None and asked.round not in {file.round for file in files}:
        raise click.UsageError(f"there is no round {asked.round} in {folder}: the newest is {newest}")
    _show(files, asked, asked.round or newest, follower)
    if follower is not None:
        with ctrl_c_ends(0):
            follow_logs(follower, folder, asked.pattern)


def _show(files: "list[LogFile]", asked: Asked, round_: int, follower: "Follower | None") -> None:
    """Print the lines that match, of one round or of all, or the last ones of a round."""
    from megascale_ops.cli.sources.rank_logs import tail

    if asked.pattern is not None:
        for file in files:
            if asked.round in (None, file.round):
                for number, line in file.matches(asked.pattern, _end(follower, file)):
                    click.echo(f"round {file.round} rank {file.rank} {file.stream}:{number}: {line}")
        return
    for file in files:
        text = tail(file.path, asked.lines, _end(follower, file)) if file.round == round_ else ""
        if text:
            click.echo(f"==> rank {file.rank}, round {file.round}, {file.stream} <==\n{text}")


def _is_here(place: Wanted, asked: Asked) -> bool:
    """Say whether this node has output of the ranks."""
    from megascale_ops.cli.sources.rank_logs import find_folder, log_files

    try:
        return bool(log_files(find_folder(place), asked.ranks, asked.streams))
    except UsageError:
        return False


def _ask_agents(place: Wanted, token_file: str | None, asked: Asked) -> int:
    """Show what the agents read; return 1 when none has read anything."""
    from megascale_ops.cli.sources.agent_logs import AgentLogs
    from megascale_ops.cli.sources.locate import find_place, read_token
    from megascale_ops.link import BlockingLink
    from megascale_ops.schema.runs import MOST_LINES, NEWEST

    if asked.lines > MOST_LINES:
        raise UsageError(f"--lines {asked.lines} is too much for agents, which give {MOST_LINES:,}: the node has all")
    at = find_place(place, journal_too=False)
    with ctrl_c_ends(0), BlockingLink(at.url, read_token(token_file, at)) as link:
        of_job = AgentLogs(link, place.job, asked.ranks, asked.streams, asked.round or NEWEST)
        read = of_job.search(asked.pattern) if asked.pattern is not None else of_job.show_end(asked.lines)
        if asked.follow:
            of_job.follow(asked.pattern)
            return 0
    return int(not read)


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
    return (
        f"no output of {what} is kept in {folder}: output of other nodes is in their own run folders, which agents "
        "read with --controller URL"
    )
