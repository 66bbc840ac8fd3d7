# SPDX-License-Identifier: Apache-2.0
"""Turn the options into what will be started. Pure: options and the machine's facts in, a plan out.

The options are torchrun's, so that a launch line carries over; where torchrun would guess and fail later (zero
ranks, a script that is not there, MIN above MAX) the plan refuses with one sentence.
"""

import re
from collections.abc import Callable
from pathlib import PurePath

import msgspec

from megascale_ops.errors import UsageError
from megascale_ops.runner.config import BY_STEP, RunConfig
from megascale_ops.runner.meeting import Meeting, meet
from megascale_ops.runner.slurm_step import Step, node_name, within
from megascale_ops.schema.identity import check_name
from megascale_ops.schema.policy import value_of

# 70: a name has at most 100 characters, of which the time and a dash take 23.
_LONGEST_STEM = 70
_PATHS = ("run_dir", "box_root", "checkpoint_dir", "log_dir", "token_file", "hosts")


class Machine(msgspec.Struct, frozen=True):
    """What the plan needs to know of the machine and the moment."""

    hostname: str
    cores: int
    gpus: int
    state_root: str  # where run folders live
    stamp: str  # e.g. 20260131-142501-3fa94c: no two launches have the same
    python: str
    cwd: str = "/"  # where the user stands
    is_here: Callable[[str], bool] = lambda _host: False  # whether a host name or address is this machine's
    step: Step | None = None  # the Slurm step of which this run is a task
    is_python: Callable[[str], bool] = lambda path: path.endswith(".py")  # whether Python runs what is at a path


class Plan(msgspec.Struct, frozen=True):
    """What will be started on this node."""

    job: str
    node: str
    nproc: int
    min_nodes: int
    max_nodes: int
    program: str
    arguments: tuple[str, ...]
    run_dir: str
    checkpoint_dir: str
    log_dir: str
    threads: int  # OMP_NUM_THREADS for each rank; 0: leave it alone
    shown_ranks: tuple[int, ...] = ()  # local ranks whose output is shown; empty: all
    has_gpus: bool = False
    virtual_local_rank: bool = False
    meeting: Meeting = Meeting()
    master: tuple[str, int] = ("", 0)  # where rank 0 shall serve the ranks' store; port 0: the round's own store

    @property
    def checkpoint_dirs(self) -> tuple[str, ...]:
        """The folder for checkpoints, where it is one: a URL is not the runner's to make."""
        return () if is_url(self.checkpoint_dir) else (self.checkpoint_dir,)


def parse_nnodes(text: str) -> tuple[int, int]:
    """Read ``N`` or ``MIN:MAX``.

    Raises:
        UsageError: when it is neither, or MIN is above MAX, or below 1.
    """
    match = re.fullmatch(r"([0-9]{1,6})(?::([0-9]{1,6}))?", text)
    if match is None:
        raise UsageError(f"--nnodes {text!r} can't be read: give a number of nodes, or MIN:MAX")
    low = int(match[1])
    high = int(match[2]) if match[2] else low
    if low < 1 or high < low:
        raise UsageError(f"--nnodes {text!r} can't be met: MIN must be at least 1 and at most MAX")
    return low, high


def parse_nproc(text: str, machine: Machine) -> int:
    """Read a number of ranks for each node, or ``auto``, ``gpu``, ``cpu``.

    Raises:
        UsageError: zero ranks, ``gpu`` on a machine without one, or something else.
    """
    if text == "gpu" and machine.gpus == 0:
        raise UsageError("--nproc-per-node gpu: this node has no GPU; give a number, or cpu")
    words = {"gpu": machine.gpus, "cpu": machine.cores, "auto": machine.gpus or machine.cores}
    if text in words:
        return words[text]
    if not re.fullmatch(r"[0-9]{1,6}", text) or int(text) == 0:
        raise UsageError(f"--nproc-per-node {text!r} can't be used: give at least 1, or auto, gpu, cpu")
    return int(text)


def parse_ranks(text: str) -> tuple[int, ...]:
    """Read local ranks as in ``0,3``.

    Raises:
        UsageError: when it is not a list of numbers.
    """
    if not re.fullmatch(r"([0-9]{1,6}(,[0-9]{1,6})*)?", text):
        raise UsageError(f"--local-ranks-filter {text!r} can't be read: give local ranks, as in 0,3")
    return tuple(int(number) for number in text.split(",") if number)


def default_job(command: tuple[str, ...], *, alone: bool, stamp: str, step: Step | None = None) -> str:
    """Name a job after its script; alone on a machine with the time too, so that a second try starts afresh.

    Nodes of one job must agree on its name, so where they meet at a controller the time stays out. Where Slurm has
    started them its job's number comes instead: a requeued job goes on.
    """
    stem = re.sub(r"[^A-Za-z0-9._-]", "-", PurePath(command[0]).stem[:_LONGEST_STEM]).strip("-._") or "job"
    if not alone and step is not None:
        return f"{stem}-{step.job}"
    return f"{stem}-{stamp}" if alone else stem


