# SPDX-License-Identifier: Apache-2.0
"""Uncaught exceptions: their rank and thread, when, and what they came from."""

import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from megascale_ops.recorder.recording.endings import Endings, describe
from megascale_ops.recorder.torch_hooks.bracket import bracket
from megascale_ops.schema.progress import RankError


class _Box:
    def __init__(self) -> None:
        self.errors: list[RankError] = []
        self.state = "running"

    def set_error(self, error: RankError) -> None:
        self.errors.append(error)

    def set_state(self, state: str) -> None:
        self.state = state


class _Recording:
    """As much of a recording as its end needs."""

    def __init__(self) -> None:
        self.box, self.live, self.step_number = _Box(), True, 7


@pytest.fixture
def recording(monkeypatch: pytest.MonkeyPatch) -> Iterator[_Recording]:
    """Return a recording whose hooks are in place, over hooks that say nothing, and gone afterwards."""
    monkeypatch.setattr(sys, "excepthook", lambda *_: None)
    monkeypatch.setattr(threading, "excepthook", lambda _: None)
    monkeypatch.setattr("atexit.register", lambda leave: monkeypatch.setattr(sys, "leave_rank", leave, raising=False))
    made = _Recording()
    Endings(made).install()  # type: ignore[arg-type]  a small stand-in
    return made


def _raise(error: BaseException) -> None:
    raise error


def _in_thread(error: BaseException, name: str = "upload") -> None:
    thread = threading.Thread(target=_raise, args=(error,), name=name)
    thread.start()
    thread.join(30)


def _uncaught(error: BaseException) -> None:
    """Do what Python does with an exception that reaches the top of the main thread."""
    try:
        _raise(error)
    except BaseException as raised:  # noqa: BLE001  that is what the top does
        sys.excepthook(type(raised), raised, raised.__traceback__)


def test_a_threads_exception_carries_its_thread_its_step_and_its_time(recording: _Recording) -> None:
    """So that a judge can tell it from what ended the process; the newest stands."""
    _in_thread(ValueError("first"))
    _in_thread(ValueError("second"), "eval")

    assert [(one.message, one.thread, one.step) for one in recording.box.errors] == [
        ("first", "upload", 7),
        ("second", "eval", 7),
    ]
    assert 0 < recording.box.errors[0].raised_mono_s <= recording.box.errors[1].raised_mono_s


def test_after_the_main_threads_no_other_counts(recording: _Recording) -> None:
    """What other threads die of while the process goes down is a consequence."""
    _uncaught(RuntimeError("loss is nan"))
    _in_thread(ValueError("no queue"))

    assert [(one.message, one.thread) for one in recording.box.errors] == [("loss is nan", "")]


def test_leaving_a_thread_by_sys_exit_is_no_failure(recording: _Recording) -> None:
    """Python says nothing of it either."""
    _in_thread(SystemExit(3))

    assert recording.box.errors == []


def test_what_a_console_in_the_script_caught_is_no_end(recording: _Recording, monkeypatch: pytest.MonkeyPatch) -> None:
    """``sys.last_exc`` counts only where another hook has replaced the recorder's, so that one may be missed."""
    monkeypatch.setattr(sys, "last_value", ZeroDivisionError("caught"), raising=False)
    monkeypatch.setattr(sys, "last_exc", None, raising=False)

    sys.leave_rank()  # type: ignore[attr-defined]  the fixture put it there
    missed_nothing = list(recording.box.errors)
    monkeypatch.setattr(sys, "excepthook", lambda *_: None)
    sys.leave_rank()  # type: ignore[attr-defined]  as above

    assert (missed_nothing, recording.box.state) == ([], "exited")
    assert [one.type for one in recording.box.errors] == ["ZeroDivisionError"]


def test_the_recorders_own_frames_are_passed_over() -> None:
    """An exception is where the script called, though a hook stands between it and what raised."""
    hooked = bracket(int, lambda: None, lambda: None)

    with pytest.raises(ValueError, match="invalid literal") as raised:
        hooked("seven")

    assert raised.traceback[-1].path == Path(bracket.__code__.co_filename)
    assert describe(raised.value, 3).where.startswith(f"{__file__}:")


def _chained(*, explicit: bool) -> BaseException:
    first = RuntimeError("[gloo/transport/tcp/pair.cc:553] Connection closed by peer")
    try:
        try:
            raise first
        except RuntimeError as caught:
            if explicit:
                raise KeyError("step 7 failed") from caught
            raise KeyError("step 7 failed")  # noqa: B904  that is the other case
    except KeyError as raised:
        return raised


@pytest.mark.parametrize(("explicit", "came"), [(True, "from"), (False, "while handling")])
def test_an_exception_tells_what_it_came_from(explicit: bool, came: str) -> None:
    """A script that wraps its peers' death into an exception of its own stays their victim."""
    told = describe(_chained(explicit=explicit), 7)

    assert (told.type, told.step) == ("KeyError", 7)
    assert told.message == (
        f"'step 7 failed' ({came} RuntimeError: [gloo/transport/tcp/pair.cc:553] Connection closed by peer)"
    )


def test_what_was_suppressed_and_a_circle_are_not_told() -> None:
    """``raise ... from None`` hides what came before; exceptions that name each other end somewhere."""
    hidden = ValueError("plain")
    hidden.__context__, hidden.__suppress_context__ = KeyError("secret"), True
    one, other = ValueError("one"), ValueError("other")
    one.__cause__, other.__cause__ = other, one

    assert describe(hidden, 0).message == "plain"
    assert describe(one, 0).message == "one (from ValueError: other)"


def test_a_carried_traceback_leaves_room_for_what_was_raised() -> None:
    """As torch sends what a worker of its data loader raised: the frames are left out, the worker's words stay."""
    frames = "".join(f'  File "/lib/fetch_{at}.py", line {at}, in fetch\n    data = fetch({at})\n' for at in range(20))
    raised = "RuntimeError: unable to allocate shared memory(shm) for file </torch_1>: No space left on device (28)"
    text = f"Caught RuntimeError in worker 0.\nOriginal Traceback (most recent call last):\n{frames}{raised}\n"

    told = describe(RuntimeError(text), 7)
    plain = describe(RuntimeError("two lines\n  of which one is indented"), 7)

    assert told.message == f"Caught RuntimeError in worker 0.\n{raised}"
    assert plain.message == "two lines\n  of which one is indented"
