# SPDX-License-Identifier: Apache-2.0
"""A job of another user on this node, honest or not: his folders, his processes, and what he writes into them.

Only root can make one: only root may start processes as another user.
"""

import os
import shutil
import signal
import subprocess
import tempfile
from collections.abc import Iterator
from contextlib import closing, contextmanager
from pathlib import Path

import msgspec
import pytest
from megascale_agents.collectors import process

from megascale_ops.blackbox.records import BoxIdentity
from megascale_ops.blackbox.writer import BoxWriter
from megascale_ops.schema.environment import BEAT_THREAD
from megascale_ops.schema.identity import RankProcess, RoundFile
from megascale_ops.schema.version import MESSAGE_VERSION

NOBODY = 65534
NODE = "node-a"
# What faulthandler does on SIGUSR1, by a shell: any user can run that, where our Python lies in a folder of root's. Its
# one thread bears the name of the recorder's, which is the one that takes the signal.
ANSWERS = rf"""
printf {BEAT_THREAD} > /proc/$$/comm
exec 3>>"$0/0.stacks"
trap 'printf "Current thread 0x1 (most recent call first):\n  File \"train.py\", line 6 in inner\n" >&3' USR1
echo "Segmentation fault" >&2
while :; do sleep 0.05; done
"""
SLEEPS = "while :; do sleep 600; done"

needs_root = pytest.mark.skipif(os.geteuid() != 0, reason="only root can start processes of another user")


@contextmanager
def open_folder() -> Iterator[Path]:
    """Make a folder that every user can reach, as pytest's own are not, and remove it."""
    folder = Path(tempfile.mkdtemp(prefix="megascale-foreign-"))
    folder.chmod(0o755)
    try:
        yield folder
    finally:
        shutil.rmtree(folder)


def as_user(*command: str, uid: int = NOBODY, stderr: int | None = None) -> "subprocess.Popen[bytes]":
    """Start a program as another user, in a session of its own."""
    return subprocess.Popen(
        command, user=uid, group=uid, extra_groups=[], start_new_session=True, stderr=stderr, cwd="/"
    )


def sleeper() -> "subprocess.Popen[bytes]":
    """Start a process of our own that does nothing."""
    return subprocess.Popen(["sleep", "600"], start_new_session=True)


def ticks_of(pid: int) -> int:
    """Return when a process started."""
    return process.read_once(pid).start_ticks


class ForeignJob:
    """A job of user ``uid`` below a box root (``boxes`` in the folder, or one of his own), with a runner of his."""

    def __init__(self, folder: Path, job: str, uid: int = NOBODY, root: Path | None = None) -> None:
        self.job = job
        self.uid = uid
        self.root = root or folder / "boxes"
        self.folder = self.root / job
        self.run_dir = folder / f"run-{job}"
        self.stderr = self.run_dir / "stderr.log"
        self._scratch = folder / "scratch" / job
        self.root.mkdir(mode=0o755, exist_ok=True)
        for made in (self.folder, self.run_dir):
            made.mkdir(mode=0o700)
            self.give(made)
        self.started = [as_user("sleep", "600", uid=uid)]
        self.runner = self.started[0]

    def give(self, path: Path) -> Path:
        """Make the user the owner of a file, of a link itself."""
        os.chown(path, self.uid, self.uid, follow_symlinks=False)
        return path

    def start_rank(self, script: str = ANSWERS) -> RankProcess:
        """Start rank 0."""
        with self.stderr.open("ab") as stderr:
            child = as_user("sh", "-c", script, str(self.folder), uid=self.uid, stderr=stderr.fileno())
        self.give(self.stderr)
        self.started.append(child)
        return self.names(child.pid)

    def names(self, pid: int, *, start_ticks: int = 0) -> RankProcess:
        """Say that a process is rank 0."""
        return RankProcess(0, 0, pid, start_ticks or ticks_of(pid), "", str(self.stderr))

    def write_round(self, *ranks: RankProcess) -> None:
        """Write the round file as a runner does."""
        file = RoundFile(
            version=MESSAGE_VERSION,
            job=self.job,
            node=NODE,
            round=1,
            runner_pid=self.runner.pid,
            runner_start_ticks=ticks_of(self.runner.pid),
            run_dir=str(self.run_dir),
            ranks=ranks,
        )
        beside = self.folder / "beside"
        beside.write_bytes(msgspec.json.encode(file))
        self.give(beside).replace(self.folder / f"{NODE}.round.json")

    def make_box(self, pid: int, rank: int = 0) -> None:
        """Make a black box that names a process; the writer makes its own user's, so elsewhere."""
        identity = BoxIdentity(
            job=self.job, node=NODE, rank=rank, local_rank=rank, world_size=1, round=1,
            pid=pid, start_ticks=ticks_of(pid),
        )  # fmt: skip
        with closing(BoxWriter.create(self._scratch, identity)) as box:
            box.set_state("running")
        beside = self.folder / "beside"
        beside.write_bytes((self._scratch / f"{rank}.box").read_bytes())
        self.give(beside).replace(self.folder / f"{rank}.box")

    def close(self) -> None:
        """Leave nothing running."""
        for child in self.started:
            if child.poll() is None:
                os.killpg(child.pid, signal.SIGKILL)
            child.wait()
