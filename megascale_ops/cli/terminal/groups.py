# SPDX-License-Identifier: Apache-2.0
"""A verb with words of its own behind it; one that does not exist is refused with the nearest."""

from typing import ClassVar

import click

from megascale_ops.suggest import unknown


class NamingGroup(click.Group):
    """Names the nearest command where the one that was given does not exist.

    Attributes:
        what: how a sentence calls a command.
    """

    what: ClassVar[str] = "command"

    def resolve_command(
        self, ctx: click.Context, args: list[str]
    ) -> tuple[str | None, click.Command | None, list[str]]:
        """Refuse an unknown command with the nearest one named."""
        known = self.list_commands(ctx)
        if args and args[0] not in known and not args[0].startswith("-"):
            raise click.UsageError(unknown(self.what, args[0], known), ctx)
        return super().resolve_command(ctx, args)
