# SPDX-License-Identifier: Apache-2.0
"""A real server of Debian's, started by a test in a folder of its own and stopped for certain."""

import random
import re
import shutil
import signal
import socket
import subprocess
import time
import urllib.request
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path
from types import TracebackType
from typing import Self, TypeVar

import pytest

T = TypeVar("T")

# Prometheus and Alertmanager start in 0.3 s on a quiet machine; a loaded one has needed 8 s.
START_S = 60.0
_LISTENS = re.compile(r'msg="Listening on" address=(\S+)')
# No proxy of the machine's environment may stand between a test and its own server.
opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))


def until(condition: Callable[[], T], what: str, deadline_s: float = 150.0, why: Callable[[], str] = str) -> T:
    """Return the first true answer of a condition.

    Raises:
        AssertionError: it did not become true within the deadline.
    """
    end_s = time.monotonic() + deadline_s
    while not (answer := condition()):
        assert time.monotonic() < end_s, f"waited {deadline_s} s in vain until {what}. {why()}"
        time.sleep(0.05)
    return answer


def free_ports(number: int) -> list[int]:
    """Return ports that nobody has, out of those that the kernel gives to nobody who has not named one.

    A port that it has chosen itself may belong to somebody's connection the next moment: each that is made takes one,
    and a server that listens at all addresses can't have it then.
    """
    first = int(Path("/proc/sys/net/ipv4/ip_local_port_range").read_text().split()[0])
    found = []
    for port in random.sample(range(first // 2, first), min(first // 4, 100 + number)):
        with socket.socket() as probe, suppress(OSError):
            probe.bind(("", port))
            found.append(port)
        if len(found) == number:
            return found
    raise AssertionError(f"of the ports {first // 2} to {first} too few are free")


class RealServer:
    """A program that says in its log where it listens.

    Args:
        folder: for its configuration, data and log; it makes one of its own in there.
        name: of that folder, and of the Debian package without ``prometheus-``.
        binaries: what the program may be called, the first that is there is taken.
        configuration: text of ``NAME.yml``.
    """

    def __init__(self, folder: Path, name: str, binaries: Sequence[str], configuration: str) -> None:
        self._name, self._binaries, self._configuration = name, binaries, configuration
        self.folder = folder / name
        self._server: subprocess.Popen[bytes] | None = None
        self.address = ""

    def arguments(self) -> list[str]:
        """Return the command line behind the program's name and its configuration."""
        raise NotImplementedError

    def is_ready(self) -> bool:
        """Say whether it answers, once it listens."""
        return True

    def __enter__(self) -> Self:
        """Start it and wait until it answers."""
        binary = next((found for name in self._binaries if (found := shutil.which(name))), None)
        if binary is None:
            pytest.skip(f"no {self._name} on this machine: apt-get install {self._binaries[0]}")
        self.folder.mkdir(parents=True, exist_ok=True)
        config = self.folder / f"{self._name}.yml"
        config.write_text(self._configuration, encoding="utf-8")
        command = [binary, f"--config.file={config}", "--web.listen-address=127.0.0.1:0", *self.arguments()]
        with self.log.open("wb") as log:
            self._server = subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=log, stderr=log)
        try:
            self.address = self.until(self._find_address, "it listens", START_S)
            self.until(self.is_ready, "it is ready", START_S)
        except BaseException:
            self.close()
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Stop it."""
        self.close()

    @property
    def log(self) -> Path:
        """What it said."""
        return self.folder / "log"

    def close(self) -> None:
        """Stop it within five seconds; one that will not is killed."""
        server, self._server = self._server, None
        if server is None:
            return
        server.send_signal(signal.SIGTERM)
        try:
            server.wait(5.0)
        except subprocess.TimeoutExpired:
            server.kill()
            server.wait(5.0)

    def until(self, condition: Callable[[], T], what: str, deadline_s: float, why: Callable[[], str] = str) -> T:
        """Return the first true answer; fail with the end of the log when none comes, or when the server has ended."""

        def answer() -> T:
            if self._server is not None and self._server.poll() is not None:
                raise AssertionError(f"{self._name} ended before {what}:\n{self._tail()}")
            return condition()

        return until(answer, what, deadline_s, lambda: f"{why()}\n{self._tail()}")

    def _find_address(self) -> str:
        found = _LISTENS.search(self.log.read_text(encoding="utf-8", errors="replace"))
        return found.group(1) if found else ""

    def _tail(self) -> str:
        return self.log.read_text(encoding="utf-8", errors="replace")[-1500:]
