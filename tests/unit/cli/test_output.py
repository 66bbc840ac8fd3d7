# SPDX-License-Identifier: Apache-2.0
"""What verbs print: foreign text is shown, and obeyed by no terminal."""

import io

from rich.table import Table
from rich.text import Text

from megascale_ops.cli.terminal.output import SafeConsole


def printed(*things: object, terminal: bool = True) -> str:
    """Return what a console writes."""
    stream = io.StringIO()
    SafeConsole(file=stream, markup=False, highlight=False, width=60, force_terminal=terminal).print(*things)
    return stream.getvalue()


def test_escape_codes_in_a_cell_are_shown_instead_of_obeyed() -> None:
    """Neither a name in a table nor a text on its own moves the cursor, and columns stay in line."""
    table = Table("job", "node")
    table.add_row("evil\x1b[2J\x1b]0;x\x07", Text("a\rb"))
    table.add_row("good", "b")

    text = printed(table, Text("and \x9b31m\u202e"), terminal=False)

    assert text.replace("\n", "").isprintable()
    assert "evil\u241b[2J" in text
    assert len({len(line) for line in text.splitlines()[:-1]}) == 1


def test_our_own_colours_stay() -> None:
    """The control."""
    assert printed(Text("slow", style="red")) == "\x1b[31mslow\x1b[0m\n"
