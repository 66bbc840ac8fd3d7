# SPDX-License-Identifier: Apache-2.0
"""``megascale-ops audit``: who ordered what, when, from where, and what came of it."""

import click

from megascale_ops.cli.terminal.options import job_argument, json_option, log_options, where_options

_MOST = 1000


@click.command("audit")
@job_argument
@click.option("--limit", type=click.IntRange(1, _MOST), default=50, help="The newest so many.  [50]")
@click.option("--before", type=click.IntRange(1), metavar="NUMBER", help="Only older ones than this entry.")
@where_options
@json_option
@log_options
def audit(
    controller: str | None,
    job: str | None,
    limit: int,
    before: int | None,
    run_dir: str | None,
    token_file: str | None,
    as_json: bool,
) -> None:
    """List what people have ordered a controller to do, newest last: of JOB, or of all jobs and nodes.

    Each line has the entry's number, when, who (the name of the token, and eight digits by which it is known), from
    which address, what was asked, and the HTTP status of the answer. Needs a token that may read everything.
    """
    from megascale_ops.cli.sources.locate import Wanted, find_place, read_token
    from megascale_ops.link import BlockingLink

    place = find_place(Wanted(controller or "", "" if controller else job or "", run_dir or ""), journal_too=False)
    with BlockingLink(place.url, read_token(token_file, place)) as link:
        found = link.audit(job or "", limit, before or 0)
    if as_json:
        from megascale_ops.cli.terminal.output import print_json

        print_json(found)
        return
    if not found.entries:
        click.echo(f"nobody has ordered anything{f' of job {job}' if job else ''} yet")
        return
    from megascale_ops.schema.wording import clock, printable

    if found.older:
        click.echo(f"(older ones: --before {found.entries[0].number})")
    for one in found.entries:
        click.echo(f"{one.number:>6}  {clock(one.wall_s)}  {printable(one.text)}")
