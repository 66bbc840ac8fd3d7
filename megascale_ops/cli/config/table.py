# SPDX-License-Identifier: Apache-2.0
"""The table of `config show`: every setting with its value and where it came from."""

from collections.abc import Iterable

from rich.console import RenderableType
from rich.text import Text

from megascale_ops.cli.config.configuration import Effective
from megascale_ops.cli.terminal.tables import plain_table


def settings_view(rows: Iterable[Effective]) -> RenderableType:
    """Return every setting with its effective value, what it is, and where it came from."""
    table = plain_table("setting", "value", "from")
    for row in rows:
        shown = "none" if row.value is None else repr(row.value) if isinstance(row.value, str) else str(row.value)
        style = "dim" if row.origin == "default" else "bold"
        said = Text(shown)
        if row.help:
            said.append(f"\n{row.help}", style="dim italic")
        table.add_row(f"{row.section}.{row.name}", said, Text(row.origin, style=style))
    return table
