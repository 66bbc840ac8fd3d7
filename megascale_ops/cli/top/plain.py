# SPDX-License-Identifier: Apache-2.0
"""``top`` without Textual: the same lines, shown anew whenever a frame comes, until Ctrl-C. No keys."""

import asyncio
import contextlib
from typing import TYPE_CHECKING

from rich.console import Group
from rich.live import Live

from megascale_ops.cli.top.verdict import Look
from megascale_ops.cli.top.view import screen

if TYPE_CHECKING:
    from rich.console import Console
    from rich.text import Text

    from megascale_ops.cli.top.feed import Feed
    from megascale_ops.schema.live import Frame

# 1 s: ages are shown in seconds.
TICK_S = 1.0


def print_once(console: "Console", frame: "Frame") -> None:
    """Print as many lines as it takes."""
    for line in screen(frame, Look(console.width, ascii_only=console.options.ascii_only)):
        console.print(line, no_wrap=True, crop=True)


async def watch(console: "Console", feed: "Feed", job: str, over: asyncio.Event, last_line: str) -> None:
    """Show a job until ``over``.

    Args:
        console: on a terminal.
        feed: what is known of the job.
        job: "" for the job that needs a look most.
        over: set when the user wants to leave.
        last_line: stands at the bottom.
    """
    news = asyncio.Event()
    following = asyncio.create_task(feed.follow(job, news.set))
    ending = asyncio.create_task(over.wait())
    ending.add_done_callback(lambda _: news.set())
    try:
        # A terminal that has gone needs nothing of what is written at the end.
        with contextlib.suppress(OSError), Live(console=console, screen=True, auto_refresh=False) as live:
            while not over.is_set():
                if following.done():  # it never ends by itself: let its error be seen
                    following.result()
                live.update(Group(*_lines(console, feed, last_line)), refresh=True)
                with contextlib.suppress(TimeoutError):
                    async with asyncio.timeout(TICK_S):
                        await news.wait()
                news.clear()
    finally:
        for task in (following, ending):
            task.cancel()
        await asyncio.gather(following, ending, return_exceptions=True)


def _lines(console: "Console", feed: "Feed", last_line: str) -> "list[Text]":
    size = console.size
    look = Look(size.width, size.height, feed.heard_s, feed.away, None, console.options.ascii_only, last_line)
    lines = screen(feed.frame, look)
    for line in lines:
        line.no_wrap = True
    return lines
