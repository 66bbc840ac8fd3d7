# SPDX-License-Identifier: Apache-2.0
"""A job that is there to be broken: started with folders of its own, observed from outside, removed completely.

Every process that it brings up carries ``MEGASCALE_CHAOS=<mark>`` in its environment, so that each can be found,
at any depth and whatever started it. ``close`` ends them all and removes the black boxes.
"""

import contextlib
import os
import shutil
import signal
import subprocess
import time
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple, Self, TypeVar

import msgspec

from megascale_ops import foreign
from megascale_ops.chaos import leftovers
from megascale_ops.chaos.faults import Fault, Layout
from megascale_ops.chaos.launchers import FT_SETTINGS, WORKLOAD, ours, rival, workload_arguments
from megascale_ops.chaos.relay import Relay
from megascale_ops.errors import MegascaleError
from megascale_ops.link import BlockingLink
from megascale_ops.link.whereabouts import link_of
from megascale_ops.schema.events import Incident, Incidents
from megascale_ops.schema.identity import MOST_ROUND_BYTES, RoundFile

JOB = "chaos"
NODES = ("first", "second")
# 0.1 s between two looks: a tenth of a heartbeat, and a negligible load.
LOOK_S = 0.1
T = TypeVar("T")


class Step(NamedTuple):
    """One line of a rank's own record."""

    wall_s: float
    pid: int
    step: int
    restored: int


class Plan(NamedTuple):
    """How a trial is run; ``check`` raises when the user wants to stop.

    ``shared_gpus`` are those that all ranks have together, which run them by turns; 0: none is shared.
    """

    check: Callable[[], None]
    nproc: int = 4
    rank: int = 1
    launcher: str = "ours"
    ft_launcher: str = "ft_launcher"
    backend: str = "gloo"
    shared_gpus: int = 0

    @property
    def in_words(self) -> str:
        """How many ranks, over what and, where they share GPUs, on how many of these."""
        on = f" on {self.shared_gpus} GPU{'s' * (self.shared_gpus > 1)}" if self.shared_gpus else ""
        return f"{self.nproc} ranks over {self.backend}{on}"


