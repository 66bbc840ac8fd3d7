# SPDX-License-Identifier: Apache-2.0
"""A real Slurm on this machine, of one node or more: munged, slurmctld and slurmd, started by hand, surely stopped.

    with OneNode(prolog=..., epilog=..., task_prolog=...) as slurm:
        job = slurm.submit(script, env)
        slurm.until_over(job)
        slurm.node_state()  # "idle"

No systemd, no cgroups, nothing in /etc: configuration, key, sockets, state and logs lie in a folder of its own, ports
are free ones of the loopback. Processes are followed by /proc (``proctrack/linuxproc``). It takes root, as Slurm does.
"""

import contextlib
import os
import shutil
import signal
import socket
import subprocess
import tempfile
from collections.abc import Mapping
from pathlib import Path
from types import TracebackType
from typing import Self

import psutil
import pytest

from tests.fakes.servers import free_ports, until
from tests.fakes.slurm_accounting import Accounting, need

NEEDED = ("munged", "slurmctld", "slurmd", "sbatch", "scontrol", "sinfo")
# All three are there in 1 s, a job of a second is over 2 s later; on a busy machine a run of 11 s took more than 60.
PATIENCE_S = 240.0
_CONFIGURATION = """
ClusterName=one
SlurmctldHost={host}(127.0.0.1)
SlurmctldPort={ports[0]}
SlurmUser=root
AuthType=auth/munge
AuthInfo=socket={folder}/munge.socket
StateSaveLocation={folder}/state
SlurmdSpoolDir={folder}/spool.%n
SlurmctldPidFile={folder}/slurmctld.pid
SlurmdPidFile={folder}/slurmd.%n.pid
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
SelectType=select/linear
JobAcctGatherType=jobacct_gather/none
MpiDefault=none
SchedulerType=sched/builtin
ReturnToService=2
SlurmdParameters=config_overrides
SlurmdDebug=verbose
PrologFlags=Alloc
Prolog={prolog}
Epilog={epilog}
TaskProlog={task_prolog}
{nodes}
PartitionName=all Nodes=ALL Default=YES
"""
# A requeued job starts again after cred_expire and a second more, when the scheduler looks next: by default that is two
# minutes.
SOON = """
AuthInfo=socket={folder}/munge.socket,cred_expire=5
SchedulerType=sched/backfill
SchedulerParameters=sched_interval=1,sched_min_interval=100000,bf_interval=1
SelectType=select/cons_tres
SelectTypeParameters=CR_Core
KillWait=20
ReturnToService=1
"""


_WITH_NAMES = 'mount --bind "$1" /etc/hosts && shift && exec "$@"'


