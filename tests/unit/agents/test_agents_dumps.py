# SPDX-License-Identifier: Apache-2.0
"""What stacks and flight-recorder dumps look like, and what is read out of them."""

import json
import signal

import pytest
from megascale_agents.evidence import dump_format, flight_recorder, frame_classes, py_spy, stacks, tracebacks
from megascale_agents.evidence.flight_recorder import NoAnswerError
from megascale_agents.evidence.frame_classes import Frame

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
    text = tracebacks.parse(FAULTHANDLER)

    assert text.startswith("Current thread")
    assert text.index("/train.py") < text.index("beat.py")


def test_threads_without_python_are_left_out() -> None:
    """The server's own thread has nothing to say."""
    text = tracebacks.parse(WORKER_SERVER)

    assert "no Python frame" not in text
    assert "line 6 in inner" in text


@pytest.mark.parametrize("data", [b"", b"\n\n", b"\xff\xfe", b"no thread at all"])
def test_odd_tracebacks_are_no_error(data: bytes) -> None:
    """What a dying process writes is shown as it is."""
    assert isinstance(tracebacks.parse(data), str)


def test_py_spy_tells_who_holds_the_gil() -> None:
    """Main thread first, with what it does and holds."""
    text = py_spy.parse(PY_SPY, 11).text

    assert text.splitlines()[0] == "Thread 11 MainThread (active, holds the GIL)"
    assert '  File "train.py", line 6 in inner' in text
    assert "Thread 12 beat (idle)" in text


@pytest.mark.parametrize("data", [b"", b"{}", b"Error: no permission", b'[{"frames": 3}]'])
def test_what_py_spy_did_not_write_is_no_answer(data: bytes) -> None:
    """Another version's output, or none."""
    with pytest.raises(NoAnswerError, match="can't be read"):
        py_spy.parse(data, 11)


def test_a_signal_is_sent_only_to_a_process_that_catches_it() -> None:
    """SIGUSR1 kills a process without a handler."""
    catching = "Name:\tpython\nSigIgn:\t0000000001001000\nSigCgt:\t0000000000000202\n"
    others = "Name:\tpython\nSigCgt:\t0000000000000002\n"

    assert stacks.catches(catching, signal.SIGUSR1)
    assert not stacks.catches(others, signal.SIGUSR1)
    assert not stacks.catches("", signal.SIGUSR1)


def test_the_summary_says_where_a_rank_waits() -> None:
    """Only ``retired`` is believed: on Gloo the state never changes and the completed number may stay behind."""
    text = flight_recorder.parse(DUMP).text

    assert text.splitlines() == [
        "2 collectives recorded",
        "group 0: entered 6",
        "group 1: entered 3",
        "not finished: gloo:barrier 6 of group 0",
    ]


def test_a_long_queue_is_not_told_in_full() -> None:
    """Thousands of collectives queued behind a stuck one fit into a summary."""
    text = flight_recorder.parse(b'{"entries": [' + b",".join([b"{}"] * 2000) + b"]}").text

    assert text.splitlines()[-1] == "and 1980 more"
    assert len(text) < 4000


def test_a_long_batch_is_looked_through_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """An exchange with 512 peers is a batch of a thousand: each piece is asked a few times what it is, not by each."""
    asked = 0
    is_end = vars(dump_format.Entry)["ends_batch"].fget

    def counted(entry: dump_format.Entry) -> bool:
        nonlocal asked
        asked += 1
        return bool(is_end(entry))

    monkeypatch.setattr(dump_format.Entry, "ends_batch", property(counted))
    send = b'{"profiling_name": "nccl:send 0->1", "is_p2p": true, "p2p_seq_id": 4, "collective_seq_id": 4}'
    end = b'{"profiling_name": "nccl:coalesced", "is_p2p": true, "p2p_seq_id": 4, "state": "completed"}'

    text = flight_recorder.parse(b'{"entries": [' + b",".join([send] * 1000 + [end]) + b"]}").text

    assert 1001 <= asked <= 4 * 1001
    assert "not finished" not in text


@pytest.mark.parametrize(
    "data", [b"", b"[]", b"<html>", b'{"pg_status": 3}', b'{"entries": 3}', b'{"x":' + b"[" * 9999 + b"]" * 9999 + b"}"]
)
def test_what_is_no_dump_is_refused(data: bytes) -> None:
    """No other server's answer is taken for a flight recorder's."""
    with pytest.raises(ValueError, match="flight recorder"):
        flight_recorder.parse(data)