class Job:
    """One run of the workload under one launcher; a context manager."""

    def __init__(self, plan: Plan, fault: Fault, folder: Path) -> None:
        self.plan, self.fault, self.folder = plan, fault, folder
        self.mark = leftovers.new_mark()
        self.box_root = leftovers.box_root(self.mark)
        clean = {
            name: value for name, value in os.environ.items() if not name.startswith(("MEGASCALE_", "TORCHELASTIC"))
        }
        self.env = {
            **clean,
            leftovers.MARK: self.mark,
            "XDG_STATE_HOME": str(folder / "state"),
            "MEGASCALE_BOX_ROOT": str(self.box_root),
            "OMP_NUM_THREADS": "1",
            # Separate: a warm cache would leave nothing to compile, a shared one makes trials wait for each other.
            "TORCHINDUCTOR_CACHE_DIR": str(folder / "inductor"),
            "PYTHONPATH": os.pathsep.join([str(Path(__file__).parents[2]), os.environ.get("PYTHONPATH", "")]).strip(
                ":"
            ),
        }
        if plan.launcher == "ft_launcher":
            self.env["CHAOS_FT_CLIENT"] = "1"
        self.procs: list[subprocess.Popen[bytes]] = []
        self.relay: Relay | None = None
        self._link: BlockingLink | None = None
        self._seen: dict[str, Incident] = {}

    def __enter__(self) -> Self:
        self.folder.mkdir(parents=True, exist_ok=True)
        with contextlib.ExitStack() as undo:
            undo.callback(self.close)
            self.start()
            undo.pop_all()
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    # Starting

    def start(self) -> None:
        """Start everything that the fault's layout needs."""
        if self.plan.launcher != "ours":
            self.spawn(self._rival(), "run.log")
        elif self.fault.layout == "embedded":
            self.spawn(self._run(), "run.log")
        else:
            url = self._controller(self.fault.layout)
            for node in NODES if self.fault.layout == "two_nodes" else NODES[:1]:
                self.spawn(self._run(f"--controller={url}", f"--node={node}", node=node), f"{node}.log")

    def spawn(self, command: list[str], log: str) -> subprocess.Popen[bytes]:
        """Start a program of this job."""
        with (self.folder / log).open("ab") as out:
            proc = subprocess.Popen(
                command,
                env=self.env,
                stdout=out,
                stderr=out,
                stdin=subprocess.DEVNULL,
                start_new_session=True,
            )
        self.procs.append(proc)
        return proc

    def start_again(self) -> None:
        """Start the runner once more, as a user would after it was killed."""
        self.spawn(self._run(), "run.log")

    def _controller(self, layout: Layout) -> str:
        port_file = self.folder / "port"
        run_dir = self.folder / "run"
        listen = [*ours("controller"), "--listen=127.0.0.1:0", f"--port-file={port_file}", f"--run-dir={run_dir}"]
        self.spawn([*listen, f"--store=sqlite:///{self.folder / 'journal.db'}"], "controller.log")
        self.until(port_file.exists, "the controller to serve", 30.0)
        port = int(port_file.read_text())
        self._link = BlockingLink(f"http://127.0.0.1:{port}")
        if layout == "relayed":
            self.relay = Relay(port)
            port = self.relay.port
        return f"http://127.0.0.1:{port}"

    def _run(self, *options: str, node: str = "") -> list[str]:
        nodes = len(NODES) if self.fault.layout == "two_nodes" else 1
        command = [*ours("run"), f"--job={JOB}", f"--nproc-per-node={self.plan.nproc // nodes}", "--quiet"]
        command += [f"--run-dir={self.folder / 'run' / node}", f"--box-root={self.box_root}", *options]
        if self.plan.backend == "nccl":  # collectives run on while Python goes on: only NCCL has the rank that was late
            command.append("--nccl-profiler=on")
        if nodes > 1:
            command.append(f"--nnodes=1:{nodes}")
        for item in self.fault.policy:
            command += ["--policy", item]
        return [*command, "-m", "--", WORKLOAD, *self._arguments()]

    def _rival(self) -> list[str]:
        settings = self.folder / "ft.yaml"
        settings.write_text(FT_SETTINGS)
        own = rival(self.plan.launcher, self.plan.ft_launcher, settings)
        return [*own, f"--nproc-per-node={self.plan.nproc}", "-m", WORKLOAD, *self._arguments()]

    def _arguments(self) -> list[str]:
        return [*workload_arguments(self.fault, self.folder, self.plan.rank), f"--backend={self.plan.backend}"]

    # Looking

    def until(self, answer: Callable[[], T], what: str, deadline_s: float) -> T:
        """Return the first true answer.

        Raises:
            MegascaleError: none came before the deadline.
        """
        end = time.monotonic() + deadline_s
        while True:
            self.plan.check()
            self.poll_incidents()
            found = answer()
            if found:
                return found
            if time.monotonic() > end:
                raise MegascaleError(f"waited {deadline_s:.0f} s in vain for {what}")
            time.sleep(LOOK_S)

    def ended(self) -> bool:
        """Return whether every program that was started has ended (the controller aside, which never does)."""
        first = 1 if self.fault.layout != "embedded" and self.plan.launcher == "ours" else 0
        return all(proc.poll() is not None for proc in self.procs[first:])

    def steps(self) -> dict[int, list[Step]]:
        """Return what every rank has written so far; only whole lines."""
        found: dict[int, list[Step]] = {}
        for path in (self.folder / "steps").glob("*"):
            rows = (line.split() for line in path.read_text().splitlines())
            found[int(path.name)] = [Step(float(r[0]), int(r[1]), int(r[2]), int(r[3])) for r in rows if len(r) == 4]
        return found

    def everyone_at(self, step: int) -> bool:
        """Return whether every rank has finished ``step``."""
        steps = self.steps()
        return len(steps) == self.plan.nproc and all(rows and rows[-1].step >= step for rows in steps.values())

    def struck_at(self) -> float:
        """Return when the first rank suffered the fault (wall clock), 0.0 when none has yet."""
        marks = [path.read_text() for path in (self.folder / "marks").glob(f"{self.fault.name}.*")]
        return min((float(text) for text in marks if text), default=0.0)

    def round_file(self, node: str = "") -> RoundFile | None:
        """Return what a runner has started."""
        for path in (self.box_root / JOB).glob(f"{node or '*'}.round.json"):
            with contextlib.suppress(OSError, *foreign.UNREADABLE):
                return msgspec.json.decode(foreign.read(path, MOST_ROUND_BYTES), type=RoundFile)
        return None

    def poll_incidents(self) -> None:
        """Ask the controller what has happened, and keep it: a run's own controller ends with the run."""
        try:
            if self._link is None:
                self._link = link_of(self.folder / "run")
            for listed in self._link.incidents(JOB).incidents:
                self._seen[listed.id] = listed
        except (OSError, ValueError, MegascaleError):
            return

    def incidents(self) -> list[Incident]:
        """Return what was journaled, oldest first; the newest knowledge of each."""
        return list(self._seen.values())

    def read_journal(self) -> None:
        """Read what the run's own controller wrote in its last moments."""
        if self.plan.launcher != "ours" or self.fault.layout != "embedded":
            self.poll_incidents()
            return
        command = [*ours("incidents"), "--json", f"--run-dir={self.folder / 'run'}"]
        done = subprocess.run(command, env=self.env, capture_output=True, timeout=60, check=False)
        with contextlib.suppress(*foreign.UNREADABLE):
            for listed in msgspec.json.decode(done.stdout or b"{}", type=Incidents).incidents:
                self._seen[listed.id] = listed

    def output(self) -> str:
        """Return what the programs printed."""
        return "\n".join(path.read_text(errors="replace") for path in sorted(self.folder.glob("*.log")))

    # Ending

    def living(self) -> list[int]:
        """Return every process that carries this job's mark."""
        return leftovers.marked(self.mark)

    def close(self) -> None:
        """End everything: in order where it obeys, for certain where it does not; remove the black boxes."""
        if self._link is not None:
            self._link.close()
            self._link = None
        for proc in self.procs[::-1]:
            if proc.poll() is None:
                proc.send_signal(signal.SIGINT)
        end = time.monotonic() + 15.0
        for proc in self.procs[::-1]:
            with contextlib.suppress(subprocess.TimeoutExpired):
                proc.wait(max(0.1, end - time.monotonic()))
        end = time.monotonic() + 10.0
        while (living := self.living()) and time.monotonic() < end:
            for pid in living:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
            time.sleep(0.05)
        for proc in self.procs:
            proc.poll()
        if self.relay is not None:
            self.relay.close()
        shutil.rmtree(self.box_root, ignore_errors=True)
