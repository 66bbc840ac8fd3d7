# SPDX-License-Identifier: Apache-2.0
"""``megascale-ops page``: the address of the live page, with a token in it that may only read.

The token stands behind the ``#``: a browser never sends that part, and the page takes it out of the address. It is
derived from the controller's for a day, so what is left of it in a terminal or a chat soon opens nothing.
"""

import time
from urllib.parse import quote

import click

from megascale_ops.cli.terminal.options import job_argument, log_options, where_options

# A day: a page that was opened in the morning still works at night.
_VALID_S = 86_400


@click.command
@job_argument
@where_options
@log_options
def page(controller: str | None, job: str | None, run_dir: str | None, token_file: str | None) -> None:
    """Print where to see a job in a browser; whoever has the address may look for a day, and change nothing."""
    from megascale_ops.cli.sources.locate import Wanted, find_place, read_token

    place = find_place(Wanted(controller or "", job or "", run_dir or ""), journal_too=False)
    click.echo(address(place.url, read_token(token_file, place), job or "", time.time()))


def address(url: str, own: str | None, job: str, wall_s: float) -> str:
    """Return the page's address, with a token to read one job, or all, where the controller asks for one."""
    from megascale_ops.schema.tokens import Grant, is_derived, issue

    shown = [f"job={quote(job, safe='')}"] if job else []
    if own:
        given = own if is_derived(own) else issue(own, Grant("read", job, until_wall_s=float(int(wall_s + _VALID_S))))
        shown.append(f"token={quote(given, safe='')}")
    first = url.partition(",")[0]  # of several; a standby sends a browser on to the leader
    return f"{first.rstrip('/')}/" + (f"#{'&'.join(shown)}" if shown else "")