@pytest.mark.parametrize(
    "broken",
    [
        b'{"collective_seq_id": null}',
        b'{"collective_seq_id": "7"}',
        b'{"collective_seq_id": 1180591620717411303424}',
        b'{"collective_seq_id": -9}',
        b'{"process_group": null}',
        b'{"process_group": [3]}',
        b'{"input_sizes": [4]}',
        b"[]",
        b"null",
    ],
)
def test_one_broken_entry_costs_no_other(broken: bytes) -> None:
    """Of a recorder of another version, or a damaged one, is told what can be read, and how much can't."""
    whole = b'{"collective_seq_id": 6, "process_group": ["0", "x"], "profiling_name": "gloo:barrier"}'

    found = flight_recorder.parse(b'{"pg_status": null, "entries": [' + broken + b", " + whole + b"]}")

    assert [(fact.function, fact.seq) for fact in found.collectives] == [("barrier", 6)]
    assert found.text.startswith("2 collectives recorded\n1 of them can't be read: ")
    assert "not finished: gloo:barrier 6 of group 0" in found.text


@pytest.mark.parametrize(
    "odd",
    [
        {"collective_seq_id": "41"},
        {"input_dtypes": None, "input_split_sizes": None},
        {"process_group": "0"},
        {"frames": ["step (train.py:3)"], "tags": [1], "priority": None},
    ],
)
def test_dumps_that_a_program_wrote_anew_are_read(odd: dict[str, object]) -> None:
    """Numbers as text, nulls, a group without its description, and keys that no version has: what is known counts."""
    entry = {
        "process_group": ["0", "default_pg"], "collective_seq_id": 41, "profiling_name": "nccl:all_reduce",
        "input_sizes": [[8]], "input_dtypes": ["Float"], "state": "started", "is_p2p": False, "retired": False,
    }  # fmt: skip
    plain = {"version": "2.10", "comm_lib_version": "2.28.9", "nccl_comm_state": {}, "entries": [entry]}

    found = flight_recorder.parse(json.dumps(plain | {"entries": [entry | odd]}).encode())

    (fact,) = found.collectives
    assert (fact.group, fact.seq, fact.function, fact.done) == ("0", 41, "all_reduce", False)


def test_an_empty_recorder_is_a_dump_too() -> None:
    """Before the first process group there is nothing in it."""
    empty = b'{"pg_status": {"0": {"last_enqueued_collective": "x"}}}'

    assert flight_recorder.parse(empty).text.splitlines() == ["0 collectives recorded", "group 0: entered -1"]


SITE = "/opt/venv/lib/python3.11/site-packages"
C10D = f"{SITE}/torch/distributed/distributed_c10d.py"
LOADER = f"{SITE}/torch/utils/data/dataloader.py"
TRAIN = Frame("train", "/home/me/train.py", 40)


def test_the_main_thread_of_a_traceback_is_the_last() -> None:
    """Innermost frame first, as it stands there."""
    assert tracebacks.main_frames(FAULTHANDLER) == (
        Frame("inner", "/train.py", 6),
        Frame("<module>", "/train.py", 7),
    )


def test_a_main_thread_without_python_has_no_frames() -> None:
    """Another thread's frames are not taken for its."""
    ending = b'Thread 0x01 (most recent call first):\n  File "/beat.py", line 1 in run\n\n' + WORKER_SERVER[:81]

    assert tracebacks.main_frames(ending) == ()
    assert tracebacks.main_frames(b"") == ()


def test_py_spy_tells_the_main_thread_by_its_id() -> None:
    """Its name is missing where threading is not imported."""
    nameless = PY_SPY.replace(b'"MainThread"', b"null")

    assert py_spy.parse(nameless, 11).frames[0] == Frame("inner", "train.py", 6)
    assert py_spy.parse(nameless, 99).frames == ()
    assert py_spy.parse(nameless, 11).owns_gil


def test_native_frames_are_told_from_python_ones() -> None:
    """They come from a shared object."""
    native = b"""[{"os_thread_id": 11, "owns_gil": true, "frames": [
      {"name": "usleep", "filename": "/usr/lib/libc.so.6", "module": "/usr/lib/libc.so.6", "line": 0},
      {"name": "0x7f6f0984524a", "filename": "/usr/lib/libffi.so.8", "module": "/usr/lib/libffi.so.8", "line": 0},
      {"name": "hold", "filename": "/train.py", "module": null, "line": 3}]}]"""

    frames = py_spy.parse(native, 11).frames

    assert [frame.native for frame in frames] == [True, True, False]
    assert frame_classes.write(frames) == ("usleep (libc.so.6:0)", "hold (/train.py:3)")


