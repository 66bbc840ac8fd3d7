# SPDX-License-Identifier: Apache-2.0
"""What is done to a job from outside: signals, starved cores, damaged checkpoints, a full disk, a cut line.

Each injector takes the job, does its deed and returns; what it left behind (a burning process, a mount) it undoes in
``undo``, which the trial calls once the fault has been named or the trial is over.
"""

import contextlib
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import psutil

from megascale_ops.chaos import counterpart
from megascale_ops.chaos.job import NODES, Job
from megascale_ops.checkpoint.storage import candidates
from megascale_ops.errors import MegascaleError
from megascale_ops.schema import environment

Undo = Callable[[], None]

# 8 s: far beyond the grace of a stopped process (1.5 s) and the floor of patience (5 s).
DEBUGGED_S = 8.0
CUT_S = 8.0
# Of three processes on a core one gets a third, which is about what a rank that mostly waits uses: no rank is slow.
BUSY = 8


def inject(job: Job) -> Undo:
    """Do the job's fault now; return what undoes it."""
    return INJECTORS[job.fault.name](job)


def _nothing() -> None:
    """Leave everything as it is."""


def pid_of(job: Job, rank: int) -> int:
    """Return the process that is this rank now."""
    return job.steps()[rank][-1].pid


def _signal_to_rank(number: signal.Signals) -> Callable[[Job], Undo]:
    def send(job: Job) -> Undo:
        os.kill(pid_of(job, job.plan.rank), number)
        return _nothing

    return send


def _kill_companion(name: str) -> Callable[[Job], Undo]:
    def kill(job: Job) -> Undo:
        found = job.round_file()
        if found is None:
            raise MegascaleError("the runner has written no round file")
        os.kill(int(getattr(found, f"{name}_pid")), signal.SIGKILL)
        if name == "runner":
            time.sleep(1.0)
            job.start_again()
        return _nothing

    return kill


def _kill_node(job: Job) -> Undo:
    by_name = {f"--node={NODES[1]}", f"--node-name={NODES[1]}"}
    for pid in job.living():
        with contextlib.suppress(psutil.Error, OSError):  # it has ended since
            found = psutil.Process(pid)
            if found.environ().get(environment.NODE) == NODES[1] or not by_name.isdisjoint(found.cmdline()):
                found.kill()
    return _nothing


def burn(core: int, env: dict[str, str]) -> subprocess.Popen[bytes]:
    """Start a process that does nothing but use one core."""
    code = f"import os\nos.sched_setaffinity(0, {{{core}}})\nwhile True: pass"
    return subprocess.Popen([sys.executable, "-S", "-c", code], env=env, start_new_session=True)


def starve(pid: int, env: dict[str, str]) -> Undo:
    """Bind a process to one core that others keep busy."""
    core = max(os.sched_getaffinity(pid))
    for thread in (Path("/proc") / str(pid) / "task").iterdir():
        os.sched_setaffinity(int(thread.name), {core})
    burning = [burn(core, env) for _ in range(BUSY)]

    def stop() -> None:
        for proc in burning:
            proc.kill()
            proc.wait(5.0)

    return stop


def _starve(job: Job) -> Undo:
    own = pid_of(job, job.plan.rank)
    core = max(os.sched_getaffinity(own))
    rest = os.sched_getaffinity(own) - {core}
    for rank, rows in job.steps().items():
        if rank != job.plan.rank and rest:
            for thread in (Path("/proc") / str(rows[-1].pid) / "task").iterdir():
                os.sched_setaffinity(int(thread.name), rest)
    return starve(own, job.env)


def newest_checkpoint(job: Job) -> Path:
    """Return the newest whole checkpoint, of at least two.

    Raises:
        MegascaleError: there are fewer.
    """
    found = candidates(job.folder / "checkpoints")
    if len(found) < 2:
        raise MegascaleError(f"only {len(found)} checkpoints were written before the fault")
    return found[0]


