# SPDX-License-Identifier: Apache-2.0
"""Tests that take turns (`tests/turns.toml`): each is there, and what must be held at every run is not among them."""

import ast
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from megascale_ops.schema.fault_classes import FAULTS
from tests.architecture.test_matrix import MARK, kept, words
from tests.turns import IN_TURN, TOGETHER, TURNS, name_of, parted, turn_of

TESTS = Path(__file__).parents[1]
CONTROL = "negative control"


def found_in(file: str) -> Iterator[ast.FunctionDef | ast.AsyncFunctionDef]:
    """Yield the tests of a file, with their decorators and docstrings."""
    for node in ast.parse((TESTS / file).read_text("utf-8")).body:
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) and node.name.startswith("test_"):
            yield node


def takes_turns(file: str, test: ast.FunctionDef | ast.AsyncFunctionDef) -> bool:
    """Return whether a test stands in the table, with all of its cases."""
    fixtures = [one.arg for one in test.args.args]
    return name_of(f"tests/{file}::{test.name}", fixtures) is not None


def files() -> list[str]:
    """Return the files that the table names."""
    return sorted({name.partition("::")[0] for name in IN_TURN})


def test_each_is_there_and_says_what_holds_its_road() -> None:
    """A test that was renamed has not left its place in silence."""
    for name, why in IN_TURN.items():
        file, _, what = name.partition("::")
        test = what.partition("[")[0]
        source = (TESTS / file).read_text("utf-8")
        assert not what or f"def {test.removeprefix('@')}(" in source, name
        assert len(why) > 8, name


def test_what_holds_a_road_is_there() -> None:
    """Each file and test that a row names, and is none of those that take turns itself."""
    stems = {path.stem for path in TESTS.rglob("test_*.py")}
    functions = {test.name for path in TESTS.rglob("test_*.py") for test in found_in(str(path.relative_to(TESTS)))}

    for name, why in IN_TURN.items():
        for word in why.replace(",", " ").replace(";", " ").replace(":", " ").split():
            if "/" in word and not word.startswith("http"):
                assert (TESTS / word).is_dir() or (TESTS / f"{word}.py").is_file(), (name, word)
            elif word.startswith("test_"):
                assert word in stems | functions, (name, word)
                assert f"processes/{word}.py" not in IN_TURN, (name, word)


def test_each_class_of_fault_has_its_real_process_at_every_run() -> None:
    """What any test of processes names that `make test` holds, one names that takes no turns."""
    sources = {path: kept(path.read_text("utf-8")) for path in (TESTS / "processes").glob("test_*.py")}
    named = {fault for tree in sources.values() for fault in FAULTS.keys() & words(tree)}
    for path, tree in sources.items():
        file = f"processes/{path.name}"
        tree.body = [one for one in tree.body if not (is_test(one) and takes_turns(file, one))]

    stay = {fault for tree in sources.values() for fault in FAULTS.keys() & words(tree)}

    assert len(named) > 20
    assert named - stay == set()


def is_test(node: ast.stmt) -> Any:  # noqa: ANN401  narrows nothing
    """Return whether a statement of a file is a test."""
    return isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) and node.name.startswith("test_")


def test_no_negative_control_and_no_command_of_the_readme_takes_turns() -> None:
    """What must not be named, and what a newcomer types, is held each time."""
    for file in files():
        source = (TESTS / file).read_text("utf-8")
        for test in found_in(file):
            if takes_turns(file, test) and not MARK.search(" ".join(map(ast.unparse, test.decorator_list))):
                assert CONTROL not in (ast.get_docstring(test) or ""), (file, test.name)
        if "README_COMMANDS" in source:
            assert any(not takes_turns(file, test) for test in found_in(file)), file


def test_the_thirds_are_thirds() -> None:
    """Each turn holds some, none holds most, and together they hold each once; what takes no turns is in all three."""
    items: Any = [SimpleNamespace(nodeid=f"tests/{name}", fixturenames=()) for name in IN_TURN if "::@" not in name]
    items.append(SimpleNamespace(nodeid="tests/processes/test_recovery.py::test_none", fixturenames=()))

    turns = [parted(items, turn)[0] for turn in range(1, TURNS + 1)]

    assert all(0.2 < len(held) / len(items) < 0.47 for held in turns), [len(held) for held in turns]
    assert sum(len(held) - 1 for held in turns) == len(items) - 1
    assert {turn_of(name) for name in IN_TURN} == {1, 2, 3}


def test_a_variant_is_compiled_in_one_run_of_three() -> None:
    """Whatever looks at it is held in the same third; and of each kernel's file other variants are held every time."""
    assert {TOGETHER[name] for name in TOGETHER} == set(range(1, TURNS + 1))
    assert all(turn_of(name) == turn for name, turn in TOGETHER.items())
    variants = [name for name in TOGETHER if name.endswith("[hopper_ag-parts]")]
    assert len(variants) == 3
    assert len({turn_of(name) for name in variants}) == 1
    for file in {name.partition("::")[0] for name in TOGETHER}:
        whole = [test for test in found_in(file) if not takes_turns(file, test)]
        assert len(whole) > 5, file


def test_a_fixture_s_tests_and_a_file_s_stay_together() -> None:
    """And a case that is named alone is not its neighbour."""
    assert name_of("tests/processes/test_ski_rental.py::test_any") == "processes/test_ski_rental.py"
    assert (
        name_of("tests/processes/test_moe_cpu.py::test_x[a]", ["in_series"]) == "processes/test_moe_cpu.py::@in_series"
    )
    budget = "processes/test_nccl_profiler.py::test_what_is_recorded_gives_way_to_the_budget"
    assert name_of(f"tests/{budget}[fixed]") == f"{budget}[fixed]"
    assert name_of(f"tests/{budget}[adapt]") is None


@pytest.mark.parametrize("option", ["--turn=4", "--turn=all"])
def test_a_turn_that_can_not_be_is_refused(pytestconfig: pytest.Config, option: str) -> None:
    """By pytest itself, which lists what can be."""
    with pytest.raises(pytest.UsageError, match="invalid choice"):
        pytestconfig._parser.parse([option])
