# SPDX-License-Identifier: Apache-2.0
"""A real Slurm of one node on this machine: munged, slurmctld and slurmd, started by hand and stopped for certain.

    with OneNode(prolog=..., epilog=..., task_prolog=...) as slurm:
        job = slurm.submit(script, env)
        slurm.until_over(job)
        slurm.node_state()  # "idle"

No systemd, no cgroups, nothing in /etc: configuration, key, sockets, state and logs lie in a folder of its own, ports
are free ones of the loopback. Processes are followed by /proc (``proctrack/linuxproc``). It takes root, as Slurm does.
"""

import os
import shutil
import socket
import subprocess
import tempfile
from collections.abc import Mapping
from pathlib import Path
from types import TracebackType
from typing import Self

import pytest

from tests.fakes.servers import until

NEEDED = ("munged", "slurmctld", "slurmd", "sbatch", "scontrol", "sinfo")
# 60 s: all three are there in 1 s, a job of a second is over 2 s later.
PATIENCE_S = 60.0
_CONFIGURATION = """
ClusterName=one
SlurmctldHost={host}(127.0.0.1)
SlurmctldPort={ports[0]}
SlurmdPort={ports[1]}
SlurmUser=root
AuthType=auth/munge
AuthInfo=socket={folder}/munge.socket
StateSaveLocation={folder}/state
SlurmdSpoolDir={folder}/spool
SlurmctldPidFile={folder}/slurmctld.pid
SlurmdPidFile={folder}/slurmd.pid
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
SelectType=select/linear
JobAcctGatherType=jobacct_gather/none
MpiDefault=none
SchedulerType=sched/builtin
ReturnToService=2
SlurmdParameters=config_overrides
PrologFlags=Alloc
Prolog={prolog}
Epilog={epilog}
TaskProlog={task_prolog}
NodeName=n1 NodeHostname={host} NodeAddr=127.0.0.1 CPUs=1
PartitionName=all Nodes=ALL Default=YES
"""


class OneNode:
    """A cluster of this machine alone; its node is n1."""

    def __init__(self, *, prolog: Path, epilog: Path, task_prolog: Path) -> None:
        missing = [name for name in NEEDED if shutil.which(name) is None]
        if missing or os.getuid() != 0:
            pytest.skip(f"Slurm takes root and {', '.join(NEEDED)}; not here: {', '.join(missing) or 'root'}")
        # Not below pytest's folder: a socket's name has at most 107 bytes.
        self.folder = Path(tempfile.mkdtemp(prefix="slurm-"))
        self._running: list[subprocess.Popen[bytes]] = []
        scripts = {"prolog": prolog, "epilog": epilog, "task_prolog": task_prolog}
        host = socket.gethostname().partition(".")[0]
        self._configuration = self.folder / "slurm.conf"
        self._configuration.write_text(
            _CONFIGURATION.format(host=host, ports=_free_ports(2), folder=self.folder, **scripts)
        )
        self.env = {**os.environ, "SLURM_CONF": str(self._configuration)}

    def __enter__(self) -> Self:
        """Start all three, and wait until the node takes jobs."""
        key = self.folder / "munge.key"
        key.touch(mode=0o600)
        key.write_bytes(os.urandom(128))
        for name in ("state", "spool"):
            (self.folder / name).mkdir()
        files = [f"--{name}-file={self.folder}/munge.{name}" for name in ("key", "pid", "log", "seed")]
        try:
            # --force: a folder that is root's alone is no reason not to start.
            self._start("munged", "--foreground", "--force", f"--socket={self.folder}/munge.socket", *files)
            until((self.folder / "munge.socket").exists, "munged listens", PATIENCE_S, self.logs)
            self._start("slurmctld", "-D", "-i", "-c", "-f", str(self._configuration))
            self._start("slurmd", "-D", "-c", "-f", str(self._configuration))
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
        """End all three, the last first, and remove the folder."""
        for program in reversed(self._running):
            program.terminate()
            try:
                program.wait(10.0)
            except subprocess.TimeoutExpired:
                program.kill()
                program.wait(10.0)
        self._running.clear()
        shutil.rmtree(self.folder, ignore_errors=True)

    def submit(self, script: str, env: Mapping[str, str]) -> str:
        """Hand in a batch script with an environment; return the job's number."""
        env = {**env, "SLURM_CONF": str(self._configuration)}
        return self._ask("sbatch", "--parsable", f"--output={self.folder}/job.out", env=env, said=script)

    def job(self, job: str) -> dict[str, str]:
        """Return what Slurm knows of a job, by its own names: JobState, ExitCode, Restarts."""
        words = self._ask("scontrol", "--oneliner", "show", "job", job).split()
        return dict(word.split("=", 1) for word in words if "=" in word)

    def until_state(self, job: str, *states: str) -> None:
        """Wait until a job is in one of these states."""
        until(lambda: self.job(job)["JobState"] in states, f"the job is {states}", PATIENCE_S, self.logs)

    def node_state(self) -> str:
        """Return how the node stands, "" as long as there is no answer."""
        asked = subprocess.run(
            ["sinfo", "--noheader", "--format=%T"],
            env=self.env,
            capture_output=True,
            text=True,
            timeout=30,
            check=False,
        )
        return asked.stdout.strip().rstrip("*")

    def output(self) -> str:
        """Return what jobs have printed."""
        path = self.folder / "job.out"
        return path.read_text() if path.exists() else ""

    def logs(self) -> str:
        """Return the ends of all logs."""
        files = sorted(self.folder.glob("*.log"))
        return "\n".join(f"{path.name}: {path.read_text(errors='replace')[-1500:]}" for path in files) + self.output()

    def _start(self, name: str, *arguments: str) -> None:
        with (self.folder / f"{name}.log").open("wb") as log:
            self._running.append(
                subprocess.Popen([name, *arguments], stdin=subprocess.DEVNULL, stdout=log, stderr=log, env=self.env)
            )

    def _ask(self, *command: str, env: Mapping[str, str] | None = None, said: str | None = None) -> str:
        done = subprocess.run(
            command, env=env or self.env, input=said, capture_output=True, text=True, timeout=30, check=False
        )
        assert done.returncode == 0, f"{command[0]}: {done.stderr}\n{self.logs()}"
        return done.stdout.strip()


def _free_ports(number: int) -> list[int]:
    """Return ports of the loopback that are free now; Slurm can't choose its own."""
    sockets = [socket.create_server(("127.0.0.1", 0)) for _ in range(number)]
    ports = [int(one.getsockname()[1]) for one in sockets]
    for one in sockets:
        one.close()
    return ports
