# SPDX-License-Identifier: Apache-2.0
"""``megascale-ops token new`` makes a controller's token, ``token issue`` derives one for a job, a node or a reader.

Both work without asking the controller: what it needs to know of a derived token stands in the token itself.
"""

import time
from pathlib import Path
from typing import TYPE_CHECKING

import click

from megascale_ops.cli.terminal.completion import offers
from megascale_ops.cli.terminal.groups import NamingGroup
from megascale_ops.cli.terminal.options import FiniteRange, argument, log_options
from megascale_ops.errors import UsageError

if TYPE_CHECKING:
    from megascale_ops.schema.tokens import Grant

# 30 days: longer than most jobs run, and a leaked copy is invalid after a month.
DAYS = 30.0
_DAY_S = 86_400.0


@click.group("token", cls=NamingGroup)
def token() -> None:
    """Make a controller's token, or derive one from it that allows less."""


@token.command("new")
@argument("file", type=click.Path(dir_okay=False))
@log_options
def new(file: str) -> None:
    """Write a random token of 256 bits into FILE, mode 0600, for a controller and all who may do everything."""
    from megascale_ops.link.token_files import write_token_file
    from megascale_ops.schema.tokens import new_token

    write_token_file(Path(file), new_token(), anew=True)
    click.echo(f"written to {file}: give it to controller, agents and runs as --token-file {file}", err=True)


@token.command("rotate")
@argument("file", type=click.Path(dir_okay=False))
@click.option("--end", is_flag=True, help="End the change: the token before is no longer valid.")
@log_options
def rotate(file: str, *, end: bool) -> None:
    """Put another token into FILE while its controller runs; the one before stays valid until --end.

    The controller reads the files again within a second; agents and runs read theirs again when they are refused.
    """
    from megascale_ops.link import token_files
    from megascale_ops.schema.tokens import new_token

    if end:
        token_files.end_rotation(Path(file))
        click.echo(f"the token before the one in {file} is valid no more, nor what was derived from it", err=True)
        return
    token_files.rotate(Path(file), new_token())
    click.echo(
        f"{file} holds another token, and {token_files.former_of(file)} the one before; both are valid. Give the new "
        f"one to all that use the old, then: megascale-ops token rotate --end {file}",
        err=True,
    )


@token.command("issue")
@click.option("--token-file", type=click.Path(), help="The controller's own token.  [MEGASCALE_TOKEN_FILE]")
@click.option("--run-dir", type=click.Path(), help="Folder of a run, whose own controller the token is for.")
@click.option("--job", metavar="JOB", shell_complete=offers("job"), help="For this job only.")
@click.option("--node", metavar="NODE", help="For this node only: reports of its agent, and its runner in --job.")
@click.option("--right", type=click.Choice(["read", "operate"]), help="What it allows.  [read; with --node: operate]")
@click.option("--name", metavar="NAME", help="Who gets it: what `megascale-ops audit` says of its requests.")
@click.option("--days", type=FiniteRange(min=0, min_open=True), default=DAYS, help="How long it is valid.  [30]")
@click.option("--out", type=click.Path(dir_okay=False), help="Write FILE, mode 0600, instead of printing the token.")
@log_options
def issue(
    token_file: str | None,
    run_dir: str | None,
    job: str | None,
    node: str | None,
    right: str | None,
    name: str | None,
    days: float,
    out: str | None,
) -> None:
    """Print a token that allows less than the controller's own, and ends by itself.

    \b
    --job JOB --right operate               what runners, agents and people of one job need
    --job JOB --node NODE --right operate   the same from one node only, as a prolog gives it to a job
    --node NODE                             what the agent of one node needs
    --job JOB --right read                  looking at one job
    --right read                            looking at everything, as Prometheus does
    --right operate --name NAME             everything but issuing tokens, by a person who is named

    A new own token of the controller makes all of them void.
    """  # noqa: D301  \b is click's
    import msgspec

    from megascale_ops.cli.sources.locate import Place, Wanted, find_place, read_token
    from megascale_ops.link.token_files import write_token_file
    from megascale_ops.schema import tokens

    place = find_place(Wanted(run_dir=run_dir), journal_too=False) if run_dir and not token_file else Place()
    own = read_token(token_file, place)
    if not own:
        raise UsageError("no token to derive one from: give --token-file FILE, the controller's own, or --run-dir DIR")
    wanted = {"right": right or ("operate" if node else "read"), "job": job or "", "node": node or ""}
    wanted["name"] = name or ""
    grant = msgspec.convert({**wanted, "until_wall_s": float(int(time.time() + days * _DAY_S))}, tokens.Grant)
    derived = tokens.issue(own, grant)
    if out is None:
        click.echo(derived)
    else:
        write_token_file(Path(out), derived)
    click.echo(_said(grant), err=True)


def _said(grant: "Grant") -> str:
    until = time.strftime("%Y-%m-%d %H:%M", time.gmtime(grant.until_wall_s))
    return f"valid for {grant.scope} until {until} UTC, or until the controller gets another token"
