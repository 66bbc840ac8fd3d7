# SPDX-License-Identifier: Apache-2.0
"""The real controller under the heartbeats of thousands of agents: seconds of its CPU, memory, and where it bends.

Wall-clock figures on a shared machine say little, so the unit is the CPU time of the controller's process, by thread;
waits are told with the load at which they came. Agents and controller run on the same machine. Phases, in this order:

- ``join``: every node's runner joins, each job's after the other's. ``begin``: each job's join and first in turn.
- ``first``: every agent's first heartbeat, which tells everything, as fast as they are taken.
- ``steady``: heartbeats each ``--every`` seconds, spread evenly, every step told.
- ``idle``: no heartbeat comes; what remains is the tick.
- ``scrape``: Prometheus asks for the page, twice.
- ``restart``: SIGKILL, a new controller on the same journal, every agent comes back at once and tells everything.
- ``hang``: nothing moves any more; all nodes are asked for evidence and give it, until the verdict or for ``--hang``
  seconds.

    python benchmarks/load/load.py --nodes 1536
    python benchmarks/load/load.py --nodes 100000 --jobs 8 --every 64 --phases begin,steady,scrape
"""

import argparse
import os
import resource
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from fleet import NPROC, Fleet, Lines

PHASES = ("join", "first", "steady", "idle", "scrape", "restart", "hang")
_SERVE = """
import sys
from pathlib import Path
from megascale_ops.controller.config import ControllerConfig
from megascale_ops.controller.main import serve
folder, listen, parent = Path(sys.argv[1]), sys.argv[2], int(sys.argv[3])
serve(ControllerConfig(listen=listen, store=f"sqlite:///{folder}/ops.db", port_file=folder / "port",
                       exit_with_parent=parent))
"""
_TICKS = os.sysconf("SC_CLK_TCK")
# 200 descriptors are the generator's own and the controller's own.
_KEPT = 200


class Controller:
    """The process under load."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self.port = 0
        self.process = self._start("127.0.0.1:0")

    def _start(self, listen: str) -> subprocess.Popen[bytes]:
        port_file = self._folder / "port"
        port_file.unlink(missing_ok=True)
        log = (self._folder / "log").open("ab")
        process = subprocess.Popen(
            [sys.executable, "-c", _SERVE, str(self._folder), listen, str(os.getpid())], stderr=log, stdout=log
        )
        deadline_s = time.monotonic() + 300
        while not port_file.exists():
            assert process.poll() is None, (self._folder / "log").read_text()
            assert time.monotonic() < deadline_s, "the controller does not come up"
            time.sleep(0.02)
        self.port = int(port_file.read_text())
        return process

    def restart(self) -> None:
        """SIGKILL, and a new one at the same address."""
        self.process.send_signal(signal.SIGKILL)
        self.process.wait(30)
        self.process = self._start(f"127.0.0.1:{self.port}")

    def cpu_s(self) -> dict[str, float]:
        """Return CPU seconds by thread; "all": of the process, with threads that have ended."""
        found = {"all": _cpu_s(Path(f"/proc/{self.process.pid}/stat"))}
        for task in Path(f"/proc/{self.process.pid}/task").iterdir():
            name = "loop" if task.name == str(self.process.pid) else (task / "comm").read_text().strip()
            found[name] = found.get(name, 0.0) + _cpu_s(task / "stat")
        return found

    def memory_mb(self) -> float:
        """Return what is resident now."""
        pages = int(Path(f"/proc/{self.process.pid}/statm").read_text().split()[1])
        return pages * os.sysconf("SC_PAGE_SIZE") / 1e6

    def journal_mb(self) -> float:
        """Return what the journal's files take."""
        return sum(one.stat().st_size for one in self._folder.glob("ops.db*")) / 1e6

    def descriptors(self) -> int:
        """Return how many it has open."""
        return len(list(Path(f"/proc/{self.process.pid}/fd").iterdir()))


