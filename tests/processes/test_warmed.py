# SPDX-License-Identifier: Apache-2.0
"""What is forked out of the warm parent is a process like the program that it stands for."""

import json
import os
import shlex
import signal
import socket
import subprocess
import sys
from contextlib import suppress
from pathlib import Path

import psutil
import pytest

from megascale_ops.runner.processes import start_ticks
from tests.processes import warmed
from tests.processes.launch import ENDLESS, PATIENCE_S, PLAIN, TOY, Launch, until
from tests.processes.warmed import Forked, WarmParent, stand_in

pytestmark = pytest.mark.processes


def words_of(pid: int) -> list[str]:
    """Return a process's command line."""
    return [word for word in Path(f"/proc/{pid}/cmdline").read_bytes().decode().split("\0") if word]


def sockets_of(pid: int) -> set[Path]:
    """Return the names of a process's sockets."""
    links = set()
    for path in Path(f"/proc/{pid}/fd").iterdir():
        with suppress(OSError):  # closed meanwhile
            links.add(path.readlink())
    return {link for link in links if link.name.startswith("socket:")}


@pytest.mark.parametrize("is_cold", [False, True], ids=["forked", "a program"])
def test_what_is_forked_looks_like_the_program(launch: Launch, *, is_cold: bool) -> None:
    """Runner, controller, agent and rank, by what /proc shows of them; all end with the runner."""
    launch.is_cold = is_cold
    run = launch.run(*ENDLESS, nproc=1, script=TOY)
    launch.until_step(5)
    found = launch.round_file()
    assert found is not None
    pids = {"run": run.pid, "controller": found.controller_pid, "agent": found.agent_pid, "rank": found.ranks[0].pid}

    assert isinstance(run, Forked) != is_cold
    assert len(set(pids.values())) == 4
    for name, pid in pids.items():
        words, env = words_of(pid), psutil.Process(pid).environ()
        assert words[0] == sys.executable
        assert words[1:3] == (["-u", str(TOY)] if name == "rank" else ["-m", "megascale_ops.cli.main"]), words
        assert name in (words[3], "rank")
        assert env["XDG_STATE_HOME"] == str(launch.state)
        assert ("RANK" in env) == (name == "rank")
        assert os.getsid(pid) == os.getpgid(pid) == pid
        if name != "run":
            assert psutil.Process(pid).ppid() == run.pid
            assert sockets_of(pid).isdisjoint(sockets_of(run.pid)), "a socket of the runner's would outlive it there"
    assert sockets_of(run.pid)
    run.send_signal(signal.SIGKILL)

    assert run.wait(PATIENCE_S) == -signal.SIGKILL
    assert run.poll() == -signal.SIGKILL
    until(lambda: not any(start_ticks(pid) for pid in pids.values()), "all that the runner has started to end with it")


@pytest.mark.parametrize("ended_by", [signal.SIGTERM, signal.SIGKILL])
def test_what_stands_for_the_program_ends_with_what_it_stands_for(launch: Launch, ended_by: signal.Signals) -> None:
    """Started by another program: a signal is passed on and its outcome is told; who is killed takes all along."""
    line = [*shlex.split(stand_in()), "run", "--job=toy", "--", str(PLAIN), *ENDLESS]
    with (launch.tmp_path / "run.log").open("wb") as out:
        started = subprocess.Popen(line, env=launch.env, stdout=out, stderr=out)
    launch.procs.append(started)
    launch.until_step(5)
    found = launch.round_file()
    assert found is not None

    started.send_signal(ended_by)

    # As the runner of `test_run_signals`, which is a program, ends.
    assert started.wait(PATIENCE_S) == (128 + ended_by if ended_by == signal.SIGTERM else -ended_by)
    assert found.runner_pid != started.pid
    until(lambda: not launch.living(), "all that the runner has started to end with it")


def test_what_stands_for_the_program_says_and_ends_as_the_program(launch: Launch) -> None:
    """Its words, where they belong, and its exit code; as a program for the same mistake."""
    line = [*shlex.split(stand_in()), "run"]
    done = subprocess.run(line, env=launch.env, capture_output=True, text=True, timeout=180, check=False)
    program = launch.command("run", is_cold=True)

    assert (done.returncode, done.stdout, done.stderr) == (program.returncode, program.stdout, program.stderr)
    assert done.returncode == 2


def test_a_pid_that_comes_again_is_another_process(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """A session starts more processes than the kernel has pids: the second of a number ends by itself."""
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    monkeypatch.setattr(warmed, "connected", lambda: ours)
    parent = WarmParent()

    def tell(**what: float) -> None:
        theirs.send(json.dumps(what).encode())

    def order() -> Forked:
        tell(began=77)
        with (tmp_path / "out").open("wb") as out:
            return parent.fork(["--version"], os.environ, out)

    with theirs:
        first = order()
        tell(ended=77, code=0, cpu_s=1.0)
        assert first.wait(60.0) == 0
        second = order()
        assert second.poll() is None
        tell(ended=77, code=3, cpu_s=1.0)
        assert second.wait(60.0) == 3
        assert first.poll() == 0
    parent.close()
    assert parent.cpu_s == 2.0
