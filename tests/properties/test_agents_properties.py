# SPDX-License-Identifier: Apache-2.0
"""Whatever a process is called, a log contains, or a rank answers: the agent reads it or refuses it, nothing else."""

import contextlib
from pathlib import Path

from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from megascale_agents.collectors import process
from megascale_agents.evidence import flight_recorder, py_spy, tracebacks
from megascale_agents.ranks.stderr_scanner import LogScanner

from megascale_ops.diagnosis.exits.last_words import match, strip_prefix
from megascale_ops.diagnosis.exits.word_table import PATTERNS

LINES = st.lists(
    st.one_of(
        st.text(st.characters(exclude_characters="\n", codec="utf-8"), max_size=60),
        st.sampled_from(
            [
                "Traceback (most recent call last):",
                '  File "train.py", line 1, in <module>',
                "ValueError: x",
                "Segmentation fault",
                "[rank0]: RuntimeError: [gloo/transport/tcp/pair.cc:1] Connection closed by peer",
                "",
            ]
        ),
    ),
    max_size=30,
)
relaxed = settings(max_examples=100, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])


@relaxed
@given(lines=LINES, cuts=st.lists(st.integers(min_value=1, max_value=40), max_size=20))
def test_a_log_reads_the_same_in_any_pieces(tmp_path: Path, lines: list[str], cuts: list[int]) -> None:
    """Where a write ended when we looked does not change what was said."""
    data = "".join(f"{line}\n" for line in lines).encode(errors="ignore")
    whole, pieces = tmp_path / "whole", tmp_path / "pieces"
    whole.write_bytes(data)
    pieces.write_bytes(b"")
    at_once, bit_by_bit = LogScanner(str(whole)), LogScanner(str(pieces))

    at_once.poll_stderr()
    with pieces.open("ab", buffering=0) as file:
        rest = data
        for cut in [*cuts, len(data) + 1]:
            file.write(rest[:cut])
            rest = rest[cut:]
            bit_by_bit.poll_stderr()

    assert list(at_once.lines) == list(bit_by_bit.lines)
    assert at_once.last_words == bit_by_bit.last_words
    at_once.close()
    bit_by_bit.close()


@given(data=st.binary(max_size=300))
def test_a_stat_line_is_read_or_refused(data: bytes) -> None:
    """ValueError is the only way out."""
    with contextlib.suppress(ValueError):
        process.parse(data)


@given(name=st.binary(min_size=0, max_size=15))
def test_no_name_of_a_process_confuses_us(name: bytes) -> None:
    """The kernel puts the name in as it is."""
    line = b"7 (" + name + b") S 1 7 7 0 -1 0 0 0 0 0 5 5 0 0 20 0 3 0 99 1000 4 0\n"

    assert process.parse(line)[:2] == ("S", 99)


@given(line=st.text(max_size=200), ends=st.booleans())
def test_any_line_can_be_judged(line: str, *, ends: bool) -> None:
    """No line takes long or raises; what is matched is in the table."""
    found = match(strip_prefix(line), ends_traceback=ends)

    assert found is None or found in PATTERNS


@given(data=st.binary(max_size=300))
def test_any_answer_of_a_rank_can_be_read_or_refused(data: bytes) -> None:
    """A rank that is broken may answer anything."""
    assert isinstance(tracebacks.parse(data), str)
    assert isinstance(tracebacks.main_frames(data), tuple)
    with contextlib.suppress(flight_recorder.NoAnswerError):
        py_spy.parse(data, 1)
    with contextlib.suppress(ValueError):
        flight_recorder.parse(data)
