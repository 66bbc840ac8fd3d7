# SPDX-License-Identifier: Apache-2.0
"""Several nodes on one machine: a controller, and runners that each bring an agent, a box root and a run folder.

What makes a node here is that nothing of it is shared: name, black boxes, run folder, agent. Its processes carry its
mark in their environment, however deep they were started, so a whole node can be killed at once. With ``netns`` the
node lives in a network namespace of its own; otherwise its way to the controller may lead through a relay.
"""

import os
import shutil
import signal
import subprocess
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

import msgspec

from megascale_ops.errors import ControllerUnreachableError, MegascaleError
from megascale_ops.link import BlockingLink
from megascale_ops.schema.events import Event, Incident, JobStatus
from megascale_ops.schema.identity import RoundFile
from tests.processes.launch import ENDLESS, LOCKSTEP, PASSING, PATIENCE_S, Launch, all_have_made, until
from tests.processes.warmed import start

MARK = "TEST_NODE_MARK"


class Program:
    """One program of ours that the test keeps: started, killed, started again."""

    def __init__(self, cluster: "Cluster", log: str) -> None:
        self.cluster = cluster
        self.log = log
        self.netns = ""  # the network namespace that it lives in; "": the test's
        self.proc: subprocess.Popen[bytes] | None = None

    def spawn(self, *arguments: str, env: dict[str, str]) -> subprocess.Popen[bytes]:
        """Start ``megascale-ops`` with these arguments."""
        launch = self.cluster.launch
        with (launch.tmp_path / self.log).open("ab") as out:
            self.proc = start(arguments, env, out, netns=self.netns, is_cold=launch.is_cold)
        launch.procs.append(self.proc)
        return self.proc

    def output(self) -> str:
        """Return what it has printed so far, in all its lives."""
        return self.cluster.launch.output(self.log)

    def kill(self) -> None:
        """SIGKILL to this one process."""
        assert self.proc is not None
        self.proc.kill()
        self.proc.wait(PATIENCE_S)


class Controller(Program):
    """The controller of all nodes, at one address for all its lives."""

    def __init__(self, cluster: "Cluster", host: str = "127.0.0.1") -> None:
        super().__init__(cluster, "controller.log")
        self.journal = cluster.launch.tmp_path / "ops.db"
        self.host = host
        self.port = 0
        self.token_file: Path | None = None
        self.env = dict(cluster.launch.env)

    @property
    def url(self) -> str:
        """Its address."""
        return f"http://{self.host}:{self.port}"

    def start(self) -> None:
        """Serve; the second time at the same port as the first."""
        port_file = self.cluster.launch.tmp_path / "port"
        port_file.unlink(missing_ok=True)
        token = () if self.token_file is None else (f"--token-file={self.token_file}",)
        listen = (f"--listen={self.host}:{self.port}", f"--store=sqlite:///{self.journal}", f"--port-file={port_file}")
        proc = self.spawn("controller", *listen, *token, env=self.env)

        def serves() -> bool:
            assert proc.poll() is None, f"the controller ended:\n{self.output()}"
            return port_file.exists()

        until(serves, "the controller to serve")
        self.port = int(port_file.read_text())

    def link(self) -> BlockingLink:
        """Return a link to it, for the test."""
        token = self.token_file.read_text().strip() if self.token_file else None
        return BlockingLink(self.url, token, timeout_s=30.0)  # a busy machine may need more than 5 s


