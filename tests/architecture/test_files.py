# SPDX-License-Identifier: Apache-2.0
"""What every file of the house looks like: its first lines, its size, and what must never stand in it."""

import ast
import io
import re
import subprocess
import tokenize
from collections.abc import Callable, Iterator
from functools import cache
from pathlib import Path
from typing import NamedTuple

import pytest

from tests.architecture.statements import statements

ROOT = Path(__file__).parents[2]
PYTHON_FOLDERS = ("megascale_ops", "agents", "kernels", "tests", "examples", "benchmarks", "dashboards", "docs")
SPDX = "# SPDX-License-Identifier: Apache-2.0"
# 500: a file fits one sitting; the field's ugliest launchers have thousands.
MOST_LINES = 500
MOST_FUNCTION_LINES = 60
# Words for a person, where docstrings and comments of the product have to name a rank, an agent, a process, a user.
UNNAMED = re.compile(r"\b(?:whoever|somebody|nobody|anybody|everybody)\b", re.IGNORECASE)


# A docstring that stands there plainly, behind comments alone: nearly every file's, which is not parsed for it.
_DOCSTRING = re.compile(r'(?:#[^\n]*\n|\n)*"""((?:[^"\\]|"(?!""))+)"""\n')


class Source(NamedTuple):
    """A file as the rules see it: its name, as in a message, and its text."""

    name: str
    text: str


# A rule answers with what is wrong in one file, and with nothing when all is well.
Rule = Callable[[Source], Iterator[str]]


class Shape(NamedTuple):
    """What the rules ask of the tree of a Python file; kept in place of the tree, which is a thousand times as large.

    Attributes:
        docstring: of the module.
        functions: name and number of lines of each function, methods and inner ones too.
        docstrings: name and docstring of each module, class and function, without those of verbs: they are help texts.
    """

    docstring: str
    functions: tuple[tuple[str, int], ...]
    docstrings: tuple[tuple[str, str], ...]


@cache
def shape(text: str) -> Shape:
    """Return the shape of a Python file; each is parsed once, whatever the number of rules."""
    tree = ast.parse(text)
    found = list(statements(tree))
    functions = [node for node in found if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef))]
    classes = (node for node in found if isinstance(node, ast.ClassDef))
    named = (*classes, *(node for node in functions if not is_verb(node)))
    return Shape(
        ast.get_docstring(tree) or "",
        tuple((node.name, (node.end_lineno or 0) - node.lineno + 1) for node in functions),
        (
            ("the module", ast.get_docstring(tree) or ""),
            *((node.name, ast.get_docstring(node) or "") for node in named),
        ),
    )


def is_verb(function: ast.FunctionDef | ast.AsyncFunctionDef) -> bool:
    """Return whether click makes a command of a function: ``@click.command``, ``@GROUP.command(...)`` or a group."""
    plain = (one.func if isinstance(one, ast.Call) else one for one in function.decorator_list)
    return any(isinstance(one, ast.Attribute) and one.attr in {"command", "group"} for one in plain)


def python_files(*folders: str) -> list[Path]:
    """Return the Python files below some folders of the repository, caches left out."""
    found = [path for folder in folders for path in (ROOT / folder).rglob("*.py") if "__pycache__" not in path.parts]
    return sorted(found)


def relative(path: Path) -> str:
    """Return a path as it is named in a message."""
    return str(path.relative_to(ROOT))


ALL_PYTHON = python_files(*PYTHON_FOLDERS)
OURS = [path for path in ALL_PYTHON if path.relative_to(ROOT).parts[0] != "tests"]
PRODUCT = python_files("megascale_ops", "agents/megascale_agents", "kernels/megascale_kernels", "dashboards")
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


def offences(rule: Rule, paths: list[Path]) -> list[str]:
    """Return what a rule finds in files, each with its file; a folder that is read as empty is no good news.

    Raises:
        ValueError: there is no file to look at.
    """
    if not paths:
        raise ValueError("a rule was given no files: it would hold whatever they say")
    sources = [Source(relative(path), path.read_text(encoding="utf-8")) for path in paths]
    return [f"{source.name}: {wrong}" for source in sources for wrong in rule(source)]


def hold(rule: Rule, paths: list[Path]) -> None:
    """Assert that no file breaks a rule; the message names all that do."""
    found = offences(rule, paths)

    assert not found, "\n".join(found)


def says_nothing_of_itself(source: Source) -> Iterator[str]:
    """Look for the licence in the first line and a docstring behind it."""
    lines = [line for line in source.text.splitlines() if not line.startswith("#!")]
    if not lines or lines[0] != SPDX:
        yield "the first line is not the licence"
    # 20 characters: less is the file's name over again.
    plain = _DOCSTRING.match(source.text)
    if len(plain[1].strip() if plain else shape(source.text).docstring) <= 20:
        yield "no docstring tells what it is"


def names_no_licence(source: Source) -> Iterator[str]:
    """Look for the licence in the first three lines, whatever a comment looks like there."""
    if not any("SPDX-License-Identifier: Apache-2.0" in line for line in source.text.splitlines()[:3]):
        yield "no licence in its first three lines"


def is_too_long(source: Source) -> Iterator[str]:
    """Count the lines."""
    if (lines := len(source.text.splitlines())) > MOST_LINES:
        yield f"{lines} lines, {MOST_LINES} at most"


def has_long_functions(source: Source) -> Iterator[str]:
    """Count the lines of each function."""
    for name, lines in shape(source.text).functions:
        if lines > MOST_FUNCTION_LINES:
            yield f"{name} has {lines} lines, {MOST_FUNCTION_LINES} at most"


