# SPDX-License-Identifier: Apache-2.0
"""``megascale-ops why INCIDENT``: the verdict with its evidence and numbers, and what to type next."""

import click

from megascale_ops.cli.sources.locate import Wanted, find_place, narrowed, reader_of
from megascale_ops.cli.terminal.completion import offers
from megascale_ops.cli.terminal.options import argument, json_option, log_options, where_options


@click.command
@argument("incident", required=False, shell_complete=offers("incident"))
@where_options
@json_option
@log_options
def why(
    incident: str | None,
    controller: str | None,
    job: str | None,
    run_dir: str | None,
    token_file: str | None,
    as_json: bool,
) -> None:
    """Explain INCIDENT, or the newest one when no name is given.

    Asks the running controller; when the run is over, reads the journal it left.
    """
    from megascale_ops.cli.sources.history import NothingHappenedError, find_incident, open_place

    wanted = narrowed(Wanted(controller or "", job or "", run_dir or ""), incident or "")
    place = find_place(wanted, journal_too=True)
    with open_place(place, token_file) as history:
        try:
            found = find_incident(history, incident, job)
        except NothingHappenedError as error:
            from megascale_ops.cli.sources.ended import of_whom

            raise NothingHappenedError(f"{error} ({of_whom(place, job)})") from error
    if as_json:
        from megascale_ops.cli.terminal.output import print_json

        print_json(found)
        return
    from megascale_ops.cards import plain_incident
    from megascale_ops.cli.terminal.incident_panel import render_incident
    from megascale_ops.cli.terminal.output import console

    screen, reader = console(), reader_of(wanted, token_file, place)
    if screen.is_terminal:
        screen.print(render_incident(found, reader=reader))
    else:
        click.echo(plain_incident(found, reader=reader))
