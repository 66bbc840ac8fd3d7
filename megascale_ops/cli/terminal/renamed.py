# SPDX-License-Identifier: Apache-2.0
"""Names that are called otherwise now: the old ones go on working, unseen in ``--help``, with one line on stderr."""

from collections.abc import Iterator, Mapping
from typing import Any

import click


class Renaming(click.Command):
    """A command some of whose options have another name now.

    Args:
        old_names: an option's name before -> its name now.
        arguments: as for every command.
    """

    def __init__(self, *arguments: Any, old_names: Mapping[str, str], **more: Any) -> None:  # noqa: ANN401  click's own
        super().__init__(*arguments, **more)
        self.old_names = old_names

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        """Read the line with each old name as its new one."""
        return super().parse_args(ctx, list(self._now(ctx, args)))

    def _now(self, ctx: click.Context, args: list[str]) -> Iterator[str]:
        words = iter(args)
        for word in words:
            name, equals, value = word.partition("=")
            now = self.old_names.get(name)
            if now is not None:
                note(ctx, name, now)
            yield word if now is None else f"{now}{equals}{value}"
            if word == "--":  # behind it nothing is an option
                yield from words


def note(ctx: click.Context, old: str, now: str) -> None:
    """Say that something has another name now; not where a shell only asks what could be typed."""
    if not ctx.resilient_parsing:
        click.echo(f"note: {old} is called {now} now; both work", err=True)
