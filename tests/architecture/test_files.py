# SPDX-License-Identifier: Apache-2.0
"""What every file of the house looks like: its first lines, its size, and what must never stand in it."""

import ast
import re
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PYTHON_FOLDERS = ("megascale_ops", "agents", "kernels", "tests", "examples", "benchmarks", "dashboards")
SPDX = "# SPDX-License-Identifier: Apache-2.0"
# 500: a file fits one sitting; the field's ugliest launchers have thousands.
MOST_LINES = 500
MOST_FUNCTION_LINES = 60


def python_files(*folders: str) -> list[Path]:
    """Return the Python files below some folders of the repository, caches left out."""
    found = [path for folder in folders for path in (ROOT / folder).rglob("*.py") if "__pycache__" not in path.parts]
    return sorted(found)


def relative(path: Path) -> str:
    """Return a path as it is named in a message."""
    return str(path.relative_to(ROOT))


ALL_PYTHON = python_files(*PYTHON_FOLDERS)
OURS = [path for path in ALL_PYTHON if path.relative_to(ROOT).parts[0] != "tests"]
# C, shell and configuration carry the licence line too, as a comment of their own kind.
OTHERS = [
    path
    for pattern in (
        "megascale_ops/**/*.[ch]",
        "kernels/**/*.[ch]",
        ".ci/*",
        "Makefile",
        "pyproject.toml",
        ".importlinter",
    )
    for path in sorted(ROOT.glob(pattern))
    if path.is_file()
]


@pytest.mark.parametrize("path", ALL_PYTHON, ids=relative)
def test_a_file_begins_by_saying_what_it_is(path: Path) -> None:
    """The first line is the licence, then comes a docstring that tells a stranger what the file is for."""
    text = path.read_text(encoding="utf-8")

    lines = [line for line in text.splitlines() if not line.startswith("#!")]
    assert lines
    assert lines[0] == SPDX
    docstring = ast.get_docstring(ast.parse(text))
    assert docstring
    # 20 characters: less is the file's name over again.
    assert len(docstring) > 20


@pytest.mark.parametrize("path", OTHERS, ids=relative)
def test_files_of_other_kinds_carry_the_licence_too(path: Path) -> None:
    """C, shell scripts and configuration name the licence within their first three lines."""
    head = path.read_text(encoding="utf-8").splitlines()[:3]

    assert any("SPDX-License-Identifier: Apache-2.0" in line for line in head)


@pytest.mark.parametrize("path", ALL_PYTHON, ids=relative)
def test_a_file_fits_one_sitting(path: Path) -> None:
    """No file is longer than 500 lines."""
    assert len(path.read_text(encoding="utf-8").splitlines()) <= MOST_LINES


@pytest.mark.parametrize("path", OURS, ids=relative)
def test_a_function_fits_a_screen(path: Path) -> None:
    """No function of the product is longer than 60 lines."""
    tree = ast.parse(path.read_text(encoding="utf-8"))
    long = [
        f"{node.name}: {(node.end_lineno or 0) - node.lineno + 1}"
        for node in ast.walk(tree)
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef))
        and (node.end_lineno or 0) - node.lineno + 1 > MOST_FUNCTION_LINES
    ]

    assert not long


@pytest.mark.parametrize("path", ALL_PYTHON + OTHERS, ids=relative)
def test_nothing_is_left_for_later(path: Path) -> None:
    """No note to self: what is missing stands in the issue tracker."""
    words = ("TO" + "DO", "FIX" + "ME", "X" * 3)  # put together, or this file would find itself

    assert not re.search(rf"\b({'|'.join(words)})\b", path.read_text(encoding="utf-8"))


@pytest.mark.parametrize("path", OURS, ids=relative)
def test_every_silenced_warning_has_its_reason(path: Path) -> None:
    """``noqa`` and ``type: ignore`` name what they silence and say why, on the same line."""
    bare = [
        line.strip()
        for line in path.read_text(encoding="utf-8").splitlines()
        if re.search(r"#\s*noqa(:\s*[A-Z0-9, ]+)?\s*$|#\s*type:\s*ignore(\[[^]]*\])?\s*$", line)
    ]

    assert not bare


def test_the_names_of_well_known_packages_are_not_taken() -> None:
    """``agents/`` and ``kernels/`` are folders, not packages: PyPI has packages of these names."""
    assert not (ROOT / "agents" / "__init__.py").exists()
    assert not (ROOT / "kernels" / "__init__.py").exists()


def test_every_room_has_its_design_note() -> None:
    """Each package that holds more than its ``__init__`` has a README.md, in it or above it (not the repository's)."""
    inits = [path for path in OURS if path.name == "__init__.py" and path.parent != ROOT / "megascale_ops"]
    rooms = [path.parent for path in inits if len(list(path.parent.glob("*.py"))) > 1]
    without = [
        relative(room)
        for room in rooms
        if not any((place / "README.md").exists() for place in (room, *room.parents) if ROOT in place.parents)
    ]

    assert not without


def test_no_file_is_named_after_nothing() -> None:
    """Rooms are named by what happens there; a drawer for everything is none."""
    drawers = {"utils.py", "util.py", "common.py", "shared.py", "helpers.py", "misc.py", "base.py"}

    assert not [relative(path) for path in ALL_PYTHON if path.name in drawers]


def test_scripts_of_ci_are_executable() -> None:
    """``.ci/run`` runs as it is, and calls nothing but ``make test``."""
    script = ROOT / ".ci" / "run"

    assert script.stat().st_mode & 0o111
    assert "exec make test" in script.read_text(encoding="utf-8")
    subprocess.run(["bash", "-n", str(script), str(ROOT / ".ci" / "apt.sh")], check=True, timeout=10)
