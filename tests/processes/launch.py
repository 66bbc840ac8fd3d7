# SPDX-License-Identifier: Apache-2.0
"""Start real runs for tests, look at them from outside, and check that they leave nothing behind."""

import json
import os
import shutil
import signal
import subprocess
import time
import uuid
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import TypeVar

import msgspec

from megascale_ops.cli.sources.history import open_history
from megascale_ops.cli.sources.locate import Wanted
from megascale_ops.errors import ControllerUnreachableError, MegascaleError
from megascale_ops.link import BlockingLink
from megascale_ops.link.whereabouts import link_of
from megascale_ops.schema.events import Incident, JobStatus
from megascale_ops.schema.identity import RoundFile
from tests.fakes.servers import free_ports
from tests.processes.warmed import Ahead, ask, env_of_programs, start

SCRIPTS = Path(__file__).parents[1] / "fixtures" / "scripts"
TOY = SCRIPTS / "toy.py"
# Without torch, which costs a rank 2 s of CPU in every round: ranks in lockstep, and independent ranks.
LOCKSTEP = SCRIPTS / "lockstep.py"
PLAIN = SCRIPTS / "plain.py"
# For PYTHONPATH: ranks of a script that is run as it is start without torch's compiler.
SOON = SCRIPTS.with_name("soon")
# For a script that shall train until the test has seen what it needs: `Launch.enough` ends it.
ENDLESS = ("--steps=1000000", "--until-enough")
T = TypeVar("T")
# States of incidents that nothing was done about: a suspicion that came to nothing, a warning, a warning that is over.
PASSING = ("harmless", "watching", "over")
# Deadlines of waits, here and in the tests: several times what a machine needs that is three times slower than a desk.
# A wait ends as soon as what it waits for is there, so a generous one costs nothing when all is well.
PATIENCE_S = 90.0


def until(condition: Callable[[], T | None], what: str, deadline_s: float = PATIENCE_S) -> T:
    """Return the first true answer of ``condition``; fail the test when none comes."""
    end = time.monotonic() + deadline_s
    while time.monotonic() < end:
        answer = condition()
        if answer:
            return answer
        time.sleep(0.05)  # every look costs the machine that the test waits for
    raise AssertionError(f"waited {deadline_s} s in vain: {what}")


def free_port() -> int:
    """Return a port that nobody has, and that no connection gets."""
    return free_ports(1)[0]


def all_have_made(step: int, status: JobStatus) -> bool:
    """Whether every rank of the job's round has finished ``step``: `JobStatus.step` speaks of those that have begun."""
    made = [one.report.progress.step for one in status.ranks if one.report.progress is not None]
    return len(made) == status.world_size and min(made, default=-1) >= step


def acted_upon(incidents: Sequence[Incident]) -> list[Incident]:
    """Return those that something was done about.

    On a busy machine there may be warnings beside them, and suspicions that came to nothing.
    """
    return [one for one in incidents if one.state not in PASSING]


