# SPDX-License-Identifier: Apache-2.0
"""The screens of ``top``: a job, one of its incidents, its ranks by how much they stand out.

What stands on them is decided by ``view`` and its neighbours, which are pure; here it meets keys and scrolling.
"""

from typing import TYPE_CHECKING, ClassVar

from rich.text import Text
from textual.binding import Binding, BindingType
from textual.message import Message
from textual.screen import Screen
from textual.widgets import Footer

from megascale_ops.cli.terminal.incident_panel import render_incident
from megascale_ops.cli.terminal.output import SafeConsole
from megascale_ops.cli.top import ranks, view
from megascale_ops.cli.top.lines import Lines
from megascale_ops.cli.top.verdict import Look
from megascale_ops.errors import MegascaleError
from megascale_ops.schema.live import Frame
from megascale_ops.schema.wording import printable

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable

    from textual.app import ComposeResult

    from megascale_ops.schema.events import Incident

# 5 s: evidence and marks of an open incident grow slowly.
INCIDENT_EVERY_S = 5.0
# Incidents above the one that is shown: where it stands among its neighbours.
_NEIGHBOURS = 5
# 512 ranks take 10 ms a frame; `megascale-ops status --json` has all of them.
MOST_RANKS = 512


class Outdated(Message):
    """Sent to the program: more is known than is shown."""


class JobTurned(Message):
    """Sent to the program: the next (1) or the previous (-1) job is wanted."""

    def __init__(self, by: int) -> None:
        super().__init__()
        self.by = by


class FeedScreen(Screen[None]):
    """A screen that shows a frame; painted anew with each of them."""

    def __init__(self) -> None:
        super().__init__()
        self._offered: dict[str, bool] = {}

    def on_mount(self) -> None:
        """Be painted as soon as there is something to paint on."""
        self.post_message(Outdated())

    @property
    def can_be_painted(self) -> bool:
        """Whether its lines are there: not yet before they are composed, and no more while the program ends."""
        return self.is_mounted and bool(self.query(Lines))

    def paint(self, frame: Frame, look: Look) -> None:
        """Show a frame."""
        raise NotImplementedError

    def check_action(self, action: str, parameters: tuple[object, ...]) -> bool | None:
        """Offer only keys that do something."""
        del parameters
        return self._offered.get(action, True)

    def _offer(self, **actions: bool) -> None:
        """Set which actions have something to do; the footer, 20 ms of work, is made anew only when that changes."""
        if actions != self._offered:
            self._offered = actions
            self.refresh_bindings()

    def _show_head(self, lines: list[Text]) -> None:
        """Show lines that stay while what is below them scrolls."""
        head = self.query_one("#head", Lines)
        head.styles.height = len(lines)
        head.show(lines)


class JobScreen(FeedScreen):
    """The whole of one job: verdict, progress, step times, ranks, incidents.

    Args:
        ask: answers with what the controller knows of an incident.
    """

    BINDINGS: ClassVar[list[BindingType]] = [
        Binding("j,down", "turn_job(1)", "next job", key_display="j"),
        Binding("k,up", "turn_job(-1)", "previous", key_display="k"),
        Binding("i", "incidents", "incidents"),
        Binding("r", "ranks", "ranks"),
    ]

    def __init__(self, ask: "Callable[[str], Awaitable[Incident]]") -> None:
        super().__init__()
        self._ask = ask
        self._newest = ""
        self._offered = {"turn_job": False, "incidents": False}

    def compose(self) -> "ComposeResult":
        """Lines in the order of their worth, keys below."""
        yield Lines(id="job", scrolls=False)
        yield Footer()

    def paint(self, frame: Frame, look: Look) -> None:
        """Show a frame."""
        self.query_one(Lines).show(view.screen(frame, look))
        self._newest = frame.incidents[0].id if frame.incidents else ""
        self._offer(turn_job=len(frame.jobs or ()) > 1, incidents=bool(self._newest))

    def action_turn_job(self, by: int) -> None:
        """Go to another job of the controller."""
        self.post_message(JobTurned(by))

    def action_incidents(self) -> None:
        """Show the newest incident."""
        self.app.push_screen(IncidentScreen(self._newest, self._ask))

    def action_ranks(self) -> None:
        """Show the ranks that stand out."""
        self.app.push_screen(RanksScreen())


