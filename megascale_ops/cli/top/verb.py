# SPDX-License-Identifier: Apache-2.0
"""``megascale-ops top``: one job on one screen, alive until q or Ctrl-C; once where no terminal is."""

import asyncio
from typing import TYPE_CHECKING

import click

from megascale_ops.cli.sources.locate import Wanted, find_place, read_token
from megascale_ops.cli.terminal.interrupt import ctrl_c_ends
from megascale_ops.cli.terminal.options import json_option, log_options, where_options

if TYPE_CHECKING:
    from rich.console import Console

    from megascale_ops.schema.live import Frame


@click.command
@click.option("--once", is_flag=True, help="Print one screen and end; so it is where the output is no terminal.")
@where_options
@json_option
@log_options
def top(
    controller: str | None,
    job: str | None,
    run_dir: str | None,
    token_file: str | None,
    as_json: bool,
    once: bool,
) -> None:
    """Watch a job: the verdict, its progress, every rank, what happened.

    Without --job it is the one that needs a look most. Keys: q leaves, j and k go to the next and the previous job, i
    shows incidents.
    """
    place = find_place(Wanted(controller or "", job or "", run_dir or ""), journal_too=False)
    from megascale_ops.cli.terminal.output import console, print_json

    screen = console()
    if as_json:
        print_json(asyncio.run(_snapshot(place.url, read_token(token_file, place), job or "")))
        return
    if once or not screen.is_terminal or screen.is_dumb_terminal:
        _print_once(screen, asyncio.run(_snapshot(place.url, read_token(token_file, place), job or "")))
        return
    with ctrl_c_ends(0):
        asyncio.run(_watch(screen, place.url, read_token(token_file, place), job or ""))


async def _snapshot(url: str, token: str | None, job: str) -> "Frame":
    from megascale_ops.link import Link

    async with Link(url, token) as link:
        return await link.live_snapshot(job)


async def _watch(screen: "Console", url: str, token: str | None, job: str) -> None:
    """Show until the user leaves. What can't work at all is said before the terminal is taken over."""
    from megascale_ops.cli.top.program import Top
    from megascale_ops.link import Link

    async with Link(url, token) as link:
        first = await link.live_snapshot(job)
        await Top(link, screen, first, job).run()


def _print_once(screen: "Console", frame: "Frame") -> None:
    from megascale_ops.cli.top import view
    from megascale_ops.cli.top.verdict import Look

    look = Look(screen.width, ascii_only=screen.options.ascii_only)
    for line in view.screen(frame, look):
        screen.print(line, no_wrap=True, crop=True)