def _cpu_s(stat: Path) -> float:
    fields = stat.read_text(encoding="ascii", errors="replace").rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / _TICKS


class Run:
    """The phases, and their table."""

    def __init__(self, options: argparse.Namespace, controller: Controller) -> None:
        self.options, self.controller = options, controller
        self.fleet = Fleet(options.nodes, options.jobs, options.step, options.every)
        self.lines = self._lines()

    def _lines(self) -> Lines:
        _soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
        return Lines(("127.0.0.1", self.controller.port), min(self.options.nodes, hard - _KEPT))

    @contextmanager
    def measured(self, phase: str, lines: Lines | None = None) -> Iterator[dict[str, object]]:
        """Print what a phase took."""
        lines = self.lines if lines is None else lines
        lines.waits_s.clear()
        before, began_s, answered = self.controller.cpu_s(), time.monotonic(), lines.answered
        memory, journal = self.controller.memory_mb(), self.controller.journal_mb()
        more: dict[str, object] = {}
        yield more
        wall_s, count = time.monotonic() - began_s, lines.answered - answered
        cpu = {name: after - before.get(name, 0.0) for name, after in self.controller.cpu_s().items()}
        threads = ", ".join(f"{name} {spent:.2f}" for name, spent in cpu.items() if name != "all" and spent >= 0.05)
        waits = sorted(lines.waits_s)
        told = [f"{wall_s:.1f} s", f"CPU {cpu['all']:.2f} s ({threads})", f"{cpu['all'] / wall_s:.1%} of a core"]
        if count:
            told += [
                f"{count:,} answers",
                f"{count / wall_s:,.0f} a second",
                f"{cpu['all'] / count * 1e6:,.0f} us each",
            ]
            told.append(f"p50 {statistics.median(waits) * 1e3:.1f} p99 {waits[int(len(waits) * 0.99)] * 1e3:.0f} ms")
        told.append(f"memory {memory:,.0f} -> {self.controller.memory_mb():,.0f} MB")
        told.append(f"journal {journal:,.1f} -> {self.controller.journal_mb():,.1f} MB")
        told += [f"{name} {value}" for name, value in more.items()]
        refused = (
            f"refused {lines.refused}, closed {lines.closed}, said again {lines.again}, not connected {lines.failed}"
        )
        if lines.refused or lines.closed or lines.failed:
            told.append(refused)
        load = Path("/proc/loadavg").read_text().split()[0]
        print(f"| {self.options.nodes:,} | {phase} | {' | '.join(told)} | load {load} |", flush=True)

    def _nodes_of(self, job: int) -> range:
        size = self.options.nodes // self.options.jobs
        return range(job * size, (job + 1) * size)

    def join(self) -> None:
        """Let all nodes join."""
        for job in range(self.options.joined or self.options.jobs):
            self._join(job)

    def begin(self) -> None:
        """Let each job's nodes join, and its agents tell everything, before the next job's."""
        for job in range(self.options.jobs):
            if job < (self.options.joined or self.options.jobs):
                self.lines.hang_up()  # there may be no room for both
                self._join(job)
            with self.measured(f"first of job {job}"):
                self._all_at_once(self._nodes_of(job))

    def _join(self, job: int) -> None:
        lines = self._lines()
        with self.measured(f"join of job {job}", lines):
            for node in self._nodes_of(job):
                lines.ask(node, *self.fleet.join(node))
                lines.look(0.0)
            lines.until_answered(600)
        lines.hang_up()

    def _beat(self, node: int) -> None:
        body = self.fleet.beat(node)
        self.lines.ask(node, "/v1/heartbeat", body, lambda _status, reply, node=node: self.fleet.take(node, reply))
        self.lines.look(0.0)

    def first(self) -> None:
        """Let all agents tell everything, with at most 256 answers outstanding."""
        with self.measured("first") as more:
            self._all_at_once(range(self.options.nodes))
            more["connections"] = len(self.lines)
            more["descriptors"] = self.controller.descriptors()

    def _all_at_once(self, nodes: range) -> None:
        for node in nodes:
            self._beat(node)
            while self.lines.asked - self.lines.answered > 256:
                self.lines.look(0.05)
        self.lines.until_answered(300)

    def beat_for(self, seconds: float) -> None:
        """Let every agent beat in turn; the pace is the clock's, and beats that are late are sent at once."""
        nodes, every_s = self.options.nodes, self.options.every
        began_s = time.monotonic()
        sent = 0
        while (passed_s := time.monotonic() - began_s) < seconds:
            due = int(passed_s / every_s * nodes)
            while sent < due:
                self._beat(sent % nodes)
                sent += 1
                self._testify()
            self.lines.look(0.002)
        self.lines.until_answered(300)

    def _testify(self) -> None:
        for node, body in self.fleet.evidence[:16]:
            self.lines.ask(node, "/v1/evidence", body)
            self.testified += 1
        del self.fleet.evidence[:16]

    testified = 0

    def steady(self) -> None:
        """Heartbeats as ever; not counted until the first steps were judged."""
        self.beat_for(self.options.warm)
        with self.measured("steady"):
            self.beat_for(self.options.seconds)

    def idle(self) -> None:
        """Nothing comes."""
        with self.measured("idle"):
            time.sleep(5.0)

    def scrape(self) -> None:
        """Ask for the page, twice."""
        sizes: list[int] = []
        for _ in range(2):
            with self.measured("scrape") as more:
                self.lines.ask(0, "/metrics", b"", lambda _status, body: sizes.append(len(body)), method="GET")
                self.lines.until_answered(300)
                more["bytes"] = f"{sizes[-1]:,}"

    def restart(self) -> None:
        """Kill it, and let all come back."""
        self.lines.hang_up()
        self.controller.restart()
        self.lines = self._lines()
        up = self.controller.cpu_s()["all"]
        with self.measured("restart") as more:
            more["CPU until it listens"] = f"{up:.1f} s"
            self.fleet.reconnected()
            self._all_at_once(range(self.options.nodes))

    def hang(self) -> None:
        """Let nothing move, until the verdict."""
        self.fleet.hung_s = time.monotonic()
        with self.measured("hang") as more:
            deadline_s = time.monotonic() + self.options.hang
            while time.monotonic() < deadline_s and "stop" not in self.fleet.orders:
                self.beat_for(1.0)
            more["orders"] = self.fleet.orders
            more["evidence"] = self.testified