class OneNode:
    """A cluster of this machine alone; its node is n1.

    Of several nodes each is a slurmd, all are this machine, and their tasks know them by name: n1, n2, ...
    ``settings``: lines of slurm.conf that count for more than those above, such as `SOON`; ``cpus``: of each node;
    ``accounting``: with slurmdbd and its database, for `sacct`.
    """

    def __init__(
        self,
        *,
        prolog: Path = Path("/bin/true"),
        epilog: Path = Path("/bin/true"),
        task_prolog: Path = Path("/bin/true"),
        nodes: int = 1,
        settings: str = "",
        cpus: int = 1,
        accounting: bool = False,
    ) -> None:
        missing = [name for name in NEEDED if shutil.which(name) is None]
        if missing or os.getuid() != 0:
            pytest.skip(f"Slurm takes root and {', '.join(NEEDED)}; not here: {', '.join(missing) or 'root'}")
        if accounting:
            need()
        # Not below pytest's folder: a socket's name has at most 107 bytes.
        self.folder = Path(tempfile.mkdtemp(prefix="slurm-"))
        self._running: list[subprocess.Popen[bytes]] = []
        self._daemons: list[str] = []  # nodes whose slurmd runs, in the order of the programs behind the first two
        scripts = {"prolog": prolog, "epilog": epilog, "task_prolog": task_prolog}
        host = socket.gethostname().partition(".")[0]
        self._configuration = self.folder / "slurm.conf"
        self._names = [f"n{number}" for number in range(1, nodes + 1)]
        ports = free_ports(2 + nodes)
        port = ports.pop()
        self._accounting = Accounting(self.folder, port) if accounting else None
        # In one line: of two lines Slurm refuses the second, for it has the same host name.
        many = f"n[1-{nodes}]" if nodes > 1 else "n1"
        line = f"NodeName={many} NodeHostname={host} NodeAddr=127.0.0.1 CPUs={cpus}"
        line += f" Port=[{','.join(map(str, ports[1:]))}]" if nodes > 1 else f" Port={ports[1]}"
        text = _CONFIGURATION + settings + (self._accounting.settings if self._accounting else "")
        text = text.format(host=host, ports=ports, folder=self.folder, nodes=line, **scripts)
        # Of two lines with one key the later one counts; partitions are told one a line.
        lines = {one if one.startswith("PartitionName") else one.partition("=")[0]: one for one in text.splitlines()}
        self._configuration.write_text("\n".join([*lines.values(), ""]))
        self.env = {**os.environ, "SLURM_CONF": str(self._configuration)}

    def __enter__(self) -> Self:
        """Start all three, and wait until the node takes jobs."""
        key = self.folder / "munge.key"
        key.touch(mode=0o600)
        key.write_bytes(os.urandom(128))
        for name in ("state", *(f"spool.{node}" for node in self._names)):
            (self.folder / name).mkdir()
        files = [f"--{name}-file={self.folder}/munge.{name}" for name in ("key", "pid", "log", "seed")]
        try:
            # --force: a folder that is root's alone is no reason not to start.
            self._start("munged", "--foreground", "--force", f"--socket={self.folder}/munge.socket", *files)
            until((self.folder / "munge.socket").exists, "munged listens", PATIENCE_S, self.logs)
            if self._accounting:
                self._accounting.start()
            self._start("slurmctld", "-D", "-i", "-c", "-f", str(self._configuration))
            for name in self._names:
                self._start_slurmd(name)
            until(lambda: self.node_state() == "idle", "the node takes jobs", PATIENCE_S, self.logs)
        except BaseException:
            self.close()
            raise
        return self

    def __exit__(
        self, _kind: type[BaseException] | None, _error: BaseException | None, _trace: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        """End all three, the last first, with whatever a job that did not end has left, and remove the folder."""
        for program in reversed(self._running):
            program.terminate()
            try:
                program.wait(10.0)
            except subprocess.TimeoutExpired:
                program.kill()
                program.wait(10.0)
        self._running.clear()
        if self._accounting:
            self._accounting.close()
        mine = f"SLURM_CONF={self._configuration}\0".encode()
        for process in Path("/proc").glob("[0-9]*"):  # slurmstepd writes its title before its environment
            with contextlib.suppress(OSError):
                if mine in (process / "environ").read_bytes():
                    os.kill(int(process.name), signal.SIGKILL)
        shutil.rmtree(self.folder, ignore_errors=True)

    def _start_slurmd(self, name: str, *options: str) -> None:
        daemon = ("slurmd", "-D", "-c", "-N", name, "-f", str(self._configuration), *options)
        named = ("unshare", "-m", "sh", "-c", _WITH_NAMES, "sh", str(self._hosts()))
        self._start(*(named if len(self._names) > 1 else ()), *daemon, log=f"slurmd.{name}")
        self._daemons.append(name)

    def _hosts(self) -> Path:
        """Write the table of host names that the nodes have in place of this machine's."""
        path = self.folder / "hosts"
        path.write_text(f"{Path('/etc/hosts').read_text()}\n127.0.0.1 {' '.join(self._names)}\n")
        return path

    def submit(self, script: str, env: Mapping[str, str], output: str = "job.out") -> str:
        """Hand in a batch script with an environment; return the job's number."""
        env = {**env, "SLURM_CONF": str(self._configuration)}
        where = f"--output={self.folder}/{output}"
        return self._ask("sbatch", "--parsable", "--open-mode=append", where, env=env, said=script)

    def ask(self, *command: str) -> str:
        """Run one of Slurm's commands as its administrator."""
        return self._ask(*command)

    def let_all_in(self) -> None:
        """Let other users read the configuration and talk to munged: the folder is root's alone otherwise."""
        self.folder.chmod(0o755)

    def kill_slurmd(self, name: str) -> None:
        """End a node's slurmd alone; what it has started runs on."""
        daemon = self._running.pop(self._daemons.index(name) + 2)
        self._daemons.remove(name)
        daemon.kill()
        daemon.wait(10.0)

    def kill_node(self, name: str) -> None:
        """End a node of several as a power cut would: its slurmd and all that it runs, at once."""
        daemon = self._running.pop(self._daemons.index(name) + 2)
        self._daemons.remove(name)
        namespace = Path(f"/proc/{daemon.pid}/ns/mnt").readlink()
        mine = []
        for process in psutil.process_iter():
            with contextlib.suppress(psutil.Error, OSError):
                # By the mount namespace that a node's processes share: slurmstepd writes over its environment.
                if Path(f"/proc/{process.pid}/ns/mnt").readlink() == namespace:
                    process.suspend()  # first all: the last word of a stepd would be that its task has failed
                    mine.append(process)
        for process in mine:
            with contextlib.suppress(psutil.Error):
                process.kill()
        daemon.wait(10.0)

    def start_node(self, name: str, *options: str) -> None:
        """Bring a node up again; ``-b`` tells Slurm that the machine was restarted."""
        self._start_slurmd(name, *options)

    def job(self, job: str) -> dict[str, str]:
        """Return what Slurm knows of a job, by its own names: JobState, ExitCode, Restarts."""
        words = self._ask("scontrol", "--oneliner", "show", "job", job).split()
        return dict(word.split("=", 1) for word in words if "=" in word)

    def until_state(self, job: str, *states: str) -> None:
        """Wait until a job is in one of these states."""
        until(lambda: self.job(job)["JobState"] in states, f"the job is {states}", PATIENCE_S, self.logs)

    def node_state(self, name: str = "") -> str:
        """Return how the node stands, "" as long as there is no answer; of several without a name, if all are alike."""
        asked = subprocess.run(
            ["sinfo", "--noheader", "--format=%T", *([f"--nodes={name}"] if name else [])],
            env=self.env,
            capture_output=True,
            text=True,
            timeout=PATIENCE_S,
            check=False,
        )
        return asked.stdout.strip().rstrip("*")

    def output(self, name: str = "job.out") -> str:
        """Return what jobs have printed."""
        path = self.folder / name
        return path.read_text() if path.exists() else ""

    def logs(self) -> str:
        """Return the ends of all logs."""
        files = sorted(self.folder.glob("*.log"))
        return "\n".join(f"{path.name}: {path.read_text(errors='replace')[-1500:]}" for path in files) + self.output()

    def _start(self, name: str, *arguments: str, log: str = "") -> None:
        with (self.folder / f"{log or name}.log").open("wb") as output:
            self._running.append(
                subprocess.Popen(
                    [name, *arguments], stdin=subprocess.DEVNULL, stdout=output, stderr=output, env=self.env
                )
            )

    def _ask(self, *command: str, env: Mapping[str, str] | None = None, said: str | None = None) -> str:
        done = subprocess.run(
            command, env=env or self.env, input=said, capture_output=True, text=True, timeout=PATIENCE_S, check=False
        )
        assert done.returncode == 0, f"{command[0]}: {done.stderr}\n{self.logs()}"
        return done.stdout.strip()