def with_whole_paths(config: RunConfig, cwd: str) -> RunConfig:
    """Return the configuration with every path absolute: a script may change its folder, and its ranks with it.

    A URL for checkpoints stays as it is.
    """
    given = {name: getattr(config, name) for name in _PATHS}
    whole = {name: str(PurePath(cwd, path)) for name, path in given.items() if path and not is_url(path)}
    return msgspec.structs.replace(config, **whole)


def is_url(checkpoint_dir: str) -> bool:
    """Whether checkpoints go to an object store and not to a folder."""
    return "://" in checkpoint_dir


def as_node(plan: Plan, node: str) -> Plan:
    """Return the plan for a node of another name: a second runner of one line on this machine, one of several nodes."""
    if node == plan.node:
        return plan
    return msgspec.structs.replace(plan, node=node, log_dir=str(PurePath(plan.log_dir).with_name(node)))


def make_plan(config: RunConfig, command: tuple[str, ...], machine: Machine, threads_set: bool) -> Plan:
    """Decide what to start.

    Args:
        config: The effective configuration.
        command: Script (or module, or program) and its arguments.
        machine: What this machine has.
        threads_set: Whether the user has set OMP_NUM_THREADS.

    Raises:
        UsageError: with one sentence, when the pieces can't be put together.
    """
    if not command or not command[0]:
        raise UsageError("nothing to run: give the training script after `--`, as in `megascale-ops run -- train.py`")
    if config.module and (config.wrap or config.no_python):
        raise UsageError("--module can't be combined with --wrap or --no-python: a module is run by Python")
    _check_numbers(config)
    asked = config.nnodes
    config, said = within(config, machine.step)
    min_nodes, max_nodes = parse_nnodes(config.nnodes)
    meeting = meet(config, (min_nodes, max_nodes), machine.is_here, is_shared=machine.step is not None)
    meeting = meeting._replace(said=(*said, *meeting.said))
    nproc = 1 if config.wrap else parse_nproc(config.nproc_per_node, machine)
    job = check_name(
        "job",
        config.job
        or default_job(
            command,
            alone=not _is_named_by_step(config, meeting, machine.step, is_one=asked == BY_STEP),
            stamp=machine.stamp,
            step=machine.step,
        ),
    )
    node = check_name("node", config.node_name or node_name(machine.step, machine.hostname))
    program, arguments = _entry(config, command, machine)
    run_dir = config.run_dir or f"{machine.state_root}/{job}"
    return Plan(
        job=job,
        node=node,
        nproc=nproc,
        min_nodes=min_nodes,
        max_nodes=meeting.max_nodes,
        program=program,
        arguments=arguments,
        run_dir=run_dir,
        checkpoint_dir=config.checkpoint_dir or f"{run_dir}/checkpoints",
        log_dir=_log_dir(config.log_dir or f"{run_dir}/logs", node, meeting.max_nodes),
        # As torchrun: several ranks of one node must not each start a thread for every core.
        threads=1 if nproc > 1 and not threads_set else 0,
        shown_ranks=parse_ranks(config.local_ranks_filter),
        has_gpus=machine.gpus > 0,
        virtual_local_rank=config.virtual_local_rank,
        meeting=meeting,
        master=_master(config, meeting),
    )


def _is_named_by_step(config: RunConfig, meeting: Meeting, step: Step | None, *, is_one: bool) -> bool:
    """Return whether nodes, or lives of one job, have to agree on a name: those that meet, and one that is requeued."""
    is_all_of_step = step is not None and step.nodes == 1 and (step.tasks == 1 or is_one)
    return bool(meeting.controller or (config.requeues and is_all_of_step))


def _check_numbers(config: RunConfig) -> None:
    """Refuse numbers that can't be meant, wherever they were set."""
    if not config.monitor_interval_s > 0.0:
        raise UsageError(
            f"--monitor-interval {config.monitor_interval_s:g} can't be used: give seconds above 0, as 0.1"
        )
    try:
        value_of("max_restarts", config.max_restarts)
    except ValueError as error:
        raise UsageError(f"--max-restarts {config.max_restarts} can't be used: {error} (-1: no limit)") from error


def _log_dir(base: str, node: str, max_nodes: int) -> str:
    """Return where this node's ranks write: of several nodes, whose disk may be one they share, each its own folder."""
    return base if max_nodes == 1 else f"{base}/{node}"


def _master(config: RunConfig, meeting: Meeting) -> tuple[str, int]:
    """Return where rank 0 shall serve the ranks' store, port 0 for the round's own store on a free port.

    Not where another launcher gives ports. Of several nodes the controller chooses the one with rank 0.
    """
    port = config.master_port or meeting.master_port
    if config.wrap or not port:
        return "", 0
    return config.master_addr if meeting.max_nodes == 1 else "", port


def _entry(config: RunConfig, command: tuple[str, ...], machine: Machine) -> tuple[str, tuple[str, ...]]:
    """Program and arguments of one rank."""
    if config.module:
        return machine.python, ("-u", "-m", *command)
    if not config.wrap and not config.no_python and machine.is_python(command[0]):
        # Of a script whose name begins like an option Python would take the name for one.
        script = f"./{command[0]}" if command[0].startswith("-") else command[0]
        return machine.python, ("-u", script, *command[1:])
    return command[0], tuple(command[1:])
