# SPDX-License-Identifier: Apache-2.0
"""A verb with words of its own behind it; one that does not exist is refused with the nearest."""

from collections.abc import Mapping
from typing import ClassVar

import click

from megascale_ops.cli.terminal.renamed import note
from megascale_ops.suggest import unknown


class NamingGroup(click.Group):
    """Names the nearest command where the one that was given does not exist.

    Attributes:
        what: how a sentence calls a command.
        old_names: a command's name before -> its name now; both work.
    """

    what: ClassVar[str] = "command"
    old_names: ClassVar[Mapping[str, str]] = {}

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        """Return a command, by its old name too."""
        return super().get_command(ctx, self.old_names.get(cmd_name, cmd_name))

    def resolve_command(
        self, ctx: click.Context, args: list[str]
    ) -> tuple[str | None, click.Command | None, list[str]]:
        """Refuse an unknown command with the nearest one named."""
        known = self.list_commands(ctx)
        if args and args[0] in self.old_names:
            note(ctx, *(f"{ctx.info_name} {name}" for name in (args[0], self.old_names[args[0]])))
            args = [self.old_names[args[0]], *args[1:]]
        if args and args[0] not in known and not args[0].startswith("-"):
            raise click.UsageError(unknown(self.what, args[0], known), ctx)
        return super().resolve_command(ctx, args)
