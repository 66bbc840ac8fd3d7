# SPDX-License-Identifier: Apache-2.0
"""Slurm's prolog, task prolog and epilog, run by themselves as Slurm would run them."""

import os
import subprocess
from pathlib import Path

from tests.processes.launch import Launch

DEPLOY = Path(__file__).parents[2] / "agents" / "deploy"


def tool(*command: str, **env: str) -> "subprocess.CompletedProcess[str]":
    """Run a program to its end."""
    full = {**os.environ, **env}
    return subprocess.run(command, capture_output=True, text=True, timeout=180, check=False, env=full)


class Slurm:
    """Runs prolog, task prolog and epilog of one job on this machine, with folders of the test's own."""

    def __init__(self, launch: Launch, settings: str, job: str = "17", uid: int | None = None) -> None:
        self.run = launch.tmp_path / "run"
        self.folder = self.run / job
        self.uid = os.getuid() if uid is None else uid
        self.box_root = Path(f"{launch.box_root}-{self.uid}")
        path = launch.tmp_path / "agent.env"
        path.write_text(f"{settings}MEGASCALE_OPS_RUN={self.run}\nMEGASCALE_OPS_BOXES={launch.box_root}\n")
        clean = {name: "" for name in os.environ if name.startswith("MEGASCALE_")}
        self.env = {**clean, "MEGASCALE_OPS_SETTINGS": str(path), "SLURM_JOB_ID": job, "SLURM_JOB_UID": str(self.uid)}

    def move(self, place: Path) -> None:
        """Keep the folders of jobs below ``place``: pytest's own folder is root's alone, and other users shall see."""
        self.run = place / "run"
        self.folder = self.run / self.env["SLURM_JOB_ID"]
        settings = Path(self.env["MEGASCALE_OPS_SETTINGS"])
        settings.write_text(f"{settings.read_text()}MEGASCALE_OPS_RUN={self.run}\n")

    def pretend_job(self, job: str = "") -> None:
        """Make what the prolog makes of a job, without an agent."""
        folder = self.run / (job or self.folder.name)
        folder.mkdir(parents=True)
        (folder / "uid").write_text(f"{self.uid}\n")

    def script(self, name: str) -> "subprocess.CompletedProcess[str]":
        """Run one of the scripts; it ends well whatever it met, or Slurm would drain the node."""
        done = tool(str(DEPLOY / "slurm" / f"{name}.sh"), **self.env)
        assert done.returncode == 0, done.stderr
        return done

    def pid(self) -> int:
        """Return the agent's process."""
        return int((self.folder / "agent.pid").read_text().split()[0])

    def log(self) -> str:
        """Return what the agent said."""
        path = self.folder / "agent.log"
        return (
            path.read_text() if path.exists() else ""
        )  # made by the agent's shell, which the prolog does not wait for


def is_gone(pid: int) -> bool:
    """Say whether a process has ended; a zombie has."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(") ")[2].startswith("Z")
    except OSError:
        return True
