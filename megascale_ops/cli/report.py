# SPDX-License-Identifier: Apache-2.0
"""``megascale-ops report JOB -o FILE``: one HTML file about a job, to be read anywhere and sent on."""

from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from megascale_ops.cli.sources.locate import Wanted
from megascale_ops.cli.terminal.interrupt import ctrl_c_noted
from megascale_ops.cli.terminal.options import job_argument, json_option, log_options, where_options
from megascale_ops.cli.terminal.renamed import Renaming

if TYPE_CHECKING:
    from megascale_ops.trace.report_facts import Report


@click.command(cls=Renaming, old_names={"--output": "--out"})
@job_argument
@click.option(
    "-o", "--out", type=click.Path(), metavar="FILE", help="The page to write, or its folder.  [JOB-report.html]"
)
@click.option("--png", type=click.Path(), metavar="FILE", help="Also a picture of it; needs Chromium or Chrome.")
@click.option("--dark", is_flag=True, help="The picture in dark colours (the page follows its reader's setting).")
@where_options
@json_option
@log_options
def report(
    out: str | None,
    png: str | None,
    controller: str | None,
    job: str | None,
    run_dir: str | None,
    token_file: str | None,
    *,
    dark: bool,
    as_json: bool,
) -> None:
    """Write one HTML file about JOB, or about the newest one when no name is given.

    Verdicts, who was late and when, where the wall time went; it needs no network to be read. Asks the running
    controller; when the run is over, reads what it left. With --json and no FILE, only prints the numbers.
    """
    from megascale_ops.cli.sources.report import gather
    from megascale_ops.trace.report_facts import reckon

    found = reckon(gather(Wanted(controller or "", job or "", run_dir or ""), token_file))
    page = Path(out or ".")
    if page.is_dir():
        page /= f"{found.gathered.job}-report.html"
    writes_page = bool(out or png or not as_json)
    if writes_page:
        with ctrl_c_noted() as ctrl_c:  # half a page would stay behind
            size = _write(found, page)
        ctrl_c.check()
        if png:
            from megascale_ops.trace.browser import picture

            picture(page, Path(png), dark=dark)
    if as_json:
        from megascale_ops.cli.terminal.output import print_json

        print_json(_numbers(found) | ({"page": str(page)} if writes_page else {}))
        return
    for note in found.gathered.notes:
        click.echo(f"note: {note}", err=True)
    click.echo(f"{page}: {size / 1e6:.1f} MB, open it in any browser" + (f"; picture in {png}" if png else ""))


def _write(found: "Report", page: Path) -> int:
    """Write the page beside and rename; return its size in bytes.

    Raises:
        UsageError: it can't be written there.
    """
    from megascale_ops.errors import UsageError
    from megascale_ops.trace.report import render
    from megascale_ops.whole_file import open_beside

    content = render(found).encode()
    try:
        with open_beside(page, follow=True) as file:
            file.write(content)
    except OSError as error:
        raise UsageError(f"the report {page} can't be written: {error.strerror}") from error
    return len(content)


def _numbers(found: "Report") -> dict[str, Any]:
    """Return the ledger and the summary for programs; seconds with six digits, as they are counted."""
    gathered, ledger = found.gathered, found.ledger
    return {
        "job": gathered.job,
        "state": gathered.state,
        "began_wall_s": gathered.began_wall_s,
        "until_wall_s": gathered.until_wall_s,
        "wall_s": ledger.wall_us / 1e6,
        "goodput": found.goodput,
        "ledger_s": {row: us / 1e6 for row, us in ledger.rows.items()},
        "ledger_notes": list(ledger.notes),
        "ranks": len(found.places),
        "nodes": len({place.node for place in found.places}),
        "step": max(found.times.reached) if found.times is not None else -1,
        "step_s": found.step_s,
        "slowest": [slow._asdict() for slow in found.slowest],
        "incidents": [told.incident.id for told in gathered.told],
        "open": [told.incident.id for told in gathered.told if told.incident.state in ("open", "watching")],
        "notes": list(gathered.notes),
        "source": gathered.source,
    }
