# SPDX-License-Identifier: Apache-2.0
"""``megascale-ops chaos list|run|score``: break a job on purpose, and score the verdicts against the truth."""

import shlex
from contextlib import ExitStack
from typing import TYPE_CHECKING

import click

from megascale_ops.cli.chaos.score import score
from megascale_ops.cli.chaos.trials import (
    hold_all,
    interrupts_noted,
    nproc_option,
    plan_of,
    rank_option,
    trial_options,
)
from megascale_ops.cli.terminal.completion import offers
from megascale_ops.cli.terminal.groups import NamingGroup
from megascale_ops.cli.terminal.interrupt import ctrl_c_noted
from megascale_ops.cli.terminal.options import argument, json_option, log_options
from megascale_ops.errors import UsageError

if TYPE_CHECKING:
    from megascale_ops.chaos.faults import Fault


class _Words(NamingGroup):
    """The three words behind ``chaos``; an unknown one is refused with the nearest."""

    what = "word behind chaos"


@click.group("chaos", cls=_Words, subcommand_metavar="list|run|score ...")
@log_options
def chaos() -> None:
    """Break a training job on purpose, and score what is made of it against the truth."""


chaos.add_command(score)


@chaos.command("list")
@nproc_option
@rank_option
@json_option
def list_faults(nproc: int, rank: int, as_json: bool) -> None:
    """List every fault with its ground truth."""
    from megascale_ops.chaos.faults import MATRIX
    from megascale_ops.chaos.present import fault_lines
    from megascale_ops.cli.terminal.output import print_json

    if as_json:
        print_json([{**row._asdict(), "culprits": row.culprits(rank, nproc)} for row in MATRIX])
        return
    click.echo("\n".join(fault_lines(MATRIX, rank, nproc)))


@chaos.command("run")
@argument("faults", nargs=-1, required=True, metavar="FAULT...", shell_complete=offers("fault"))
@trial_options
@click.option("--keep", is_flag=True, help="Keep the run folders and say where they are.")
@click.option("--job", metavar="JOB", shell_complete=offers("job"), help="Do it to this running job here instead.")
@click.option("--box-root", type=click.Path(), envvar="MEGASCALE_BOX_ROOT", help="Black boxes of that job's run.")
@click.option("--run-dir", type=click.Path(), help="Run folder of that job.")
@click.option("--controller", metavar="URL", help="Controller of that job.")
@click.option("--yes", is_flag=True, help="With --job: do it without asking.")
@json_option
def run_faults(
    faults: tuple[str, ...],
    nproc: int,
    rank: int,
    launcher: str,
    ft_path: str,
    backend: str,
    keep: bool,
    job: str | None,
    box_root: str | None,
    run_dir: str | None,
    controller: str | None,
    yes: bool,
    as_json: bool,
) -> int:
    """Inject each FAULT into a job of its own (or with --job into yours) and say what was made of it.

    Exits with 1 when any verdict or deed is wrong.
    """
    from megascale_ops.cli.terminal.output import print_json

    rows = [_known(name) for name in faults]
    if job is not None:
        if len(rows) > 1:
            raise UsageError("--job takes one fault at a time: the job has to recover in between")
        return _hurt(rows[0], job, rank, box_root or "", (controller or "", run_dir or ""), yes)
    with interrupts_noted() as ctrl_c:
        plan = plan_of(ctrl_c.check, nproc, rank, launcher, ft_path, backend)
        grades = hold_all(rows, plan, keep="all" if keep else "none", quiet=as_json)
    if as_json:
        print_json(grades)
    return 0 if all(each.right for each in grades) else 1


def _known(name: str) -> "Fault":
    from megascale_ops.chaos.faults import BY_NAME
    from megascale_ops.suggest import unknown

    if name not in BY_NAME:
        raise UsageError(unknown("fault", name, BY_NAME) + " (`megascale-ops chaos list` shows all)")
    return BY_NAME[name]


def _hurt(row: "Fault", job: str, rank: int, box_root: str, where: tuple[str, str], yes: bool) -> int:
    """Do ``row`` to a running job, and print its controller's verdict."""
    from megascale_ops.blackbox.roots import find_job
    from megascale_ops.chaos.live import do, plan_deed, verdict_after
    from megascale_ops.cli.sources.locate import Wanted, find_place, read_token, reader_of
    from megascale_ops.link import BlockingLink

    deed = plan_deed(row, job, rank, find_job(job, box_root))
    wanted = Wanted(where[0], job, where[1])
    place = find_place(wanted, journal_too=False)
    if not yes and not click.confirm(f"{deed.sentence}. Do it?"):
        return 1
    with ctrl_c_noted() as ctrl_c, BlockingLink(place.url, read_token(None, place)) as link, ExitStack() as stack:
        known = {each.id for each in link.incidents(job).incidents}
        stack.callback(do(deed))
        click.echo(f"done: {deed.sentence}")
        # 5 s are enough to see that the end of a part of the product has no effect.
        incident = verdict_after(link, job, known, 5.0 if row.quiet else row.name_s + 5.0, ctrl_c.check)
    if incident is None or incident.verdict is None:
        click.echo("no verdict came" + (", as it should be" if row.quiet else ""))
        return 0 if row.quiet else 1
    verdict = incident.verdict
    right = verdict.fault in row.classes and (rank in verdict.culprits or not verdict.culprits)
    blamed = ",".join(map(str, verdict.culprits)) or "none"
    click.echo(f"{'right' if right else 'WRONG'}: {verdict.fault} rank {blamed}: {verdict.reason}")
    click.echo(f"`{reader_of(wanted, None, place).command(f'why {shlex.quote(incident.id)}')}` tells more")
    return 0 if right else 1
