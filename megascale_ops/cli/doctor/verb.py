# SPDX-License-Identifier: Apache-2.0
"""``megascale-ops doctor``: the verb. Exit code 1 where training can't do without something that is missing."""

import click

from megascale_ops.cli.terminal.options import json_option, log_options

_MARKS = {"good": ("ok", "green"), "costs": ("costs", "yellow"), "must": ("MISSING", "red")}


@click.command
@json_option
@log_options
def doctor(*, as_json: bool) -> None:
    """Look at this machine's set-up, and say what is missing, what that costs and what to do.

    Changes nothing. It is about compilers, memory, rights and names, not about whether the hardware is well.
    """
    from megascale_ops.cli.doctor.checks import MUST, all_checks, answered
    from megascale_ops.link.whereabouts import state_root

    found = [answered(name, check) for name, check in all_checks(state_root()).items()]
    if as_json:
        from megascale_ops.cli.terminal.output import print_json

        print_json(found)
    else:
        for one in found:
            mark, colour = _MARKS[one.kind]
            click.echo(f"{click.style(f'{mark:8}', fg=colour)}{one.name:15}{one.found}")
            if one.remedy:
                click.echo(f"{'':23}-> {one.remedy}")
    if any(one.kind == MUST for one in found):
        click.get_current_context().exit(1)