class RanksScreen(FeedScreen):
    """The ranks that stand out, worst first; more than a job's screen has room for."""

    BINDINGS: ClassVar[list[BindingType]] = [
        Binding("r,escape", "app.pop_screen", "back to the job", key_display="r"),
    ]

    def compose(self) -> "ComposeResult":
        """A heading that stays, rows that scroll."""
        yield Lines(id="head", scrolls=False)
        yield Lines(id="ranks")
        yield Footer()

    def paint(self, frame: Frame, look: Look) -> None:
        """Show a frame."""
        rows = [ranks.row(one) for one in ranks.standing_out(frame, MOST_RANKS)]
        left = frame.pace.world_size - len(rows) if frame.pace is not None else 0
        if left > 0:
            rows.append(Text(f"{left:>7,} more: `{look.reader.command('status --json')}` has all", style="dim"))
        unwell = ranks.unwell(frame)
        said = (
            f"{unwell:,} {'rank is' if unwell == 1 else 'ranks are'} not well; those that stand out most are at the top"
        )
        head = [view.title(frame, look), *(view.alarms(frame, look) or [Text(said, style="dim")]), ranks.heading()]
        self._show_head(view.cut(head, look))
        self.query_one("#ranks", Lines).show(view.cut(rows, look))


class IncidentScreen(FeedScreen):
    """One incident with everything that is known of it, asked for anew while it is shown.

    Args:
        incident: its id.
        ask: answers with what the controller knows of an incident.
    """

    BINDINGS: ClassVar[list[BindingType]] = [
        Binding("j", "turn(1)", "next incident"),
        Binding("k", "turn(-1)", "previous"),
        Binding("i,escape", "app.pop_screen", "back to the job", key_display="i"),
    ]

    def __init__(self, incident: str, ask: "Callable[[str], Awaitable[Incident]]") -> None:
        super().__init__()
        self._wanted = incident
        self._ask = ask
        self._names: list[str] = []
        self._known: Incident | None = None
        self._error = ""

    def compose(self) -> "ComposeResult":
        """Its neighbours stay, what is known of it scrolls."""
        yield Lines(id="head", scrolls=False)
        yield Lines(id="card")
        yield Footer()

    def on_mount(self) -> None:
        """Ask now, and again while it is shown."""
        self.set_interval(INCIDENT_EVERY_S, self._begin_asking)
        self._begin_asking()

    def paint(self, frame: Frame, look: Look) -> None:
        """Show a frame."""
        known = frame.incidents or ()
        self._names = [one.id for one in known]
        self._offer(turn=len(known) > 1)
        at = self._names.index(self._wanted) if self._wanted in self._names else 0
        first = max(0, min(at - _NEIGHBOURS // 2, len(known) - _NEIGHBOURS))
        rows = view.incident_rows(known[first : first + _NEIGHBOURS], look, frame.wall_s, self._wanted)
        head = [view.title(frame, look), *view.alarms(frame, look), Text(), *rows, Text()]
        self._show_head(view.cut(head, look))
        self.query_one("#card", Lines).show(view.cut(self._card(look), look))

    def action_turn(self, by: int) -> None:
        """Go to a neighbour, around the end."""
        self._wanted = neighbour(self._names, self._wanted, by) or self._wanted
        self.query_one("#card", Lines).scroll_home(animate=False)
        self._begin_asking()
        self.post_message(Outdated())

    def _begin_asking(self) -> None:
        self.run_worker(self._tell(self._wanted), exclusive=True)

    async def _tell(self, incident: str) -> None:
        try:
            self._known, self._error = await self._ask(incident), ""
        except MegascaleError as error:
            self._error = str(error)
        self.post_message(Outdated())

    def _card(self, look: Look) -> list[Text]:
        lines = []
        if self._known is not None and self._known.id == self._wanted:
            # A scroll bar may need a column.
            console = SafeConsole(width=max(20, look.width - 1), markup=False, highlight=False, emoji=False)
            for segments in console.render_lines(render_incident(self._known, look.zone, look.reader), pad=False):
                line = Text()
                for segment in segments:
                    line.append(segment.text, segment.style)
                lines.append(line)
        elif not self._error:
            lines.append(Text("asking for it", style="dim"))
        if self._error:
            lines.append(Text(printable(self._error), style="red"))
        return lines


def neighbour(names: list[str], now: str, by: int) -> str:
    """Return the next name, around the end; the first when ``now`` is not among them any more."""
    if not names:
        return ""
    return names[(names.index(now) + by) % len(names)] if now in names else names[0]