def _damage(how: Callable[[Path, Path], None]) -> Callable[[Job], Undo]:
    def damage(job: Job) -> Undo:
        newest = newest_checkpoint(job)
        before = candidates(job.folder / "checkpoints")[1]
        how(newest, before)
        (job.folder / "damaged").write_text(newest.name.removeprefix("step-"))
        os.kill(pid_of(job, job.plan.rank), signal.SIGKILL)
        return _nothing

    return damage


def _largest(folder: Path) -> Path:
    return max(folder.glob("*.tensors"), key=lambda path: path.stat().st_size)


def _tear(newest: Path, _before: Path) -> None:
    path = _largest(newest)
    os.truncate(path, path.stat().st_size // 2)


def _flip(newest: Path, _before: Path) -> None:
    path = _largest(newest)
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes(data)


def _lose(newest: Path, _before: Path) -> None:
    _largest(newest).unlink()


def _make_stale(newest: Path, before: Path) -> None:
    shutil.rmtree(newest)
    shutil.copytree(before, newest)


def prepare_disk(job: Job) -> Undo:
    """Give the checkpoints a disk of 16 MB of their own (a tmpfs; needs root).

    Raises:
        MegascaleError: it can't be mounted here.
    """
    folder = job.folder / "checkpoints"
    folder.mkdir(parents=True)
    mount = ["mount", "-t", "tmpfs", "-o", "size=16m", "chaos", str(folder)]
    done = subprocess.run(mount, capture_output=True, text=True, timeout=20, check=False)
    if done.returncode:
        raise MegascaleError(f"no disk of its own can be mounted: {done.stderr.strip()}")

    def unmount() -> None:
        subprocess.run(["umount", "-l", str(folder)], capture_output=True, timeout=20, check=False)

    return unmount


def _fill_disk(job: Job) -> Undo:
    ballast = job.folder / "checkpoints" / "ballast"
    try:
        with ballast.open("wb") as out:
            while True:
                out.write(bytes(1 << 16))
                out.flush()
    except OSError:
        pass
    return lambda: ballast.unlink(missing_ok=True)


def _cut(job: Job) -> Undo:
    assert job.relay is not None
    job.relay.cut()
    time.sleep(CUT_S)
    job.relay.mend()
    return _nothing


def _impersonate(job: Job) -> Undo:
    pid = pid_of(job, job.plan.rank)
    env = psutil.Process(pid).environ()
    env.pop(environment.CLAIMED, None)
    code = "import time\nfrom megascale_ops.recorder import recorder\nfor _ in range(600):\n"
    code += "    recorder.step()\n    time.sleep(0.1)"
    double = subprocess.Popen([sys.executable, "-c", code], env=env, start_new_session=True, stderr=subprocess.DEVNULL)

    def stop() -> None:
        double.kill()
        double.wait(5.0)

    return stop


def debug(pid: int, seconds: float) -> None:
    """Stop every thread of a process as a debugger does (state t), then let go of it.

    Raises:
        MegascaleError: the system does not allow it.
    """
    try:
        counterpart.debug(pid, seconds)
    except OSError as error:
        raise MegascaleError(f"no debugger may be attached here: {error.strerror}") from error


def after_mark(job: Job) -> None:
    """Do what an inside fault needs from outside once its rank has declared it."""
    if job.fault.name == "debugger_attached":
        time.sleep(0.3)
        debug(pid_of(job, job.plan.rank), DEBUGGED_S)
        (job.folder / "debugged").touch()


INJECTORS: dict[str, Callable[[Job], Undo]] = {
    "sigkill": _signal_to_rank(signal.SIGKILL),
    "sigterm": _signal_to_rank(signal.SIGTERM),
    "sigstop": _signal_to_rank(signal.SIGSTOP),
    "node_killed": _kill_node,
    "cpu_starved": _starve,
    "checkpoint_torn": _damage(_tear),
    "checkpoint_flipped": _damage(_flip),
    "checkpoint_missing": _damage(_lose),
    "checkpoint_stale": _damage(_make_stale),
    "disk_full": _fill_disk,
    "agent_killed": _kill_companion("agent"),
    "controller_killed": _kill_companion("controller"),
    "runner_killed": _kill_companion("runner"),
    "partition_controller": _cut,
    "duplicate_rank": _impersonate,
}
