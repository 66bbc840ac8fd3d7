# SPDX-License-Identifier: Apache-2.0
"""What `make test` leaves to `make test-matrix` is told, with what holds it instead, and never is all of anything."""

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

from megascale_ops.schema.fault_classes import FAULTS
from tests.matrix import some, wide

TESTS = Path(__file__).parents[1]
NOTES = (TESTS / "README.md", TESTS / "processes" / "README.md")
MARK = re.compile(r"\bmark\.matrix\b|\bwide\(")
ROW = re.compile(r"^\| `([\w/]+)` \| (?:fixture )?`(\w+)` \| (.+?) \| (.+?) \|$", re.MULTILINE)
# All of these: what they take is no part of `make test`, or is minutes of Slurm. Other files hold the same.
ALL_LEFT = {"test_database_failover", "test_leaders_killed_for_real", "test_slurm_accounting", "test_slurm_faults"}


def left_out(source: str) -> set[str]:
    """Return the tests of a file, and its fixtures, that carry the marker, all or some of their cases.

    The marker is among their decorators, or in a function or value of the file that these name; `wide` sets it.
    """
    body = ast.parse(source).body
    makers = {
        name
        for node in body
        if MARK.search(ast.unparse(node))
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
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            names = {one.id for mark in node.decorator_list for one in ast.walk(mark) if isinstance(one, ast.Name)}
            if names & makers or any(MARK.search(ast.unparse(mark)) for mark in node.decorator_list):
                found.add(node.name)
    return found | ({node.name for node in _tests(body)} if "pytestmark" in makers else set())


def _tests(body: list[ast.stmt]) -> Iterator[ast.FunctionDef | ast.AsyncFunctionDef]:
    for node in body:
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) and node.name.startswith("test_"):
            yield node


class Kept(ast.NodeTransformer):
    """Takes out of a file what `make test` leaves to the matrix: tests, and cases."""

    def visit_FunctionDef(self, node: ast.FunctionDef) -> ast.AST | None:
        """Leave a test out that carries the marker itself."""
        return (
            None if any(ast.unparse(mark) == "pytest.mark.matrix" for mark in node.decorator_list) else self._on(node)
        )

    visit_AsyncFunctionDef = visit_FunctionDef  # type: ignore[assignment]  # both have decorators  # noqa: N815

    def visit_Call(self, node: ast.Call) -> ast.AST | None:
        """Leave a marked case out, and of a family all but those to keep."""
        called = ast.unparse(node.func)
        if called.endswith("param") and MARK.search(ast.unparse(node)):
            return ast.Constant(None)
        if called.rpartition(".")[2] == "wide":
            return ast.Tuple([one.value for one in node.keywords], ast.Load())
        return self._on(node)

    def _on(self, node: ast.AST) -> ast.AST:
        self.generic_visit(node)
        return node


def kept(source: str) -> ast.Module:
    """Return what `make test` holds of a file."""
    tree = ast.parse(source)
    if any(ast.unparse(node).startswith("pytestmark") and MARK.search(ast.unparse(node)) for node in tree.body):
        return ast.Module([], [])
    left: ast.Module = Kept().visit(tree)
    return left


def words(tree: ast.AST) -> set[str]:
    """Return all texts that stand in a file, but for docstrings."""
    return {one.value for one in ast.walk(tree) if isinstance(one, ast.Constant) and isinstance(one.value, str)}


def told() -> dict[tuple[str, str], str]:
    """Return what holds each test that a table names, by the test's file and name."""
    return {(Path(row[1]).name, row[2]): row[4] for note in NOTES for row in ROW.finditer(note.read_text("utf-8"))}


def test_every_test_of_the_matrix_is_told_with_what_holds_it() -> None:
    """And no other is: one that came back to `make test` has lost its row."""
    files = [path for path in TESTS.rglob("test_*.py") if MARK.search(path.read_text("utf-8"))]

    marked = {(path.stem, name) for path in files for name in left_out(path.read_text("utf-8"))}

    assert len(marked) > 30
    assert marked ^ told().keys() == set()


