# SPDX-License-Identifier: Apache-2.0
"""``megascale-ops top`` on a real terminal with a real controller behind it."""

import os
import re
import signal
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.processes.launch import ENDLESS, LOCKSTEP, Launch, free_port, until
from tests.processes.terminal import Terminal

pytestmark = pytest.mark.processes

# Sequences that choose another colour than the terminal's own (39 and 49).
COLOURS = re.compile(rb"\x1b\[(?:\d+;)*(?:3[0-8]|4[0-8]|9[0-7]|10[0-7])(?:;\d+)*m")

Open = Callable[..., Terminal]


@pytest.fixture
def terminal(launch: Launch) -> Iterator[Open]:
    """Opens terminals and closes them whatever the test does."""
    opened: list[Terminal] = []

    def start(*arguments: str, **env: str) -> Terminal:
        opened.append(Terminal({**launch.env, **env}, "top", *arguments))
        return opened[-1]

    yield start
    for one in opened:
        one.close()


def test_a_fault_is_seen_as_it_happens_and_the_terminal_is_given_back(launch: Launch, terminal: Open) -> None:
    """A rank is killed while `top` is open: verdict, incident, ranks, recovery, all without leaving the screen."""
    # On a busy machine a rank is slow, and the screen says so: not below nine tenths of a step.
    run = launch.run(*ENDLESS, job="toy", script=LOCKSTEP, options=("--policy", "straggler_share=0.9"))
    launch.until_step(5)
    top = terminal("--job=toy")
    # Painted to its last line: half a screen may be there first.
    calm = top.until(lambda shown: "All 2 ranks make progress." in shown and "q quit" in shown, "a calm job")

    os.kill(launch.pid(1), signal.SIGKILL)
    top.until(lambda shown: "Rank 1 was killed" in shown, "the verdict")
    top.until(lambda shown: "toy-1" in shown and "recovered" in shown, "the recovery")
    top.type("r")
    top.until(lambda shown: "0 ranks are not well" in shown and "back to the job" in shown, "the ranks")
    top.type("ri")
    incident = top.until(lambda shown: "confidence" in shown and "signal from outside" in shown, "the incident")
    top.type("i?")
    top.until(lambda shown: "q, Ctrl-C" in shown and "the verdict" in shown, "the help")
    top.type("?")
    top.resize(60, 14)
    os.kill(top.program.pid, signal.SIGWINCH)
    small = top.until(lambda shown: len(rows := shown.splitlines()) == 14 and "q quit" in rows[-1], "a smaller screen")
    top.type("q")
    code = top.wait()
    os.kill(run.pid, signal.SIGINT)
    launch.finish(run)

    assert calm.splitlines()[0].startswith("job toy · running · round 1 · 2 ranks on 1 node")
    assert "q quit" in calm.splitlines()[-1]
    assert "killed: the rank was killed by a signal from outside" in incident
    assert max(map(len, small.splitlines())) <= 60
    assert b"\x1b[2J" not in top.raw, "the screen is painted over, never cleared: it would flicker"
    assert b"\x1b[?1000h" not in top.raw, "the mouse is left to the terminal: a command can be selected"
    assert COLOURS.search(top.raw), "the verdict has a colour"
    assert code == 0
    assert top.is_as_before


@pytest.fixture
def controller(launch: Launch, tmp_path: Path) -> Callable[[int], int]:
    """Starts a controller without jobs on a port; answers with its pid."""

    def start(port: int) -> int:
        port_file = tmp_path / "port"
        port_file.unlink(missing_ok=True)
        store = f"--store=sqlite:///{tmp_path / 'top.db'}"
        started = launch.spawn("controller", f"--listen=127.0.0.1:{port}", store, f"--port-file={port_file}")
        until(port_file.exists, "the controller to serve")
        return started.pid

    return start


def test_while_the_controller_is_away_that_is_said_and_tried_again(
    launch: Launch, terminal: Open, controller: Callable[[int], int]
) -> None:
    """Killed and started anew while `top` is open; Ctrl-Z, fg and Ctrl-C leave the terminal as it was."""
    port = free_port()
    first = controller(port)
    top = terminal(f"--controller=http://127.0.0.1:{port}", NO_COLOR="1")
    top.until(lambda shown: "No job has joined this controller yet." in shown, "a controller without jobs")
    os.kill(first, signal.SIGKILL)
    away = top.until(lambda shown: "trying again" in shown, "that the controller is away")
    controller(port)
    top.until(lambda shown: "trying again" not in shown and "q quit" in shown, "the controller again")

    os.kill(top.program.pid, signal.SIGTSTP)
    until(lambda: _state(top.program.pid) == "T", "the program to be suspended")
    top.screen()
    as_before = top.is_as_before
    os.kill(top.program.pid, signal.SIGCONT)
    top.until(lambda shown: "No job has joined this controller yet." in shown and "q quit" in shown, "the screen again")
    # Of SIGSTOP no program is told, only of what follows it.
    os.kill(top.program.pid, signal.SIGSTOP)
    until(lambda: _state(top.program.pid) == "T", "the program to be stopped")
    os.kill(top.program.pid, signal.SIGCONT)
    top.type("\x03")

    assert "no controller answers" in away
    assert "controller not heard since" in away
    assert as_before
    assert top.wait() == 0
    assert top.is_as_before
    assert not COLOURS.search(top.raw), "NO_COLOR is obeyed"
    once = launch.command("top", f"--controller=http://127.0.0.1:{port}")
    assert (once.returncode, "\x1b" in once.stdout) == (0, False)
    assert "No job has joined this controller yet." in once.stdout
    wrong = launch.command("top", f"--controller=http://127.0.0.1:{port}", "--job=nope", is_cold=True)
    assert (wrong.returncode, wrong.stderr) == (1, "megascale-ops: there is no job 'nope'\n")


def test_where_no_keys_can_be_read_the_same_is_shown_until_it_is_ended(
    launch: Launch, terminal: Open, controller: Callable[[int], int]
) -> None:
    """A terminal of ASCII: Rich paints, a controller that went is said, and SIGTERM gives the terminal back."""
    port = free_port()
    pid = controller(port)
    top = terminal(f"--controller=http://127.0.0.1:{port}", PYTHONIOENCODING="ascii", PYTHONUTF8="0")
    top.until(lambda shown: "No job has joined" in shown and "Ctrl-C leaves" in shown, "a controller without jobs")
    os.kill(pid, signal.SIGKILL)
    top.until(lambda shown: "trying again: no controller answers" in shown, "that the controller is away")
    os.kill(top.program.pid, signal.SIGTERM)

    assert top.wait() == 0
    assert top.is_as_before
    assert top.raw.isascii()
    del launch


def _state(pid: int) -> str:
    return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
