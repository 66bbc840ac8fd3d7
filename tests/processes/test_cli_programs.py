# SPDX-License-Identifier: Apache-2.0
"""The commands of the README, run for real: one machine, several programs, and asking afterwards."""

import json
import os
import pty
import shlex
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from megascale_ops.client import Client, rows
from megascale_ops.link import BlockingLink
from tests.processes.launch import PATIENCE_S, SOON, Launch, acted_upon, until

pytestmark = pytest.mark.processes


@pytest.fixture
def launch(launch: Launch) -> Launch:
    """What is started is a program, as a user starts it: its start is part of the story."""
    launch.is_cold = True
    return launch


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
# More options of the example: as many steps that compute next to nothing.
IDLE = ("--width=32", "--layers=1", "--heads=2", "--sequence-length=32", "--batch-size=4", "--step-sleep=0.2")
README_COMMANDS = (
    "megascale-ops run --nproc-per-node 2 -- examples/train_gpt.py --steps 60",
    "megascale-ops status",
    "megascale-ops incidents",
    "megascale-ops why",
    "megascale-ops jobs",
    "megascale-ops logs --grep loss",
    "megascale-ops clean --keep 10 --dry-run",
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
    launch.env["PYTHONPATH"] = str(SOON)
    # 60 steps take 12 s so: whoever asks must find the job at work, on a machine where a verb takes 2 s, too.
    run = launch.spawn(*words(RUN_ALONE, ADDRESS, "--job=gpt"), *IDLE)
    launch.until_step(5, "gpt")
    following = launch.spawn("logs", "gpt", "--follow", "-n", "0", log="follow.log")
    os.kill(launch.pid(1, "gpt"), signal.SIGKILL)

    asked = launch.command("status")
    launch.is_cold = False  # from here on, but for what the README has
    living = json.loads(launch.command("jobs", "--json").stdout)
    with Client(run_dir=str(launch.state / "megascale-ops" / "gpt")) as ops:
        ranks, has_history = rows(ops.ranks("gpt")), ops.steps("gpt").facts.job == "gpt"
    code = launch.finish(run)

    assert code == 0, launch.output()
    assert "job gpt: every rank ended normally; step 60, " in launch.output()
    assert asked.returncode == 0, asked.stderr
    assert "job gpt" in asked.stdout
    listed = launch.command("incidents", is_cold=True)
    newest, why = launch.command("why", is_cold=True), launch.command("why", launch.the_incident("gpt").id)
    assert (listed.returncode, newest.returncode, why.returncode) == (0, 0, 0), listed.stderr + why.stderr
    assert "killed" in listed.stdout
    assert newest.stdout.startswith("incident gpt-")  # on a busy machine a slow rank may come after the kill
    assert "rank 1" in why.stdout
    assert "killed: the rank was killed by a signal from outside" in why.stdout
    gone = launch.command("status", "--watch")
    assert gone.returncode == 0, gone.stderr
    assert (
        "job gpt is over: finished (every rank ended normally), at step 60; `megascale-ops report gpt`" in gone.stdout
    )
    assert sorted(row["report.rank"] for row in ranks) == [0, 1]
    assert has_history
    assert [(one["job"], one["result"]) for one in living] == [("gpt", "running")]
    assert following.wait(PATIENCE_S) == 0
    assert "stdout:1: step 10 loss" in launch.command("logs", "--grep", "loss", is_cold=True).stdout
    cleaned = launch.command("clean", "--keep", "10", "--dry-run", is_cold=True)
    assert "nothing to remove" in cleaned.stdout
    followed = launch.output("follow.log")
    assert "--- round 2 ---" in followed
    assert "[0] step 60 loss" in followed
    assert "finished" in launch.command("jobs", is_cold=True).stdout
    assert "1 run, " in launch.command("clean", "gpt").stdout
    left = [path.name for path in (launch.state / "megascale-ops" / "gpt").iterdir()]
    assert sorted(left) == [".cleaned", "checkpoints"]
    launch.assert_nothing_left()


@pytest.mark.matrix  # test_installed starts the same three lines of the README, from a wheel
def test_controller_agent_and_run_as_programs_of_their_own(launch: Launch, tmp_path: Path) -> None:
    """Three programs, started as the README says, train together; SIGTERM ends the two that stay."""
    launch.env["PYTHONPATH"] = str(SOON)
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
    with BlockingLink(f"http://{address}") as link:
        until(lambda: any(job.step >= 5 for job in link.status().jobs), f"steps; output so far:\n{launch.output()}")
    asked = json.loads(launch.command("status", "--json").stdout)
    code = launch.finish(run)

    assert code == 0, launch.output()
    assert [int(job["step"]) >= 5 for job in asked["jobs"]] == [True]
    told = launch.incidents("gpt", f"http://{address}")  # on a busy machine one of them may have been slow
    assert acted_upon(told) == []
    assert launch.command("incidents").stdout.startswith("no incidents (") == (told == [])
    assert ("nothing to explain" in launch.command("why").stderr) == (told == [])
    for program in (agent, controller):
        program.send_signal(signal.SIGTERM)
        assert program.wait(PATIENCE_S) == 0, launch.output("agent.log") + launch.output("controller.log")
    launch.assert_nothing_left()


@pytest.fixture
def url(launch: Launch, tmp_path: Path) -> str:
    """Return the address of a controller without jobs; its own start is no part of the story."""
    port_file = tmp_path / "port"
    line = "--listen=127.0.0.1:0", f"--store=sqlite:///{tmp_path / 'w.db'}", f"--port-file={port_file}"
    launch.is_cold = False
    launch.spawn("controller", *line)
    launch.is_cold = True
    until(port_file.exists, "the controller to serve")
    return f"http://127.0.0.1:{port_file.read_text().strip()}"


@contextmanager
def started_with(sigint: "signal._HANDLER") -> Iterator[None]:
    """Let the programs started meanwhile find SIGINT as a terminal hands it on, or ignored as a script's ``&`` does."""
    before = signal.signal(signal.SIGINT, sigint)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)


