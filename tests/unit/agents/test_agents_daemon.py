# SPDX-License-Identifier: Apache-2.0
"""What one look of the daemon does when something it looks at is sick."""

import asyncio
import os
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import pytest
from megascale_agents.config import AgentConfig
from megascale_agents.daemon import Daemon
from megascale_agents.startup.node_lock import node_lock

from megascale_ops.errors import MegascaleError, UsageError
from tests.fakes.node import FakeNode


@pytest.fixture
def node(tmp_path: Path) -> Iterator[FakeNode]:
    """A node with two ranks."""
    made = FakeNode(tmp_path)
    made.start_round(2)
    yield made
    made.kill_all()


@pytest.fixture
async def daemon(node: FakeNode) -> AsyncIterator[Daemon]:
    """A daemon that is not running: the test looks."""
    made = Daemon(AgentConfig(controller="http://127.0.0.1:9", box_root=str(node.root)), node.node, None)
    yield made
    made._queues.close()


def errors(daemon: Daemon) -> dict[str, float]:
    """Failures counted so far, by collector."""
    counted = daemon._tally.values("megascale_agent_collector_errors_total")
    return {labels[1]: number for labels, number in counted.items()}


async def test_a_sick_collector_silences_no_other(
    daemon: Daemon, node: FakeNode, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """It is counted each time and logged once; ranks are seen as ever."""

    def broken(*_: object) -> None:
        raise OSError("no /proc/meminfo today")

    monkeypatch.setattr("megascale_agents.collectors.host.read", broken)
    node.freeze(1)

    daemon._look()
    daemon._slow_at_s = 0.0
    daemon._look()

    assert errors(daemon) == {"host": 2}
    assert [rank.process.stat.state == "T" for _, rank in daemon._rounds.ranks()] == [False, True]
    assert caplog.text.count("collector host failed") == 1


async def test_a_log_that_cannot_be_read_costs_only_that_log(daemon: Daemon, node: FakeNode) -> None:
    """The other rank's last words are found, and the processes are seen."""
    node.stderr(0).unlink()
    node.stderr(0).mkdir()
    node.stderr(1).write_text("Segmentation fault\n")

    daemon._look()

    words = [rank.log.last_words for _, rank in daemon._rounds.ranks()]
    assert [len(one) for one in words] == [0, 1]
    assert errors(daemon) == {"log": 1}
    assert daemon._tally.values("megascale_agent_log_matches_total") == {("node-a", "segfault"): 1}


async def test_looks_go_on_until_one_fails_and_that_is_seen(daemon: Daemon, monkeypatch: pytest.MonkeyPatch) -> None:
    """A collector that fails is survived within a look; a look that fails is a fault of the agent's own."""
    looks = iter([None, None, RuntimeError("a fault of ours")])

    def look() -> None:
        if (error := next(looks)) is not None:
            raise error

    monkeypatch.setattr(daemon, "_look", look)

    with pytest.raises(RuntimeError, match="a fault of ours"):
        await asyncio.wait_for(daemon._look_on(), 10.0)

    assert list(looks) == []


async def test_each_look_is_counted(daemon: Daemon) -> None:
    """So that a dashboard sees an agent that has stopped looking."""
    daemon._look()
    daemon._look()

    assert daemon._tally.values("megascale_agent_scans_total") == {("node-a",): 2}
    assert daemon._tally.values("megascale_agent_scan_seconds_total")["node-a",] > 0


def test_the_lock_names_its_holder_and_is_given_back(tmp_path: Path) -> None:
    """A second agent is told who is there; after the first has left it may come."""
    with node_lock(str(tmp_path), "node-a"):
        assert (tmp_path / ".agent-node-a.lock").read_text() == f"{os.getpid()}\n0\n\n"
        with pytest.raises(MegascaleError, match=f"process {os.getpid()} "), node_lock(str(tmp_path), "node-a"):
            raise AssertionError
        with node_lock(str(tmp_path), "node-b"):
            pass

    with node_lock(str(tmp_path), "node-a"):
        pass
    assert not (tmp_path / ".agent-node-a.lock").exists()


def test_an_agent_of_a_run_stands_in_nobodys_way(tmp_path: Path) -> None:
    """Its lock is its run's: daemon and agents of other runs come beside it, a second one of its run does not."""
    root = str(tmp_path)

    with node_lock(root, "node-a", 77, "http://c:7070"):
        assert (tmp_path / ".agent-node-a@77.lock").read_text() == f"{os.getpid()}\n77\nhttp://c:7070\n"
        with node_lock(root, "node-a"), node_lock(root, "node-a", 78, "http://c:7070"):
            pass
        with pytest.raises(MegascaleError, match=f"process {os.getpid()} "), node_lock(root, "node-a", 77):
            raise AssertionError

    assert not list(tmp_path.iterdir())


def test_a_lock_that_is_removed_before_it_is_held_is_opened_anew(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A runner removes locks without a holder; an agent that has just opened one must not hold a file without name."""
    path = tmp_path / ".agent-node-a@77.lock"
    opened = []

    def tidied(at: Path) -> int:
        handle = os.open(at, os.O_RDWR | os.O_CREAT, 0o600)
        opened.append(handle)
        if len(opened) == 1:
            at.unlink()
        return handle

    monkeypatch.setattr("megascale_agents.startup.node_lock._open", tidied)

    with node_lock(str(tmp_path), "node-a", 77):
        assert path.stat().st_ino == os.fstat(opened[-1]).st_ino
    assert len(opened) == 2


def test_a_box_root_that_cannot_be_made_is_a_users_mistake(tmp_path: Path) -> None:
    """One sentence with the path."""
    (tmp_path / "file").write_text("")

    with pytest.raises(UsageError, match="box root"), node_lock(str(tmp_path / "file" / "x"), "node-a"):
        raise AssertionError


@pytest.mark.parametrize("kind", ["link", "hard link", "fifo"])
def test_a_lock_that_is_no_file_of_ours_is_refused(tmp_path: Path, kind: str) -> None:
    """What is opened is written to; a link would have us write over another file, a FIFO is no lock."""
    (tmp_path / "file").write_text("precious")
    tmp_path.chmod(0o700)
    lock = tmp_path / ".agent-node-a.lock"
    if kind == "link":
        lock.symlink_to("file")
    elif kind == "hard link":
        lock.hardlink_to(tmp_path / "file")
    else:
        os.mkfifo(lock)

    with pytest.raises(UsageError, match=r"can't be used|is no lock of ours"), node_lock(str(tmp_path), "node-a"):
        pass

    assert (tmp_path / "file").read_text() == "precious"


def test_an_agent_says_whom_it_serves_and_the_same_after_a_restart(node: FakeNode, tmp_path: Path) -> None:
    """By that a controller tells two users' agents of one node apart; and two folders of one user, too."""

    def said(box_root: Path) -> str:
        config = AgentConfig(controller="http://127.0.0.1:9", box_root=str(box_root))
        one = Daemon(config, node.node, None)
        heartbeat = one._compose(urgent=False)
        one._queues.close()
        return heartbeat.serves

    assert said(node.root) == said(node.root)
    assert said(node.root) != said(tmp_path)
    assert said(node.root).startswith(f"{os.geteuid()}-")