class Launch:
    """One or more runs with a state root and a black-box root of their own.

    Attributes:
        ahead: What a forked runner imports before it begins, for ranks that it then forks.
        is_cold: What is started is a program, and not forked out of a warm parent (``warmed.py``).
    """

    def __init__(self, tmp_path: Path) -> None:
        self.tmp_path = tmp_path
        self.is_cold = False
        self.ahead: Ahead | None = None
        self.state = tmp_path / "state"
        self.box_root = Path("/dev/shm") / f"megascale-test-{uuid.uuid4().hex[:8]}"
        self.env = {
            **env_of_programs(),
            "XDG_STATE_HOME": str(self.state),
            "MEGASCALE_BOX_ROOT": str(self.box_root),
        }
        self.procs: list[subprocess.Popen[bytes]] = []

    def command(
        self, *arguments: str, cwd: Path | None = None, deadline_s: float = 180.0, is_cold: bool = False
    ) -> subprocess.CompletedProcess[str]:
        """Run ``megascale-ops`` to its end; each verb is a program in one test at least."""
        cold = is_cold or self.is_cold
        return ask(arguments, self.env, cwd=cwd, deadline_s=deadline_s, ahead=self.ahead, is_cold=cold)

    def spawn(self, *arguments: str, log: str = "run.log") -> subprocess.Popen[bytes]:
        """Start ``megascale-ops`` in the background; its output goes to ``log``."""
        with (self.tmp_path / log).open("ab") as out:
            proc = start(arguments, self.env, out, ahead=self.ahead, is_cold=self.is_cold)
        self.procs.append(proc)
        return proc

    def run(
        self, *toy: str, options: tuple[str, ...] = (), job: str = "toy", nproc: int = 2, script: Path = TOY
    ) -> subprocess.Popen[bytes]:
        """Start the toy script under the runner."""
        return self.spawn("run", f"--nproc-per-node={nproc}", f"--job={job}", *options, "--", str(script), *toy)

    def enough(self, job: str = "toy") -> None:
        """Let a script that was started with `ENDLESS` come to its end."""
        folder = self.run_dir(job) / "checkpoints"
        folder.mkdir(parents=True, exist_ok=True)
        (folder / "enough").touch()

    def output(self, log: str = "run.log") -> str:
        """Return what has been printed so far."""
        path = self.tmp_path / log
        return path.read_text(errors="replace") if path.exists() else ""

    def run_dir(self, job: str = "toy") -> Path:
        """Return the run folder."""
        return self.state / "megascale-ops" / job

    def controller(self, job: str = "toy") -> dict[str, int | str] | None:
        """Return address and pid of the run's own controller."""
        try:
            found: dict[str, int | str] = json.loads((self.run_dir(job) / "controller.json").read_text())
        except (OSError, ValueError):
            return None
        return found

    def link(self, job: str = "toy") -> BlockingLink:
        """Return a link to the run's own controller, with its token."""
        return link_of(self.run_dir(job))

    def round_file(self, job: str = "toy") -> RoundFile | None:
        """Return what the runner has started, once all ranks of a round run."""
        for path in (self.box_root / job).glob("*.round.json"):
            with suppress(FileNotFoundError):  # the run has ended since
                found = msgspec.json.decode(path.read_bytes(), type=RoundFile)
                if found.ranks:
                    return found
        return None

    def pid(self, rank: int, job: str = "toy") -> int:
        """Return the pid of a rank that runs now."""
        found = until(lambda: self.round_file(job), "the ranks to start")
        return next(process.pid for process in found.ranks if process.rank == rank)

    def status(self, job: str = "toy") -> JobStatus | None:
        """Return the controller's view of the job, or None while it does not answer."""
        try:
            with self.link(job) as link:
                return next((status for status in link.status(job).jobs if status.job == job), None)
        except MegascaleError:
            return None

    def until_step(self, step: int, job: str = "toy", deadline_s: float = 120.0) -> JobStatus:
        """Wait until every rank of the job has finished ``step``."""

        def reached() -> JobStatus | None:
            status = self.status(job)
            return status if status is not None and all_have_made(step, status) else None

        return until(reached, f"step {step}; output so far:\n{self.output()}", deadline_s)

    def until_more_steps(self, steps: int, job: str = "toy") -> JobStatus:
        """Wait until the job has finished so many steps more than now."""
        now = until(lambda: self.status(job), "the controller to answer")
        return self.until_step(now.step + steps, job)

    def incidents(self, job: str = "toy", where: str = "") -> list[Incident]:
        """Return the journaled incidents of a run, from its controller or after its end from its journal.

        ``where`` is the address to ask instead: a controller of its own. In this process, by the code of the verbs
        `incidents` and `why`: as programs they cost 0.7 s of CPU, which a wait that asks again and again takes away
        from what it waits for.
        """
        wanted = Wanted(where, job, "" if where else str(self.run_dir(job)))

        def told() -> tuple[list[Incident]] | None:
            try:
                with open_history(wanted, None) as history:
                    return ([history.incident(listed.id) for listed in history.incidents(job).incidents],)
            except ControllerUnreachableError:  # it has just been killed: the next one answers, or the journal
                return None

        return until(told, f"somebody to tell of incidents; output so far:\n{self.output()}")[0]

    def the_incident(self, job: str = "toy", where: str = "") -> Incident:
        """Return the only incident that was acted upon."""
        found = self.incidents(job, where)
        told = "\n".join(f"{one.id} {one.state}: {one.verdict and one.verdict.reason}" for one in found)
        assert len(acted_upon(found)) == 1, f"one incident to be acted upon:\n{told}\n{self.output()}"
        return acted_upon(found)[0]

    def finish(self, proc: subprocess.Popen[bytes], deadline_s: float = 360.0) -> int:
        """Wait for a run to end and return its exit code."""
        try:
            return proc.wait(deadline_s)
        except subprocess.TimeoutExpired:
            raise AssertionError(f"still running after {deadline_s} s:\n{self.output()}") from None

    def close(self) -> None:
        """Stop what a failed test left running."""
        for proc in self.procs:
            if proc.poll() is None:
                proc.send_signal(signal.SIGTERM)
        for proc in self.procs:
            try:
                proc.wait(15)
            except subprocess.TimeoutExpired:
                os.killpg(proc.pid, signal.SIGKILL)
                proc.wait(5)
        for pid in self.living():
            with suppress(ProcessLookupError):  # it has ended since
                os.kill(pid, signal.SIGKILL)
        shutil.rmtree(self.box_root, ignore_errors=True)

    def living(self) -> list[int]:
        """Return every process that still carries this test's state root in its environment."""
        mark = f"XDG_STATE_HOME={self.state}".encode()
        found = []
        for path in Path("/proc").iterdir():
            if path.name.isdigit() and int(path.name) != os.getpid():
                try:
                    if mark in (path / "environ").read_bytes().split(b"\0"):
                        found.append(int(path.name))
                except OSError:
                    continue
        return found

    def assert_nothing_left(self) -> None:
        """No process, no file in shared memory but what a node's daemon remembers of the kernel's log."""
        until(lambda: not self.living(), "all processes to end")
        left = [path for path in self.box_root.rglob("*") if not path.match(".kernel-log-*.json")]
        assert not left, left