FROM_A_TERMINAL = pytest.param(signal.default_int_handler, id="terminal")
IN_THE_BACKGROUND = pytest.param(signal.SIG_IGN, id="background")


@pytest.mark.parametrize("sigint", [FROM_A_TERMINAL, IN_THE_BACKGROUND])
def test_watch_refreshes_until_ctrl_c(launch: Launch, url: str, sigint: "signal._HANDLER") -> None:
    """``status --watch`` prints again every second; Ctrl-C ends it with exit code 0 and no traceback."""
    with started_with(sigint):
        watch = launch.spawn("status", "--watch", "--json", f"--controller={url}", log="watch.log")
    until(lambda: len(launch.output("watch.log").splitlines()) >= 2, "two refreshes")

    watch.send_signal(signal.SIGINT)

    assert watch.wait(PATIENCE_S) == 0
    assert all(json.loads(line)["jobs"] == [] for line in launch.output("watch.log").splitlines())


def test_watch_prints_tables_into_a_pipe(launch: Launch, url: str) -> None:
    """Where nothing can be redrawn, ``status --watch`` prints the tables again; Ctrl-C adds nothing to them."""
    with started_with(signal.default_int_handler):
        watch = launch.spawn("status", "--watch", f"--controller={url}", log="watch.log")
    until(lambda: len(launch.output("watch.log").splitlines()) >= 2, "two refreshes")

    watch.send_signal(signal.SIGINT)

    assert watch.wait(PATIENCE_S) == 0
    assert set(launch.output("watch.log").splitlines()) == {"no job has joined this controller yet"}


