# SPDX-License-Identifier: Apache-2.0
"""Tests that take turns: each run of `make test` holds a third of them, drawn anew; `make test-matrix` holds all.

Each is a story told by real processes that takes seconds of CPU time, a variant of a kernel that is compiled, or a case
of an emulated or simulated run, and each walks a road of the product on which another test walks at every run:
`turns.toml` names that one beside it. A mistake that only such a story sees is found in one run of three. No class of
fault has all its tests here, no negative control is here, and no file with commands of the README is left out as a
whole (`tests/architecture/test_turns.py`).

Tests that look at one compiled variant are held together: it is compiled in one run of three, whoever looks at it.

``pytest --turn=draw`` says at its begin which third it has drawn, and ``--turn=N`` holds that one again. Without the
option nothing is left out: whoever names a file gets all its tests.
"""

import random
import tomllib
import zlib
from collections.abc import Collection, Iterable, Mapping
from pathlib import Path
from typing import Any, TypeVar

import pytest

TURNS = 3
_TABLE = tomllib.loads(Path(__file__).with_suffix(".toml").read_text(encoding="utf-8"))
TOGETHER: Mapping[str, int] = {name: group["turn"] for group in _TABLE["together"] for name in group["tests"]}
IN_TURN: Mapping[str, str] = {name: why for name, why in _TABLE.items() if name != "together"} | {
    name: group["why"] for group in _TABLE["together"] for name in group["tests"]
}
T = TypeVar("T", bound=pytest.Item)


def name_of(nodeid: str, fixtures: Collection[str] = ()) -> str | None:
    """Return by which name a test stands in the table; None where it is not there."""
    place = nodeid.removeprefix("tests/")
    file = place.partition("::")[0]
    names = (place, place.partition("[")[0], *(f"{file}::@{fixture}" for fixture in fixtures), file)
    return next((name for name in names if name in IN_TURN), None)


def _name_of(item: pytest.Item) -> str | None:
    return name_of(item.nodeid, getattr(item, "fixturenames", ()))


def turn_of(name: str) -> int:
    """Return in which third a name of the table is: 1, 2 or 3, the same on every machine."""
    return TOGETHER.get(name) or zlib.crc32(name.encode()) % TURNS + 1


def parted(items: Iterable[T], turn: int) -> tuple[list[T], list[T]]:
    """Return which tests a turn holds, and which it leaves to the two others."""
    held: list[T] = []
    left: list[T] = []
    for item in items:
        name = _name_of(item)
        (held if name is None or turn_of(name) == turn else left).append(item)
    return held, left


def add_option(parser: pytest.Parser) -> None:
    """Add the option."""
    choices = ["draw", *map(str, range(1, TURNS + 1))]
    parser.addoption("--turn", choices=choices, help="hold a third of the tests that take turns (tests/turns.py)")


def pytest_configure(config: pytest.Config) -> None:
    """Draw a third; a worker takes what was drawn."""
    if hasattr(config, "workerinput"):
        config.option.turn = config.workerinput["turn"]
    elif config.getoption("--turn") == "draw":
        config.option.turn = str(random.SystemRandom().randint(1, TURNS))


@pytest.hookimpl(optionalhook=True)
def pytest_configure_node(node: Any) -> None:  # noqa: ANN401  xdist's, which has no types
    """Tell a worker which third is held."""
    node.workerinput["turn"] = node.config.getoption("--turn")


def pytest_report_header(config: pytest.Config) -> str | None:
    """Say which third is held."""
    turn = config.getoption("--turn")
    return f"of tests that take turns: third {turn}; --turn={turn} holds the same" if turn else None


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Mark what takes turns, for ``-m in_turn``, and leave two thirds of it out where that is asked for."""
    for item in items:
        if _name_of(item) is not None:
            item.add_marker("in_turn")
    if turn := config.getoption("--turn"):
        items[:], left = parted(items, int(turn))
        if left:
            config.hook.pytest_deselected(items=left)
