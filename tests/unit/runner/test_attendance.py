# SPDX-License-Identifier: Apache-2.0
"""Which agent will do for a run, and when it starts its own."""

import fcntl
import os
from pathlib import Path
from typing import cast

import pytest

from megascale_ops.runner.services import attendance
from megascale_ops.runner.services.attendance import (
    DAEMON_AWAY_S,
    Attendance,
    Attendant,
    find_agents,
    serves,
    why_start,
)
from megascale_ops.runner.services.companions import Companion

OURS = "http://10.0.0.1:7070"
DAEMON = Attendant(pid=10, run_pid=0, controller="http://controller:7070", run_lives=False)
NEIGHBOUR = Attendant(pid=11, run_pid=111, controller=OURS, run_lives=True)
STRANGER = Attendant(pid=12, run_pid=112, controller="http://127.0.0.1:40001", run_lives=True)
DYING = Attendant(pid=13, run_pid=113, controller=OURS, run_lives=False)


def test_who_serves_a_run() -> None:
    """The node's daemon, and a living run's agent with the same controller; no other."""
    assert serves(DAEMON, OURS)
    assert serves(NEIGHBOUR, OURS + "/")
    assert not serves(STRANGER, OURS)
    assert not serves(DYING, OURS)


def test_an_agent_that_goes_down_with_its_run_is_not_taken_for_one_that_stays() -> None:
    """It holds its lock a little longer than its run lives; a run that starts just then needs its own."""
    assert why_start([DYING], OURS, None, 0.0)
    assert why_start([DYING, STRANGER], OURS, None, 0.0)
    assert not why_start([DYING, DAEMON], OURS, None, 0.0)
    assert not why_start([NEIGHBOUR], OURS, None, 0.0)


def test_a_daemon_that_dies_is_given_time_to_come_back() -> None:
    """Its supervisor starts it again; only when that fails, the run starts its own, and says after how long."""
    assert not why_start([], OURS, DAEMON, DAEMON_AWAY_S - 0.1)

    reason = why_start([DYING], OURS, DAEMON, DAEMON_AWAY_S + 1.0)

    assert reason == "the node's agent (process 10) is gone for 11 s"


def test_the_agent_of_a_neighbour_does_not_come_back() -> None:
    """It ends with its run, so there is nothing to wait for."""
    assert "run 111" in why_start([], OURS, NEIGHBOUR, 0.0)


def _lock(root: Path, name: str, text: str) -> int:
    path = root / name
    path.write_text(text)
    handle = os.open(path, os.O_RDWR)
    fcntl.flock(handle, fcntl.LOCK_EX)
    return handle


def test_agents_are_found_by_the_locks_they_hold(tmp_path: Path) -> None:
    """Daemon and runs' agents of this node; a file without a lock is no agent, and a run's is removed."""
    gone = 2**22 + 1  # above the largest pid that the kernel gives
    me = os.getpid()
    held = [
        _lock(tmp_path, ".agent-a.lock", "10\n0\nhttp://c:7070\n"),
        _lock(tmp_path, f".agent-a@{me}.lock", f"11\n{me}\n{OURS}\n"),
        _lock(tmp_path, f".agent-a@{gone}.lock", f"12\n{gone}\n{OURS}\n"),
        _lock(tmp_path, ".agent-a@5.lock", ""),
        _lock(tmp_path, ".agent-a.b.lock", "13\n0\n\n"),
    ]
    (tmp_path / ".agent-a@6.lock").write_text(f"14\n6\n{OURS}\n")

    found = find_agents(tmp_path, "a")
    for handle in held:
        os.close(handle)

    assert sorted(found) == [
        Attendant(10, 0, "http://c:7070", run_lives=False),
        Attendant(11, me, OURS, run_lives=True),
        Attendant(12, gone, OURS, run_lives=False),
    ]
    assert not (tmp_path / ".agent-a@6.lock").exists()
    assert find_agents(tmp_path, "a") == []
    assert (tmp_path / ".agent-a.lock").exists()
    assert find_agents(tmp_path / "missing", "a") == []


class FakeCompanion:
    """An agent of our own that only counts."""

    pid = 4242

    def __init__(self) -> None:
        self.stopped = False

    def stop(self) -> None:
        """Note it."""
        self.stopped = True


class Node:
    """Who is there, changed by the test, and what the run has started."""

    def __init__(self, *agents: Attendant) -> None:
        self.agents = list(agents)
        self.started: list[FakeCompanion] = []
        self.refusals = 0

    def start(self) -> Companion:
        """Start one of our own, or fail as often as the test wants."""
        if self.refusals:
            self.refusals -= 1
            raise BlockingIOError(11, "no more processes")
        self.started.append(FakeCompanion())
        return cast("Companion", self.started[-1])

    def attend(self, *, alone: bool = False) -> Attendance:
        """Begin a run."""
        return Attendance(self.start, lambda: list(self.agents), OURS, alone=alone)


@pytest.fixture(autouse=True)
def _no_pauses(monkeypatch: pytest.MonkeyPatch) -> None:
    """Look a hundred times a second."""
    monkeypatch.setattr(attendance, "LOOK_EVERY_S", 0.01)


def test_a_run_with_a_controller_of_its_own_brings_its_own_agent() -> None:
    """Other agents there report elsewhere."""
    node = Node(DAEMON, STRANGER)

    attending = node.attend(alone=True)
    attending.stop()

    assert attending.pid == 4242
    assert [one.stopped for one in node.started] == [True]


def test_a_run_that_is_served_starts_none_until_it_has_to() -> None:
    """The neighbour's agent does until the neighbour ends; then the run has its own."""
    node = Node(NEIGHBOUR)
    attending = node.attend()
    before = attending.pid

    node.agents = [NEIGHBOUR._replace(run_lives=False)]
    attending._thread.join(10.0)  # it ends when it has started one

    assert attending.pid != 0
    attending.stop()

    assert before == 0
    assert [one.stopped for one in node.started] == [True]


def test_a_start_that_fails_is_tried_again(caplog: pytest.LogCaptureFixture) -> None:
    """A machine without a free process for a moment does not cost the run its agent."""
    node = Node(NEIGHBOUR)
    node.refusals = 2
    attending = node.attend()

    node.agents = []
    attending._thread.join(10.0)  # it ends when it has started one

    assert attending.pid != 0
    attending.stop()

    assert caplog.text.count("none could be started") == 2


def test_nothing_is_started_for_a_run_that_ends() -> None:
    """Stopping ends the watch as well."""
    node = Node(DAEMON)
    attending = node.attend()

    attending.stop()
    node.agents = []

    assert node.started == []
