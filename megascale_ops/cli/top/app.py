# SPDX-License-Identifier: Apache-2.0
"""``megascale-ops top`` on a terminal, with Textual: frames and keys come in, screens go out.

Painted when a frame has come, when the window's size changed, and once a second because ages grow. The terminal's own
colours are used, and the mouse is left to it, so that a command can be selected and copied.
"""

import asyncio
import os
import signal
from typing import TYPE_CHECKING, ClassVar

from textual.app import App
from textual.binding import Binding, BindingType

from megascale_ops.cards import Reader
from megascale_ops.cli.top.help import HelpScreen
from megascale_ops.cli.top.screens import (
    FeedScreen,
    JobScreen,
    JobTurned,
    Outdated,
    neighbour,
)
from megascale_ops.cli.top.verdict import Look

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable
    from datetime import tzinfo

    from textual.screen import Screen

    from megascale_ops.cli.top.feed import Feed
    from megascale_ops.schema.events import Incident

# 1 s: ages are shown in seconds.
TICK_S = 1.0


class TopApp(App[None]):
    """Shows one job at a time until the user leaves.

    Args:
        feed: what is known of the job.
        ask: answers with what the controller knows of an incident.
        job: what the user asked for; "" for the job that needs a look most.
        zone: in which wall clock times are shown; None is the machine's own.
        reader: by which options commands find this controller; None: they need none.
    """

    ENABLE_COMMAND_PALETTE = False
    BINDINGS: ClassVar[list[BindingType]] = [
        Binding("q", "quit", "quit"),
        Binding("ctrl+c,ctrl+q", "quit", show=False, priority=True),
        Binding("ctrl+z", "suspend_process", show=False),
        Binding("question_mark", "help", "help", key_display="?"),
    ]

    def __init__(
        self,
        feed: "Feed",
        ask: "Callable[[str], Awaitable[Incident]]",
        job: str,
        zone: "tzinfo | None" = None,
        reader: "Reader | None" = None,
    ) -> None:
        super().__init__(ansi_color=True)
        self.animation_level = "none"  # a terminal far away gets the end of a movement, not its way
        self.theme = "ansi-dark"  # of its colours only those that both dark and light terminals show are used
        self._feed = feed
        self._ask = ask
        self._job = job
        self._zone = zone
        self._reader = reader or Reader()

    def get_default_screen(self) -> "Screen[None]":
        """Begin with the job."""
        return JobScreen(self._ask)

    def on_mount(self) -> None:
        """Follow the job, and count seconds."""
        self._take_stops()
        self._follow()
        self.set_interval(TICK_S, self.paint)

    def paint(self) -> None:
        """Show what is known on all screens, also on one that help lies above."""
        # The last row is the footer's.
        size, feed = self.size, self._feed
        rows = max(1, size.height - 1)
        look = Look(size.width, rows, feed.heard_s, feed.away, self._zone, has_keys=True, reader=self._reader)
        for screen in self.screen_stack:
            if isinstance(screen, FeedScreen) and screen.can_be_painted:
                screen.paint(feed.frame, look)

    def on_resize(self) -> None:
        """Paint what fits now."""
        self.call_later(self.paint)

    def on_job_turned(self, message: JobTurned) -> None:
        """Go to another job of the controller, around the end."""
        frame = self._feed.frame
        self._job = neighbour([one.job for one in frame.jobs or ()], self._job or frame.job, message.by)
        self._follow()

    def on_outdated(self, message: Outdated) -> None:
        """Paint what a screen has learned."""
        del message
        self.paint()

    def action_help(self) -> None:
        """Show what keys do."""
        self.push_screen(HelpScreen())

    def _take_stops(self) -> None:
        """Have the loop see to SIGTSTP and SIGCONT, in place of Textual's handlers, which act within the signal.

        They write through a queue whose lock is held while a screen is painted: a signal in that moment waited for ever
        for a lock of its own thread. And after SIGSTOP, of which no program is told, they began to read keys twice.
        """
        if not callable(signal.getsignal(signal.SIGTSTP)):  # a driver without a terminal leaves signals alone
            return
        loop = asyncio.get_running_loop()
        loop.add_signal_handler(signal.SIGTSTP, self._stop)
        loop.add_signal_handler(signal.SIGCONT, self._repaint)

    def _stop(self) -> None:
        """Give the terminal back, be stopped, and take it again."""
        if not self.is_running:  # it has been given back for good
            _stand_still()
            return
        loop = asyncio.get_running_loop()
        loop.remove_signal_handler(signal.SIGCONT)  # what goes on is seen to here
        with self.suspend():
            _stand_still()
        loop.add_signal_handler(signal.SIGCONT, self._repaint)

    def _repaint(self) -> None:
        """Draw all: who had the terminal in the meantime has left other things on it."""
        self.refresh(layout=True)

    def _follow(self) -> None:
        self.run_worker(self._feed.follow(self._job, self.paint), exclusive=True, group="feed")


def _stand_still() -> None:
    """Be stopped until the terminal is ours again: after `bg` it would still be the shell's."""
    os.kill(os.getpid(), signal.SIGSTOP)
    while not _is_in_front():
        os.kill(os.getpid(), signal.SIGSTOP)


def _is_in_front() -> bool:
    try:
        return os.tcgetpgrp(0) in (0, os.getpgrp())  # 0: a group that this container does not see
    except OSError:  # the terminal is gone: SIGHUP ends the program
        return True
