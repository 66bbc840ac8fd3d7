# SPDX-License-Identifier: Apache-2.0
"""``megascale-ops submit ENGINE [job.toml] [options] [-- SCRIPT ...]``: write what the engine takes, and hand it in."""

import shutil
import sys
from pathlib import Path
from typing import Any

import click

from megascale_ops.cli.submit.fields import check_run_options, options_of, read_job
from megascale_ops.cli.terminal.groups import NamingGroup
from megascale_ops.cli.terminal.options import PROGRAM, log_options
from megascale_ops.engines.kubernetes.job import KubernetesJob
from megascale_ops.engines.slurm.batch import SlurmJob, name_of, output_of, script
from megascale_ops.errors import UsageError

_GIVEN = "[FILE.toml] [-- SCRIPT [ARGUMENTS]...]"


@click.group(cls=NamingGroup)
def submit() -> None:
    """Write a job's script or object and hand it in to the engine that owns the nodes."""


@submit.command("slurm")
@click.argument("given", nargs=-1, type=click.UNPROCESSED, metavar=_GIVEN)
@options_of(SlurmJob)
@click.option("--dry-run", is_flag=True, help="Print the script and hand in nothing.")
@click.option("--follow", is_flag=True, help="Stay until the job is over: its states, its verdicts, its exit code.")
@log_options
def slurm(given: tuple[str, ...], *, dry_run: bool, follow: bool, **options: Any) -> int:  # noqa: ANN401  the options above, by field name
    """Hand a job in to Slurm. What options say counts for more than what FILE says.

    The script is sbatch's; all that is ours in it is one line of srun, so it may be kept and changed.
    """
    job = read_job(SlurmJob, given, options)
    if dry_run and follow:
        raise UsageError("--dry-run hands nothing in, so there is nothing to follow: leave one of both out")
    if follow and job.array:
        raise UsageError("--follow follows one job, and --array makes several: `squeue --array` shows them")
    check_run_options(job.options)
    text = script(job, _program())
    if dry_run:
        click.echo(text, nl=False)
        return 0
    from megascale_ops.engines.slurm.commands import ask

    number = ask("sbatch", "--parsable", said=text).strip().partition(";")[0]
    click.echo(f"Slurm job {number} ({name_of(job)}); what it prints: {output_of(job).replace('%j', number)}")
    if not follow:
        return 0
    from megascale_ops.cli.submit.follow import follow as stay

    return stay(number, job)


@submit.command("kubernetes")
@click.argument("given", nargs=-1, type=click.UNPROCESSED, metavar=_GIVEN)
@options_of(KubernetesJob)
@click.option("--dry-run", is_flag=True, help="Print the object and hand in nothing.")
@log_options
def kubernetes(given: tuple[str, ...], *, dry_run: bool, **options: Any) -> None:  # noqa: ANN401  the options above, by field name
    """Hand a job in to Kubernetes, as a Job, a JobSet or Kubeflow's TrainJob; options count for more than FILE.

    The object may be kept and changed: all that is ours in it is the command. One that is there is left as it is.
    """
    from megascale_ops.engines.kubernetes.job import manifest

    job = read_job(KubernetesJob, given, options)
    check_run_options(job.options)
    made = manifest(job)
    if dry_run:
        click.echo(_yaml(made), nl=False)
        return
    from megascale_ops.engines.kubernetes.jobs import ClusterJobs

    click.echo(ClusterJobs().create(made))


def _yaml(made: dict[str, Any]) -> str:
    try:
        import yaml  # Kubernetes' client draws it
    except ImportError:
        raise UsageError("the package yaml is missing: pip install 'megascale-ops[kubernetes]'") from None
    return str(yaml.safe_dump(made, sort_keys=False, width=1000))


def _program() -> str:
    """Return this program by its path, which nodes share, as they share the environment that it is installed in."""
    beside = Path(sys.executable).with_name(PROGRAM)
    return str(beside) if beside.exists() else shutil.which(PROGRAM) or PROGRAM
