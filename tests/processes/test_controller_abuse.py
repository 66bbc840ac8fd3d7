# SPDX-License-Identifier: Apache-2.0
"""A real controller on a shared node: connections that say nothing, and a job whose script scribbles where it may.

What single messages and heads can do is held without processes (tests/unit/controller: wild messages, admission).
"""

import json
import socket
import subprocess
import sys
import urllib.request
from contextlib import ExitStack

import pytest

from tests.processes.launch import ENDLESS, LOCKSTEP, PATIENCE_S, SCRIPTS, Launch, until

pytestmark = pytest.mark.processes

# So many files may the controller have open; the limit can't be raised further.
_LIMIT, _IDLE = 256, 600
_LIMITED = 'ulimit -n "$1" && shift && exec "$@"'


class Controller:
    """One of its own for several jobs, with few descriptors."""

    def __init__(self, launch: Launch) -> None:
        self.port_file = launch.tmp_path / "port"
        self.log = launch.tmp_path / "controller.log"
        with self.log.open("wb") as out:
            self.proc = subprocess.Popen(
                [
                    *("sh", "-c", _LIMITED, "sh", str(_LIMIT), sys.executable, "-m", "megascale_ops.cli.main"),
                    *("controller", "--listen=127.0.0.1:0", f"--port-file={self.port_file}"),
                    f"--store=sqlite:///{launch.tmp_path}/ops.db",
                ],
                env=launch.env,
                stdin=subprocess.DEVNULL,
                stdout=out,
                stderr=out,
                start_new_session=True,
            )
        launch.procs.append(self.proc)
        until(self.port_file.exists, "the controller to listen")
        self.port = int(self.port_file.read_text())
        self.url = f"http://127.0.0.1:{self.port}"

    def is_well(self) -> bool:
        """Ask how it is; of a burst of connections one may be turned away, as agents are, who ask again."""
        try:
            with urllib.request.urlopen(f"{self.url}/healthz", timeout=30) as answer:  # noqa: S310  our own controller
                return bool(json.loads(answer.read())["journal"] == "ok")
        except OSError:
            return False


def test_idle_connections_and_a_scribbling_job_leave_a_controller_to_the_others(launch: Launch) -> None:
    """Twice as many connections as it may have files, and a box full of noise: the job beside trains and is judged."""
    controller = Controller(launch)
    where = (f"--controller={controller.url}",)
    launch.run(*ENDLESS, options=where, job="good", nproc=1, script=LOCKSTEP)
    launch.run(options=where, job="evil", nproc=1, script=SCRIPTS / "scribbles.py")
    begun = _step(controller, "good", 1)

    with ExitStack() as stack:
        for number in range(_IDLE):
            stack.enter_context(socket.create_connection(("127.0.0.1", controller.port), timeout=PATIENCE_S))
            if number % 100 == 99:
                until(controller.is_well, f"an answer beside {number + 1} idle connections")
        until(lambda: "scribbled" in launch.output(), "the other script to have begun")
        further = _step(controller, "good", begun + 50)
        assert controller.proc.poll() is None, controller.log.read_text()

    launch.enough("good")
    assert further > begun
    assert controller.log.stat().st_size < 200_000
    assert "Too many open files" not in controller.log.read_text()
    assert "job good goes unjudged" not in controller.log.read_text()


def _step(controller: Controller, job: str, least: int) -> int:
    """Wait until the controller has seen a step of a job, and return it."""

    def seen() -> int:
        with urllib.request.urlopen(f"{controller.url}/v1/status?job={job}", timeout=30) as answer:  # noqa: S310  ours
            (found,) = json.loads(answer.read())["jobs"]
        step = int(found["step"])
        return step if step >= least else 0

    def known() -> int:
        try:
            return seen()
        except OSError:  # 404: it has not joined yet; or turned away in a burst of connections
            return 0

    return until(known, f"step {least} of job {job}")
