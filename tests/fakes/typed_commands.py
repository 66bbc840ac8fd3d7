# SPDX-License-Identifier: Apache-2.0
"""Type a command of ours without running it: what a document shows can be typed down to its last option."""

import shlex

import click

from megascale_ops.cli.main import program
from megascale_ops.schema.policy_settings import read_settings


def parse(command: str) -> None:
    """Parse a command of ours down to its last option, and run nothing.

    Raises:
        click.UsageError: no such verb or option, or one too many.
    """
    one: click.Command = program
    words = shlex.split(command, comments=True)[1:]
    while isinstance(one, click.Group):
        found = one.get_command(click.Context(one), words[0])
        if found is None:
            raise click.UsageError(f"no command {words[0]}")
        one, words = found, words[1:]
    context = one.make_context(one.name, words)
    for values in context.params.values():
        if isinstance(values, tuple):
            read_settings(text for text in values if isinstance(text, str) and "=" in text)
