# SPDX-License-Identifier: Apache-2.0
"""Judgement is a plain function: what remembers nothing between two calls needs no class around it."""

import ast
from pathlib import Path

from tests.architecture.statements import statements

ROOT = Path(__file__).parents[2]
SOURCES = ("megascale_ops", "agents/megascale_agents", "kernels/megascale_kernels")
# Classes that only keep what they were made with, and why that is a class all the same.
HANDED_ON = {
    "kernels/megascale_kernels/emulate/interpreter.py: _Result": "Triton asks what a load returned for `get_result`",
    "kernels/megascale_kernels/emulate/operations.py: Host": "what a `Call` of the emulator is given to read and write",
}


def services_in(source: str) -> list[str]:
    """Return the classes whose constructor only keeps its arguments, for methods that never change them.

    A class with a base has that one's shape, one with dunder methods a shape of Python's, and one whose attributes are
    public is a value: those are not meant.
    """
    if "def __init__(" not in source:
        return []  # three files of five: no constructor, nothing to parse
    return [node.name for node in statements(ast.parse(source)) if isinstance(node, ast.ClassDef) and _is_service(node)]


def _is_service(node: ast.ClassDef) -> bool:
    methods = {one.name: one for one in node.body if isinstance(one, (ast.FunctionDef, ast.AsyncFunctionDef))}
    init = methods.pop("__init__", None)
    if init is None or node.bases or node.decorator_list or any(name.startswith("__") for name in methods):
        return False
    kept = _kept(init)
    changed = {attribute for method in methods.values() for attribute in _stored(method)}
    return bool(kept) and any(not name.startswith("_") for name in methods) and not changed


def _kept(init: ast.FunctionDef | ast.AsyncFunctionDef) -> set[str]:
    """Return the private attributes that are arguments, or parts of arguments; empty when it does anything else."""
    given = {one.arg for one in (*init.args.posonlyargs, *init.args.args, *init.args.kwonlyargs)}
    kept: set[str] = set()
    for line in init.body:
        if isinstance(line, ast.Expr) and isinstance(line.value, ast.Constant):
            continue  # its docstring
        for target, value in _pairs(line):
            if _root(value) not in given:
                return set()
            if not isinstance(target, ast.Attribute) or not target.attr.startswith("_"):
                return set()
            kept.add(target.attr)
    return kept


def _root(value: ast.expr | None) -> str:
    """Return the name that stands at the beginning of ``name.part.part``; "" where it is anything else."""
    while isinstance(value, ast.Attribute):
        value = value.value
    return value.id if isinstance(value, ast.Name) else ""


def _pairs(line: ast.stmt) -> list[tuple[ast.expr, ast.expr | None]]:
    """Return what is assigned to what; (the line's own place, None) for a line that is no assignment."""
    if isinstance(line, ast.AnnAssign):
        return [(line.target, line.value)]
    if not isinstance(line, ast.Assign):
        return [(ast.Name("_"), None)]
    target, value = line.targets[0], line.value
    if isinstance(target, ast.Tuple) and isinstance(value, ast.Tuple):
        return list(zip(target.elts, value.elts, strict=True))
    return [(target, value)]


def _stored(method: ast.FunctionDef | ast.AsyncFunctionDef) -> set[str]:
    """Return the attributes of ``self`` that a method binds anew."""
    return {
        one.attr
        for one in ast.walk(method)
        if isinstance(one, ast.Attribute)
        and isinstance(one.ctx, (ast.Store, ast.Del))
        and isinstance(one.value, ast.Name)
        and one.value.id == "self"
    }


def test_what_remembers_nothing_is_a_function() -> None:
    """A new class of that kind becomes functions, or stands above with its reason; a reason without a class goes."""
    found = {
        f"{path.relative_to(ROOT)}: {name}"
        for source in SOURCES
        for path in sorted((ROOT / source).rglob("*.py"))
        for name in services_in(path.read_text(encoding="utf-8"))
    }

    assert found == set(HANDED_ON)


def test_a_class_around_functions_is_seen() -> None:
    """The control: two services, and what looks like one and remembers, is a value, or has another one's shape."""
    service = """
class Leaving:
    def __init__(self, jobs, transitions):
        self._jobs = jobs
        self._clock = transitions.clock
    def leave(self, word):
        self._jobs[word.job].note(word)
"""
    in_one_line = service.replace("self._jobs = jobs\n        self._clock =", "self._jobs, self._clock = jobs,")
    remembers = service.replace("self._clock = transitions.clock", "self._told = {}")
    counts = service.replace("self._jobs[", "self._clock = self._jobs[")
    value = service.replace("_jobs", "jobs")
    shaped = service.replace("Leaving:", "Leaving(Filter):")

    assert [services_in(one) for one in (service, in_one_line)] == [["Leaving"], ["Leaving"]]
    assert [services_in(one) for one in (remembers, counts, value, shaped)] == [[], [], [], []]
