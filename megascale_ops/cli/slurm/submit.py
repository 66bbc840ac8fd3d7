# SPDX-License-Identifier: Apache-2.0
"""``megascale-ops submit slurm [job.toml] [options] [-- SCRIPT ...]``: write a batch script, hand it in, follow it."""

import shutil
import sys
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from megascale_ops.cli.terminal.groups import NamingGroup
from megascale_ops.cli.terminal.options import PROGRAM, log_options
from megascale_ops.engines.slurm.batch import SlurmJob, name_of, output_of, script
from megascale_ops.errors import UsageError
from megascale_ops.suggest import unknown

if TYPE_CHECKING:
    from collections.abc import Mapping

_MOST_BYTES = 1 << 20
_FLAGS = ("exclusive", "batch_controller")
_LISTS = ("setup", "sbatch", "options")


@click.group(cls=NamingGroup)
def submit() -> None:
    """Write a job's script and hand it in to the engine that owns the nodes."""


def _job_options(command: Callable[..., Any]) -> Callable[..., Any]:
    """Add an option for each field of a job."""
    for name in reversed(SlurmJob.__struct_fields__):
        if name == "command":
            continue
        option, text = f"--{name.replace('_', '-')}", SlurmJob.HELP[name]
        kind = SlurmJob.__struct_defaults__[SlurmJob.__struct_fields__.index(name)]
        if name in _FLAGS:
            command = click.option(option, name, is_flag=True, default=None, help=text)(command)
        elif name in _LISTS:
            command = click.option(option, name, multiple=True, metavar="TEXT", help=f"{text} Repeatable.")(command)
        else:
            is_number = isinstance(kind, int)
            said = f"{text}  [{kind}]" if is_number else text
            metavar = "N" if is_number else "TEXT"
            click_type = click.IntRange(0) if is_number else click.STRING
            command = click.option(option, name, type=click_type, metavar=metavar, help=said)(command)
    return command


@submit.command("slurm")
@click.argument("given", nargs=-1, type=click.UNPROCESSED, metavar="[FILE.toml] [-- SCRIPT [ARGUMENTS]...]")
@_job_options
@click.option("--dry-run", is_flag=True, help="Print the script and hand in nothing.")
@click.option("--follow", is_flag=True, help="Stay until the job is over: its states, its verdicts, its exit code.")
@log_options
def slurm(given: tuple[str, ...], *, dry_run: bool, follow: bool, **options: Any) -> int:  # noqa: ANN401  the options above, by field name
    """Hand a job in to Slurm. What options say counts for more than what FILE says.

    The script is sbatch's; all that is ours in it is one line of srun, so it may be kept and changed.
    """
    file, command = _split(given)
    job = _read(file, {name: value for name, value in options.items() if value not in (None, ())}, command)
    if follow and job.array:
        raise UsageError("--follow follows one job, and --array makes several: `squeue --array` shows them")
    text = script(job, _program())
    if dry_run:
        click.echo(text, nl=False)
        return 0
    from megascale_ops.engines.slurm.commands import ask

    number = ask("sbatch", "--parsable", said=text).strip().partition(";")[0]
    click.echo(f"Slurm job {number} ({name_of(job)}); what it prints: {output_of(job).replace('%j', number)}")
    if not follow:
        return 0
    from megascale_ops.cli.slurm.follow import follow as stay

    return stay(number, job)


def _split(given: tuple[str, ...]) -> tuple[str, tuple[str, ...]]:
    """Return the file, "" for none, and the command; both may be given, the file first."""
    if given and given[0].endswith(".toml"):
        return given[0], given[1:]
    return "", given


def _read(file: str, options: "Mapping[str, Any]", command: tuple[str, ...]) -> SlurmJob:
    """Return the job.

    Raises:
        UsageError: the file can't be read, or says what can't be.
    """
    import msgspec

    from megascale_ops import foreign

    values: dict[str, Any] = {}
    if file:
        try:
            values = msgspec.toml.decode(foreign.read(Path(file), _MOST_BYTES, follow=True), type=dict[str, Any])
        except OSError as error:
            raise UsageError(f"{file} can't be read: {error.strerror or error}") from None
        except foreign.UNREADABLE as error:
            raise UsageError(f"{file} is no TOML: {error}") from None
    for name in values:
        if name not in SlurmJob.__struct_fields__:
            raise UsageError(f"{file}: {unknown('setting', name, SlurmJob.__struct_fields__)}")
    values.update(options)
    if command:
        values["command"] = command
    try:
        return msgspec.convert(values, SlurmJob)
    except msgspec.ValidationError as error:
        raise UsageError(f"{file or 'the job'}: {error}") from None


def _program() -> str:
    """Return this program by its path, which nodes share, as they share the environment that it is installed in."""
    beside = Path(sys.executable).with_name(PROGRAM)
    return str(beside) if beside.exists() else shutil.which(PROGRAM) or PROGRAM
