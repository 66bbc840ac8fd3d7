# SPDX-License-Identifier: Apache-2.0
"""What ranks printed, asked of a controller, whose agents read it: of any node, a bounded part at a time."""

import re
import time
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from typing import NamedTuple

import click
import msgspec

from megascale_ops.errors import MegascaleError, UsageError
from megascale_ops.link import BlockingLink
from megascale_ops.schema.events import OVER
from megascale_ops.schema.folding import no_rank
from megascale_ops.schema.runs import MOST_LINES, NEWEST, LogPart, LogQuery
from megascale_ops.schema.wording import escaped
from megascale_ops.suggest import unknown

# 16 ranks are four screens; more are named, since each is read by the agent of its node.
MOST_RANKS, MOST_UNNAMED = 64, 16
# A search without --round looks into the newest 10.
_MOST_ROUNDS = 10
# 4 at a time: a controller lets eight of a node wait, and others send requests, too.
_AT_ONCE = 4
# 1 s: an agent gets a request once a second.
_POLL_S = 1.0
# A minute without an answer: a controller that is started again, and agents that find it, take less.
_PATIENCE_S = 60.0
# What a query takes.
_LONGEST_TEXT = 128


class Shown(NamedTuple):
    """How far an output was shown, and of which round."""

    round: int
    end: int


class AgentLogs:
    """The logs of one job.

    Args:
        link: to the controller.
        job: which; "": the only one that there is.
        ranks: which; none: all, if they are few.
        streams: which outputs of each.
        round_: of which round; ``NEWEST``: of the newest.

    Raises:
        UsageError: there is no such job or rank, or there are too many.
    """

    def __init__(
        self, link: BlockingLink, job: str, ranks: Iterable[int], streams: Iterable[str], round_: int = NEWEST
    ) -> None:
        self._link = link
        sizes = {each.job: each.world_size for each in link.status().jobs}
        self.job = _chosen(job, sizes)
        self._round = round_
        self._asked = [
            LogQuery(rank, round_, stream)  # type: ignore[arg-type]  # one of the two that the option takes
            for rank in _ranks(self.job, sizes[self.job], frozenset(ranks))
            for stream in streams
        ]
        self._pool = ThreadPoolExecutor(_AT_ONCE, thread_name_prefix="logs")
        self._shown: dict[tuple[int, str], Shown] = {}
        self._said: set[str] = set()

    def show_end(self, lines: int) -> int:
        """Print the last lines of each output; return how many outputs were read."""
        parts = self._ask([msgspec.structs.replace(one, lines=max(1, lines)) for one in self._asked])
        for part in parts:
            self._shown[part.rank, part.stream] = Shown(part.round, part.end)
            if not lines or not part.lines:
                continue
            click.echo(f"==> rank {part.rank}{_on(part)}, round {part.round}, {part.stream} <==")
            click.echo("\n".join(map(escaped, part.lines)))
            if part.is_cut and len(part.lines) < lines:
                self._say(f"earlier lines of rank {part.rank} are in its file{_on(part)}")
        return len(parts)

    def search(self, pattern: re.Pattern[str]) -> int:
        """Print the lines that match, of one round or of the newest ones, oldest first; return how many were read."""
        text = required_text(pattern.pattern)
        asked = [msgspec.structs.replace(one, lines=MOST_LINES, grep=text) for one in self._asked]
        parts = self._ask(asked)
        self._shown = {(part.rank, part.stream): Shown(part.round, part.end) for part in parts}
        if self._round == NEWEST:
            newest = sorted({number for part in parts for number in part.rounds})[-_MOST_ROUNDS:]
            parts += self._ask(
                [
                    LogQuery(part.rank, number, part.stream, MOST_LINES, grep=text)
                    for part in parts
                    for number in part.rounds
                    if number in newest and number != part.round
                ]
            )
        for part in sorted(parts, key=lambda one: (one.round, one.rank, one.stream)):
            for line in part.lines:
                if pattern.search(line):
                    click.echo(f"round {part.round} rank {part.rank} {part.stream}: {escaped(line)}")
            if part.is_cut:
                what = f"what rank {part.rank} printed to {part.stream} in round {part.round}"
                self._say(f"{what} is too much to be searched from here, only its end was: all of it is{_on(part)}")
        return len(parts)

    def follow(self, pattern: re.Pattern[str] | None) -> None:
        """Print what comes, of later rounds, too, until the job is over.

        Raises:
            MegascaleError: nothing was answered for a minute.
        """
        heard_s, round_shown, is_over = time.monotonic(), 0, False
        while True:
            time.sleep(_POLL_S)
            parts = self._news()
            for part in parts:
                if part.lines and part.round > round_shown:
                    click.echo(f"--- round {part.round} ---", err=True)
                    round_shown = part.round
                for line in part.lines:
                    if pattern is None or pattern.search(line):
                        click.echo(f"[{part.rank}] {escaped(line)}")
            if any(part.lines for part in parts):
                heard_s = time.monotonic()
                continue
            if is_over:
                return
            heard_s = time.monotonic() if parts else heard_s
            is_over = self._is_over()
            if time.monotonic() - heard_s > _PATIENCE_S:
                raise MegascaleError(f"no log of job {self.job} could be read for {_PATIENCE_S:.0f} s")

    def _news(self) -> list[LogPart]:
        """Return what has come since; of an output that goes on in another round, that round from its start."""
        asked = []
        for one in self._asked:
            known = self._shown.get((one.rank, one.stream))
            asked.append(msgspec.structs.replace(one, lines=MOST_LINES, after=known.end if known is not None else 0))
        parts = []
        for part in self._ask(asked):
            known = self._shown.get((part.rank, part.stream))
            whole = part
            if known is not None and part.round != known.round:
                whole = next(iter(self._ask([LogQuery(part.rank, part.round, part.stream, MOST_LINES)])), part)
            if whole.is_cut:
                self._say(f"rank {part.rank} prints more than can be followed: all of it is in its file{_on(part)}")
            self._shown[part.rank, part.stream] = Shown(whole.round, whole.end)
            parts.append(whole)
        return parts

    def _ask(self, queries: list[LogQuery]) -> list[LogPart]:
        """Return the parts that were asked for; what is refused is said."""
        return [part for part in self._pool.map(self._answer, queries) if part is not None]

    def _answer(self, query: LogQuery) -> LogPart | None:
        try:
            return self._link.logs(self.job, query)
        except MegascaleError as error:  # one node that does not answer costs the others' lines nothing
            self._say(str(error))
            return None

    def _is_over(self) -> bool:
        try:
            return all(each.state in OVER for each in self._link.status(self.job).jobs)
        except MegascaleError as error:
            self._say(str(error))
            return False

    def _say(self, sentence: str) -> None:
        """Say something about what is shown, once."""
        if sentence not in self._said:
            self._said.add(sentence)
            click.echo(f"megascale-ops: {escaped(sentence)}", err=True)


