# SPDX-License-Identifier: Apache-2.0
"""``megascale-ops status``: jobs with their nodes and ranks, once or every second until Ctrl-C."""

import time
from contextlib import ExitStack
from functools import partial
from typing import TYPE_CHECKING

import click

from megascale_ops.cli.sources.locate import Wanted, find_place, read_token
from megascale_ops.cli.terminal.interrupt import ctrl_c_ends
from megascale_ops.cli.terminal.options import job_argument, json_option, log_options, where_options
from megascale_ops.errors import ControllerUnreachableError

if TYPE_CHECKING:
    from collections.abc import Callable

    from rich.console import RenderableType

    from megascale_ops.link import BlockingLink

# One a second: agents report once a second, so nothing newer is to be had.
INTERVAL_S = 1.0


@click.command
@job_argument
@click.option("--watch", is_flag=True, help="Show it again every second until Ctrl-C.")
@where_options
@json_option
@log_options
def status(
    controller: str | None,
    job: str | None,
    run_dir: str | None,
    token_file: str | None,
    as_json: bool,
    watch: bool,
) -> None:
    """Show jobs, nodes and ranks: step, phase, step time, and who is suspected."""
    place = find_place(Wanted(controller or "", job or "", run_dir or ""), journal_too=False)
    from megascale_ops.link import BlockingLink

    with BlockingLink(place.url, read_token(token_file, place)) as link:
        if not watch:
            _print_once(link, job, as_json=as_json)
        elif as_json:
            _stream(link, job)
        else:
            _watch(link, job)


def _print_once(link: "BlockingLink", job: str | None, *, as_json: bool) -> None:
    from megascale_ops.cli.terminal.output import console, print_json

    found = link.status(job)
    if as_json:
        print_json(found)
        return
    from megascale_ops.cli.terminal.tables import status_view

    console().print(status_view(found))


def _stream(link: "BlockingLink", job: str | None) -> None:
    """Print one line of JSON a second until Ctrl-C, which is how it is meant to end."""
    from megascale_ops.cli.terminal.output import print_json

    with ctrl_c_ends(0):
        while True:
            print_json(link.status(job), indent=0)
            time.sleep(INTERVAL_S)


def _watch(link: "BlockingLink", job: str | None) -> None:
    """Show it again once a second until Ctrl-C; a controller that is away for a moment is said, not fatal."""
    from rich.console import Group
    from rich.control import Control
    from rich.live import Live
    from rich.text import Text

    from megascale_ops.cli.terminal.output import console
    from megascale_ops.cli.terminal.tables import status_view

    screen = console()
    redraws = screen.is_terminal and not screen.is_dumb_terminal
    # Redrawing hides the cursor and leaves it at the end of the last row.
    last_words = f"{Control.show_cursor(show=True)}\n" if redraws else ""
    with ctrl_c_ends(0, last_words), ExitStack() as stack:
        last = status_view(link.status(job))
        show: Callable[[RenderableType], None] = screen.print
        if redraws:
            show = partial(stack.enter_context(Live(console=screen, auto_refresh=False)).update, refresh=True)
        show(last)
        while True:
            time.sleep(INTERVAL_S)
            try:
                last = status_view(link.status(job))
                show(last)
            except ControllerUnreachableError as error:
                show(Group(last, Text(str(error), style="red")))