class Node(Program):
    """One node: what a machine of its own would be."""

    def __init__(self, cluster: "Cluster", name: str, *, folder: str = "") -> None:
        folder = folder or name
        super().__init__(cluster, f"node-{folder}.log")
        self.name = name
        launch = cluster.launch
        self.box_root = Path(f"{launch.box_root}-{folder}")
        self.run_dir = launch.state / folder
        self.controller_url = ""  # "": the controller itself; else the way to it, through a relay
        self.local_addr = ""
        self.env = {
            **launch.env,
            MARK: f"{launch.box_root.name}-{folder}",
            "MEGASCALE_BOX_ROOT": str(self.box_root),
        }

    def start(self, *toy: str, options: Sequence[str] = ()) -> None:
        """Start the node's runner; everything else of the node follows from it."""
        cluster = self.cluster
        token = cluster.controller.token_file
        self.spawn(
            *("run", f"--job={cluster.job}", f"--nproc-per-node={cluster.nproc}", f"--nnodes={cluster.nnodes}"),
            f"--controller={self.controller_url or cluster.controller.url}",
            *(f"--node={self.name}", f"--run-dir={self.run_dir}"),
            f"--checkpoint-dir={cluster.launch.tmp_path / 'checkpoints'}",
            *((f"--token-file={token}",) if token is not None else ()),
            *((f"--local-addr={self.local_addr}",) if self.local_addr else ()),
            *(part for setting in cluster.policy for part in ("--policy", setting)),
            *options,
            *("--", str(cluster.script), *ENDLESS, *toy),
            env=self.env,
        )

    def pids(self) -> list[int]:
        """Return every process of this node."""
        mark = f"{MARK}={self.env[MARK]}".encode()
        found = []
        for path in Path("/proc").iterdir():
            with suppress(OSError):
                if path.name.isdigit() and mark in (path / "environ").read_bytes().split(b"\0"):
                    found.append(int(path.name))
        return found

    def kill_whole(self) -> None:
        """Take the power away: stop all of it first, so that no process sees the others die, then kill."""
        pids = self.pids()
        for number in (signal.SIGSTOP, signal.SIGKILL):
            for pid in pids:
                with suppress(ProcessLookupError):
                    os.kill(pid, number)

        def is_dead() -> bool:
            # Again and again: a child that was just being started had no mark yet, and was missed.
            for pid in (left := self.pids()):
                with suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
            return not left

        until(is_dead, f"node {self.name} to be dead")
        if self.proc is not None:
            self.proc.wait(PATIENCE_S)

    def round_file(self) -> RoundFile | None:
        """Return what its runner has started, once all ranks of a round run."""
        try:
            raw = (self.box_root / self.cluster.job / f"{self.name}.round.json").read_bytes()
        except OSError:
            return None
        found = msgspec.json.decode(raw, type=RoundFile)
        return found if found.ranks else None

    def rank_pids(self) -> list[int]:
        """Return the processes of its ranks."""
        found = self.round_file()
        return [rank.pid for rank in found.ranks] if found is not None else []

    def finish(self, deadline_s: float = 360.0) -> int:
        """Wait for its runner to end and return the exit code."""
        assert self.proc is not None
        try:
            return self.proc.wait(deadline_s)
        except subprocess.TimeoutExpired:
            raise AssertionError(f"{self.name} still runs after {deadline_s} s:\n{self.cluster.outputs()}") from None