def required_text(pattern: str) -> str:
    """Return the longest text that every line has in which a regular expression matches; "": none is known.

    A controller's search is for a plain text: an expression can take an agent's core for minutes.
    """
    runs, run, at = [""], "", 0
    while at < len(pattern):
        sign = pattern[at]
        if sign in "|([":  # what stands beside or in these may be missing
            return ""
        if sign in "*?{":
            runs.append(run[:-1])
            run, at = "", pattern.find("}", at) if sign == "{" else at
        elif sign in "+.^$":
            runs.append(run)
            run = ""
        elif sign == "\\":
            at += 1
            if pattern[at].isalnum():  # a class such as \d, or a number
                runs.append(run)
                run = ""
            else:
                run += pattern[at]
        else:
            run += sign
        at += 1
    return max((*runs, run), key=len)[:_LONGEST_TEXT]


def _chosen(job: str, known: Iterable[str]) -> str:
    """Return the job that is meant.

    Raises:
        UsageError: there is none of this name, or several and none was named.
    """
    names = list(known)
    if job in names:
        return job
    if job:
        raise UsageError(unknown("job", job, names))
    if len(names) != 1:
        raise UsageError(f"say which job: {', '.join(names)}" if names else "no job has joined yet")
    return names[0]


def _ranks(job: str, size: int, wanted: frozenset[int]) -> list[int]:
    """Return the ranks that are meant, all when none is named.

    Raises:
        UsageError: the job does not have them, or they are too many.
    """
    if not size:
        raise UsageError(f"job {job} has no ranks yet")
    if beyond := sorted(rank for rank in wanted if rank >= size):
        raise UsageError(no_rank(job, size, beyond))
    ranks = sorted(wanted) or list(range(size))
    most = MOST_RANKS if wanted else MOST_UNNAMED
    if len(ranks) > most:
        raise UsageError(
            f"{len(ranks):,} ranks are too many at once: name {MOST_RANKS} at most, as in --rank 0,3 or 0-7"
        )
    return ranks


def _on(part: LogPart) -> str:
    return f" on {part.node}" if part.node else " in the run folder"