@pytest.mark.parametrize(
    ("frames", "place"),
    [
        ([Frame("all_reduce", C10D, 3), TRAIN], "in_collective"),
        ([Frame("wait_tensor", f"{SITE}/torch/distributed/_functional_collectives.py", 9)], "in_collective"),
        ([Frame("timed", f"{SITE}/megascale_ops/recorder/torch_hooks/waits.py", 59), TRAIN], "in_collective"),
        ([Frame("c10d::Work::wait", f"{SITE}/torch/lib/libtorch_cpu.so", 0, native=True), TRAIN], "in_collective"),
        (
            [Frame("c10d::Reducer::finalize_backward", f"{SITE}/torch/lib/libtorch_cpu.so", 0, native=True), TRAIN],
            "in_collective",
        ),
        ([Frame("_store_based_barrier", C10D, 3), Frame("init_process_group", C10D, 9)], "in_rendezvous"),
        ([Frame("barrier", C10D, 3), Frame("new_group", C10D, 1)], "in_rendezvous"),
        ([Frame("_tcp_rendezvous_handler", f"{SITE}/torch/distributed/rendezvous.py", 3)], "in_rendezvous"),
        ([Frame("c10d::TCPStore::wait", f"{SITE}/torch/lib/libtorch_cpu.so", 0, native=True), TRAIN], "in_rendezvous"),
        (
            [
                Frame("poll", "/usr/lib/python3.11/selectors.py", 415),
                Frame("get", "/usr/lib/python3.11/multiprocessing/queues.py", 113),
                Frame("_try_get_data", LOADER, 1275),
                TRAIN,
            ],
            "in_data_loader",
        ),
        (
            [Frame("__getitem__", "/me/data.py", 5), Frame("_next_data", f"{SITE}/torch/utils/data/x.py", 1)],
            "in_data_loader",
        ),
        ([Frame("_save", f"{SITE}/torch/serialization.py", 1180), Frame("save", "/home/me/train.py", 3)], "in_storage"),
        ([Frame("write_bytes", "/usr/lib/python3.11/pathlib.py", 1066), TRAIN], "in_storage"),
        (
            [Frame("barrier", C10D, 3), Frame("save", f"{SITE}/torch/distributed/checkpoint/state_dict_saver.py", 3)],
            "in_collective",
        ),
        ([Frame("synchronize", f"{SITE}/torch/cuda/__init__.py", 985), TRAIN], "in_native"),
        (
            [
                Frame("c10d::TCPStore::check(std::vector<std::string>)", "libtorch_cpu.so", 0, native=True),
                Frame("_wait", f"{SITE}/megascale_kernels/agreement.py", 141),
                Frame("ag_gemm", f"{SITE}/megascale_kernels/operators.py", 80),
            ],
            "in_collective",
        ),
        ([Frame("wait", "/usr/lib/python3.11/threading.py", 331), TRAIN], ""),
        ([Frame("all_reduce", "/home/me/my_distributed_c10d.py", 3), TRAIN], ""),
        ([Frame("read_text", "/home/me/reader.py", 3), TRAIN], ""),
        ([Frame("_engine_run_backward", f"{SITE}/torch/autograd/graph.py", 979), TRAIN], ""),
        ([TRAIN], ""),
        ([], ""),
    ],
)
def test_the_innermost_known_frame_names_the_place(frames: list[Frame], place: str) -> None:
    """The table of patterns, and what it must not take for one of them."""
    assert frame_classes.place_of(frames) == place


def test_frames_are_written_as_one_would_import_them() -> None:
    """Without our own hooks; a user's file keeps its path; kilobytes of C++ are cut."""
    long = Frame("pybind11::cpp_function::" + "x" * 5000, f"{SITE}/torch/lib/libtorch_python.so", 0, native=True)
    hooks = [
        Frame("timed", f"{SITE}/megascale_ops/recorder/torch_hooks/waits.py", 59),
        Frame("noted", "/src/megascale_ops/recorder/torch_hooks/collectives.py", 1),
    ]

    written = frame_classes.write([*hooks, Frame("all_reduce", C10D, 3156), long, TRAIN])

    assert written[0] == "all_reduce (torch/distributed/distributed_c10d.py:3156)"
    assert written[1].endswith("... (libtorch_python.so:0)")
    assert len(written[1]) <= 120
    assert written[2:] == ("train (/home/me/train.py:40)",)
    assert len(frame_classes.write([TRAIN] * 100)) == frame_classes.MOST_FRAMES
