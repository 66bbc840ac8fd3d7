# SPDX-License-Identifier: Apache-2.0
"""Tests that belong together are held by one worker."""

import ast
from pathlib import Path
from types import SimpleNamespace

import pytest
from xdist.remote import Producer

from tests.processes.groups import FIRST, GROUPS, ByGroup, place

ROOT = Path(__file__).parents[2]


class Config(SimpleNamespace):
    """As much of pytest's configuration as the scheduler reads."""

    def getvalue(self, name: str) -> list[str]:
        """Return the workers that were asked for."""
        assert name == "tx"
        return ["popen", "popen"]


def test_a_group_is_of_files_that_there_are() -> None:
    """A file that was moved would fall out of its group, or of its place, without a word."""
    assert [path for path in (*GROUPS, *FIRST) if not (ROOT / path).is_file()] == []


def test_the_longest_tests_are_handed_out_first() -> None:
    """In the order in which their files are named; all others keep theirs."""
    last, first, other = (f"{path}::test_a" for path in (FIRST[-1], FIRST[0], "tests/processes/test_top.py"))

    assert sorted([other, last, "tests/unit/test_a.py::test_b", first], key=place) == [
        *(first, last),
        *(other, "tests/unit/test_a.py::test_b"),
    ]


@pytest.mark.parametrize(
    ("one", "other", "together"),
    [
        ("tests/processes/test_stranger.py::test_a", "tests/processes/test_shared_memory.py::test_b[x::y]", True),
        ("tests/processes/test_kernels_cpu.py::test_a[4-b]", "tests/processes/test_kernels_cpu.py::test_c", True),
        ("tests/processes/test_stranger.py::test_a", "tests/processes/test_kernels_cpu.py::test_c", False),
        ("tests/processes/test_nodes.py::test_a[1]", "tests/processes/test_nodes.py::test_a[2]", False),
    ],
)
def test_a_group_is_one_unit_of_work_and_other_tests_one_each(one: str, other: str, together: bool) -> None:
    """By the files of both."""
    scheduler = ByGroup(Config(option=SimpleNamespace(loadscopereorder=True)), Producer("test"))

    assert (scheduler._split_scope(one) == scheduler._split_scope(other)) == together


def unmarked(source: str) -> list[str]:
    """Return the tests of a file that neither it nor they themselves say to start processes or to need a GPU."""
    body = ast.parse(source).body
    marks = ("mark.processes", "mark.gpu")
    whole = [ast.unparse(node.value) for node in body if isinstance(node, ast.Assign)
             and ast.unparse(node.targets[0]) == "pytestmark"]  # fmt: skip
    if any(mark in value for value in whole for mark in marks):
        return []
    return [
        node.name
        for node in body
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
        and node.name.startswith("test_")
        and not any(mark in ast.unparse(one) for one in node.decorator_list for mark in marks)
    ]


def test_what_test_unit_does_not_look_into_has_no_test_for_it() -> None:
    """`make test-unit` leaves two folders out, `make test-processes` takes what is marked: nothing falls in between."""
    files = [path for folder in ("processes", "gpu") for path in (ROOT / "tests" / folder).rglob("test_*.py")]
    script = (ROOT / ".ci" / "unit-tests.sh").read_text("utf-8")

    assert len(files) > 100
    assert all(f"--ignore=tests/{folder} " in script for folder in ("processes", "gpu"))
    assert {path.name: found for path in files if (found := unmarked(path.read_text("utf-8")))} == {}


def test_a_test_without_a_marker_is_seen() -> None:
    """The control: beside one that has it, and in a file that has it as a whole."""
    one = "@pytest.mark.processes\ndef test_a(): ...\nasync def test_b(): ...\n"

    assert unmarked(one) == ["test_b"]
    assert unmarked("pytestmark = [pytest.mark.gpu]\n" + one) == []
