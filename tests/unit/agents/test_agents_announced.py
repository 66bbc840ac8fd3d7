# SPDX-License-Identifier: Apache-2.0
"""An agent of root's that serves all users is found by their runs, and only root can pretend to be one."""

import os
import stat
from pathlib import Path

import pytest
from megascale_agents.startup.node_lock import announced

from megascale_ops.blackbox.roots import AGENTS, take_root
from megascale_ops.runner.processes import start_ticks
from megascale_ops.runner.services.attendance import announced_agent

URL = "http://127.0.0.1:7070"
IS_ROOT = os.getuid() == 0


@pytest.fixture
def shared(tmp_path: Path) -> Path:
    """As /dev/shm."""
    folder = tmp_path / "shm"
    folder.mkdir()
    folder.chmod(0o1777)
    return folder


def pretend(shared: Path, *, ticks: int) -> None:
    """Write what an agent of root's would write."""
    (shared / AGENTS).mkdir(exist_ok=True)
    (shared / AGENTS / "n1").write_text(f"{os.getpid()}\n{ticks}\n{URL}\n")


def test_an_agent_of_roots_tells_of_itself_while_it_lives(shared: Path) -> None:
    """All users may read it; a run believes it only when it is root's, and only for a box root that the agent sees."""
    root = take_root(shared=shared).path
    with announced("n1", URL, shared):
        found = announced_agent(root, "n1", shared)
        modes = [stat.S_IMODE(path.stat().st_mode) for path in (shared / AGENTS, shared / AGENTS / "n1")]
        elsewhere = announced_agent(shared / "other", "n1", shared)
        other_node = announced_agent(root, "n2", shared)

    assert [(agent.pid, agent.run_pid, agent.controller) for agent in found] == ([(os.getpid(), 0, URL)] * IS_ROOT)
    assert modes == [0o755, 0o644]
    assert elsewhere == other_node == []
    assert announced_agent(root, "n1", shared) == []
    assert list((shared / AGENTS).iterdir()) == []


def test_what_a_killed_agent_has_told_counts_for_nothing(shared: Path) -> None:
    """Its process is gone, or another one has its number."""
    root = take_root(shared=shared).path
    pretend(shared, ticks=start_ticks(os.getpid()))
    before = announced_agent(root, "n1", shared)

    pretend(shared, ticks=1)

    assert len(before) == IS_ROOT
    assert announced_agent(root, "n1", shared) == []


@pytest.mark.skipif(not IS_ROOT, reason="only root can give a file to somebody else")
@pytest.mark.parametrize("forgery", ["folder of a user", "open folder", "link"])
def test_what_others_have_written_is_not_believed(shared: Path, forgery: str, caplog: pytest.LogCaptureFixture) -> None:
    """A folder of another user, or one into which others may write; and root's agent writes into neither."""
    root = take_root(shared=shared).path
    pretend(shared, ticks=start_ticks(os.getpid()))
    folder = shared / AGENTS
    if forgery == "folder of a user":
        os.chown(folder, 65534, 65534)
    elif forgery == "open folder":
        folder.chmod(0o777)
    else:
        folder.rename(shared / "elsewhere")
        folder.symlink_to(shared / "elsewhere")

    found = announced_agent(root, "n1", shared)
    with announced("n2", URL, shared):
        told = (folder / "n2").exists()

    assert found == []
    assert not told
    assert "runs of other users will start agents of their own" in caplog.text
