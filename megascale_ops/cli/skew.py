# SPDX-License-Identifier: Apache-2.0
"""``megascale-ops skew JOB``: which ranks wait in collectives, which rank is to blame, and what it costs."""

import shlex
from typing import TYPE_CHECKING

import click

from megascale_ops.cli.terminal.options import job_argument, json_option, log_options, where_options

if TYPE_CHECKING:
    from rich.console import RenderableType
    from rich.text import Text

    from megascale_ops.schema.collectives import SkewView

# 32 rows, as in `status`: what is left out is counted.
MOST_ROWS = 32


@click.command
@job_argument
@where_options
@json_option
@log_options
def skew(
    controller: str | None,
    job: str | None,
    run_dir: str | None,
    token_file: str | None,
    as_json: bool,
) -> None:
    """Print how long each rank of JOB waits for others, how late it comes, and whose fault that is.

    A rank that works longer than its equals before it comes to its collectives is to blame; one that is late because it
    waited elsewhere is not. Asks the running controller. JOB may be left out where only one job runs.
    """
    from megascale_ops.cli.sources.locate import Wanted, find_place, read_token
    from megascale_ops.errors import MegascaleError
    from megascale_ops.link import BlockingLink

    where = Wanted(controller or "", job or "", run_dir or "")
    place = find_place(where, journal_too=True)
    if place.journal is not None:
        folder = place.journal.parent
        kept = any((folder / "incidents").rglob("*.box"))
        verb, what = ("whatif", "replays what its newest incident kept") if kept else ("report", "shows who was slow")
        raise MegascaleError(
            f"the run in {folder} is over, and arrival skew is known only while a job runs: "
            f"`megascale-ops {verb} --run-dir {shlex.quote(str(folder))}` {what}"
        )
    with BlockingLink(place.url, read_token(token_file, place)) as link:
        wanted = job
        known = [each.job for each in link.status().jobs]
        if wanted is None and len(known) == 1:
            wanted = known[0]
        if wanted is None:
            raise click.UsageError(f"say which job: {', '.join(known)}" if known else "no job has joined yet")
        if wanted not in known:
            from megascale_ops.suggest import unknown

            raise click.UsageError(unknown("job", wanted, known))
        found = link.skew(wanted)
    if as_json:
        from megascale_ops.cli.terminal.output import print_json

        print_json(found)
        return
    from megascale_ops.cli.terminal.output import console

    console().print(skew_view(found))


def skew_view(found: "SkewView") -> "RenderableType":
    """Return the table for people."""
    from rich.box import SIMPLE_HEAD
    from rich.console import Group
    from rich.table import Table
    from rich.text import Text

    from megascale_ops.schema.folding import named
    from megascale_ops.schema.wording import duration, percent, printable

    head = Text.assemble(("job ", "dim"), (found.job, "bold"), f" · {found.state}")
    unseen = [Text(printable(found.unseen), style="yellow")] if found.unseen else []
    if found.state != "watching":
        return Group(head, *unseen)
    head.append(f" · {duration(found.span_s)} of collectives seen")
    table = Table(box=SIMPLE_HEAD, header_style="dim", pad_edge=False, show_edge=False)
    for column in (
        "rank",
        "node",
        "waits",
        "own work",
        "late p50",
        "late p99",
        "last",
        "above equals",
        "cost",
        "verdict",
    ):
        table.add_column(column, justify="left" if column in ("node", "verdict") else "right", overflow="fold")
    for row in found.ranks[:MOST_ROWS]:
        table.add_row(
            str(row.rank),
            row.node,
            f"{row.waiting:.1%}",
            f"{row.excess:+.1%}",
            f"{row.late_p50_s * 1e3:.2f} ms",
            f"{row.late_p99_s * 1e3:.2f} ms",
            f"{row.last:.0%}",
            percent(row.above) if row.above else "",
            percent(row.cost) if row.verdict else "",
            _verdict(row.verdict, is_blind=bool(found.unseen)),
        )
    parts: list[RenderableType] = [head, Text(""), table]
    if len(found.ranks) > MOST_ROWS:
        parts.append(Text(f"and {len(found.ranks) - MOST_ROWS:,} more ranks: --json lists them", style="dim"))
    parts += [
        Text(f"{printable(link.text)}; costs up to {percent(link.cost)} of every step", "yellow")
        for link in found.links
    ]
    if found.silent:
        parts.append(Text(f"{named(found.silent)} told no collective", style="dim"))
    parts += [*unseen, Text(found.calm, style="dim")]
    return Group(*parts)


def _verdict(verdict: str, *, is_blind: bool) -> "Text":
    """Return the last cell of a row: "ok" for a rank that is not named only where all collectives were seen."""
    from rich.text import Text

    if verdict:
        return Text(f"slow ({verdict})", style="yellow")
    return Text("not known", style="dim") if is_blind else Text("ok", style="green")
