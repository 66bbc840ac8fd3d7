# SPDX-License-Identifier: Apache-2.0
"""Whoever takes JSON that may be nonsense takes it at any depth: 100,000 brackets are a RecursionError."""

import ast
from collections.abc import Iterator
from pathlib import Path

import msgspec
import pytest

ROOT = Path(__file__).parents[2]
OURS = ("megascale_ops", "agents/megascale_agents", "kernels/megascale_kernels")
READS = {"msgspec.json.decode", "json.loads"}
NONSENSE = ("MsgspecError", "DecodeError", "ValidationError", "ValueError")
AT_ANY_DEPTH = ("RecursionError", "UNREADABLE", "Exception")


def shallow(source: str) -> list[int]:
    """Return the lines that read JSON where nonsense is taken, and depth is not."""
    tree = ast.parse(source)
    above = {child: node for node in ast.walk(tree) for child in ast.iter_child_nodes(node)}
    reads = [one for one in ast.walk(tree) if isinstance(one, ast.Call) and ast.unparse(one.func) in READS]
    return [one.lineno for one in reads if _is_shallow(" ".join(_taken(one, above)))]


def _taken(node: ast.AST, above: dict[ast.AST, ast.AST]) -> Iterator[str]:
    while (outer := above.get(node)) is not None:
        if isinstance(outer, ast.Try) and node in outer.body:
            yield from (ast.unparse(one.type) for one in outer.handlers if one.type is not None)
        if isinstance(outer, ast.With):
            yield from (ast.unparse(one.context_expr) for one in outer.items if "suppress" in ast.unparse(one))
        node = outer


def _is_shallow(taken: str) -> bool:
    return any(one in taken for one in NONSENSE) and not any(one in taken for one in AT_ANY_DEPTH)


def test_who_takes_nonsense_takes_depth() -> None:
    """By `megascale_ops.foreign.UNREADABLE`, or by name."""
    files = [path for folder in OURS for path in (ROOT / folder).rglob("*.py")]
    found = {
        path: text for path in files if "json.decode(" in (text := path.read_text("utf-8")) or "json.loads(" in text
    }

    assert len(found) > 30
    assert [f"{path.relative_to(ROOT)}:{line}" for path, text in found.items() for line in shallow(text)] == []


@pytest.mark.parametrize(
    ("handler", "lines"),
    [("ValueError", [2]), ("(ValueError, RecursionError)", []), ("UNREADABLE", []), ("OSError", [])],
)
def test_the_rule_finds_what_it_forbids(handler: str, lines: list[int]) -> None:
    """The control; who takes no nonsense at all reads what is our own."""
    assert shallow(f"try:\n    json.loads(raw)\nexcept {handler}:\n    pass\n") == lines


def test_depth_is_no_value_error() -> None:
    """What the rule rests on."""
    with pytest.raises(RecursionError):
        msgspec.json.decode("[" * 100_000)
