# SPDX-License-Identifier: Apache-2.0
"""What stacks and flight-recorder dumps look like, and what is read out of them."""

import signal

import pytest
from megascale_agents import flight_recorder, stacks
from megascale_agents.flight_recorder import NoAnswerError

FAULTHANDLER = b"""Thread 0x00007f556d2276c0 (most recent call first):
  File "/site/threading.py", line 331 in wait
  File "/site/beat.py", line 12 in run

Current thread 0x00007f5592219b80 (most recent call first):
  File "/train.py", line 6 in inner
  File "/train.py", line 7 in <module>
"""
WORKER_SERVER = b"""Current thread 0x00007f556d2276c0 (most recent call first):
  <no Python frame>

Thread 0x00007f5592219b80 (most recent call first):
  File "/train.py", line 6 in inner
"""
PY_SPY = b"""[
 {"pid": 1, "thread_id": 2, "thread_name": "beat", "os_thread_id": 12, "active": false, "owns_gil": false,
  "frames": [{"name": "wait", "filename": "threading.py", "module": null, "line": 331, "locals": null}]},
 {"pid": 1, "thread_id": 1, "thread_name": "MainThread", "os_thread_id": 11, "active": true, "owns_gil": true,
  "frames": [{"name": "inner", "filename": "train.py", "line": 6},
             {"name": "<module>", "filename": "train.py", "line": 7}]}
]"""
DUMP = b"""{"version": "2.10", "pg_config": {}, "pg_status": {
 "0": {"last_enqueued_collective": "6", "last_started_collective": "-1", "last_completed_collective": "2"},
 "1": {"last_enqueued_collective": 3, "last_completed_collective": 3}},
 "entries": [
  {"record_id": 0, "collective_seq_id": 5, "process_group": ["0", "default_pg"], "profiling_name": "gloo:all_reduce",
   "state": "scheduled", "retired": true},
  {"record_id": 1, "collective_seq_id": 6, "process_group": ["0", "default_pg"], "profiling_name": "gloo:barrier",
   "state": "scheduled", "retired": false}]}"""


def test_the_main_thread_comes_first() -> None:
    """It is what a person wants to see; both writers put it last."""
    text = stacks.parse_traceback(FAULTHANDLER)

    assert text.startswith("Current thread")
    assert text.index("/train.py") < text.index("beat.py")


def test_threads_without_python_are_left_out() -> None:
    """The server's own thread has nothing to say."""
    text = stacks.parse_traceback(WORKER_SERVER)

    assert "no Python frame" not in text
    assert "line 6 in inner" in text


@pytest.mark.parametrize("data", [b"", b"\n\n", b"\xff\xfe", b"no thread at all"])
def test_odd_tracebacks_are_no_error(data: bytes) -> None:
    """What a dying process writes is shown as it is."""
    assert isinstance(stacks.parse_traceback(data), str)


def test_py_spy_tells_who_holds_the_gil() -> None:
    """Main thread first, with what it does and holds."""
    text = stacks.parse_py_spy(PY_SPY)

    assert text.splitlines()[0] == "Thread 11 MainThread (active, holds the GIL)"
    assert '  File "train.py", line 6 in inner' in text
    assert "Thread 12 beat (idle)" in text


@pytest.mark.parametrize("data", [b"", b"{}", b"Error: no permission", b'[{"frames": 3}]'])
def test_what_py_spy_did_not_write_is_no_answer(data: bytes) -> None:
    """Another version's output, or none."""
    with pytest.raises(NoAnswerError, match="can't be read"):
        stacks.parse_py_spy(data)


def test_a_signal_is_sent_only_to_a_process_that_catches_it() -> None:
    """SIGUSR1 kills a process without a handler."""
    catching = "Name:\tpython\nSigIgn:\t0000000001001000\nSigCgt:\t0000000000000202\n"
    others = "Name:\tpython\nSigCgt:\t0000000000000002\n"

    assert stacks.catches(catching, signal.SIGUSR1)
    assert not stacks.catches(others, signal.SIGUSR1)
    assert not stacks.catches("", signal.SIGUSR1)


def test_the_summary_says_where_a_rank_waits() -> None:
    """Only ``retired`` is believed: on Gloo the state never changes and the completed number may stay behind."""
    text = flight_recorder.parse(DUMP)

    assert text.splitlines() == [
        "2 collectives recorded",
        "group 0: entered 6",
        "group 1: entered 3",
        "not finished: gloo:barrier 6 of group 0",
    ]


def test_a_long_queue_is_not_told_in_full() -> None:
    """Thousands of collectives queued behind a stuck one fit into a summary."""
    text = flight_recorder.parse(b'{"entries": [' + b",".join([b"{}"] * 2000) + b"]}")

    assert text.splitlines()[-1] == "and 1980 more"
    assert len(text) < 4000


@pytest.mark.parametrize("data", [b"", b"[]", b"<html>", b'{"pg_status": 3}'])
def test_what_is_no_dump_is_refused(data: bytes) -> None:
    """Nobody's answer is taken for a flight recorder's."""
    with pytest.raises(ValueError, match="flight recorder"):
        flight_recorder.parse(data)


def test_an_empty_recorder_is_a_dump_too() -> None:
    """Before the first process group there is nothing in it."""
    empty = b'{"pg_status": {"0": {"last_enqueued_collective": "x"}}}'

    assert flight_recorder.parse(empty).splitlines() == ["0 collectives recorded", "group 0: entered -1"]
