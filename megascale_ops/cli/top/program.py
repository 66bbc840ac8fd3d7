# SPDX-License-Identifier: Apache-2.0
"""The running part of ``megascale-ops top``: frames and keys come in, screens go out.

One task follows the controller's live feed and begins anew, after a pause, whenever it breaks off; the screen then
says so and keeps what was seen last. It is painted when a frame or a key has come, when the window's size changed,
and once a second because ages grow.
"""

import asyncio
import contextlib
import signal
import time
from collections.abc import Callable
from typing import TYPE_CHECKING

from rich.console import Console
from rich.text import Text

from megascale_ops.cli.terminal.cards import render_incident
from megascale_ops.cli.top.state import INCIDENT_KEYS, JOB_KEYS, View, pressed
from megascale_ops.cli.top.terminal import Screen
from megascale_ops.cli.top.verdict import Look
from megascale_ops.cli.top.view import cut, incident_rows, screen
from megascale_ops.errors import MegascaleError
from megascale_ops.link import Backoff, Link
from megascale_ops.schema.live import Frame, merge
from megascale_ops.schema.wording import printable

if TYPE_CHECKING:
    from datetime import tzinfo

    from megascale_ops.schema.events import Incident

# 1 s: ages are told in seconds.
_TICK_S = 1.0
# 5 s: evidence and marks of an open incident grow slowly.
_INCIDENT_EVERY_S = 5.0
# Incidents above the one that is shown: where it stands among its neighbours.
_NEIGHBOURS = 5
_ENDING = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT)


class Top:
    """Shows one job at a time until the user leaves.

    Args:
        link: to the controller.
        console: on a terminal.
        first: a frame that is there already.
        job: what the user asked for; "" for the job that needs a look most.
    """

    def __init__(self, link: Link, console: Console, first: Frame, job: str) -> None:
        self._link = link
        self._console = console
        self._screen = Screen(console)
        self._view = View(job)
        self._frame = first
        self._heard_s = time.monotonic()
        self._away = ""
        self._incident: Incident | None = None
        self._incident_error = ""
        self._news = asyncio.Event()
        self._zone: tzinfo | None = None

    async def run(self) -> None:
        """Show until the user leaves, or a signal ends the program."""
        loop = asyncio.get_running_loop()
        # Signals first: one that comes while the terminal is being taken over must still see it given back.
        with contextlib.ExitStack() as stack:
            for number in _ENDING:
                self._on_signal(loop, stack, number, self._leave)
            self._on_signal(loop, stack, signal.SIGWINCH, self._news.set)
            self._on_signal(loop, stack, signal.SIGTSTP, self._suspend)
            stack.enter_context(self._screen)
            if self._screen.keys_fd >= 0:
                loop.add_reader(self._screen.keys_fd, self._read_keys)
                stack.callback(loop.remove_reader, self._screen.keys_fd)
            following = asyncio.create_task(self._follow(self._view.job))
            telling = asyncio.create_task(self._tell_incident())
            followed = self._view.job
            try:
                while not self._view.is_over:
                    if self._view.job != followed:
                        following.cancel()
                        followed = self._view.job
                        following = asyncio.create_task(self._follow(followed))
                    for task in (following, telling):
                        if task.done():  # it never ends by itself: let its error be seen
                            task.result()
                    self._screen.paint(self._lines())
                    await self._until_news()
            finally:
                for task in (following, telling):
                    task.cancel()
                await asyncio.gather(following, telling, return_exceptions=True)

    async def _until_news(self) -> None:
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(_TICK_S):
                await self._news.wait()
        self._news.clear()

    async def _follow(self, job: str) -> None:
        """Take frames for ever; what goes wrong is said and tried again."""
        backoff = Backoff()
        while True:
            known: Frame | None = None
            try:
                async for frame in self._link.live(job):
                    known = merge(known, frame)
                    self._frame, self._heard_s, self._away = known, time.monotonic(), ""
                    self._news.set()
                    backoff.reset()
            except MegascaleError as error:
                self._away = str(error)
                self._news.set()
            await asyncio.sleep(backoff.next_s())

    async def _tell_incident(self) -> None:
        """Keep what is known of the incident that is shown."""
        asked, asked_s = "", 0.0
        while True:
            wanted = self._view.incident
            if wanted and (wanted != asked or time.monotonic() - asked_s >= _INCIDENT_EVERY_S):
                asked, asked_s = wanted, time.monotonic()
                try:
                    self._incident, self._incident_error = await self._link.incident(wanted), ""
                except MegascaleError as error:
                    self._incident_error = str(error)
                self._news.set()
            await asyncio.sleep(0.1)

    def _lines(self) -> list[Text]:
        width, height = self._screen.size()
        heard_s = time.monotonic() - self._heard_s
        keys = INCIDENT_KEYS if self._view.incident else JOB_KEYS
        ascii_only = self._console.options.ascii_only
        look = Look(
            width, height, heard_s, self._away, self._zone, ascii_only, keys if self._screen.keys_fd >= 0 else ""
        )
        lines = screen(self._frame, look)
        if not self._view.incident:
            return lines
        # The incident takes the place of all between the title and the keys.
        last = 1 + bool(self._away)
        middle = self._incident_lines(look)[: max(0, height - 1 - last)]
        padding = [Text()] * max(0, height - 1 - last - len(middle))
        return cut([lines[0], *middle, *padding, *lines[-last:]], look)

    def _incident_lines(self, look: Look) -> list[Text]:
        known = self._frame.incidents or ()
        names = [one.id for one in known]
        at = names.index(self._view.incident) if self._view.incident in names else 0
        first = max(0, min(at - _NEIGHBOURS // 2, len(known) - _NEIGHBOURS))
        lines = [
            Text(),
            *incident_rows(known[first : first + _NEIGHBOURS], look, self._frame.wall_s, self._view.incident),
            Text(),
        ]
        if self._incident is not None and self._incident.id == self._view.incident:
            options = self._console.options.update(width=look.width, height=None)
            for segments in self._console.render_lines(render_incident(self._incident, look.zone), options, pad=False):
                line = Text()
                for segment in segments:
                    line.append(segment.text, segment.style)
                lines.append(line)
        elif not self._incident_error:
            lines.append(Text("asking for it", style="dim"))
        if self._incident_error:
            lines.append(Text(printable(self._incident_error), style="red"))
        return lines

    def _read_keys(self) -> None:
        for key in self._screen.read_keys():
            self._view = pressed(self._view, key, self._frame)
        self._news.set()

    def _leave(self) -> None:
        self._view = self._view._replace(is_over=True)
        self._news.set()

    def _suspend(self) -> None:
        self._screen.suspend()
        self._news.set()

    @staticmethod
    def _on_signal(
        loop: asyncio.AbstractEventLoop, stack: contextlib.ExitStack, number: signal.Signals, act: Callable[[], None]
    ) -> None:
        """Act on a signal until the stack ends; then the handler before it is there again."""
        before = signal.getsignal(number)
        loop.add_signal_handler(number, act)

        def undo() -> None:
            loop.remove_signal_handler(number)
            signal.signal(number, signal.SIG_DFL if before is None else before)

        stack.callback(undo)
