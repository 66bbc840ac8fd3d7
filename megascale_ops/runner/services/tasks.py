# SPDX-License-Identifier: Apache-2.0
"""Several tasks of a Slurm step on one node: the first is the run, and has the cores of all; the others wait for it.

They know each other as children of one slurmstepd, by the variables that it has started them with.
"""

import logging
import os
import select
import signal
import time
from collections.abc import Iterator, Mapping
from contextlib import suppress
from pathlib import Path

import psutil

log = logging.getLogger(__name__)

# 30 s: slurmstepd starts the tasks of a node within milliseconds of each other.
_SIBLINGS_S = 30.0
_LOOK_S = 0.1
# What a step's tasks are sent with the run that they wait for, which takes care of it.
_NOT_OURS = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2)


def siblings(environ: Mapping[str, str]) -> Iterator[tuple[int, int]]:
    """Yield number on the node and process id of each task of this step that runs here, this one too."""
    with suppress(psutil.Error, ValueError):
        for process in psutil.Process(int(environ.get("SLURM_TASK_PID", ""))).parent().children():  # type: ignore[union-attr]  # every task has slurmstepd
            with suppress(psutil.Error, ValueError, KeyError):
                theirs = process.environ()
                if all(theirs.get(name) == environ.get(name) for name in ("SLURM_JOB_ID", "SLURM_STEP_ID")):
                    yield int(theirs["SLURM_LOCALID"]), process.pid


def stand_by(environ: Mapping[str, str]) -> int:
    """Wait until the first task of this node has ended; return 0, for its exit code is its own.

    A task that ended before would have srun end all, with ``--wait``; and one that dies of a signal which was meant for
    the run, with ``--kill-on-bad-exit``.
    """
    for number in _NOT_OURS:
        signal.signal(number, signal.SIG_IGN)
    deadline_s = time.monotonic() + _SIBLINGS_S
    while (first := dict(siblings(environ)).get(0)) is None:
        if time.monotonic() > deadline_s:
            log.warning("the first task of this node, which starts this task's rank, is not to be seen from here")
            return 0
        time.sleep(_LOOK_S)
    with suppress(ProcessLookupError):
        handle = os.pidfd_open(first)
        waits = select.poll()
        waits.register(handle, select.POLLIN)
        waits.poll()  # as long as the run lasts: both end with their slurmstepd
        os.close(handle)
    return 0


def take_all_cores(environ: Mapping[str, str], tasks: int) -> None:
    """Let this process use the cores of all tasks of its node, where Slurm has bound each to its own.

    Args:
        environ: This task's.
        tasks: How many run on this node.
    """
    deadline_s = time.monotonic() + _SIBLINGS_S
    while len(pids := [pid for _, pid in siblings(environ)]) < tasks and time.monotonic() < deadline_s:
        if not Path("/proc", environ.get("SLURM_TASK_PID", "-")).exists():
            return  # in a container with process ids of its own
        time.sleep(_LOOK_S)
    mine = os.sched_getaffinity(0)
    cores = set(mine)
    for pid in pids:
        with suppress(OSError):
            cores |= os.sched_getaffinity(pid)
    if cores == mine:
        return
    try:
        os.sched_setaffinity(0, cores)
    except OSError as error:
        log.warning("the ranks have the %d cores of this task, not those of all tasks: %s", len(mine), error)
