# SPDX-License-Identifier: Apache-2.0
"""The rooms of the house: none is a hall, none leans on one that leans on it, and a name means one thing.

Which room may import which is a contract of import-linter each (``.importlinter``); here stands what holds for all of
them. An import counts wherever it stands: inside a function, and for types alone.
"""

import ast
from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping
from functools import cache
from pathlib import Path

from tests.architecture.statements import statements

ROOT = Path(__file__).parents[2]
PACKAGES = {
    "megascale_ops": ROOT / "megascale_ops",
    "megascale_agents": ROOT / "agents" / "megascale_agents",
    "megascale_kernels": ROOT / "kernels" / "megascale_kernels",
}
# 25: what fits a screen, one line a file.
MOST_FILES = 25
# Folders whose rooms are one program or library: their rooms are siblings.
HOUSES = (
    *("megascale_ops.controller", "megascale_ops.diagnosis", "megascale_ops.recorder", "megascale_ops.runner"),
    *("megascale_ops.cli", "megascale_ops.chaos", "megascale_ops.blackbox", "megascale_agents", "megascale_kernels"),
)
# Twins by intent: the same thing, of another operator or another detector.
TWINS = {
    "megascale_kernels": {"launch", "hopper", "hopper_launch", "triton_kernel", "decomposed", "errors"},
    "megascale_ops.diagnosis": {"detector", "causes", "cusum"},  # of stragglers, and of skew or hangs
    "megascale_ops.cli": {"verb", "report"},  # a verb with a room of its own; what each room reports
    "megascale_agents": {"hardware"},  # its watches, and what metrics show of them
}


@cache
def modules() -> dict[str, Path]:
    """Return all modules by dotted name; a package is its ``__init__``."""
    found = {}
    for name, folder in PACKAGES.items():
        for path in sorted(folder.rglob("*.py")):
            parts = path.relative_to(folder).with_suffix("").parts
            found[".".join((name, *(part for part in parts if part != "__init__")))] = path
    return found


@cache
def imports() -> dict[str, frozenset[str]]:
    """Return what of ours each module imports."""
    return {name: frozenset(_imported(path) - {name}) for name, path in modules().items()}


def _imported(path: Path) -> set[str]:
    known = modules()
    found: set[str] = set()
    for node in statements(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            found.update(alias.name for alias in node.names if alias.name in known)
        elif isinstance(node, ast.ImportFrom) and node.module:
            for alias in node.names:
                whole = f"{node.module}.{alias.name}"
                found.update(name for name in (whole if whole in known else node.module,) if name in known)
    return found


def circles(graph: Mapping[str, Iterable[str]]) -> list[list[str]]:
    """Return the groups of nodes that reach each other: what is left when leaves and roots are taken away for good."""
    left = {node: set(targets) & graph.keys() for node, targets in graph.items()}
    reach = {node: _reached(node, left) for node in left}
    groups = {frozenset(other for other in reach[node] if node in reach[other]) for node in left if node in reach[node]}
    return sorted(sorted(group) for group in groups)


def _reached(start: str, graph: Mapping[str, set[str]]) -> set[str]:
    seen: set[str] = set()
    waiting = list(graph[start])
    while waiting:
        node = waiting.pop()
        if node not in seen:
            seen.add(node)
            waiting.extend(graph[node])
    return seen


def rooms_of(house: str) -> dict[str, set[str]]:
    """Return the rooms of a house, each with the rooms that it imports; a file of its own is a room as well."""
    depth = house.count(".") + 1
    graph: defaultdict[str, set[str]] = defaultdict(set)
    for name, targets in imports().items():
        if not name.startswith(f"{house}."):
            continue
        room = name.split(".")[depth]
        graph[room].update(
            target.split(".")[depth]
            for target in targets
            if target.startswith(f"{house}.") and target.split(".")[depth] != room
        )
    return dict(graph)


def test_no_room_is_a_hall() -> None:
    """At most 25 source files in a folder: a stranger finds what it holds at a glance."""
    sizes = Counter(str(path.parent.relative_to(ROOT)) for path in modules().values() if path.stem != "__init__")

    assert not {folder: size for folder, size in sizes.items() if size > MOST_FILES}


def test_no_file_imports_itself_by_way_of_others() -> None:
    """No circle of files, also where an import is for a type or inside a function."""
    assert not circles(imports())


def test_no_room_leans_on_one_that_leans_on_it() -> None:
    """No circle of rooms in any house."""
    assert not {house: found for house in HOUSES if (found := circles(rooms_of(house)))}


def test_a_name_means_one_thing_in_a_house() -> None:
    """No module is named as another in a sibling room, unless both are the same thing of two kinds."""
    doubles = {}
    for house in HOUSES:
        names = Counter(name.rpartition(".")[2] for name in modules() if name.count(".") > house.count(".") + 1
                        and name.startswith(f"{house}.") and not name.endswith("__main__"))  # fmt: skip
        twice = {name for name, count in names.items() if count > 1} - TWINS.get(house, set())
        if twice:
            doubles[house] = sorted(twice)

    assert not doubles


def test_circles_are_found() -> None:
    """The rule can fail: a circle of three with a tail has three members, and a tree has none."""
    assert circles({"a": ["b"], "b": ["c"], "c": ["a"], "d": ["a"]}) == [["a", "b", "c"]]
    assert not circles({"a": ["b", "c"], "b": ["c"], "c": []})
