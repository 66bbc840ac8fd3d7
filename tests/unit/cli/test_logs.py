# SPDX-License-Identifier: Apache-2.0
"""Log lines: sentences for people, JSON for machines, and the fields that say what a line is about."""

import io
import json
import logging
from collections.abc import Callable, Iterator

import pytest

from megascale_ops.cli.logs import configure


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
        # -1 and "" are how an event says that it is about no rank or no node.
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
