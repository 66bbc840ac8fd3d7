# SPDX-License-Identifier: Apache-2.0
"""What ``diagnose`` tells while it measures and at its end, and the file that it writes."""

import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import click

if TYPE_CHECKING:
    from megascale_ops.cards import Row
    from megascale_ops.diagnostics.report import CheckResult, FleetReport, NodeReport, PairsReport

_CLEAR = "\r\x1b[K"
_COLOURS = {"good": "green", "warn": "yellow", "bad": "red"}
_MARKS = {"good": "ok", "warn": "warning", "bad": "BAD", "unmeasured": "not measured"}


def writable(out: str | None) -> Path | None:
    """Return where the report goes, "" nowhere: ten minutes of measuring must not end at a folder that is not there.

    Raises:
        UsageError: nothing can be written there.
    """
    import os

    from megascale_ops.errors import UsageError

    if out is None:
        return None
    place = Path(out)
    if not place.parent.is_dir():
        raise UsageError(f"--out {out}: there is no folder {place.parent}")
    if place.exists() and not place.is_file():
        raise UsageError(f"--out {out} is a device, a pipe or a folder: give a file, written beside and renamed")
    if not os.access(place.parent, os.W_OK | os.X_OK) or (place.exists() and not os.access(place, os.W_OK)):
        raise UsageError(f"--out {out} can't be written: give another file")
    return place


def write(place: Path, report: "NodeReport | FleetReport | PairsReport") -> None:
    """Write a report beside its place, and rename it.

    Raises:
        UsageError: nothing can be written there.
    """
    import msgspec

    from megascale_ops.errors import UsageError
    from megascale_ops.whole_file import write_whole

    try:
        write_whole(place, msgspec.json.format(msgspec.json.encode(report), indent=1) + b"\n", follow=True)
    except OSError as error:
        raise UsageError(f"--out {place} can't be written ({error.strerror}): give another file") from error


def show(title: str, rows: "Sequence[Row]", style: str) -> None:
    """Print a card: a panel on a terminal, text elsewhere."""
    from rich.text import Text

    from megascale_ops.cards import plain_rows
    from megascale_ops.cli.terminal.incident_panel import render_rows
    from megascale_ops.cli.terminal.output import console
    from megascale_ops.schema.wording import printable

    title = printable(title)  # a host may have any name
    screen = console()
    if screen.is_terminal:
        screen.print(render_rows(Text(title, style=style), rows, style))
    else:
        click.echo(plain_rows(title, rows))


def begun(names: Sequence[str]) -> None:
    """Say on a terminal what is being measured: one line, written over by the next."""
    if is_watched():
        click.echo(f"{_CLEAR}measuring {', '.join(names)} ...", nl=False, err=True)


def done(result: "CheckResult") -> None:
    """Tell of one result as it comes; the card follows at the end."""
    from megascale_ops.diagnostics.card import measured

    found = [one.text for one in result.findings if one.severity != "note"]
    said = "; ".join(found or [*measured([result])] or result.unmeasured)
    clear = _CLEAR if is_watched() else ""
    mark = click.style(f"{_MARKS[result.status]:13}", fg=_COLOURS.get(result.status))
    click.echo(f"{clear}{mark}{result.check:15}{result.seconds:7.1f} s  {said}", err=True)


def ended() -> None:
    """Clear the line that said what is being measured."""
    if is_watched():
        click.echo(_CLEAR, nl=False, err=True)


def is_watched() -> bool:
    """Return whether stderr is a terminal on which a line can be written over."""
    import os

    return sys.stderr is not None and sys.stderr.isatty() and os.environ.get("TERM") not in ("dumb", "unknown")


def silent(_what: object) -> None:
    """Say nothing."""