def leaves_something_for_later(source: Source) -> Iterator[str]:
    """Look for the words of a note to self."""
    words = ("TO" + "DO", "FIX" + "ME", "X" * 3)  # put together, or this file would find itself
    yield from (f"says {found}" for found in re.findall(rf"\b(?:{'|'.join(words)})\b", source.text))


def unnamed(text: str) -> list[str]:
    """Return the words of a text that leave the rank, process or user open; code in backticks is no word."""
    return UNNAMED.findall(re.sub(r"(`+).*?\1", "", text))


def names_no_part(source: Source) -> Iterator[str]:
    """Look in docstrings for words that leave the rank, process or user open."""
    for name, docstring in shape(source.text).docstrings:
        found = unnamed(docstring)
        yield from (f'the docstring of {name} says "{one}": name the rank, the process, the user' for one in found)


def comments_name_no_part(source: Source) -> Iterator[str]:
    """Look for the same words in comments; strings are left to the tests of what they print."""
    if not UNNAMED.search(source.text):
        return  # nearly all files: tokenising them takes seconds
    for token in tokenize.generate_tokens(io.StringIO(source.text).readline):
        found = unnamed(token.string) if token.type == tokenize.COMMENT else []
        yield from (f'line {token.start[0]} says "{one}": name the rank, the process, the user' for one in found)


def silences_without_a_reason(source: Source) -> Iterator[str]:
    """Look for ``noqa`` and ``type: ignore`` with nothing behind them."""
    bare = re.compile(r"#\s*noqa(:\s*[A-Z0-9, ]+)?\s*$|#\s*type:\s*ignore(\[[^]]*\])?\s*$")
    yield from (line.strip() for line in source.text.splitlines() if bare.search(line))


def test_a_file_begins_by_saying_what_it_is() -> None:
    """The first line is the licence, then comes a docstring that tells a stranger what the file is for."""
    hold(says_nothing_of_itself, ALL_PYTHON)


def test_files_of_other_kinds_carry_the_licence_too() -> None:
    """C, shell scripts and configuration name the licence within their first three lines."""
    hold(names_no_licence, OTHERS)


def test_a_file_fits_one_sitting() -> None:
    """No file is longer than 500 lines, and no function of the product longer than 60."""
    hold(is_too_long, ALL_PYTHON)
    hold(has_long_functions, OURS)


def test_nothing_is_left_for_later() -> None:
    """No note to self: what is missing stands in the issue tracker."""
    hold(leaves_something_for_later, ALL_PYTHON + OTHERS)


def test_docstrings_name_the_part_that_acts() -> None:
    """A docstring of the product names the rank, agent, process or user that it is about: no "whoever", no "nobody"."""
    hold(names_no_part, PRODUCT)


def test_comments_name_the_part_that_acts() -> None:
    """A comment in ``megascale_ops`` and ``agents`` names the rank, agent, process or user as well."""
    hold(comments_name_no_part, python_files("megascale_ops", "agents"))


def test_every_silenced_warning_has_its_reason() -> None:
    """``noqa`` and ``type: ignore`` name what they silence and say why, on the same line."""
    hold(silences_without_a_reason, OURS)


HEAD = f'{SPDX}\n"""Say what this file is for."""\n'


@pytest.mark.parametrize(
    ("rule", "good", "bad"),
    [
        (says_nothing_of_itself, "#!/usr/bin/env python\n" + HEAD, '"""Say what this file is for."""\n'),
        (says_nothing_of_itself, HEAD, f'{SPDX}\n"""Files."""\n'),
        (says_nothing_of_itself, HEAD, f"{SPDX}\n"),
        (says_nothing_of_itself, HEAD, ""),
        (names_no_licence, f"#!/bin/sh\n{SPDX}\n", f"\n\n\n{SPDX}\n"),
        (is_too_long, "\n" * MOST_LINES, "\n" * (MOST_LINES + 1)),
        (has_long_functions, "def f():\n" + "    1\n" * 59, "def f():\n" + "    1\n" * 60),
        (has_long_functions, "class C:\n" + "    x = 1\n" * 99, "class C:\n  async def f():\n" + "    1\n" * 60),
        (leaves_something_for_later, "# TO" + "DOS of others\n", "# TO" + "DO: later\n"),
        (names_no_part, '"""A `nobody` row."""\n', '"""Nobody waits."""\n'),
        (names_no_part, 'def f():\n  """No rank."""\n', 'class C:\n  def f():\n    """Tell whoever asks."""\n'),
        (names_no_part, '@c.command("v")\ndef f():\n  """For whoever."""\n', 'class C:\n  """For anybody."""\n'),
        (comments_name_no_part, 's = "# nobody"  # a user\n', "s = 1  # nobody waits\n"),
        (comments_name_no_part, "# The user `nobody`.\n", "# 5 s: Whoever\n# waits.\n"),
        (silences_without_a_reason, "x = 1  # noqa: E501 (a URL)\n", "x = 1  # noqa: E501\n"),
        (silences_without_a_reason, "x = 1  # type: ignore[arg-type] # why\n", "x = 1  # type: ignore\n"),
    ],
)
def test_a_rule_sees_what_breaks_it(rule: Rule, good: str, bad: str) -> None:
    """The control: each rule finds one thing wrong in a file that breaks it, or more, and nothing in its neighbour."""
    assert list(rule(Source("good.py", good))) == []
    assert list(rule(Source("bad.py", bad))) != []


def test_a_rule_without_files_is_refused() -> None:
    """A folder that was renamed leaves no file to look at: that is an error, and not a house without offences."""
    with pytest.raises(ValueError, match="no files"):
        offences(is_too_long, [])


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
