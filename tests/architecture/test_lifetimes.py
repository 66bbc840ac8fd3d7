# SPDX-License-Identifier: Apache-2.0
"""Nothing is reset by hand: what ends is replaced whole, so that nothing of it can be forgotten.

Two ways to find it. The parts of a job are known by name. Anywhere else, fields that a method puts back together to
what ``__init__`` gave them end together, and so are one object that has no name yet.
"""

import ast
from collections.abc import Iterable, Iterator
from pathlib import Path

from tests.architecture.statements import statements

ROOT = Path(__file__).parents[2]
CONTROLLER = ROOT / "megascale_ops" / "controller"
SOURCES = ("megascale_ops", "agents/megascale_agents", "kernels/megascale_kernels")
# What lives as long as a round, a suspicion, a batch for the journal, orders for evidence: one object each.
PARTS = frozenset({"round", "suspected", "suspects", "unsaved", "silence"})
# An object of its own within a round, ended by None.
ENDED_BY_NONE = frozenset({"together"})
# Methods after which the object is of no use any more: what they leave is not read any more.
LAST_METHODS = frozenset({"close", "__exit__"})
# Fields that end together and stay apart, and why.
KEPT_APART = {
    "Anatomy.finish": "each step in the training thread, where an object costs more than two stores",
    "Recording._takes_over": "two depths of nested calls, counted at each call in the training thread",
    "Agreement.reset": "two fields of three: the number of resets itself counts on",
    "Connection.answered": "a head of HTTP, begun anew at thousands of requests a second",
    "Exchange.end": "what is let go when a request has ended for good",
    "SymmetricMemory.clear": "counts of a memory that stays, zeroed with its words",
    "_Track.leave_open": "the two events that it has just drawn to their end",
}
EMPTY_CALLS = frozenset({"set", "dict", "list", "deque", "tuple"})


def resets_in(source: str) -> list[str]:
    """Return where a field of a job's part is put back to what it begins with, and where a part is cleared."""
    if not any(f".{part}." in source for part in PARTS):
        return []  # names no field of a part
    found = []
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Assign) and _is_initial(node.value):
            found += [f"{node.lineno}: {ast.unparse(node)}" for target in node.targets if _is_field_of_part(target)]
        elif isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr == "clear":
            found += [f"{node.lineno}: {ast.unparse(node)}"] if _is_field_of_part(node.func.value) else []
    return found


def _is_field_of_part(node: ast.expr) -> bool:
    """Whether it is ``<...>.<part>.<field>``, with a job, or ``self.job``, before it."""
    if not isinstance(node, ast.Attribute) or not isinstance(node.value, ast.Attribute):
        return False
    return node.value.attr in PARTS and node.attr not in ENDED_BY_NONE


def _is_initial(node: ast.expr) -> bool:
    """Whether a field could begin with this value."""
    if isinstance(node, ast.UnaryOp):  # -1: no step, no age
        return isinstance(node.operand, ast.Constant)
    if isinstance(node, ast.Constant):
        return not node.value
    if isinstance(node, (ast.Tuple, ast.List, ast.Set)):
        return not node.elts
    if isinstance(node, ast.Dict):
        return not node.keys
    return (
        isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id in EMPTY_CALLS and not node.args
    )


def resets_together_in(source: str) -> list[str]:
    """Return the methods that put two fields or more, one right after the other, back to their first values."""
    if "def __init__(" not in source:
        return []  # three files of five: no first values, nothing to parse
    found = []
    for one in statements(ast.parse(source)):
        if not isinstance(one, ast.ClassDef):
            continue
        methods = [each for each in one.body if isinstance(each, (ast.FunctionDef, ast.AsyncFunctionDef))]
        first = {
            field: ast.unparse(value)
            for method in methods
            if method.name == "__init__"
            for line in method.body
            for field, value in _assigned(line)
            if value is not None and _is_literal(value)
        }
        found += [
            f"{one.name}.{method.name}"
            for method in methods
            if method.name != "__init__"
            and method.name not in LAST_METHODS
            and any(_put_back(block, first) > 1 for block in _blocks(method))
        ]
    return found


