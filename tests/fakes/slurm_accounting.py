# SPDX-License-Identifier: Apache-2.0
"""Slurm's accounting for a cluster of a test: a real slurmdbd over a real MariaDB, what `sacct` asks.

Nothing listens but slurmdbd, on a free port of the loopback; the database has a socket in the folder. Debian:
slurmdbd, mariadb-server.
"""

import os
import shutil
import subprocess
from pathlib import Path

import pytest

from tests.fakes.servers import until

NEEDED = ("slurmdbd", "sacct", "sacctmgr", "mariadbd", "mariadb-install-db")
PATIENCE_S = 240.0
# Of slurm.conf: comments are kept only with the flag, which is what docs/how-to/slurm.md asks for.
_FOR_THE_CLUSTER = """
AccountingStorageType=accounting_storage/slurmdbd
AccountingStorageHost=localhost
AccountingStoragePort={port}
AccountingStoragePass={folder}/munge.socket
AccountingStoreFlags=job_comment
"""
_SLURMDBD = """\
DbdHost=localhost
DbdPort={port}
SlurmUser=root
AuthType=auth/munge
AuthInfo=socket={folder}/munge.socket
StorageType=accounting_storage/mysql
StorageUser=root
StorageLoc=accounting
PidFile={folder}/slurmdbd.pid
"""


def need() -> None:
    """Skip the test where this machine has no accounting of Slurm."""
    missing = [name for name in NEEDED if shutil.which(name) is None]
    if missing:
        pytest.skip(f"needs Slurm's accounting (Debian: slurmdbd, mariadb-server); not here: {', '.join(missing)}")


class Accounting:
    """Both programs; ``settings`` are slurm.conf's lines for them."""

    def __init__(self, folder: Path, port: int) -> None:
        self._folder, self._running = folder, list[subprocess.Popen[bytes]]()
        self.settings = _FOR_THE_CLUSTER.format(port=port, folder=folder)
        self._port = port

    def start(self) -> None:
        """Start both, once munged listens; slurmctld asks slurmdbd before it does anything else."""
        data, socket = self._folder / "sql", self._folder / "sql.socket"
        made = ["--no-defaults", f"--datadir={data}", "--user=root"]
        subprocess.run(
            ["mariadb-install-db", *made, "--auth-root-authentication-method=normal", "--skip-test-db"],
            check=True,
            capture_output=True,
            timeout=PATIENCE_S,
        )
        small = ["--innodb-buffer-pool-size=32M", "--innodb-flush-log-at-trx-commit=0", "--skip-log-bin"]
        self._begin("mariadbd", *made, "--skip-networking", f"--socket={socket}", *small)
        until(socket.exists, "MariaDB listens", PATIENCE_S, self.logs)
        settings = self._folder / "slurmdbd.conf"  # beside slurm.conf, where it is looked for
        settings.touch(mode=0o600)  # it holds a password elsewhere: slurmdbd refuses any other mode
        settings.write_text(_SLURMDBD.format(folder=self._folder, port=self._port))
        self._begin("slurmdbd", "-D")
        until(self._answers, "slurmdbd answers", PATIENCE_S, self.logs)

    def close(self) -> None:
        """End both, slurmdbd first."""
        for program in reversed(self._running):
            program.terminate()
            try:
                program.wait(20.0)
            except subprocess.TimeoutExpired:
                program.kill()
                program.wait(10.0)
        self._running.clear()

    def logs(self) -> str:
        """Return the ends of both logs."""
        files = (self._folder / f"{name}.log" for name in ("mariadbd", "slurmdbd"))
        return "\n".join(f"{path.name}: {path.read_text(errors='replace')[-1500:]}" for path in files if path.exists())

    def _answers(self) -> bool:
        asked = subprocess.run(
            ["sacctmgr", "--noheader", "show", "cluster"], env=self._env(), capture_output=True, timeout=60, check=False
        )
        return asked.returncode == 0

    def _env(self) -> dict[str, str]:
        return {
            **os.environ,
            "SLURM_CONF": str(self._folder / "slurm.conf"),
            "MYSQL_UNIX_PORT": str(self._folder / "sql.socket"),
        }

    def _begin(self, name: str, *arguments: str) -> None:
        with (self._folder / f"{name}.log").open("wb") as output:
            program = subprocess.Popen(
                [name, *arguments], stdin=subprocess.DEVNULL, stdout=output, stderr=output, env=self._env()
            )
        self._running.append(program)
