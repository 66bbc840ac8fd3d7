# SPDX-License-Identifier: Apache-2.0
"""The demo's run, seen from outside: its controller's answers, its ranks' process ids, its loss."""

import re
import shutil
import signal
import subprocess
import time
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple, TypeVar

import msgspec

from megascale_ops.cli.terminal.interrupt import CtrlC
from megascale_ops.errors import MegascaleError
from megascale_ops.link.whereabouts import link_of
from megascale_ops.schema.events import Incident, JobStatus
from megascale_ops.schema.identity import RoundFile

if TYPE_CHECKING:
    from megascale_ops.link import BlockingLink


_LINE = re.compile(r"step (\d+) loss ([\d.]+)")
# 0.2 s: five looks a second show progress without taking the processor from the ranks.
_LOOK_S = 0.2
T = TypeVar("T")


class Loss(NamedTuple):
    """One printed line of rank 0."""

    round: int
    step: int
    value: float


class Stage:
    """A run that was started with ``--job=demo`` in ``folder``."""

    def __init__(self, proc: subprocess.Popen[bytes], folder: Path, box_root: Path, ctrl_c: CtrlC) -> None:
        self.wake = folder / "wake"  # the file that wakes the bug of ``script``
        self._proc = proc
        self._folder = folder
        self._box_root = box_root
        self._ctrl_c = ctrl_c
        self._link: BlockingLink | None = None
        self._status: JobStatus | None = None

    def wait(self, condition: Callable[[], T], what: str, deadline_s: float, progress: Callable[["Stage"], None]) -> T:
        """Return the first true answer of ``condition``, showing progress meanwhile.

        Raises:
            KeyboardInterrupt: Ctrl-C has come.
            MegascaleError: the run ended, or no such answer came before the deadline.
        """
        end = time.monotonic() + deadline_s
        while time.monotonic() < end:
            self._ctrl_c.check()
            self._status = self._ask()
            answer = condition()
            if answer:
                return answer
            if self._proc.poll() is not None:
                raise MegascaleError(f"the run ended while the demo waited for {what}:\n{self.last_lines()}")
            progress(self)
            time.sleep(_LOOK_S)
        raise MegascaleError(f"the demo waited {deadline_s:.0f} s in vain for {what}:\n{self.last_lines()}")

    def last_lines(self) -> str:
        """Return the end of what the run printed."""
        return "\n".join((self._folder / "run.log").read_text(errors="replace").splitlines()[-8:])

    def _ask(self) -> JobStatus | None:
        try:
            if self._link is None:
                self._link = link_of(self._folder / "run")
            return next(iter(self._link.status("demo").jobs), None)
        except (OSError, ValueError, MegascaleError):
            return None

    @property
    def status(self) -> JobStatus | None:
        """What the controller said last."""
        return self._status

    def step(self) -> int:
        """Return the newest step that every rank has finished; -1 before the first."""
        return self._status.step if self._status is not None else -1

    def useful_ratio(self) -> float:
        """Return the share of wall time that was useful."""
        return self._status.useful_ratio if self._status is not None else -1.0

    def incidents(self) -> list[Incident]:
        """Return the incidents so far, whole."""
        if self._link is None:
            return []
        try:
            return [self._link.incident(listed.id) for listed in self._link.incidents("demo").incidents]
        except MegascaleError:
            return []

    def pid(self, rank: int) -> int:
        """Return the pid of a rank that runs now."""
        (path,) = (self._box_root / "demo").glob("*.round.json")
        found = msgspec.json.decode(path.read_bytes(), type=RoundFile)
        return next(process.pid for process in found.ranks if process.rank == rank)

    def losses(self) -> list[Loss]:
        """Return what rank 0 has printed, over all rounds."""
        found = []
        logs = self._folder / "run" / "logs"
        for path in sorted(logs.glob("round-*/rank-0/stdout.log"), key=lambda p: int(p.parts[-3].split("-")[1])):
            number = int(path.parts[-3].split("-")[1])
            found += [
                Loss(number, int(step), float(loss)) for step, loss in _LINE.findall(path.read_text(errors="replace"))
            ]
        return found

    def stop(self) -> None:
        """End the run as Ctrl-C would."""
        if self._link is not None:
            self._link.close()
        if self._proc.poll() is None:
            self._proc.send_signal(signal.SIGINT)
            try:
                self._proc.wait(20.0)
            except subprocess.TimeoutExpired:
                self._proc.kill()
                self._proc.wait(5.0)
        shutil.rmtree(self._box_root, ignore_errors=True)
