# SPDX-License-Identifier: Apache-2.0
"""The commands of the README, run for real: one machine, several programs, and asking afterwards."""

import json
import os
import shlex
import signal
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from tests.processes.launch import Launch, until

if TYPE_CHECKING:
    import subprocess

pytestmark = pytest.mark.processes

ROOT = Path(__file__).parents[2]
ADDRESS = "127.0.0.1:7070"

# Character for character as in README.md; tests/architecture/test_readme.py compares. What a test needs on top (a free
# port, a job's name) is added when the command is run.
RUN_ALONE = "megascale-ops run --nproc-per-node 2 -- examples/train_gpt.py --steps 60"
CONTROLLER = "megascale-ops controller --listen 127.0.0.1:7070 --store sqlite:///ops.db"
AGENT = "megascale-ops agent --controller http://127.0.0.1:7070"
RUN_TOGETHER = (
    "megascale-ops run --controller http://127.0.0.1:7070 --nnodes 1:2 --nproc-per-node 2 "
    "-- examples/train_gpt.py --steps 60"
)
README_COMMANDS = (
    "megascale-ops run --nproc-per-node 2 -- examples/train_gpt.py --steps 60",
    "megascale-ops status",
    "megascale-ops incidents",
    "megascale-ops why",
    "megascale-ops controller --listen 127.0.0.1:7070 --store sqlite:///ops.db",
    "megascale-ops agent --controller http://127.0.0.1:7070",
    (
        "megascale-ops run --controller http://127.0.0.1:7070 --nnodes 1:2 --nproc-per-node 2 "
        "-- examples/train_gpt.py --steps 60"
    ),
    "megascale-ops config show",
)


def words(command: str, address: str = ADDRESS, *extra: str) -> list[str]:
    """Return a README command's arguments, with another address, paths that hold anywhere, and more options."""
    line = command.replace(ADDRESS, address).replace("examples/", f"{ROOT}/examples/")
    _program, verb, *rest = shlex.split(line)
    return [verb, *extra, *rest]


def test_the_commands_are_the_readmes() -> None:
    """What is run here is what is declared."""
    assert {RUN_ALONE, CONTROLLER, AGENT, RUN_TOGETHER} <= set(README_COMMANDS)


def test_train_alone_break_it_and_ask_afterwards(launch: Launch) -> None:
    """A rank is killed; the run recovers, ends well, and ``incidents`` and ``why`` name the rank after the run."""
    run = launch.spawn(*words(RUN_ALONE, ADDRESS, "--job=gpt"))
    launch.until_step(5, "gpt")
    asked = launch.command("status")
    os.kill(launch.pid(1, "gpt"), signal.SIGKILL)

    code = launch.finish(run)

    assert code == 0, launch.output()
    assert asked.returncode == 0, asked.stderr
    assert "job gpt" in asked.stdout
    listed = launch.command("incidents")
    why = launch.command("why")
    assert (listed.returncode, why.returncode) == (0, 0), listed.stderr + why.stderr
    assert "killed" in listed.stdout
    assert "rank 1" in why.stdout
    assert "killed: the rank was killed by a signal from outside" in why.stdout
    gone = launch.command("status")
    assert gone.returncode == 1
    assert "`megascale-ops incidents` still reads what the last run left" in gone.stderr
    launch.assert_nothing_left()


def test_controller_agent_and_run_as_programs_of_their_own(launch: Launch, tmp_path: Path) -> None:
    """Three programs, started as the README says, train together; SIGTERM ends the two that stay."""
    port_file = tmp_path / "port"
    extra = [f"--port-file={port_file}", f"--run-dir={tmp_path}"]
    store = words(CONTROLLER, "127.0.0.1:0", *extra)
    store[-1] = f"sqlite:///{tmp_path / 'ops.db'}"
    controller = launch.spawn(*store, log="controller.log")
    until(port_file.exists, "the controller to serve")
    address = f"127.0.0.1:{port_file.read_text().strip()}"
    launch.env["MEGASCALE_CONTROLLER"] = f"http://{address}"
    agent = launch.spawn(*words(AGENT, address), log="agent.log")

    run = launch.spawn(*words(RUN_TOGETHER, address, "--job=gpt"))
    until(lambda: _step(launch) >= 5, f"steps; output so far:\n{launch.output()}", 60.0)
    code = launch.finish(run)

    assert code == 0, launch.output()
    assert launch.command("incidents").stdout == "no incidents\n"
    assert "nothing to explain" in launch.command("why").stderr
    for program in (agent, controller):
        program.send_signal(signal.SIGTERM)
        assert program.wait(10) == 0, launch.output("agent.log") + launch.output("controller.log")
    launch.assert_nothing_left()


def _step(launch: Launch) -> int:
    """Return the job's step as ``status --json`` tells it."""
    asked = launch.command("status", "--json")
    if asked.returncode != 0:
        return -1
    return max((int(job["step"]) for job in json.loads(asked.stdout)["jobs"]), default=-1)


def test_watch_refreshes_until_ctrl_c(launch: Launch, tmp_path: Path) -> None:
    """``status --watch`` prints again every second; Ctrl-C ends it with exit code 0 and no traceback."""
    port_file = tmp_path / "port"
    launch.spawn(
        "controller", "--listen=127.0.0.1:0", f"--store=sqlite:///{tmp_path / 'w.db'}", f"--port-file={port_file}"
    )
    until(port_file.exists, "the controller to serve")
    url = f"--controller=http://127.0.0.1:{port_file.read_text().strip()}"
    watch = launch.spawn("status", "--watch", "--json", url, log="watch.log")

    until(lambda: len(launch.output("watch.log").splitlines()) >= 2, "two refreshes")
    watch.send_signal(signal.SIGINT)

    assert watch.wait(10) == 0
    assert all(json.loads(line)["jobs"] == [] for line in launch.output("watch.log").splitlines())


def test_config_show_prints_every_setting(launch: Launch) -> None:
    """Every section is there, with where each value came from."""
    shown = launch.command("config", "show")

    assert shown.returncode == 0, shown.stderr
    assert "run.policy.silence_floor_s" in shown.stdout
    assert "environment MEGASCALE_BOX_ROOT" in shown.stdout


@pytest.mark.parametrize(
    ("line", "code", "sentence"),
    [
        (["status", "--controller=http://127.0.0.1:9"], 1, "no controller answers at http://127.0.0.1:9"),
        (["status", "--controller=nonsense"], 2, "controller address 'nonsense' can't be used"),
        (["agent"], 2, "no controller given"),
        (["agent", "--controler=http://127.0.0.1:9"], 2, "did you mean '--controller'?"),
        (["controller", "--listen=0.0.0.0:7070"], 2, "refusing to listen on 0.0.0.0 without a token"),
        (["controller", "--listen=here"], 2, "listen address 'here' can't be used"),
        (["controller", "--store=mysql://x/y"], 2, "store"),
        (["controller", "--config=/no/such/file.toml"], 2, "/no/such/file.toml: no such file"),
    ],
)
def test_what_can_not_work_is_one_sentence(launch: Launch, line: list[str], code: int, sentence: str) -> None:
    """A mistake ends at once with one line on stderr, a non-zero exit code and no traceback."""
    done: subprocess.CompletedProcess[str] = launch.command("--log-level=error", *line)

    assert done.returncode == code
    assert sentence in done.stderr
    assert done.stderr.count("\n") == 1
    assert done.stderr.startswith("megascale-ops: ")
