# SPDX-License-Identifier: Apache-2.0
"""A real PostgreSQL server of the tests' own: started, frozen, continued and stopped."""

import os
import shutil
import signal
import subprocess
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import psutil
import psycopg
import pytest


def _binaries() -> Path:
    """Return where the server's programs are; a missing one is a failure where tests must be complete."""
    found = sorted(Path("/usr/lib/postgresql").glob("*/bin/initdb"))
    if not found:
        assert os.environ.get("CI") != "true", "PostgreSQL is not installed (apt package postgresql)"
        pytest.skip("PostgreSQL is not installed (apt package postgresql)")
    return found[-1].parent


class PostgresServer:
    """One server, reached by a socket in its own folder, with a database for each test.

    Args:
        replica_of: The server whose writes it follows until it is promoted; None: it is one of its own.
        folder: Where everything lies; None: a new one.

    Attributes:
        folder: Where everything lies.
        database: The test's.
        url: Of that database.
        socket: Path of the socket that it answers on.
        socket_name: The last part of that path.
    """

    def __init__(self, replica_of: "PostgresServer | None" = None, folder: Path | None = None) -> None:
        self._programs = _binaries()
        self.folder = folder or Path(tempfile.mkdtemp(prefix="megascale-pg-"))
        self._as_user: list[str] = []
        if os.getuid() == 0:  # the server refuses to run as root
            shutil.chown(self.folder, "postgres", "postgres")
            self._as_user = ["setpriv", "--reuid=postgres", "--regid=postgres", "--clear-groups"]
        self._data = str(self.folder / "data")
        self.url = f"postgresql+psycopg://ops@/postgres?host={self.folder}"
        self.database, self._databases = "postgres", 0
        self.socket_name = ".s.PGSQL.5432"
        self.socket = str(self.folder / self.socket_name)
        if replica_of is not None:
            self._run("pg_basebackup", "-D", self._data, "-R", "-X", "stream", "-c", "fast", "-U", "ops",
                      "-h", str(replica_of.folder), "--no-sync")  # fmt: skip
            return
        self._run("initdb", "-D", self._data, "-U", "ops", "-A", "trust", "--no-sync", "-E", "UTF8", "--locale=C")

    def start(self) -> None:
        """Start it and wait until it takes connections."""
        options = f"-c listen_addresses='' -c unix_socket_directories='{self.folder}' -c fsync=off"
        self._run("pg_ctl", "-D", self._data, "-o", options, "-w", "-l", str(self.folder / "log"), "start")

    def begin_anew(self) -> None:
        """Run, whatever a test before has done to it, with an empty database that no connection knows."""
        self.thaw()
        if not Path(self._data, "postmaster.pid").exists():
            self.start()
        self._databases += 1
        name = self.database = f"test{self._databases}"
        with psycopg.connect(f"user=ops dbname=postgres host={self.folder}", autocommit=True) as connection:
            connection.execute(f"CREATE DATABASE {name}".encode())
        self.url = f"postgresql+psycopg://ops@/{name}?host={self.folder}"

    def promote(self) -> None:
        """Make a replica the server that takes writes."""
        self._run("pg_ctl", "-D", self._data, "-w", "promote")

    def freeze(self) -> None:
        """SIGSTOP to the server and all that it has started."""
        for _ in range(2):  # what the first of them has started meanwhile, too
            for process in self._processes():
                with suppress(psutil.NoSuchProcess):
                    process.send_signal(signal.SIGSTOP)

    def thaw(self) -> None:
        """Let it go on."""
        for process in self._processes():
            with suppress(psutil.NoSuchProcess):
                process.send_signal(signal.SIGCONT)

    def stop(self) -> None:
        """Stop it at once."""
        self.thaw()
        if Path(self._data, "postmaster.pid").exists():
            self._run("pg_ctl", "-D", self._data, "-m", "immediate", "stop")

    def close(self) -> None:
        """Stop it and remove its folder."""
        try:
            self.stop()
        finally:
            shutil.rmtree(self.folder, ignore_errors=True)

    def _processes(self) -> list[psutil.Process]:
        try:
            main = psutil.Process(int(Path(self._data, "postmaster.pid").read_text().split()[0]))
        except (OSError, psutil.NoSuchProcess):
            return []
        return [main, *main.children(recursive=True)]

    def _run(self, program: str, *arguments: str) -> None:
        command = [*self._as_user, str(self._programs / program), *arguments]
        done = subprocess.run(command, cwd=self.folder, capture_output=True, text=True, timeout=180, check=False)
        assert done.returncode == 0, done.stdout + done.stderr


@contextmanager
def running(replica_of: PostgresServer | None = None) -> Iterator[PostgresServer]:
    """Run a server of a test's own, whose end is no matter to others; all else takes the fixture ``postgres``."""
    made = PostgresServer(replica_of)
    try:
        made.start()
        yield made
    finally:
        made.close()
