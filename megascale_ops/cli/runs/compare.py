# SPDX-License-Identifier: Apache-2.0
"""``megascale-ops compare RUN RUN``: two runs side by side, by the figures of their reports."""

import os
from typing import TYPE_CHECKING, Any

import click

from megascale_ops.cli.terminal.options import argument, json_option, log_options

if TYPE_CHECKING:
    from megascale_ops.trace.compare import Side


@click.command
@argument("first", metavar="RUN")
@argument("second", metavar="RUN")
@click.option("--controller", metavar="URL", help="Both are jobs of this controller, and not runs of this machine.")
@click.option("--token-file", type=click.Path(), help="File that holds the controller's token.")
@json_option
@log_options
def compare(first: str, second: str, controller: str | None, token_file: str | None, as_json: bool) -> None:
    """Show step time, goodput, lost time and verdicts of two runs: RUN is a job's name or a run folder.

    Runs that live and runs that are over; the change is that of the second against the first.
    """
    from megascale_ops.trace import compare as sides

    one, other = (_side(name, controller, token_file) for name in (first, second))
    figures = sides.figures(one, other)
    if as_json:
        from megascale_ops.cli.terminal.output import print_json

        print_json({"runs": [_numbers(side) for side in (one, other)], "figures": [row._asdict() for row in figures]})
        return
    from megascale_ops.cli.terminal.output import console
    from megascale_ops.cli.terminal.tables import plain_table
    from megascale_ops.schema.wording import duration, printable

    for side in (one, other):
        for note in side.report.gathered.notes:
            click.echo(f"note on {side.label}: {note}", err=True)
    table = plain_table("", printable(one.label), printable(other.label), "change")
    for figure in figures:
        table.add_row(figure.name, *figure.shown, figure.change)
    table.add_row("state", one.report.gathered.state, other.report.gathered.state, "")
    for row, before_s, after_s in sides.losses(one.report, other.report):
        table.add_row(f"lost: {row}", duration(before_s), duration(after_s), "")
    counts = [dict(sides.verdicts(side.report)) for side in (one, other)]
    for verdict in dict.fromkeys([*counts[0], *counts[1]]):
        table.add_row(f"verdict: {printable(verdict)}", *(str(count.get(verdict, 0)) for count in counts), "")
    console().print(table)


def _side(name: str, controller: str | None, token_file: str | None) -> "Side":
    """Return what is known of one run: a folder where there is one of that name, else a job."""
    from megascale_ops.cli.sources.locate import Wanted
    from megascale_ops.cli.sources.report import gather
    from megascale_ops.trace.compare import Side
    from megascale_ops.trace.report_facts import reckon

    is_folder = not controller and os.sep in name
    wanted = Wanted(controller or "", "" if is_folder else name, name if is_folder else "")
    return Side(reckon(gather(wanted, token_file)), os.path.basename(name.rstrip(os.sep)) if is_folder else name)  # noqa: PTH119  a label


def _numbers(side: "Side") -> dict[str, Any]:
    from megascale_ops.trace.compare import verdicts

    gathered, ledger = side.report.gathered, side.report.ledger
    return {
        "run": side.label,
        "job": gathered.job,
        "state": gathered.state,
        "source": gathered.source,
        "ledger_s": {row: us / 1e6 for row, us in ledger.rows.items()},
        "verdicts": dict(verdicts(side.report)),
        "notes": list(gathered.notes),
    }
