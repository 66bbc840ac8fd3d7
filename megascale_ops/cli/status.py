# SPDX-License-Identifier: Apache-2.0
"""``megascale-ops status``: jobs with their nodes and ranks, once or every second until they are over."""

import shlex
import time
from contextlib import ExitStack
from functools import partial
from typing import TYPE_CHECKING

import click

from megascale_ops.cli.sources.locate import JOURNAL_FILE, Place, Wanted, find_place, read_token
from megascale_ops.cli.terminal.interrupt import ctrl_c_ends
from megascale_ops.cli.terminal.options import job_argument, json_option, log_options, where_options
from megascale_ops.errors import ControllerUnreachableError
from megascale_ops.link.whereabouts import state_root

if TYPE_CHECKING:
    from collections.abc import Callable

    from rich.console import RenderableType

    from megascale_ops.link import BlockingLink
    from megascale_ops.schema.events import Status

# One a second: agents report once a second, so nothing newer is to be had.
INTERVAL_S = 1.0


@click.command
@job_argument
@click.option("--watch", is_flag=True, help="Show it again every second until Ctrl-C or the end of the run.")
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
    """Show jobs, nodes and ranks: step, phase, step time, and who is suspected.

    Asks the running controller; when the run is over, reads what it left. --watch ends with the run.
    """
    place = find_place(Wanted(controller or "", job or "", run_dir or ""), journal_too=True)
    if place.journal is not None:
        _show_left(place, job, as_json=as_json, ends=watch)
        return
    from megascale_ops.link import BlockingLink

    with BlockingLink(place.url, read_token(token_file, place)) as link:
        if not watch:
            _print_once(link, job, as_json=as_json)
        elif as_json:
            _stream(_Watched(link, place, job, token_file))
        else:
            _watch(_Watched(link, place, job, token_file))


def _print_once(link: "BlockingLink", job: str | None, *, as_json: bool) -> None:
    _print(link.status(job), as_json=as_json)


def _print(found: "Status", *, as_json: bool) -> None:
    from megascale_ops.cli.terminal.output import console, print_json

    if as_json:
        print_json(found)
        return
    from megascale_ops.cli.terminal.tables import status_view

    console().print(status_view(found))


def _show_left(place: Place, job: str | None, *, as_json: bool, ends: bool) -> None:
    """Show what a run that is over has left; ``ends``: with a sentence that nothing more will come."""
    from megascale_ops.cli.sources.ended import last_words, status_left

    assert place.journal is not None
    found = status_left(place.journal, job)
    _print(found, as_json=as_json)
    if ends:
        click.echo(last_words(found, _where(place, job)), err=as_json)


def _where(place: Place, job: str | None, token_file: str | None = None) -> str:
    """Return the options by which other verbs find what is watched."""
    token = ("--token-file", token_file) if token_file else ()
    if place.folder is None:
        return shlex.join([*((job,) if job else ()), "--controller", place.url, *token])
    if place.folder.parent == state_root():
        return shlex.quote(job or place.folder.name)
    return shlex.join(["--run-dir", str(place.folder)])


class _Watched:
    """What is watched: jobs of a controller, until they are over.

    Args:
        link: to the controller.
        place: where that is; a run's own ends with it, and leaves a journal.
        job: the only one that is wanted.
        token_file: as it was given.
    """

    def __init__(self, link: "BlockingLink", place: Place, job: str | None, token_file: str | None) -> None:
        self._link = link
        self._place = place
        self._job = job
        self._token_file = token_file
        self.end = ""  # the sentence that ends it

    def status(self) -> "Status":
        """Return how things stand; once they are over ``end`` says so.

        Raises:
            ControllerUnreachableError: the controller is away, and its run is not known to be over.
        """
        from megascale_ops.cli.sources.ended import all_over, last_words, status_left

        try:
            found = self._link.status(self._job)
        except ControllerUnreachableError:
            left = self._place.folder / JOURNAL_FILE if self._place.folder is not None else None
            if left is None or not left.is_file():
                raise
            found = status_left(left, self._job)
            if not all_over(found):
                raise
        # A controller of many jobs serves later ones; one whose only job is over has no further status.
        if (self._place.folder is not None or self._job is not None) and all_over(found):
            self.end = last_words(found, _where(self._place, self._job, self._token_file))
        return found


def _stream(watched: _Watched) -> None:
    """Print one line of JSON a second until Ctrl-C, which is how it is meant to end, or until all is over."""
    from megascale_ops.cli.terminal.output import print_json

    with ctrl_c_ends(0):
        while True:
            print_json(watched.status(), indent=0)
            if watched.end:
                click.echo(watched.end, err=True)
                return
            time.sleep(INTERVAL_S)


def _watch(watched: _Watched) -> None:
    """Show it again once a second until Ctrl-C or the end; a controller that is away for a moment is not fatal."""
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
        last = status_view(watched.status())
        show: Callable[[RenderableType], None] = screen.print
        if redraws:
            show = partial(stack.enter_context(Live(console=screen, auto_refresh=False)).update, refresh=True)
        show(last)
        while not watched.end:
            time.sleep(INTERVAL_S)
            try:
                last = status_view(watched.status())
                show(last)
            except ControllerUnreachableError as error:
                show(Group(last, Text(str(error), style="red")))
    click.echo(watched.end)
