# SPDX-License-Identifier: Apache-2.0
"""Help of ``top``: what keys do and what signs mean."""

from typing import TYPE_CHECKING, ClassVar

from rich.text import Text
from textual.binding import Binding, BindingType
from textual.screen import Screen
from textual.widgets import Footer

from megascale_ops.cli.top import heat, rank_map
from megascale_ops.cli.top.lines import Lines
from megascale_ops.cli.top.verdict import LEVELS
from megascale_ops.schema.live import JUDGED

if TYPE_CHECKING:
    from textual.app import ComposeResult

KEYS = (
    ("q, Ctrl-C", "leave; Ctrl-Z suspends, `fg` comes back"),
    ("j, k", "next and previous job; on incidents: next and previous one"),
    ("i", "incidents of the job; back"),
    ("r", "ranks that stand out, also those without room; back"),
    ("arrows, PgUp, PgDn", "scroll what is longer than the window"),
    ("?", "this help; back"),
)
VERDICTS = (
    ("act", "needs action"),
    ("watch", "have a look"),
    ("waiting", "no step yet"),
    ("calm", ""),
    ("over", ""),
)


class HelpScreen(Screen[None]):
    """One page that stays until it is left."""

    BINDINGS: ClassVar[list[BindingType]] = [
        Binding("question_mark,escape", "app.pop_screen", "back", key_display="?"),
    ]

    def compose(self) -> "ComposeResult":
        """Lines, keys below."""
        yield Lines()
        yield Footer()

    def on_mount(self) -> None:
        """Show the lines."""
        self.query_one(Lines).show(help_lines())


def help_lines() -> list[Text]:
    """Return what keys do and what signs mean."""
    lines = [Text.assemble((f"{keys:<20}", "bold"), said) for keys, said in KEYS]
    lines += [Text(), Text("the map: a sign is a rank, or the worst of several neighbouring ones", style="dim")]
    signs = Text()
    for place, word in enumerate(JUDGED):
        signs.append(rank_map.SIGNS[place].replace(" ", "(blank)"), style=rank_map.STYLES[place]).append(f" {word}   ")
    lines += [signs, Text()]
    lines += [Text("below step times: own work of ranks by time, in % of the median's", style="dim")]
    lines += [heat.legend(1), Text()]
    levels = Text()
    for level, means in VERDICTS:
        word, style = LEVELS[level]
        levels.append(f" {word} ", style=style).append(f" {means}  " if means else " ")
    return [*lines, Text("the verdict", style="dim"), levels]
