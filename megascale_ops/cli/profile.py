# SPDX-License-Identifier: Apache-2.0
"""``megascale-ops profile [JOB]``: which kernels the ranks run, how long they take, and which ranks are slow."""

import re
import time
from typing import TYPE_CHECKING

import click

from megascale_ops.cli.terminal.interrupt import EXIT_INTERRUPTED, ctrl_c_ends
from megascale_ops.cli.terminal.options import FiniteRange, job_argument, json_option, log_options, where_options
from megascale_ops.errors import MegascaleError, UsageError

if TYPE_CHECKING:
    from rich.console import RenderableType

    from megascale_ops.link import BlockingLink
    from megascale_ops.schema.kernels import ProfileAsk, ProfileRow, ProfileView

# 0.2 s: five looks a second at most, of one person.
POLL_S = 0.2
# 10 s beyond the deadline that the ranks have: the controller ends a profile 5 s after it.
SLACK_S = 10.0
MOST_SILENT = 8
# 54 characters of a kernel's name: the table stays within 120 columns; --json and the files have all of it.
NAME_CHARACTERS = 54


@click.command("profile")
@job_argument
@click.option("--ranks", default="all", show_default=True, metavar="all|0,3-5", help="Which ranks to profile.")
@click.option("--steps", type=click.IntRange(1, 100), default=2, show_default=True, help="How many steps, the next.")
@click.option("--sampled", is_flag=True, help="Profile nothing: read what `run --profile-every` has sampled last.")
@click.option("--top", type=click.IntRange(1), default=12, show_default=True, help="Show so many kernels.")
@click.option(
    "--timeout", type=FiniteRange(1, 600), default=60.0, show_default=True, help="Seconds that ranks may take."
)
@where_options
@json_option
@log_options
def profile(
    ranks: str,
    steps: int,
    sampled: bool,
    top: int,
    timeout: float,
    controller: str | None,
    job: str | None,
    run_dir: str | None,
    token_file: str | None,
    as_json: bool,
) -> int:
    """Time the kernels of the next steps on ranks of JOB, and compare the same kernels across ranks.

    torch's profiler is on for these steps only; without a GPU it times operators of the CPU. At least three ranks are
    needed to name one of them. Each rank's timings are kept in the run folder, below profiles/. Exits with 1 when no
    rank has answered.
    """
    from megascale_ops.cli.sources.locate import Wanted, find_place, read_token
    from megascale_ops.link import BlockingLink
    from megascale_ops.link.whereabouts import state_root
    from megascale_ops.schema.kernels import ProfileAsk

    ask = ProfileAsk(0 if sampled else steps, read_ranks(ranks), timeout)
    wanted = job or ""
    # A mistyped job has no folder: the running controller then names the jobs.
    folder = wanted if wanted and (state_root() / wanted).is_dir() else ""
    place = find_place(Wanted(controller or "", folder, run_dir or ""), journal_too=False)
    with ctrl_c_ends(EXIT_INTERRUPTED), BlockingLink(place.url, read_token(token_file, place)) as link:
        found = _wait_for(link, _job(link, wanted, ask.ranks), ask)
    if as_json:
        from megascale_ops.cli.terminal.output import print_json

        print_json(found)
    else:
        from megascale_ops.cli.terminal.output import console

        console().print(profile_view(found, top))
    return int(all(rank.text and not rank.path for rank in found.ranks))


def read_ranks(text: str) -> tuple[int, ...]:
    """Return the ranks of a list such as ``0,3-5``; none for all.

    Raises:
        UsageError: it is no such list.
    """
    if text.strip() == "all":
        return ()
    found: set[int] = set()
    for part in text.split(","):
        span = re.fullmatch(r"\s*(\d{1,6})(?:-(\d{1,6}))?\s*", part)
        if span is None or int(span[2] or span[1]) < int(span[1]):
            raise UsageError(f"--ranks {text!r} can't be read: give all, or ranks such as 0,3-5")
        found.update(range(int(span[1]), int(span[2] or span[1]) + 1))
    return tuple(sorted(found))


def _job(link: "BlockingLink", wanted: str, ranks: tuple[int, ...]) -> str:
    """Return the job that is meant; raise with the names of the jobs, or of its ranks, when there is no such one."""
    known = {each.job: each.world_size for each in link.status().jobs}
    if not wanted and len(known) == 1:
        wanted = next(iter(known))
    if not wanted:
        raise click.UsageError(f"say which job: {', '.join(known)}" if known else "no job has joined yet")
    if wanted not in known:
        from megascale_ops.suggest import unknown

        raise click.UsageError(unknown("job", wanted, known))
    if any(rank >= known[wanted] for rank in ranks):
        from megascale_ops.schema.folding import no_rank

        raise UsageError(no_rank(wanted, known[wanted], [rank for rank in ranks if rank >= known[wanted]]))
    return wanted