def _put_back(block: Iterable[ast.stmt], first: dict[str, str]) -> int:
    """Return how many fields the longest run of neighbouring lines puts back."""
    most = run = 0
    for line in block:
        back = {
            field
            for field, value in _assigned(line)
            if field in first and (value is None or ast.unparse(value) == first[field])
        }
        run = run + len(back) if back else 0
        most = max(most, run)
    return most


def _blocks(method: ast.AST) -> Iterator[list[ast.stmt]]:
    for node in ast.walk(method):
        for name in ("body", "orelse", "finalbody"):
            block = getattr(node, name, None)
            if isinstance(block, list):
                yield block


def _assigned(line: ast.stmt) -> list[tuple[str, ast.expr | None]]:
    """Return the fields of ``self`` that a line assigns, with the value; None: it clears them."""
    pairs: list[tuple[ast.expr, ast.expr | None]] = []
    if isinstance(line, ast.AnnAssign) and line.value is not None:
        pairs = [(line.target, line.value)]
    elif isinstance(line, ast.Assign):
        for target in line.targets:
            if isinstance(target, ast.Tuple) and isinstance(line.value, ast.Tuple):
                pairs += zip(target.elts, line.value.elts, strict=False)
            else:
                pairs.append((target, line.value))
    elif isinstance(line, ast.Expr) and isinstance(line.value, ast.Call):
        called = line.value.func
        if isinstance(called, ast.Attribute) and called.attr == "clear":
            pairs = [(called.value, None)]
    return [
        (target.attr, value)
        for target, value in pairs
        if isinstance(target, ast.Attribute) and isinstance(target.value, ast.Name) and target.value.id == "self"
    ]


def _is_literal(node: ast.expr) -> bool:
    """Whether it is an empty value, or one that stands there as it is."""
    return isinstance(node, ast.Constant) or _is_initial(node)


def test_no_part_of_a_job_is_reset_by_hand() -> None:
    """The code that ends a round, a suspicion or a batch puts a new one in its place."""
    found = {
        str(path.relative_to(CONTROLLER)): resets
        for path in sorted(CONTROLLER.rglob("*.py"))
        if (resets := resets_in(path.read_text(encoding="utf-8")))
    }

    assert found == {}


def test_a_reset_by_hand_is_seen() -> None:
    """The control: each way to put a field back."""
    source = "job.round.step = -1\njob.round.exits.clear()\njob.suspects.looks = {}\njob.unsaved.may_wait = False\n"

    assert len(resets_in(source)) == 4
    assert resets_in("job.round = Round(record)\njob.round.step = progress.step\njob.suspected = None\n") == []


def test_what_ends_together_is_one_object() -> None:
    """A method that begins anew puts one new object in place; the others stand above, each with its reason."""
    found = {
        name
        for source in SOURCES
        for path in sorted((ROOT / source).rglob("*.py"))
        for name in resets_together_in(path.read_text(encoding="utf-8"))
    }

    assert found == set(KEPT_APART)


def test_fields_that_are_put_back_together_are_seen() -> None:
    """The control: in one line or in several, by a first value or by ``clear``; but no single field, no other value."""
    watch = """
class Watch:
    def __init__(self):
        self._step, self._of = -1, 2
        self._told: dict[int, int] = {}
        self._name = "a"
    def begin(self):
        self.round += 1
        LINES
"""
    together = ["self._step = -1\n        self._told.clear()", "self._step, self._told = -1, {}"]
    apart = [
        "self._step = -1",
        "self._step, self._told = 0, {}",
        "self._step = -1\n        go()\n        self._told = {}",
    ]

    assert [resets_together_in(watch.replace("LINES", lines)) for lines in together] == [["Watch.begin"]] * 2
    assert [resets_together_in(watch.replace("LINES", lines)) for lines in apart] == [[], [], []]
