# SPDX-License-Identifier: Apache-2.0
"""Before anything is started: a controller that has no time yet is asked again, one that is not there is not."""

from pathlib import Path

import pytest

from megascale_ops.errors import ControllerUnreachableError, MegascaleError, RefusedError, StrangerError
from megascale_ops.link import BlockingLink
from megascale_ops.runner.preflight import check_controller
from megascale_ops.runner.services import own_controller
from megascale_ops.runner.services.own_controller import wait_for_controller


@pytest.mark.parametrize(
    ("cause", "answers_at", "asked", "fails"),
    [
        (TimeoutError(), 3, 3, False),
        (TimeoutError(), 4, 3, True),
        (ConnectionRefusedError(), 2, 1, True),
        (TimeoutError(), 1, 1, False),
    ],
)
def test_who_has_no_time_is_asked_three_times(
    monkeypatch: pytest.MonkeyPatch, cause: OSError, answers_at: int, asked: int, *, fails: bool
) -> None:
    """Thousands of runners start at once; where no program listens the user sees it at once."""
    count = 0

    def status(_link: BlockingLink, **_asked: object) -> None:
        nonlocal count
        count += 1
        if count < answers_at:
            raise ControllerUnreachableError("no answer") from cause

    monkeypatch.setattr(BlockingLink, "status", status)

    if fails:
        with pytest.raises(ControllerUnreachableError):
            check_controller("http://127.0.0.1:1", "")
    else:
        check_controller("http://127.0.0.1:1", "")

    assert count == asked


class Clock:
    """Time that passes during sleeps."""

    def __init__(self) -> None:
        self.now_s = 0.0

    def monotonic(self) -> float:
        """Return what it shows."""
        return self.now_s

    def sleep(self, seconds: float) -> None:
        """Let time pass."""
        self.now_s += seconds


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Clock:
    """The clock of the waits, where no run of this user tells of a controller."""
    made = Clock()
    monkeypatch.setattr(own_controller, "time", made)
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path))
    return made


def test_a_controller_that_comes_back_in_time_is_waited_for(
    monkeypatch: pytest.MonkeyPatch, clock: Clock, caplog: pytest.LogCaptureFixture, tmp_path: Path
) -> None:
    """The run says at once that it waits, and once."""

    def status(_link: BlockingLink, **_asked: object) -> None:
        if clock.now_s < 30.0:
            raise ControllerUnreachableError("no controller answers") from ConnectionRefusedError()

    monkeypatch.setattr(BlockingLink, "status", status)
    caplog.set_level("INFO")

    wait_for_controller("http://127.0.0.1:1", "", tmp_path, 60.0)

    assert caplog.text.count("this run waits for it, for 60 s") == 1
    assert 30.0 <= clock.now_s < 31.0


def test_one_that_never_comes_is_one_sentence(monkeypatch: pytest.MonkeyPatch, clock: Clock, tmp_path: Path) -> None:
    """When its time is over, and without any wait where none is granted."""

    def status(_link: BlockingLink, **_asked: object) -> None:
        raise ControllerUnreachableError("no controller answers") from ConnectionRefusedError()

    monkeypatch.setattr(BlockingLink, "status", status)

    with pytest.raises(ControllerUnreachableError, match="no controller answers; waited for 60 s"):
        wait_for_controller("http://127.0.0.1:1", "", tmp_path, 60.0)
    assert 60.0 <= clock.now_s < 61.0
    with pytest.raises(ControllerUnreachableError, match=r"no controller answers$"):
        wait_for_controller("http://127.0.0.1:1", "", tmp_path, 0.0)
    assert clock.now_s < 61.0


@pytest.mark.parametrize("no", [RefusedError("this controller wants a token"), StrangerError("an SSH server listens")])
def test_one_that_says_no_is_not_waited_for(
    monkeypatch: pytest.MonkeyPatch, clock: Clock, tmp_path: Path, no: MegascaleError
) -> None:
    """A wrong token gets no better, and another program becomes no controller."""

    def status(_link: BlockingLink, **_asked: object) -> None:
        raise no

    monkeypatch.setattr(BlockingLink, "status", status)

    with pytest.raises(type(no)):
        wait_for_controller("http://127.0.0.1:1", "", tmp_path, 60.0)
    assert clock.now_s == 0.0
