# SPDX-License-Identifier: Apache-2.0
"""Log lines: sentences for people, JSON for machines, and the fields that say what a line is about."""

import io
import json
import logging
from collections.abc import Callable, Iterator

import pytest

from megascale_ops.cli.terminal.logs import configure


@pytest.fixture(autouse=True)
def _restore_root_logger() -> Iterator[None]:
    root = logging.getLogger()
    handlers, level = root.handlers[:], root.level
    yield
    root.handlers[:] = handlers
    root.setLevel(level)


@pytest.fixture
def logged() -> Callable[..., str]:
    """Return what is printed when a line with fields is logged in the given format and level."""

    def log(log_format: str, level: str = "info", *, error: bool = False) -> str:
        stream = io.StringIO()
        configure(level, log_format, stream)
        logger = logging.getLogger("megascale_ops.controller.loop")
        try:
            _ = 1 // (0 if error else 1)
        except ZeroDivisionError:
            logger.exception("could not judge", extra={"job": "gpt"})
        # -1 and "" in an event mean no rank or no node.
        logger.info("job %s runs", "gpt", extra={"job": "gpt", "rank": -1, "node": "", "incident": ""})
        logger.info("rank %d is silent", 2, extra={"job": "gpt", "rank": 2, "incident": "gpt-1"})
        return stream.getvalue()

    return log


def test_text_is_a_sentence_with_its_fields(logged: Callable[..., str]) -> None:
    """On a terminal a line is a time, a level, a room, a sentence, and what it is about."""
    first, second = logged("text").splitlines()

    assert first.endswith("info controller: job gpt runs [job=gpt]")
    assert second.endswith("info controller: rank 2 is silent [job=gpt rank=2 incident=gpt-1]")


def test_json_is_one_object_a_line(logged: Callable[..., str]) -> None:
    """As JSON each line is one object, tracebacks included, with the fields by name."""
    lines = [json.loads(line) for line in logged("json", error=True).splitlines()]

    assert [line["level"] for line in lines] == ["error", "info", "info"]
    assert "ZeroDivisionError" in lines[0]["traceback"]
    assert lines[2]["message"] == "rank 2 is silent"
    assert (lines[2]["job"], lines[2]["rank"], lines[2]["incident"]) == ("gpt", 2, "gpt-1")
    assert "node" not in lines[1]


def test_level_holds_back_what_is_below_it(logged: Callable[..., str]) -> None:
    """A line below the chosen level is not printed."""
    assert logged("text", "warning") == ""


def test_last_configuration_wins(logged: Callable[..., str]) -> None:
    """Configuring twice does not print every line twice."""
    logged("text")

    assert len(logged("text").splitlines()) == 2


FORGED = "fine\n12:00:00 error controller: rank 3 is to blame\x1b[2J\x1b]0;title\x07\r\u202e"


def test_foreign_text_forges_no_line_and_moves_no_cursor() -> None:
    """A rank's error, a node's name, an exception's text: every line that looks like one of ours is one."""
    stream = io.StringIO()
    configure("info", "text", stream)
    logger = logging.getLogger("megascale_ops.controller.loop")

    logger.info("rank said %s", FORGED, extra={"job": FORGED})
    try:
        raise ValueError(FORGED)  # noqa: TRY301  as a request's
    except ValueError:
        logger.exception("a request failed")

    first, second, *trace = stream.getvalue().splitlines()
    assert "12:00:00 error controller: rank 3" in first
    assert second.endswith("a request failed")
    assert all(line.startswith("    ") for line in trace)
    assert stream.getvalue().replace("\n", "").isprintable()


def test_lines_of_one_kind_are_limited_and_their_number_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    """Tracebacks sooner than sentences; another job's line is another kind."""
    stream = io.StringIO()
    configure("info", "text", stream)
    logger = logging.getLogger("megascale_ops.controller.loop")
    now_s = [1_800_000_000.0]
    monkeypatch.setattr("logging.time.time", lambda: now_s[0])
    monkeypatch.setattr("logging.time.time_ns", lambda: int(now_s[0] * 1e9), raising=False)

    def fail(job: str) -> None:
        logger.error("could not judge", exc_info=ValueError("x"), extra={"job": job})

    for _ in range(1000):
        logger.warning("no connection can be taken")
        fail("a")
    fail("b")
    written = stream.getvalue()
    now_s[0] += 11.0
    fail("a")

    assert written.count("no connection can be taken") == 100
    assert written.count("could not judge [job=a]") == 5
    assert written.count("could not judge [job=b]") == 1
    assert "could not judge (995 more lines like this one were left out) [job=a]" in stream.getvalue()


def test_ordinary_lines_are_all_written() -> None:
    """The control: umlauts, spaces and ninety events of a job within ten seconds."""
    stream = io.StringIO()
    configure("info", "text", stream)

    for number in range(90):
        logging.getLogger("megascale_ops.x").info("Größe  %d: two  spaces", number)

    assert [line.partition("x: ")[2] for line in stream.getvalue().splitlines()] == [
        f"Größe  {number}: two  spaces" for number in range(90)
    ]
