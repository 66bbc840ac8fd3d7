# SPDX-License-Identifier: Apache-2.0
"""The verdict card as a panel of a terminal; ``megascale_ops/cards.py`` decides what it says."""

from collections.abc import Sequence
from datetime import tzinfo

from rich.console import RenderableType
from rich.panel import Panel
from rich.table import Table
from rich.text import Text

from megascale_ops.cards import Reader, Row, card
from megascale_ops.schema.events import Incident

STATE_STYLES = {"open": "yellow", "recovered": "green", "ended": "red", "harmless": "cyan"}


def render_incident(
    incident: Incident, zone: tzinfo | None = None, reader: Reader | None = None, *, leads_on: bool = True
) -> RenderableType:
    """Return the card as a rich renderable; see ``card`` for the arguments."""
    style = STATE_STYLES.get(incident.state, "white")
    title = Text.assemble(("incident ", "dim"), (incident.id, "bold"), " · ", (incident.state, style))
    return render_rows(title, card(incident, zone, reader, leads_on=leads_on), style)


def render_rows(title: Text, rows: Sequence[Row], style: str) -> RenderableType:
    """Return a card's rows as a panel in a colour."""
    grid = Table.grid(padding=(0, 2))
    grid.add_column(style="dim", no_wrap=True)
    grid.add_column(overflow="fold")
    for label, lines in rows:
        text = Text(_listed(lines), style={"what": "bold", "next": "bold cyan"}.get(label, ""))
        grid.add_row(label, text)
    return Panel(grid, title=title, title_align="left", border_style=style, width=None, expand=False)


def _listed(lines: tuple[str, ...]) -> str:
    return lines[0] if len(lines) == 1 else "\n".join(f"- {line}" for line in lines)