def main() -> None:
    """Run the phases that are asked for."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--nodes", type=int, default=1536)
    parser.add_argument("--jobs", type=int, default=1)
    parser.add_argument("--joined", type=int, default=0, help="how many jobs join; agents alone tell of the others")
    parser.add_argument("--every", type=float, default=1.0, help="seconds between two heartbeats of a node")
    parser.add_argument("--step", type=float, default=2.0, help="seconds of a step")
    parser.add_argument("--warm", type=float, default=15.0, help="seconds of heartbeats before it is measured")
    parser.add_argument("--seconds", type=float, default=20.0)
    parser.add_argument("--hang", type=float, default=120.0, help="seconds that a hang may take")
    parser.add_argument("--phases", default=",".join(PHASES))
    options = parser.parse_args()
    _soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    cluster = f"{options.nodes:,} nodes of {NPROC} ranks in {options.jobs} jobs"
    print(f"{cluster}, a heartbeat each {options.every:g} s, a step {options.step:g} s")
    with tempfile.TemporaryDirectory(prefix="megascale-load-") as folder:
        controller = Controller(Path(folder))
        try:
            run = Run(options, controller)
            for phase in options.phases.split(","):
                getattr(run, phase)()
        finally:
            controller.process.kill()
            controller.process.wait(30)
            print(Path(folder, "log").read_text()[-1500:], file=sys.stderr)


if __name__ == "__main__":
    main()
