# SPDX-License-Identifier: Apache-2.0
"""A real controller with a collector, with one that never answers, and with none."""

import json
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from megascale_ops.link import BlockingLink
from megascale_ops.schema.messages import Join, RankExit
from tests.fakes.otlp_receiver import otlp_receiver
from tests.fakes.servers import opener
from tests.processes.launch import until

pytestmark = pytest.mark.processes

COUNTED = "megascale_controller_otlp_records_total"
VARIABLE = "OTEL_EXPORTER_OTLP_ENDPOINT"
# Serves, and prints at its end what it has imported.
PROGRAM = """
import json, sys
from megascale_ops.cli.main import main
code = main(["controller", "--listen=127.0.0.1:0", *sys.argv[2:]])
names = sorted(name for name in sys.modules if name.split(".")[0] in ("opentelemetry", "google", "requests"))
open(sys.argv[1], "w").write(json.dumps(names))
sys.exit(code)
"""


class Controller:
    """One, in a folder of its own."""

    def __init__(self, folder: Path, endpoint: str) -> None:
        self.folder = folder
        self.log = folder / "log"
        env = {"PATH": "/usr/bin:/bin", **({VARIABLE: endpoint} if endpoint else {})}
        arguments = [f"--port-file={folder}/port", f"--store=sqlite:///{folder}/ops.db"]
        with self.log.open("wb") as out:
            self.proc = subprocess.Popen(
                [sys.executable, "-c", PROGRAM, str(folder / "names"), *arguments],
                env=env, stdin=subprocess.DEVNULL, stdout=out, stderr=out, start_new_session=True,
            )  # fmt: skip

    def lose_a_rank(self) -> None:
        """Have a job whose only rank is killed, and restarted."""
        until((self.folder / "port").exists, "the controller to listen")
        mine = {"job": "gpt", "node": "a", "runner_id": "r1", "nproc": 1, "min_nodes": 1, "max_nodes": 1}
        mine |= {"addr": "127.0.0.1", "store_port": 29500}
        with BlockingLink(f"http://127.0.0.1:{(self.folder / 'port').read_text().strip()}", timeout_s=60.0) as link:
            link.join(Join(join_id="j1", mono_s=time.monotonic(), **mine))
            exits = (RankExit(0, 0, 7, -9, time.monotonic(), step=3),)
            again = {"previous_round": 1, "cause": "failure", "exits": exits}
            assert link.join(Join(join_id="j2", mono_s=time.monotonic(), **mine, **again)).status == "go"
            assert link.incident("gpt-1").verdict is not None

    def metrics(self) -> str:
        """Return what it tells Prometheus."""
        port = (self.folder / "port").read_text().strip()
        with opener.open(f"http://127.0.0.1:{port}/metrics", timeout=60) as answer:
            return str(answer.read().decode())

    def end(self) -> list[str]:
        """Ask it to end; return what it had imported."""
        self.proc.terminate()
        assert self.proc.wait(60.0) == 0, self.log.read_text()
        found: list[str] = json.loads((self.folder / "names").read_text())
        return found


@pytest.fixture
def started() -> Iterator[list[Controller]]:
    """Controllers that end with the test."""
    running: list[Controller] = []
    yield running
    for one in running:
        one.proc.kill()
        one.proc.wait(30.0)


def test_a_verdict_reaches_the_collector_and_is_counted(tmp_path: Path, started: list[Controller]) -> None:
    """As the variable of all OpenTelemetry programs names it."""
    with otlp_receiver() as receiver:
        started.append(Controller(tmp_path, receiver.url))
        started[0].lose_a_rank()
        receiver.until(lambda one: bool(one.logs), "a verdict")
        until(lambda: f'{COUNTED}{{outcome="sent"}} 1.0' in started[0].metrics(), "it to be counted")
        names = started[0].end()

    (log,) = receiver.logs
    assert log.attributes["megascale.class"] == "killed"
    assert "incident gpt-1" in log.message.body.string_value
    assert "opentelemetry.sdk.trace" in names


def test_what_happened_just_before_the_end_is_sent(tmp_path: Path, started: list[Controller]) -> None:
    """The controller looks once more, and gives what waits a moment to go."""
    with otlp_receiver() as receiver:
        started.append(Controller(tmp_path, receiver.url))
        until((tmp_path / "port").exists, "the controller to listen")
        until(
            lambda: "are sent to the OpenTelemetry collector" in started[0].log.read_text(), "the library to be there"
        )
        started[0].lose_a_rank()
        started[0].end()
        receiver.until(lambda one: bool(one.logs), "a verdict")


def test_a_collector_that_never_answers_delays_no_judgement_and_no_end(
    tmp_path: Path, started: list[Controller]
) -> None:
    """The killed rank is judged, the job restarted and the controller ends in order."""
    with socket.create_server(("127.0.0.1", 0)) as silent:
        started.append(Controller(tmp_path, f"http://127.0.0.1:{silent.getsockname()[1]}"))
        started[0].lose_a_rank()
        started[0].end()

    assert "did not reach the OpenTelemetry collector" in started[0].log.read_text()


def test_without_a_collector_nothing_of_it_is_imported(tmp_path: Path, started: list[Controller]) -> None:
    """Neither the library nor protobuf nor its client: the start costs what it did."""
    started.append(Controller(tmp_path, ""))
    started[0].lose_a_rank()

    metrics = started[0].metrics()
    assert started[0].end() == []
    assert f"{COUNTED}{{" not in metrics
