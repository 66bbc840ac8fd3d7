# SPDX-License-Identifier: Apache-2.0
"""``megascale-ops top`` on a terminal, with Textual: frames and keys come in, screens go out.

Painted when a frame has come, when the window's size changed, and once a second because ages grow. The terminal's own
colours are used, and the mouse is left to it, so that a command can be selected and copied.
"""

from typing import TYPE_CHECKING, ClassVar

from textual.app import App
from textual.binding import Binding, BindingType

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
    ) -> None:
        super().__init__(ansi_color=True)
        self.animation_level = "none"  # a terminal far away gets the end of a movement, not its way
        self.theme = "ansi-dark"  # of its colours only those that both dark and light terminals show are used
        self._feed = feed
        self._ask = ask
        self._job = job
        self._zone = zone

    def get_default_screen(self) -> "Screen[None]":
        """Begin with the job."""
        return JobScreen(self._ask)

    def on_mount(self) -> None:
        """Follow the job, and count seconds."""
        self._follow()
        self.set_interval(TICK_S, self.paint)
        # The program that had the terminal while this was suspended has left other things on it.
        self.app_resume_signal.subscribe(self, lambda _: self.refresh(layout=True))

    def paint(self) -> None:
        """Show what is known on all screens, also on one that help lies above."""
        # The last row is the footer's.
        size, feed = self.size, self._feed
        look = Look(size.width, max(1, size.height - 1), feed.heard_s, feed.away, self._zone, has_keys=True)
        for screen in self.screen_stack:
            if isinstance(screen, FeedScreen) and screen.is_mounted:
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

    def _follow(self) -> None:
        self.run_worker(self._feed.follow(self._job, self.paint), exclusive=True, group="feed")
