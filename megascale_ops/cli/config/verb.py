# SPDX-License-Identifier: Apache-2.0
"""``megascale-ops config show``: every setting's effective value and where it came from."""

import re

import click

from megascale_ops.cli.terminal.groups import NamingGroup
from megascale_ops.cli.terminal.options import argument, config_option, json_option, log_options
from megascale_ops.suggest import unknown


@click.group(cls=NamingGroup)
def config() -> None:
    """Look at the configuration: defaults, then --config FILE, then MEGASCALE_*, then the command line."""


@config.command
@argument("section", required=False, metavar="[SECTION]")
@config_option
@json_option
@log_options
@click.pass_context
def show(ctx: click.Context, /, section: str | None, config_path: str | None, as_json: bool) -> None:
    """Print every effective value, where it came from and what it is; SECTION is run, controller or agent."""
    from megascale_ops.cli.config.configuration import SECTIONS, effective
    from megascale_ops.cli.terminal.output import console, print_json

    if section is not None and section not in SECTIONS:
        raise click.UsageError(unknown("section", section, SECTIONS))
    told = {name: options_of(ctx.find_root(), name) for name in SECTIONS}
    rows = [
        row if row.help else row._replace(help=told[row.section].get(row.name, ""))
        for row in effective(config_path)
        if section in {None, row.section}
    ]
    if as_json:
        print_json([row._asdict() for row in rows])
        return
    from megascale_ops.cli.config.table import settings_view

    console().print(settings_view(rows))


def options_of(program: click.Context, verb: str) -> dict[str, str]:
    """Return what the help of a verb says of each option, by the setting's name: one line, said once, for both."""
    assert isinstance(program.command, click.Group)
    command = program.command.get_command(program, verb)
    assert command is not None
    return {
        str(option.name): re.sub(r"\s+\[[^]]*\]$", "", option.help)  # the default stands in a column of its own
        for option in command.params
        if isinstance(option, click.Option) and option.help
    }
