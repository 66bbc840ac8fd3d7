# SPDX-License-Identifier: Apache-2.0
"""Lines read the same whatever launchers, loggers and printers of tracebacks put before and around them."""

import pytest

from megascale_ops.diagnosis.exits.last_traceback import read
from megascale_ops.diagnosis.exits.last_words import heard_in
from megascale_ops.diagnosis.exits.prefixes import Prefixes, strip_prefix

LINES = (
    "Traceback (most recent call last):",
    '  File "/app/train.py", line 31, in main',
    "    run(batch)",
    "ValueError: bad row",
)


@pytest.mark.parametrize(
    "prefix",
    [
        "",
        "[rank3]: ",
        "[default1]:[rank3]: ",
        "[1,0]<stderr>:",
        "[1,0]<stderr>: ",
        "(Worker pid=12, ip=10.0.0.1) ",
        "3: ",
        "10.1.2.3: [rank3]: ",
        "[kubeflow][worker-3] ",
        "[pod/train-0/pytorch] ",
        "node1:3: ",
        "2024-07-24 08:45:13.616 ",
        "2024-07-24T08:45:13.616789Z ",
        "07/24 08:45:13 n3 stderr | ",
        "bench.n1.cluster.example.nolog [stderr] [rank3]: ",
        "[n1/3] ERROR train.py:88 - ",
    ],
)
def test_a_traceback_is_read_behind_any_prefix(prefix: str) -> None:
    """Known by its form or learnt where the traceback begins; the number of a time may differ from line to line."""
    text = "".join(f"{prefix.replace(':13', f':1{at}')}{line}\n" for at, line in enumerate(LINES))

    error = read(text)

    assert error is not None
    assert (error.type, error.message, error.where) == ("ValueError", "bad row", "/app/train.py:31 main")
    assert [one.row.name for one in heard_in(text)] == ["exception"]


@pytest.mark.parametrize("prefix", ["", "[rank1]: ", "10.1.2.3: "])
def test_a_group_of_exceptions_is_read_by_its_last(prefix: str) -> None:
    """Python draws a frame around each of them."""
    drawn = (
        "  + Exception Group Traceback (most recent call last):",
        '  |   File "/app/train.py", line 5, in <module>',
        "  |     asyncio.run(main())",
        "  | ExceptionGroup: unhandled errors in a TaskGroup (1 sub-exception)",
        "  +-+---------------- 1 ----------------",
        *(f"    | {line}" for line in LINES),
        "    +------------------------------------",
    )

    error = read("".join(f"{prefix}{line}\n" for line in drawn))

    assert error is not None
    assert (error.type, error.message) == ("ValueError", "bad row")


def test_a_box_of_rich_is_a_traceback() -> None:
    """Its frames count, and what stands below the box is what was raised."""
    text = (
        "╭────── Traceback (most recent call last) ──────╮\n│ /app/train.py:31 in main                      │\n"
        "│ ❱ 31 │   run(batch)                           │\n╰───────────────────────────────────────────────╯\n"
        "ValueError: bad row\n"
    )

    error = read(text)

    assert error is not None
    assert (error.type, error.where) == ("ValueError", "/app/train.py:31 main")


def test_an_ordinary_line_keeps_what_it_has() -> None:
    """Nothing is learnt from a line of a log, and what was learnt takes nothing from lines that differ."""
    prefixes = Prefixes()
    before = [prefixes.bare(line) for line in ("  | 30/1000 it/s", "INFO no Traceback here", "12 of 13 done")]
    prefixes.bare("[n1/3] ERROR - Traceback (most recent call last):")

    after = prefixes.bare("[n1/3] WARN - Traceback is above")

    assert before == ["  | 30/1000 it/s", "INFO no Traceback here", "12 of 13 done"]
    assert after == "[n1/3] WARN - Traceback is above"
    assert strip_prefix("2024 was a good year") == "2024 was a good year"


def test_a_list_in_a_message_hides_no_exception() -> None:
    """load_state_dict writes a line for each parameter; lines of a rank that went on still end the look."""
    traceback = "\n".join(LINES[:3]) + "\nRuntimeError: Error(s) in loading state_dict for Net:\n"

    assert read(traceback + "\tsize mismatch for a.weight\n" * 40) is not None
    assert read(traceback + "went on with the next file\n" * 7) is None
