# SPDX-License-Identifier: Apache-2.0
"""Only the wheel is installed, in an environment of its own and far from any checkout: the README's commands work.

Libraries come from the environment of the tests, so nothing is downloaded; of ours nothing can be seen there.
"""

import os
import shlex
import signal
import subprocess
import sys
from pathlib import Path
from typing import NamedTuple

import click
import pytest
import yaml

import megascale_ops
from tests.processes.launch import PATIENCE_S, SOON, Launch, free_port, until

pytestmark = pytest.mark.processes

ROOT = Path(__file__).parents[2]
README_COMMANDS = ("megascale-ops examples copy",)
TRAIN = "megascale-ops run --nproc-per-node 2 -- examples/train_gpt.py --steps 60"
# The README's verbs for a run that has ended. `why` has no incident to show, and exits with 1.
ASKED = {
    "megascale-ops status": 0,
    "megascale-ops incidents": 0,
    "megascale-ops why": 1,
    "megascale-ops jobs": 0,
    "megascale-ops logs --grep loss": 0,
    "megascale-ops clean --keep 10 --dry-run": 0,
    "megascale-ops config show": 0,
}


class Installed(NamedTuple):
    """An environment with the wheel in it, and a folder of the user's to work in."""

    program: Path
    python: Path
    home: Path
    launch: Launch

    def run(self, line: str) -> subprocess.CompletedProcess[str]:
        """Run a command line of the README to its end."""
        command = [str(self.program), *shlex.split(line)[1:]]
        return subprocess.run(
            command, cwd=self.home, env=self.launch.env, capture_output=True, text=True, timeout=180, check=False
        )

    def start(self, line: str, log: Path) -> subprocess.Popen[bytes]:
        """Start one of its programs, which is ended with the test."""
        with log.open("wb") as out:
            proc = subprocess.Popen(
                [str(self.program), *shlex.split(line)[1:]],
                cwd=self.home,
                env=self.launch.env,
                stdin=subprocess.DEVNULL,
                stdout=out,
                stderr=out,
                start_new_session=True,
            )
        self.launch.procs.append(proc)
        return proc


def environment(folder: Path, wheel: Path) -> Path:
    """Make a virtual environment with a wheel in it and the tests' libraries in sight; return its Python."""
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", str(folder)], check=True, timeout=180)
    python = folder / "bin" / "python"
    pip = [sys.executable, "-m", "pip", "--python", str(python), "install", "--quiet", "--no-deps", "--no-index"]
    # What is asked for compiles what it imports, a sixth of all.
    subprocess.run([*pip, "--no-compile", str(wheel)], check=True, timeout=120)
    (site,) = (folder / "lib").glob("python*/site-packages")
    (site / "libraries.pth").write_text(f"{Path(click.__file__).parents[1]}\n")
    return python


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Build the wheel once."""
    folder = tmp_path_factory.mktemp("built")
    build = [sys.executable, "-m", "pip", "wheel", "--quiet", "--no-deps", "--no-build-isolation", "--no-index"]
    subprocess.run([*build, "--wheel-dir", str(folder), str(ROOT)], check=True, timeout=120, capture_output=True)
    return next(folder.glob("*.whl"))


@pytest.fixture(scope="module")
def python(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Install it once."""
    return environment(tmp_path_factory.mktemp("env") / "env", wheel)


@pytest.fixture
def installed(python: Path, tmp_path: Path, launch: Launch) -> Installed:
    """The installation, and a folder that is nobody's."""
    home = tmp_path / "elsewhere"
    home.mkdir()
    launch.env["PYTHONPATH"] = str(SOON)  # nothing of ours is in that folder but a start without the compiler
    return Installed(python.with_name("megascale-ops"), python, home, launch)


