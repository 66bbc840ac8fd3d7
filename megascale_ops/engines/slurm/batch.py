# SPDX-License-Identifier: Apache-2.0
"""A job as a file describes it, and the batch script that Slurm gets for it. Pure."""

import re
import shlex
from collections.abc import Iterator
from pathlib import PurePath
from typing import Annotated, ClassVar

import msgspec
from msgspec import Meta

from megascale_ops.errors import UsageError
from megascale_ops.schema.identity import check_name

Count = Annotated[int, Meta(ge=0, le=1_000_000)]
# Two minutes before the limit: a checkpoint of 60 s, the end in order, and the half minute by which Slurm may be late.
WARN_S = 120


class SlurmJob(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """What ``megascale-ops submit slurm`` takes from a file, or as options of the same names."""

    HELP: ClassVar[dict[str, str]] = {
        "command": "Script and its arguments.",
        "name": "Name of the job.  [the script's]",
        "nodes": "Nodes that train.",
        "spares": "Further nodes of the allocation, which wait for the place of one that is lost.",
        "gpus_per_node": "GPUs of each node; as many ranks.",
        "cpus_per_task": "Cores of each node's task.",
        "mem": "Memory of each node, as in sbatch: 0 for all.",
        "partition": "As in sbatch.",
        "account": "As in sbatch.",
        "qos": "As in sbatch.",
        "time": "Limit, as in sbatch: 24:00:00.",
        "constraint": "As in sbatch.",
        "nodelist": "As in sbatch.",
        "exclude": "As in sbatch.",
        "reservation": "As in sbatch.",
        "array": "As in sbatch; each task is a job of its own.",
        "out": "File of what the job prints.  [NAME-%j.out]",
        "comment": "As in sbatch.",
        "exclusive": "Nodes that no other job shares.",
        "requeues": "How often the job saves and goes back into the queue when its time is up.",
        "warn_s": "Seconds before the limit at which it is told to save.",
        "batch_controller": "Run the controller in the batch script, not in the first node's `run`.",
        "setup": "Lines of shell before the job: modules, environments.",
        "sbatch": "Further options of sbatch.",
        "options": "Further options of `megascale-ops run`.",
    }

    command: tuple[str, ...] = ()
    name: str = ""
    nodes: Annotated[int, Meta(ge=1, le=1_000_000)] = 1
    spares: Count = 0
    gpus_per_node: Count = 0
    cpus_per_task: Count = 0
    mem: str = ""
    partition: str = ""
    account: str = ""
    qos: str = ""
    time: str = ""
    constraint: str = ""
    nodelist: str = ""
    exclude: str = ""
    reservation: str = ""
    array: str = ""
    out: str = ""
    comment: str = ""
    exclusive: bool = False
    requeues: Count = 3
    warn_s: Count = WARN_S
    batch_controller: bool = False
    setup: tuple[str, ...] = ()
    sbatch: tuple[str, ...] = ()
    options: tuple[str, ...] = ()


# The job's name here has Slurm's number behind it, which has 10 digits at most, and 100 characters in all.
_MOST_NAME = 89
_AS_IN_SBATCH = (
    *("mem", "partition", "account", "qos", "time", "constraint", "nodelist", "exclude", "reservation", "array"),
    "comment",
)
_CONTROLLER = """\
state=${{XDG_STATE_HOME:-$HOME/.local/state}}/megascale-ops/slurm-$SLURM_JOB_ID
mkdir -p -m 700 "$state"
[ -s "$state/token" ] || {program} token new "$state/token"
rm -f "$state/port"
{program} controller --listen 0.0.0.0:0 --port-file "$state/port" --token-file "$state/token" \\
  --store "sqlite:///$state/journal.db" --run-dir "$state" --exit-with-parent $$ &
for _ in $(seq 600); do [ -s "$state/port" ] && break; sleep 0.1; done
[ -s "$state/port" ] || {{ echo "the controller did not come up within 60 s" >&2; exit 1; }}
controller=http://${{SLURMD_NODENAME:-$(hostname)}}:$(cat "$state/port")"""


def name_of(job: SlurmJob) -> str:
    """Return the job's name: its own, or the script's.

    Raises:
        UsageError: there is nothing to run.
    """
    if not job.command or not job.command[0]:
        raise UsageError('nothing to run: give `command = ["train.py"]` in the file, or the script after `--`')
    if job.name:
        return job.name
    return re.sub(r"[^A-Za-z0-9._-]", "-", PurePath(job.command[0]).stem).lstrip("._-")[:_MOST_NAME] or "job"


def output_of(job: SlurmJob) -> str:
    """Return sbatch's pattern for the file of what the job prints."""
    return job.out or f"{name_of(job)}-{'%A_%a' if job.array else '%j'}.out"


def script(job: SlurmJob, program: str) -> str:
    """Return the batch script.

    Args:
        job: The job.
        program: `megascale-ops` as the nodes find it.

    Raises:
        UsageError: the pieces can't be put together.
    """
    _check(job)
    named = f"--job={shlex.quote(name_of(job))}-$SLURM_JOB_ID"  # the same after a requeue
    lines = ["#!/bin/bash", *(f"#SBATCH {one}" for one in _options(job)), *job.setup]
    run = [program, "run", *_run_options(job)]
    srun = ["srun", "--ntasks-per-node=1"]
    srun += [f"--cpus-per-task={job.cpus_per_task}"] if job.cpus_per_task else []  # Slurm 22.05 hands it on no more
    srun += ["--no-kill"] if job.spares else []
    line = f"{shlex.join([*srun, *run])} {named}"
    if job.batch_controller:
        lines.append(_CONTROLLER.format(program=shlex.quote(program)))
        line += ' --controller "$controller" --token-file "$state/token"'
    start = "" if job.batch_controller else "exec "  # the controller is the shell's child
    return "\n".join([*lines, f"{start}{line} -- {shlex.join(job.command)}", ""])


def _check(job: SlurmJob) -> None:
    """Refuse what sbatch, srun or `run` would take for something else, hours later perhaps.

    Raises:
        UsageError: one sentence.
    """
    name = check_name("job", name_of(job))
    if len(name) > _MOST_NAME:
        raise UsageError(
            f"the job's name has {len(name)} characters; with Slurm's number behind it {_MOST_NAME} may be"
        )
    for line in (*job.sbatch, *(str(getattr(job, name)) for name in _AS_IN_SBATCH), job.out):
        if "\n" in line:
            raise UsageError(f"{line!r} can't be an option of sbatch: it has more than one line")
    for option in job.sbatch:
        if option in ("hetjob", "packjob"):
            raise UsageError(
                "a heterogeneous job is several, and `submit` writes one: put what --dry-run prints for each into a "
                "script of your own, with `srun --het-group=N` before `megascale-ops run`"
            )
        if not option.startswith("-"):
            raise UsageError(f"sbatch: {option!r} is no option of sbatch, which all begin with '-': --{option}?")
    if ":" in (*job.options, *job.command):
        raise UsageError(
            "':' by itself can't be an argument of what srun starts: srun takes it for the begin of a heterogeneous "
            "step's next component"
        )


def _options(job: SlurmJob) -> Iterator[str]:
    yield f"--job-name={_quoted(name_of(job))}"
    yield f"--nodes={job.nodes + job.spares}"
    yield "--ntasks-per-node=1"
    if job.gpus_per_node:
        yield f"--gpus-per-node={job.gpus_per_node}"
    if job.cpus_per_task:
        yield f"--cpus-per-task={job.cpus_per_task}"
    for name in _AS_IN_SBATCH:
        if value := getattr(job, name):
            yield f"--{name}={_quoted(value)}"
    if job.exclusive:
        yield "--exclusive"
    if job.spares:
        yield "--no-kill"
    if job.requeues:
        yield "--requeue"
        yield f"--signal=USR1@{job.warn_s}"
    yield "--open-mode=append"
    yield f"--output={_quoted(output_of(job))}"
    yield from job.sbatch


def _run_options(job: SlurmJob) -> Iterator[str]:
    """Yield options of `run`; without spares the step itself says how many nodes there are."""
    if job.spares:
        yield f"--nnodes={job.nodes}"
    if job.requeues:
        yield f"--requeues={job.requeues}"
    yield from job.options


def _quoted(value: str) -> str:
    """Return a value as sbatch reads it in a script: it takes quotes and backslashes as a shell does."""
    return value if re.fullmatch(r"[\w@%+=:,./\[\]&|*-]+", value) else '"' + re.sub(r'(["\\])', r"\\\1", value) + '"'
