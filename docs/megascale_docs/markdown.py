# SPDX-License-Identifier: Apache-2.0
"""Text of the code's own as Markdown: a sentence, a cell of a table, a table. What was meant as text stays text."""

import html
import re
from collections.abc import Iterable, Sequence

_CODE = re.compile(r"``?([^`]+)``?")


def prose(text: str) -> str:
    """Return a sentence of a help text or docstring; what stands in backticks there is code here."""
    parts = _CODE.split(text)
    return "".join(code(part) if index % 2 else _plain(part) for index, part in enumerate(parts))


def code(text: str) -> str:
    """Return code, also for a cell: neither Markdown nor a table's bars are read within."""
    return f"<code>{_barless(html.escape(text, quote=False))}</code>"


def table(head: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """Return a table; cells are Markdown already."""
    lines = [f"| {' | '.join(head)} |", f"| {' | '.join('---' for _ in head)} |"]
    lines += [f"| {' | '.join(' '.join(cell.split()) for cell in row)} |" for row in rows]
    return "\n".join(lines) + "\n"


def page(title: str, *parts: str) -> str:
    """Return a page: its heading, then its parts with an empty line before each."""
    return "\n\n".join((f"# {title}", *(part.strip("\n") for part in parts if part.strip()))) + "\n"


def _plain(text: str) -> str:
    return _barless(re.sub(r"([\\*_\[\]])", r"\\\1", html.escape(text, quote=False)))


def _barless(text: str) -> str:
    return text.replace("|", "&#124;")