def _wait_for(link: "BlockingLink", job: str, ask: "ProfileAsk") -> "ProfileView":
    """Ask, and wait until all ranks have answered or can't any more."""
    found = link.profile(job, ask)
    until_s = time.monotonic() + ask.deadline_s + SLACK_S
    while found.state == "waiting":
        if time.monotonic() > until_s:
            raise MegascaleError(f"profile {found.id} of job {job} has no end in {ask.deadline_s + SLACK_S:g} s")
        time.sleep(POLL_S)
        found = link.profiled(job, found.id)
    return found


def profile_view(found: "ProfileView", top: int) -> "RenderableType":
    """Return the tables for people: the ranks that stand out, then the kernels that take longest."""
    from rich.box import SIMPLE_HEAD
    from rich.console import Group
    from rich.table import Table
    from rich.text import Text

    from megascale_ops.schema.folding import named
    from megascale_ops.schema.wording import duration, printable

    answered = [rank for rank in found.ranks if not rank.text]
    head = Text.assemble(("job ", "dim"), (found.job, "bold"), f" · profile {found.id}")
    parts: list[RenderableType] = [head]
    if answered:
        steps = f"{found.steps} step{'s' if found.steps != 1 else ''}" if found.steps else "a sampled step"
        longest_s, own_s = (max(getattr(rank, field) for rank in answered) for field in ("span_s", "own_s"))
        head.append(f" · {steps} of {named([rank.rank for rank in answered])} in {duration(longest_s)}")
        head.append(f", {duration(own_s)} more for the profiler")
        table = Table(box=SIMPLE_HEAD, header_style="dim", pad_edge=False, show_edge=False)
        table.add_column("rank", justify="right")
        table.add_column("kernel" if found.device == "gpu" else "operator", no_wrap=True)
        for column in ("calls", "median us", "others us", "ratio", "of time"):
            table.add_column(column, justify="right", no_wrap=True)
        table.add_column("", no_wrap=True)
        for row in chosen_rows(found, top):
            word, style = ("slow", "yellow") if row.is_slow else ("waits", "dim") if row.is_waiting else ("", "")
            table.add_row(
                str(row.rank),
                printable(shortened(row.kernel)),
                f"{row.calls:,}",
                f"{row.median_us:,.1f}",
                f"{row.others_us:,.1f}" if row.others_us else "",
                f"{row.ratio:.2f}" if row.ratio else "",
                f"{row.share:.1%}",
                Text(word, style=style),
            )
        parts += [Text(""), table, Text("")]
        if len(answered) > 1:
            parts.append(Text("of each kernel the rank that needs longest is shown: --json has all", style="dim"))
    is_slow = any(row.is_slow for row in found.rows)
    parts.append(Text(printable(found.verdict), style="yellow" if is_slow or not answered else "green"))
    silent = [rank for rank in found.ranks if rank.text]
    parts += [Text(f"rank {rank.rank}: {printable(rank.text)}", style="yellow") for rank in silent[:MOST_SILENT]]
    if len(silent) > MOST_SILENT:
        parts.append(Text(f"and {len(silent) - MOST_SILENT:,} more ranks without an answer: --json lists them"))
    kept = next((rank.path for rank in found.ranks if rank.path), "")
    if kept:
        parts.append(Text(f"kept in {kept.rpartition('/')[0]}", style="dim"))
    return Group(*parts)


def chosen_rows(found: "ProfileView", top: int) -> "list[ProfileRow]":
    """Return what stands out, then of each of the longest kernels the rank that is slowest in it."""
    chosen = [row for row in found.rows if row.is_slow][:top]
    total_us: dict[str, float] = {}
    worst: dict[str, ProfileRow] = {}
    for row in found.rows:
        total_us[row.kernel] = total_us.get(row.kernel, 0.0) + row.total_us
        if row.kernel not in worst or row.median_us > worst[row.kernel].median_us:
            worst[row.kernel] = row
    shown = {row.kernel for row in chosen}
    longest = sorted((kernel for kernel in worst if kernel not in shown), key=lambda kernel: -total_us[kernel])
    return chosen + [worst[kernel] for kernel in longest[: max(0, top - len(chosen))]]


def shortened(kernel: str) -> str:
    """Return a kernel's name as a table shows it: its beginning and its end."""
    if len(kernel) <= NAME_CHARACTERS:
        return kernel
    return f"{kernel[: NAME_CHARACTERS - 22]}..{kernel[-20:]}"
