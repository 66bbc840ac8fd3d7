# SPDX-License-Identifier: Apache-2.0
"""No part of a job is reset by hand: what ends is replaced whole, so that nothing of it can be forgotten."""

import ast
from pathlib import Path

CONTROLLER = Path(__file__).parents[2] / "megascale_ops" / "controller"
# What lives as long as a round, a suspicion, a batch for the journal, orders for evidence: one object each.
PARTS = frozenset({"round", "suspected", "suspects", "unsaved", "silence"})
# An object of its own within a round, ended by None.
ENDED_BY_NONE = frozenset({"together"})
EMPTY_CALLS = frozenset({"set", "dict", "list", "deque", "tuple"})


def resets_in(source: str) -> list[str]:
    """Return where a field of a job's part is put back to what it begins with, and where a part is cleared."""
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


def test_no_part_of_a_job_is_reset_by_hand() -> None:
    """Whoever ends a round, a suspicion or a batch puts a new one in its place."""
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
