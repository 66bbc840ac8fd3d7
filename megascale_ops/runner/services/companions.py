# SPDX-License-Identifier: Apache-2.0
"""The controller and the agent that a run starts for itself when it is given none.

Each is a process of its own and dies with the runner. One that dies alone is started again at the same address, with
the same journal, at once and then ever more seldom, as long as the run lasts; training does not notice.
"""

import logging
import os
import signal
import subprocess
import sys
import threading
import time
from contextlib import suppress
from pathlib import Path

from megascale_ops.errors import MegascaleError, UsageError
from megascale_ops.link.token_files import write_token_file
from megascale_ops.link.whereabouts import TOKEN_FILE, Whereabouts, write_whereabouts
from megascale_ops.schema.tokens import new_token

log = logging.getLogger(__name__)

# 120 s for a start that takes half a second: with a load of ten on each core it took more than 20, and ranks that
# import torch take several times as long. One that ended is not waited for.
_START_DEADLINE_S = 120.0
_LOOK_S = 0.1
# A killed process is gone in milliseconds, later on a machine without a free core.
_REAP_DEADLINE_S = 10.0
# One that ran for a minute was healthy: the next end counts as the first. Otherwise the fifth is logged as an error.
_WELL_S, _MANY_DEATHS = 60.0, 5
# 60 s: what ends it (a full disk, no memory) may be over at any time; an attempt takes half a second of a core.
_MOST_PAUSE_S = 60.0


class Companion:
    """One program of ours, kept alive until ``stop``."""

    def __init__(self, name: str, arguments: list[str], log_path: Path, env: dict[str, str]) -> None:
        self.name = name
        self._arguments = [sys.executable, "-m", "megascale_ops.cli.main", *arguments]
        self._log_path = log_path
        self._env = env
        self._stopping = threading.Event()
        self.deaths = 0  # in a row, each within a minute of its start
        self._began_s = 0.0
        self.proc = self._spawn()
        # A child may be bound to the thread that started it, so this thread lives as long as the companion.
        self._thread = threading.Thread(target=self._keep, name=f"keep-{name}", daemon=True)
        self._thread.start()

    @property
    def pid(self) -> int:
        """Process id of the companion that runs now."""
        return self.proc.pid

    def replace_arguments(self, arguments: list[str]) -> None:
        """Use other arguments for the next start."""
        self._arguments = [sys.executable, "-m", "megascale_ops.cli.main", *arguments]

    def _spawn(self) -> subprocess.Popen[bytes]:
        self._began_s = time.monotonic()
        with self._log_path.open("ab") as out:
            return subprocess.Popen(
                self._arguments,
                stdin=subprocess.DEVNULL,
                stdout=out,
                stderr=out,
                env=self._env,
                start_new_session=True,
            )

    def _keep(self) -> None:
        while not self._stopping.wait(_LOOK_S):
            code = self.proc.poll()
            if code is None:
                continue
            self.deaths = 1 if time.monotonic() - self._began_s >= _WELL_S else self.deaths + 1
            wait_s = pause_s(self.deaths)
            log.log(
                logging.ERROR if self.deaths == _MANY_DEATHS else logging.WARNING,
                "the %s ended (status %d)%s; it is started again%s, and nothing else ends with it. Its log: %s",
                *(self.name, code, f", {self.deaths} times in a row" if self.deaths > 1 else ""),
                *(f" in {wait_s:g} s" if wait_s else "", self._log_path),
            )
            while not self._stopping.wait(wait_s) and not self._start_again():
                wait_s = _MOST_PAUSE_S

    def _start_again(self) -> bool:
        """Start it; return whether that succeeded."""
        try:
            self.proc = self._spawn()
        except OSError as error:
            log.warning("the %s can't be started now (%s); it is tried again", self.name, error)
            return False
        return True

    def tail(self) -> str:
        """Return the last line that the companion wrote."""
        try:
            lines = self._log_path.read_text(errors="replace").strip().splitlines()
        except OSError:
            return ""
        return lines[-1] if lines else ""

    def stop(self) -> None:
        """SIGTERM, then SIGKILL."""
        self._stopping.set()
        self._thread.join(timeout=_REAP_DEADLINE_S)  # it may be starting the next one
        if self.proc.poll() is None:
            self.proc.send_signal(signal.SIGTERM)
            try:
                self.proc.wait(3.0)
            except subprocess.TimeoutExpired:
                self.proc.kill()
                with suppress(subprocess.TimeoutExpired):  # the kernel holds it
                    self.proc.wait(_REAP_DEADLINE_S)


