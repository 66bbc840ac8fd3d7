# SPDX-License-Identifier: Apache-2.0
"""This process as a writer of checkpoints, and whether another one of this machine still lives."""

import os
import signal
import socket
import time
import uuid
from contextlib import suppress
from pathlib import Path

from megascale_ops.checkpoint.writers import Life, Process, Writer

# The names of schema.environment; schema and checkpoint share a floor and do not import each other.
_JOB, _JOB_ID, _ROUND, _NODE = "MEGASCALE_JOB", "MEGASCALE_JOB_ID", "MEGASCALE_ROUND", "MEGASCALE_NODE"
_PF_EXITING = 0x4  # include/linux/sched.h: the process has begun to die and runs no more of its program
_KILLED = 1 << (signal.SIGKILL - 1)  # its bit among the signals that are pending


def this_process() -> Process:
    """The identity of this process."""
    boot_id = pid_namespace = ""
    with suppress(OSError):  # no /proc: other writers can't check this process, and the lease alone counts
        boot_id = Path("/proc/sys/kernel/random/boot_id").read_text(encoding="ascii").strip()
        pid_namespace = str(Path("/proc/self/ns/pid").readlink())
    stat = _read_stat(os.getpid())
    return Process(os.uname().nodename, boot_id, pid_namespace, os.getpid(), stat[3] if stat else 0)


def describe_writer(rank: int, world_size: int) -> Writer:
    """This process as the one that leads a save of ``world_size`` ranks."""
    environ = os.environ
    job_id, number = environ.get(_JOB_ID, ""), environ.get(_ROUND, "")
    round_ = int(number) if number.isascii() and number.isdigit() else 0
    process = this_process()
    return Writer(
        process=process,
        token=uuid.uuid4().hex,
        node=environ.get(_NODE) or socket.gethostname(),
        rank=rank,
        since_wall_s=time.time(),
        job=environ.get(_JOB) or environ.get("TORCHELASTIC_RUN_ID", ""),
        job_id=job_id,
        round=round_,
        incarnation=_incarnation(process, job_id, round_) if world_size > 1 else "",
    )


def _incarnation(process: Process, job_id: str, round_: int) -> str:
    """What all ranks of one process group, and no others, have in common.

    With a controller the round of the job; else the address at which they met, which only one job at a time can serve.
    A loopback address counts for one machine only.
    """
    if job_id:
        return f"{job_id}/{round_}"
    addr, port = os.environ.get("MASTER_ADDR", ""), os.environ.get("MASTER_PORT", "")
    if not addr or not port:
        return ""
    is_loopback = addr == "localhost" or addr.startswith("127.") or addr == "::1"
    return f"{addr}:{port}" + (f"@{process.host}/{process.boot_id}" if is_loopback else "")


def life_of(process: Process, me: Process) -> Life:
    """Whether another process lives, by this machine's kernel; ``unknown`` where it can't know."""
    if not process.is_visible_to(me) or process.pid <= 0:
        return "unknown"
    stat = _read_stat(process.pid)
    if stat is None:
        return _life_by_signal(process.pid)
    state, flags, threads, start_ticks, pending = stat
    if start_ticks != process.start_ticks:
        return "dead"  # its pid was given to another
    if threads <= 1 and state in "ZXx":
        return "dead"
    # The kernel frees 140 GB in seconds, and a restart that follows a SIGKILL at once comes in between; on a busy
    # machine also before the process has been given a core to die on.
    return "dying" if flags & _PF_EXITING or pending & _KILLED else "alive"


def _life_by_signal(pid: int) -> Life:
    """Ask by signal 0: /proc may hide the processes of other users (hidepid)."""
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return "dead"
    except (PermissionError, OverflowError):
        return "unknown"
    return "unknown"


def _read_stat(pid: int) -> tuple[str, int, int, int, int] | None:
    """State, flags, number of threads, start ticks and pending signals; None: not known.

    proc_pid_stat(5): fields 3, 9, 20, 22, 31. The last are those of its first thread, and SIGKILL is given to each.
    """
    with suppress(OSError, ValueError, IndexError):
        text = Path(f"/proc/{pid}/stat").read_text(encoding="utf-8", errors="replace")
        fields = text[text.rindex(")") + 2 :].split()
        return fields[0], int(fields[6]), int(fields[17]), int(fields[19]), int(fields[28])
    return None
