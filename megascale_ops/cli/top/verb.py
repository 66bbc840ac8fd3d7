# SPDX-License-Identifier: Apache-2.0
"""``megascale-ops top``: one job on one screen, alive until q or Ctrl-C; once where no terminal is."""

import asyncio
import signal
import sys
from contextlib import ExitStack
from importlib.util import find_spec
from typing import TYPE_CHECKING

import click

from megascale_ops.cli.sources.locate import Wanted, find_place, read_token
from megascale_ops.cli.terminal.interrupt import ctrl_c_ends
from megascale_ops.cli.terminal.options import json_option, log_options, where_options

if TYPE_CHECKING:
    from collections.abc import Callable

    from rich.console import Console

    from megascale_ops.schema.live import Frame

_ENDING = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT)
LEAVE = "Ctrl-C leaves"
WITHOUT_TEXTUAL = f"{LEAVE}; keys and scrolling need Textual: pip install 'megascale-ops[top]'"


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
) -> int:
    """Watch a job: the verdict, its progress, every rank, what happened.

    Without --job it is the one that needs a look most. Keys: q leaves, j and k go to the next and the previous job, i
    shows incidents, r ranks, ? says what else there is. Keys need the extra `top` (Textual).
    """
    place = find_place(Wanted(controller or "", job or "", run_dir or ""), journal_too=False)
    from megascale_ops.cli.terminal.output import console, print_json

    screen = console()
    if as_json:
        print_json(asyncio.run(_snapshot(place.url, read_token(token_file, place), job or "")))
        return 0
    if once or not screen.is_terminal or screen.is_dumb_terminal:
        from megascale_ops.cli.top.plain import print_once

        print_once(screen, asyncio.run(_snapshot(place.url, read_token(token_file, place), job or "")))
        return 0
    with ctrl_c_ends(0):
        return asyncio.run(_watch(screen, place.url, read_token(token_file, place), job or ""))


async def _snapshot(url: str, token: str | None, job: str) -> "Frame":
    from megascale_ops.link import Link

    async with Link(url, token) as link:
        return await link.live_snapshot(job)


async def _watch(screen: "Console", url: str, token: str | None, job: str) -> int:
    """Show until the user leaves; return the exit code. What can't work is said before the terminal is taken over."""
    from megascale_ops.cli.top.feed import Feed
    from megascale_ops.link import Link

    async with Link(url, token) as link:
        feed = Feed(link, await link.live_snapshot(job))
        # Signals first: one that comes while the terminal is being taken over must still see it given back.
        with ExitStack() as stack:
            if not takes_keys(screen):
                from megascale_ops.cli.top.plain import watch

                over = asyncio.Event()
                _on_signals(stack, over.set)
                await watch(screen, feed, job, over, LEAVE if find_spec("textual") else WITHOUT_TEXTUAL)
                return 0
            from megascale_ops.cli.top.app import TopApp

            app = TopApp(feed, link.incident, job)
            _on_signals(stack, app.exit)
            await app.run_async(mouse=False)
            return app.return_code or 0


def takes_keys(screen: "Console") -> bool:
    """Return whether Textual is there and can work: it reads stdin, writes to stderr, and draws in Unicode."""
    ours = (sys.__stdin__, sys.__stderr__)
    return (
        find_spec("textual") is not None
        and not screen.options.ascii_only
        and all(one is not None and one.isatty() for one in ours)
    )


def _on_signals(stack: ExitStack, leave: "Callable[[], None]") -> None:
    """Leave when a signal asks for it; when the stack ends, each has the handler that it had before."""
    loop = asyncio.get_running_loop()
    for number in _ENDING:
        before = signal.getsignal(number)
        loop.add_signal_handler(number, leave)
        stack.callback(signal.signal, number, signal.SIG_DFL if before is None else before)
        stack.callback(loop.remove_signal_handler, number)