def test_of_each_file_some_tests_stay() -> None:
    """But of those that need what `make test` does not install."""
    files = [path for path in TESTS.rglob("test_*.py") if MARK.search(path.read_text("utf-8"))]

    empty = {path.stem for path in files if not any(_tests(kept(path.read_text("utf-8")).body))}

    assert empty - {"test_matrix"} == ALL_LEFT


def test_each_class_of_fault_keeps_its_real_process() -> None:
    """What any test of processes names, one that stays names."""
    sources = [path.read_text("utf-8") for path in (TESTS / "processes").glob("test_*.py")]

    named = {fault for source in sources for fault in FAULTS.keys() & words(ast.parse(source))}
    stay = {fault for source in sources for fault in FAULTS.keys() & words(kept(source))}

    assert len(named) > 20
    assert named - stay == set()


def test_what_stays_of_a_file_is_seen() -> None:
    """The control: a test that is marked, a case, and all of a family but what is kept, are not there."""
    test = "def test_a(one):\n    assert one == 'killed'\n"

    assert words(kept(f"@pytest.mark.parametrize('one', wide(['frozen', 'idle'], keep=['idle']))\n{test}")) == {
        "one", "idle", "killed",
    }  # fmt: skip
    marked = "CASES = [pytest.param('frozen', marks=pytest.mark.matrix), 'idle']\n"
    assert words(kept(f"{marked}{test}")) == {"idle", "killed"}
    assert words(kept(f"@pytest.mark.matrix\nasync {test}")) == words(kept(f"@pytest.mark.matrix\n{test}")) == set()
    assert words(kept(f"pytestmark = [pytest.mark.processes, pytest.mark.matrix]\n{test}")) == set()


def test_a_family_keeps_some_and_leaves_some() -> None:
    """Neither all nor none, and no case that is none; a name stands for a case that has one."""
    cases = wide(["a", ("b", 1), pytest.param("c", id="third")], keep=["third"])

    assert [case.values for case in cases] == [("a",), ("b", 1), ("c",)]
    assert [[mark.name for mark in case.marks] for case in cases] == [["matrix"], ["matrix"], []]
    with pytest.raises(ValueError, match="no case of this family: d"):
        wide(["a", "b"], keep=["a", "d"])
    for keep in ([], ["a", "b"]):
        with pytest.raises(ValueError, match="some cases of a family stay"):
            wide(["a", "b"], keep=keep)


def test_of_drawn_inputs_a_quarter_is_tried(monkeypatch: pytest.MonkeyPatch) -> None:
    """And one at least; all of them where `make test-matrix` says so."""
    monkeypatch.setattr("tests.matrix.DRAWS_ALL", False)
    assert [some(drawn) for drawn in (1, 4, 75, 400)] == [1, 1, 19, 100]

    monkeypatch.setattr("tests.matrix.DRAWS_ALL", True)
    assert some(75) == 75


def test_each_way_to_mark_is_seen() -> None:
    """The control: a decorator, a case, a case that a function makes, a family, a fixture, a whole file."""
    cases = "CASES = [1, pytest.param(2, marks=pytest.mark.matrix)]\n"
    made = "def rows():\n    return [pytest.mark.matrix]\n"
    test = "def test_a():\n    pass\n"

    assert left_out(f"@pytest.mark.matrix\n{test}") == {"test_a"}
    assert left_out(f"@pytest.mark.parametrize('n', [pytest.param(1, marks=pytest.mark.matrix)])\n{test}") == {"test_a"}
    assert left_out(f"{cases}@pytest.mark.parametrize('n', CASES)\n{test}") == {"test_a"}
    assert left_out(f"{made}@pytest.mark.parametrize('n', rows())\nasync {test}") == {"test_a"}
    assert left_out(f"CASES = wide([1, 2], keep=[1])\n@pytest.mark.parametrize('n', CASES)\n{test}") == {"test_a"}
    assert left_out(f"@pytest.fixture(params=wide([1, 2], keep=[1]))\ndef made():\n    pass\n{test}") == {"made"}
    assert left_out(f"pytestmark = pytest.mark.matrix\n{test}") == {"test_a"}
    assert left_out(f"{cases}{made}{test}") == set()
