# SPDX-License-Identifier: Apache-2.0
"""A worker keeps reports to itself that nobody is shown, and no other."""

from typing import Any

import pytest

from tests.few_reports import is_told

QUIET: dict[str, Any] = {
    "when": "setup", "outcome": "passed", "sections": [], "user_properties": [], "duration": 0.001,
}  # fmt: skip


@pytest.mark.parametrize("when", ["setup", "teardown"])
def test_what_was_nothing_is_not_told(when: str) -> None:
    """A phase of no time, that went well and said nothing."""
    assert not is_told("testreport", {"data": QUIET | {"when": when}}, 0.005)


@pytest.mark.parametrize(
    "other",
    [
        {"when": "call"},
        {"outcome": "failed"},
        {"outcome": "skipped"},
        {"sections": [("Captured stdout setup", "told")]},
        {"user_properties": [("MEGASCALE_TEST_SEED", 7)]},
        {"duration": 0.005},
    ],
)
def test_all_else_is_told(other: dict[str, Any]) -> None:
    """The control: what is printed, counted, kept for the next run or among the slowest, and every other event."""
    assert is_told("testreport", {"data": QUIET | other}, 0.005)
    assert is_told("logstart", {"nodeid": "test_it.py::test_it"}, 0.005)
