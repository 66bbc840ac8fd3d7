# SPDX-License-Identifier: Apache-2.0
"""The two tables of `policy show`: settings with what they are, and what is done about each class of fault and why."""

from collections.abc import Collection, Iterable

from rich.console import RenderableType
from rich.text import Text

from megascale_ops.cli.terminal.tables import plain_table
from megascale_ops.schema.policy import ACTIONS_PREFIX, SETTINGS, JobPolicy
from megascale_ops.schema.policy_settings import ClassAction, default_of, show_settings


def settings_view(policy: JobPolicy, changed: Collection[str]) -> RenderableType:
    """Return every setting with its value, what it is, and whether it was set by hand.

    Args:
        policy: the one that the job lives under.
        changed: settings that were changed while the job lives.
    """
    table = plain_table("setting", "value", "what it is")
    table.columns[0].no_wrap = table.columns[1].no_wrap = True
    for name, value in show_settings(policy).items():
        if name not in SETTINGS:
            continue
        default = default_of(name)
        notes = [f"default {default}"] if value != default else []
        notes += ["changed while it lives"] if name in changed else []
        shown = Text(value)
        if notes:
            shown.append(f"  ({', '.join(notes)})", style="bold")
        table.add_row(name, shown, Text(JobPolicy.HELP[name]))
    return table


def actions_view(rows: Iterable[ClassAction], changed: Collection[str]) -> RenderableType:
    """Return what is done about each class of fault, and why; what the job's policy says is marked."""
    table = plain_table("class of fault", "action", "why")
    table.columns[0].no_wrap = table.columns[1].no_wrap = True
    for row in rows:
        name = f"{ACTIONS_PREFIX}{row.fault}" if row.is_own else row.fault
        note = "  (changed while it lives)" if name in changed else ""
        table.add_row(name, Text(row.action + note, style="bold" if row.is_own else ""), Text(row.why))
    return table