class Cluster:
    """A controller and its nodes, for one job."""

    def __init__(
        self,
        launch: Launch,
        *names: str,
        nnodes: str = "1:2",
        nproc: int = 1,
        policy: Sequence[str] = (),
        script: Path = LOCKSTEP,
    ) -> None:
        self.launch = launch
        self.script = script
        self.job = "toy"
        self.nnodes = nnodes
        self.nproc = nproc
        # 6 s: node_lost_s of a test that must not wait 15. The last call ends when all nodes have joined.
        self.policy = ("node_lost_s=6", f"last_call_s={PATIENCE_S:g}", *policy)
        self.controller = Controller(self)
        self.nodes = {name: Node(self, name) for name in names}

    def __getitem__(self, name: str) -> Node:
        return self.nodes[name]

    def start(self, *toy: str) -> None:
        """Start the controller and all nodes, in order: the first to join holds rank 0."""
        self.controller.start()
        for node in self.nodes.values():
            node.start(*toy)
            self.until_known(node)

    def until_known(self, node: Node) -> None:
        """Wait until the node's runner has joined: the first to join comes first."""

        def joined() -> bool:
            assert node.proc is not None
            assert node.proc.poll() is None, f"the runner of {node.name} ended:\n{self.outputs()}"
            status = self.status()
            return status is not None and any(one.node == node.name for one in status.nodes)

        until(joined, f"{node.name} to join")

    def status(self) -> JobStatus | None:
        """Return the controller's view of the job, or None while there is none."""
        try:
            with self.controller.link() as link:
                return link.status(self.job).jobs[0]
        except MegascaleError:
            return None

    def until_status(self, state: str = "", *, step: int = -1, round_: int = 0, deadline_s: float = 120.0) -> JobStatus:
        """Wait until the job is in ``state``, all ranks have finished ``step``, and it is in ``round_`` or later."""

        def reached() -> JobStatus | None:
            status = self.status()
            if status is None or status.round < round_ or state not in ("", status.state):
                return None
            return status if step < 0 or all_have_made(step, status) else None

        return until(reached, f"{state or 'step'} {step} in round {round_}; so far:\n{self.outputs()}", deadline_s)

    def incidents(self) -> list[Incident]:
        """Return all incidents, in order, as the controller knows them now."""

        def told() -> tuple[list[Incident]] | None:
            try:
                with self.controller.link() as link:
                    return ([link.incident(one.id) for one in link.incidents(self.job).incidents],)
            except ControllerUnreachableError:
                return None

        return until(told, f"the controller to tell of incidents; so far:\n{self.outputs()}")[0]

    def faults(self, *, warnings: bool = False) -> list[str]:
        """Return the classes of all incidents that were acted upon, or of all."""
        return [
            incident.verdict.fault
            for incident in self.incidents()
            if incident.verdict is not None and (warnings or incident.state not in PASSING)
        ]

    def events(self) -> list[Event]:
        """Return the job's events so far, from the journal."""
        from megascale_ops.controller.journal.store import open_store

        store = open_store(f"sqlite:///{self.controller.journal}", readonly=True)
        try:
            return store.events(self.job)
        finally:
            store.close()

    def outputs(self) -> str:
        """Return the end of every program's output, for the message of a failed test."""
        programs: list[Program] = [self.controller, *self.nodes.values()]
        return "\n".join(f"--- {one.log}\n{one.output()[-4000:]}" for one in programs)

    def finish(self, *names: str, deadline_s: float = 360.0) -> None:
        """Let the job come to its end, and wait until these runners (default: all) have ended well."""
        self.enough()
        for name in names or self.nodes:
            assert self.nodes[name].finish(deadline_s) == 0, self.outputs()

    def enough(self) -> None:
        """Let the ranks end at the next checkpoint."""
        folder = self.launch.tmp_path / "checkpoints"
        folder.mkdir(exist_ok=True)
        (folder / "enough").touch()

    def until_more_steps(self, deadline_s: float = 120.0) -> JobStatus:
        """Wait until the job trains, and has gone on by some steps since the first look."""
        first: list[tuple[int, int]] = []

        def trains() -> JobStatus | None:
            status = self.status()
            if status is None or status.state not in ("running", "degraded") or status.step < 0:
                return None
            first.append((status.round, status.step))
            begun = next(step for round_, step in first if round_ == status.round)
            return status if status.step >= begun + 5 else None

        return until(trains, f"the job to train; so far:\n{self.outputs()}", deadline_s)

    def close(self) -> None:
        """Kill what is left and remove the black boxes."""
        for node in self.nodes.values():
            node.kill_whole()
            shutil.rmtree(node.box_root, ignore_errors=True)


class Clusters:
    """Makes clusters that are gone when the test is over."""

    def __init__(self, launch: Launch) -> None:
        self._launch = launch
        self._made: list[Cluster] = []

    def __call__(
        self,
        *names: str,
        nnodes: str = "1:2",
        nproc: int = 1,
        policy: Sequence[str] = (),
        script: Path = LOCKSTEP,
    ) -> Cluster:
        """Make one; nothing of it runs yet."""
        self._made.append(Cluster(self._launch, *names, nnodes=nnodes, nproc=nproc, policy=policy, script=script))
        return self._made[-1]

    def close(self) -> None:
        """Kill what is left of all of them."""
        for cluster in self._made:
            cluster.close()
