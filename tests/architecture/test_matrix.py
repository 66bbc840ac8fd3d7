# SPDX-License-Identifier: Apache-2.0
"""What `make test` leaves to `make test-matrix` is told, with what holds it instead."""

import ast
import re
from pathlib import Path

TESTS = Path(__file__).parents[1]
NOTES = (TESTS / "README.md", TESTS / "processes" / "README.md")
MARK = "mark.matrix"
ROW = re.compile(r"^\| `([\w/]+)` \| `(test_\w+)` \| (.+?) \| (.+?) \|$", re.MULTILINE)


def left_out(source: str) -> set[str]:
    """Return the tests of a file that carry the marker, all or some of their cases.

    The marker is among a test's decorators, or in a function or value of the file that these name.
    """
    body = ast.parse(source).body
    makers = {
        name
        for node in body
        if MARK in ast.unparse(node)
        for name in (
            [node.name]
            if isinstance(node, ast.FunctionDef) and not node.name.startswith("test_")
            else [target.id for target in node.targets if isinstance(target, ast.Name)]
            if isinstance(node, ast.Assign)
            else []
        )
    }
    found = set()
    for node in body:
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) and node.name.startswith("test_"):
            names = {one.id for mark in node.decorator_list for one in ast.walk(mark) if isinstance(one, ast.Name)}
            if names & makers or any(MARK in ast.unparse(mark) for mark in node.decorator_list):
                found.add(node.name)
    if "pytestmark" in makers:
        found |= {node.name for node in body if isinstance(node, ast.FunctionDef) and node.name.startswith("test_")}
    return found


def told() -> dict[tuple[str, str], str]:
    """Return what holds each test that a table names, by the test's file and name."""
    return {(Path(row[1]).name, row[2]): row[4] for note in NOTES for row in ROW.finditer(note.read_text("utf-8"))}


def test_every_test_of_the_matrix_is_told_with_what_holds_it() -> None:
    """And no other is: one that came back to `make test` has lost its row."""
    files = [path for path in TESTS.rglob("test_*.py") if MARK in path.read_text("utf-8")]

    marked = {(path.stem, name) for path in files for name in left_out(path.read_text("utf-8"))}

    assert len(marked) > 30
    assert marked ^ told().keys() == set()


def test_each_way_to_mark_is_seen() -> None:
    """The control: a decorator, a case, a case that a function makes, a whole file."""
    cases = "CASES = [1, pytest.param(2, marks=pytest.mark.matrix)]\n"
    made = "def rows():\n    return [pytest.mark.matrix]\n"
    test = "def test_a():\n    pass\n"

    assert left_out(f"@pytest.mark.matrix\n{test}") == {"test_a"}
    assert left_out(f"@pytest.mark.parametrize('n', [pytest.param(1, marks=pytest.mark.matrix)])\n{test}") == {"test_a"}
    assert left_out(f"{cases}@pytest.mark.parametrize('n', CASES)\n{test}") == {"test_a"}
    assert left_out(f"{made}@pytest.mark.parametrize('n', rows())\nasync {test}") == {"test_a"}
    assert left_out(f"pytestmark = pytest.mark.matrix\n{test}") == {"test_a"}
    assert left_out(f"{cases}{made}{test}") == set()