def test_watch_gives_the_terminal_its_cursor_back(launch: Launch, url: str) -> None:
    """On a terminal ``status --watch`` redraws; the Ctrl-C typed there ends it with code 0 and the cursor shown."""
    with started_with(signal.default_int_handler):
        watch, terminal = pty.fork()
        if watch == 0:
            line = [sys.executable, "-m", "megascale_ops.cli.main", "status", "--watch", f"--controller={url}"]
            os.execve(line[0], line, launch.env | {"TERM": "xterm"})  # noqa: S606  the child has the terminal
    shown = b""
    while shown.count(b"no job has joined") < 2:
        shown += os.read(terminal, 4096)

    os.write(terminal, b"\x03")

    try:
        while some := os.read(terminal, 4096):
            shown += some
    except OSError:
        pass  # EIO: no process has the terminal open any more
    os.close(terminal)
    assert os.waitstatus_to_exitcode(os.waitpid(watch, 0)[1]) == 0
    assert shown.count(b"\x1b[?25l") == 1
    assert shown.endswith(b"\x1b[?25h\r\n")


# Python prints and drops an exception that is raised in a destructor or in the callback of a weak reference.
IN_A_DESTRUCTOR = """
import os, signal
from megascale_ops.cli.terminal.interrupt import ctrl_c_ends

class Victim:
    def __del__(self):
        os.kill(os.getpid(), signal.SIGINT)

with ctrl_c_ends(130, "last words"):
    Victim()
    print("went on")
"""


@pytest.mark.parametrize("sigint", [FROM_A_TERMINAL, IN_THE_BACKGROUND])
def test_ctrl_c_is_never_lost(launch: Launch, sigint: "signal._HANDLER") -> None:
    """Also a Ctrl-C that comes where an exception would be lost ends the program, at once and without a word more."""
    with started_with(sigint):
        done = subprocess.run(
            [sys.executable, "-c", IN_A_DESTRUCTOR], env=launch.env, capture_output=True, text=True, check=False
        )

    assert (done.returncode, done.stdout, done.stderr) == (130, "last words", "")


@pytest.mark.parametrize("sigint", [FROM_A_TERMINAL, IN_THE_BACKGROUND])
def test_ctrl_c_while_waiting_for_an_answer(launch: Launch, sigint: "signal._HANDLER") -> None:
    """A verb that waits for a controller that does not answer ends at once, with code 130 and no traceback."""
    with socket.create_server(("127.0.0.1", 0)) as silent:
        with started_with(sigint):
            asking = launch.spawn("status", f"--controller=http://127.0.0.1:{silent.getsockname()[1]}")
        silent.settimeout(PATIENCE_S)
        caller, _address = silent.accept()
        with caller:
            asking.send_signal(signal.SIGINT)

            # The verb itself gives up after 5 s, with code 1.
            assert asking.wait(PATIENCE_S) == 130

    assert launch.output() == ""


@pytest.mark.parametrize("sigint", [FROM_A_TERMINAL, pytest.param(signal.SIG_IGN, marks=pytest.mark.matrix)])
def test_an_interrupted_demo_leaves_nothing_behind(launch: Launch, tmp_path: Path, sigint: "signal._HANDLER") -> None:
    """Ctrl-C ends ``demo`` with code 130; one more meanwhile does not keep it from ending its run."""
    launch.env["TMPDIR"] = str(tmp_path)
    with started_with(sigint):
        demo = launch.spawn("demo", log="demo.log")
    until(lambda: len(launch.living()) >= 8, "demo, run, controller, agent and four ranks to start")

    demo.send_signal(signal.SIGINT)
    time.sleep(0.3)  # the demo looks five times a second
    demo.send_signal(signal.SIGINT)

    assert demo.wait(PATIENCE_S) == 130
    assert "Traceback" not in launch.output("demo.log")
    assert not list(tmp_path.glob("megascale-demo-*"))
    assert not list(Path("/dev/shm").glob(f"megascale-demo-{demo.pid}-*"))
    launch.assert_nothing_left()


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
    """A mistake ends at once with one line on stderr, a non-zero exit code and no traceback; as programs: bad_input."""
    launch.is_cold = False
    done: subprocess.CompletedProcess[str] = launch.command("--log-level=error", *line)

    assert done.returncode == code
    assert sentence in done.stderr
    assert done.stderr.count("\n") == 1
    assert done.stderr.startswith("megascale-ops: ")