def pause_s(deaths: int) -> float:
    """Return how long to wait after so many deaths in a row: first not at all, then twice as long each time."""
    return min(_MOST_PAUSE_S, 0.5 * 2 ** (min(deaths, 20) - 2)) if deaths > 1 else 0.0


def start_controller(
    run_dir: Path, env: dict[str, str], listen: str = "127.0.0.1:0", token_file: str = "", url: str = ""
) -> tuple[Companion, Whereabouts]:
    """Start a controller, on a free loopback port where none is named, and wait until it serves.

    Args:
        run_dir: Where its journal goes, and the word of where it is.
        env: Its environment.
        listen: HOST:PORT.
        token_file: With the token that it asks for; "": it gets one of its own, in ``controller.token``.
        url: By which all nodes reach it, written in the run folder; "": the address that it listens at.

    Returns:
        The companion, and where it is.

    Raises:
        MegascaleError: it ended, or did not come up in time; its last words are in the text.
    """
    # Another runner of the same line may start one in the same folder at the same time, and only one of them gets the
    # port: so each has files of its own, and a token takes its place once its controller serves.
    port_file = run_dir / f".controller.port.{os.getpid()}"
    port_file.unlink(missing_ok=True)
    store = f"sqlite:///{run_dir / 'journal.db'}"
    made = None if token_file else run_dir / f".{TOKEN_FILE}.{os.getpid()}.new"
    if made is not None:
        try:
            write_token_file(made, new_token())
        except UsageError as error:
            why = getattr(error.__cause__, "strerror", None) or error
            raise UsageError(
                f"the run folder {run_dir} can't be written to ({why}): --run-dir names another"
            ) from error

    def arguments(listen: str, token_file: str) -> list[str]:
        return [
            "controller",
            f"--listen={listen}",
            f"--store={store}",
            f"--run-dir={run_dir}",
            f"--port-file={port_file}",
            f"--exit-with-parent={os.getpid()}",
            f"--token-file={token_file}",
        ]

    try:
        companion = Companion("controller", arguments(listen, str(made or token_file)), run_dir / "controller.log", env)
        _wait_until_it_serves(companion, port_file)
        address = f"{listen.rpartition(':')[0]}:{int(port_file.read_text())}"
        if made is not None:
            token_file = str(made.replace(run_dir / TOKEN_FILE))
    finally:
        if made is not None:
            made.unlink(missing_ok=True)
    companion.replace_arguments(arguments(address, token_file))
    found = Whereabouts(url or f"http://{address}", companion.pid, os.getpid(), token_file)
    write_whereabouts(run_dir, found)
    return companion, found


def _wait_until_it_serves(companion: Companion, port_file: Path) -> None:
    deadline = time.monotonic() + _START_DEADLINE_S
    while not port_file.exists():
        if companion.deaths or time.monotonic() > deadline:
            companion.stop()
            told = f"no answer within {_START_DEADLINE_S:.0f} s, at a load of {os.getloadavg()[0]:.0f}"
            raise MegascaleError(f"the controller of this run did not start: {companion.tail() or told}")
        time.sleep(0.01)


def start_agent(url: str, node: str, box_root: Path, run_dir: Path, env: dict[str, str], token_file: str) -> Companion:
    """Start an agent for this node."""
    arguments = [
        "agent",
        f"--controller={url}",
        f"--node={node}",
        f"--box-root={box_root}",
        f"--exit-with-parent={os.getpid()}",
    ]
    if token_file:
        arguments.append(f"--token-file={token_file}")
    return Companion("agent", arguments, run_dir / "agent.log", env)
