# SPDX-License-Identifier: Apache-2.0
"""What Python printed last tells of a script that failed before it had a black box; what was survived does not."""

import traceback

import msgspec
import pytest

from megascale_ops.diagnosis.exits.classify import Ended
from megascale_ops.diagnosis.exits.first_cause import judge_exits
from megascale_ops.diagnosis.exits.last_traceback import before_it, read, with_error
from megascale_ops.schema.messages import RankExit
from megascale_ops.schema.progress import RankError

TAIL = 'Traceback (most recent call last):\n  File "/home/u/train.py", line 3, in main\n    go()\nValueError: bad row\n'
EXIT = RankExit(0, 0, 100, 1, 0.0, stderr_tail=TAIL)
EMPTY = "Expecting value: line 1 column 1 (char 0)"
LINE_2 = "train.py:2 <module>"
FOUND = RankError("ValueError", "bad row", "/home/u/train.py:3 main")


def _printed(script: str) -> str:
    """Return what Python prints of a script that fails."""
    try:
        exec(compile(script, "train.py", "exec"), {"__name__": "__main__"})  # noqa: S102  scripts of this file
    except Exception as error:  # noqa: BLE001  any exception is the expected one
        trace = error.__traceback__
        return "".join(traceback.format_exception(error.with_traceback(trace.tb_next if trace is not None else None)))
    raise AssertionError(script)


@pytest.mark.parametrize(
    ("script", "expected"),
    [
        ("import no_such", RankError("ModuleNotFoundError", "No module named 'no_such'", "train.py:1 <module>")),
        ("\nx = (1,\n", RankError("SyntaxError", "'(' was never closed", "train.py:2")),
        ("import json\njson.loads('')", RankError("json.decoder.JSONDecodeError", EMPTY, LINE_2)),
        ("assert 1 == 2", RankError("AssertionError", "", "train.py:1 <module>")),
        ("try: 1/0\nfinally:\n  {}['lr']", RankError("KeyError", "'lr'", "train.py:3 <module>")),
        ("raise ValueError('a\\nb\\nc')", RankError("ValueError", "a\nb\nc", "train.py:1 <module>")),
    ],
    ids=["import", "syntax", "in-a-library", "no-message", "while-handling", "lines"],
)  # fmt: skip
def test_what_python_prints_of_a_failed_script_is_read(script: str, expected: RankError) -> None:
    """Its class, its message, and the script's own line rather than a library's."""
    assert read("epoch 1\n" + _printed(script)) == expected


def test_what_ray_carries_without_frames_is_read() -> None:
    """Ray names the class in brackets and the message on the line below; another class below is another line."""
    carried = "ray.exceptions.RayTaskError({}): ray::Actor.connect() (pid=7, ip=10.0.0.1)\nAttributeError: no x\n"

    error = read(TAIL.split("ValueError", maxsplit=1)[0] + carried.format("AttributeError"))

    assert error is not None
    assert (error.type, error.message) == ("AttributeError", "no x")
    assert read("epoch 1\n" + carried.format("KeyError")) is None


@pytest.mark.parametrize(
    "tail",
    [
        "",
        "out of data\n",
        "Error: out of data\n",
        TAIL + "step 12\n" * 6,
        "/home/u/train.py:3: UserWarning: slow\n  warnings.warn('slow')\n",
        'Thread 0x7f (most recent call first):\n  File "/home/u/train.py", line 3 in main\nAborted\n',
        TAIL.replace(
            "ValueError: bad row", "subprocess.CalledProcessError: Command 'x' returned non-zero exit status 1."
        ),
    ],
    ids=["nothing", "words", "like-a-class", "went-on", "warning", "faulthandler", "of-another"],
)
def test_what_is_no_end_by_an_exception_is_not_taken_for_one(tail: str) -> None:
    """Words of the script's own, an exception that it survived, stacks, a launcher's word about another process."""
    assert read(tail) is None


def test_colours_and_crooked_lines_are_no_hindrance() -> None:
    """Python 3.13 paints tracebacks where FORCE_COLOR is set."""
    painted = TAIL.replace("ValueError", "\x1b[1;35mValueError\x1b[0m").replace('"/home', '\x1b[35m"/home')

    assert read(painted) == FOUND


@pytest.mark.parametrize(
    "changes",
    [{"code": 3}, {"code": -9}, {"code": 0}, {"by_us": True}, {"phase": "forward"}],
    ids=["own-status", "signal", "well", "stopped", "has-a-box"],
)
def test_only_an_uncaught_exception_without_a_box_is_read(changes: dict[str, object]) -> None:
    """A black box knows better what was caught; another status is the script's choice."""
    assert with_error(EXIT).error == FOUND
    assert with_error(msgspec.structs.replace(EXIT, **changes)).error is None


def test_the_verdict_names_the_exception_and_where_it_is_known_from() -> None:
    """Not as an exit code, however late the agent read the output."""
    verdict = judge_exits(
        [Ended("n0", EXIT, 0.1)], world_size=2, missing=(), reports={}, hosts={}, round_=1, wall_s=1e6
    )

    assert (verdict.fault, verdict.culprits) == ("exception", (0,))
    assert "ValueError: bad row at /home/u/train.py:3 main" in verdict.reason
    assert verdict.evidence[0].source == "stderr"


CHAIN = (
    'Traceback (most recent call last):\n  File "c.py", line 1, in write\n    f.write(b)\n{first}\n\n'
    "{marker}\n\n"
    'Traceback (most recent call last):\n  File "t.py", line 3, in main\n    save()\nRuntimeError: step 400 failed\n'
)
CAUSED = "The above exception was the direct cause of the following exception:"
HANDLED = "During handling of the above exception, another exception occurred:"


@pytest.mark.parametrize("marker", [CAUSED, HANDLED])
@pytest.mark.parametrize(
    ("first", "fault"),
    [
        ("OSError: [Errno 28] No space left on device", "disk_full"),
        ("torch.OutOfMemoryError: CUDA out of memory.", "out_of_memory"),
        ("RuntimeError: CUDA error: an illegal memory access was encountered", "cuda_error"),
        ("KeyError: 'lr'", "exception"),
        ("requests.exceptions.ConnectionError: reset by peer", "exception"),
    ],
)
def test_the_root_of_a_chain_tells_more_than_what_was_raised_from_it(first: str, fault: str, marker: str) -> None:
    """Scripts and frameworks wrap what they met in an exception of their own."""
    exit_ = RankExit(0, 0, 100, 1, 0.0, stderr_tail=CHAIN.format(first=first, marker=marker))

    found = judge_exits([Ended("n0", exit_, 0.1)], world_size=2, missing=(), reports={}, hosts={}, round_=1, wall_s=1e6)

    assert (found.fault, found.culprits) == (fault, (0,))


def test_an_older_chain_is_none_of_the_last_ones() -> None:
    """A disk that was full for a moment, caught and printed, does not end the rank an hour later."""
    older = CHAIN.format(first="OSError: [Errno 28] No space left on device", marker=HANDLED)
    newer = CHAIN.format(first="KeyError: 'lr'", marker=CAUSED)

    assert [error.type for error in before_it(older + newer)] == ["KeyError"]
    assert before_it(older + TAIL) == []
    assert before_it(TAIL) == []
