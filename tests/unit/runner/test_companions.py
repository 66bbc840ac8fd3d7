# SPDX-License-Identifier: Apache-2.0
"""A companion that dies is started again, ever more seldom and as long as the run lasts."""

import errno
import threading
import time
from pathlib import Path

import pytest

from megascale_ops.errors import UsageError
from megascale_ops.runner.services import companions
from megascale_ops.runner.services.companions import Companion, pause_s


def test_the_first_death_costs_nothing_and_the_next_ever_more() -> None:
    """What fails at start must not burn a core; what was well for a minute begins anew."""
    assert [pause_s(deaths) for deaths in range(1, 11)] == [0.0, 0.5, 1.0, 2.0, 4.0, 8.0, 16.0, 32.0, 60.0, 60.0]
    assert pause_s(10_000) == 60.0


class Doomed:
    """A process that is dead as soon as it is looked at."""

    pid = 7

    def poll(self) -> int:
        """Say how it ended."""
        return 1


def test_one_that_dies_again_and_again_is_never_given_up(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Also where it can't even be started for a while; the fifth death is told as an error."""
    started = []
    enough = threading.Event()

    def spawn(self: Companion) -> Doomed:
        self._began_s = time.monotonic()
        started.append(1)
        if len(started) > 12:
            enough.set()
        if len(started) in (3, 4):
            raise BlockingIOError(11, "Resource temporarily unavailable")
        return Doomed()

    monkeypatch.setattr(Companion, "_spawn", spawn)
    monkeypatch.setattr(companions, "_MOST_PAUSE_S", 0.001)
    monkeypatch.setattr(companions, "_LOOK_S", 0.001)

    companion = Companion("agent", [], tmp_path / "agent.log", {})
    assert enough.wait(30.0)
    companion.stop()

    assert not [thread for thread in threading.enumerate() if thread.name == "keep-agent"]
    assert caplog.text.count("can't be started now") == 2
    assert [record.levelname for record in caplog.records].count("ERROR") == 1
    assert "the agent ended (status 1); it is started again, and nothing else ends with it." in caplog.text
    assert "the agent ended (status 1), 2 times in a row; it is started again in " in caplog.text


def test_one_that_lived_for_a_minute_begins_anew(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Deaths that lie far apart are no row."""
    started = []
    enough = threading.Event()

    def spawn(self: Companion) -> Doomed:
        started.append(1)
        self._began_s = -1000.0  # long ago
        if len(started) > 8:
            enough.set()
        return Doomed()

    monkeypatch.setattr(Companion, "_spawn", spawn)
    monkeypatch.setattr(companions, "_LOOK_S", 0.001)

    companion = Companion("agent", [], tmp_path / "agent.log", {})
    assert enough.wait(30.0)
    companion.stop()

    assert companion.deaths == 1


def test_a_run_folder_without_room_is_said(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nobody has named the token file that is written there first."""

    def full(*_: object) -> None:
        raise UsageError("token file") from OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(companions, "write_token_file", full)

    with pytest.raises(
        UsageError, match=r"the run folder \S+ can't be written to \(No space left on device\): --run-dir"
    ):
        companions.start_controller(tmp_path, {})