@pytest.mark.matrix  # the next test trains from the wheel as well, and test_cli_programs asks every verb
def test_the_commands_of_the_readme_work_without_a_checkout(installed: Installed) -> None:
    """Examples are copied, trained, and asked about."""
    copied = installed.run("megascale-ops examples copy")
    trained = installed.run(TRAIN)
    asked = {line: installed.run(line) for line in ASKED}

    assert copied.returncode == 0, copied.stderr
    assert trained.returncode == 0, trained.stdout + trained.stderr
    assert "every rank ended normally; step 60, " in trained.stdout + trained.stderr
    assert {line: done.returncode for line, done in asked.items()} == ASKED
    assert not [line for line, done in asked.items() if "Traceback" in done.stderr or not done.stdout + done.stderr]
    assert "step 10 loss" in asked["megascale-ops logs --grep loss"].stdout
    installed.launch.assert_nothing_left()


@pytest.mark.matrix
def test_several_programs_work_without_a_checkout(installed: Installed, tmp_path: Path) -> None:
    """Controller, agent and run of the README; alerts link to the controller; modules are the wheel's."""
    where = "import megascale_ops, megascale_agents, megascale_kernels as k; print(megascale_ops.__file__, k.__file__)"
    seen = subprocess.run(
        [str(installed.python), "-c", where],
        cwd=installed.home, env=installed.launch.env, capture_output=True, text=True, timeout=180, check=True,
    )  # fmt: skip
    address = f"127.0.0.1:{free_port()}"
    installed.launch.env["MEGASCALE_AGENT_METRICS_LISTEN"] = "127.0.0.1:0"
    copied = installed.run("megascale-ops examples copy")
    controller = installed.start(
        f"megascale-ops controller --listen {address} --store sqlite:///ops.db --port-file {tmp_path / 'port'}",
        tmp_path / "controller.log",
    )
    until((tmp_path / "port").exists, "the controller to serve")
    agent = installed.start(f"megascale-ops agent --controller http://{address}", tmp_path / "agent.log")

    done = installed.run(
        f"megascale-ops run --controller http://{address} --nnodes 1:2 --nproc-per-node 2 "
        "--policy last_call_s=0 -- examples/train_gpt.py --steps 60 --width=32 --layers=1 --heads=2 --batch-size=4"
    )
    page = subprocess.run(
        [str(installed.python), "-c",
         f"import urllib.request as r; print(r.urlopen('http://{address}/runbooks/AgentDown', timeout=60).read())"],
        env=installed.launch.env, capture_output=True, text=True, timeout=180, check=False,
    )  # fmt: skip

    assert all(str(installed.python.parents[1]) in path for path in seen.stdout.split())
    assert copied.returncode == 0, copied.stderr
    assert done.returncode == 0, done.stdout + done.stderr
    assert "journalctl" in page.stdout, page.stderr
    for program in (agent, controller):
        program.send_signal(signal.SIGTERM)
        assert program.wait(PATIENCE_S) == 0
    installed.launch.assert_nothing_left()


def test_an_exported_image_needs_neither_checkout_nor_index(installed: Installed, tmp_path: Path) -> None:
    """The export's build context has the wheel of this installation; what is installed from it is the same program."""
    done = installed.run("megascale-ops dashboards export watch --controller http://ops.example.com:7070")

    image = installed.home / "watch" / "image"
    (wheel,) = image.glob("*.whl")
    python = environment(tmp_path / "again", wheel)
    version = subprocess.run(
        [str(python.with_name("megascale-ops")), "--version"],
        cwd=tmp_path, env=installed.launch.env, capture_output=True, text=True, timeout=180, check=False,
    )  # fmt: skip
    compose = yaml.safe_load((installed.home / "watch" / "compose.yml").read_text())
    rules = (installed.home / "watch" / "rules" / "alerts.yml").read_text()

    assert done.returncode == 0, done.stderr
    assert done.stderr == ""
    assert f"=={megascale_ops.__version__}" in (image / "Dockerfile").read_text()
    assert compose["services"]["controller"]["build"] == "./image"
    assert version.stdout == f"megascale-ops, version {megascale_ops.__version__}\n"
    assert "runbook_url: http://ops.example.com:7070/runbooks/JobNoProgress\n" in rules
    assert os.access(python, os.X_OK)
