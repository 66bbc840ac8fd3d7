# SPDX-License-Identifier: Apache-2.0
"""Which Python, torch and Triton we support is said once: everywhere the same, and held by `make test-versions`."""

import re
import subprocess
import sys
import tomllib
from collections.abc import Iterator
from importlib import import_module
from pathlib import Path
from types import ModuleType

import pytest
from packaging.requirements import Requirement
from packaging.specifiers import SpecifierSet

from megascale_ops.cli.doctor import checks

ROOT = Path(__file__).parents[2]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
TABLE = (ROOT / "benchmarks/results/versions.txt").read_text(encoding="utf-8")
EXTRAS = PROJECT["optional-dependencies"]
PYTHONS = SpecifierSet(PROJECT["requires-python"])


@pytest.fixture
def versions(monkeypatch: pytest.MonkeyPatch) -> Iterator[ModuleType]:
    """The script."""
    monkeypatch.syspath_prepend(str(ROOT / ".ci"))
    yield import_module("versions")
    sys.modules.pop("versions", None)


def range_of(extra: str, name: str) -> SpecifierSet:
    """What an extra asks for of a package."""
    (found,) = (one for line in EXTRAS[extra] if (one := Requirement(line)).name == name)
    return found.specifier


def minors(allowed: SpecifierSet, major: int) -> list[tuple[int, int]]:
    """The releases ``major.N`` that a range lets in."""
    return [(major, minor) for minor in range(40) if allowed.contains(f"{major}.{minor}.0")]


def test_every_place_names_the_same_versions() -> None:
    """What pip lets in is what `doctor` calls tested, `make setup` takes and the documents say."""
    pythons, torches = minors(PYTHONS, 3), minors(range_of("train", "torch"), 2)
    said = f"{pythons[0][0]}.{pythons[0][1]} to {pythons[-1][0]}.{pythons[-1][1]}"
    makefile = (ROOT / "Makefile").read_text(encoding="utf-8")
    limits = (ROOT / "docs/explanation/limits.md").read_text(encoding="utf-8")

    assert (pythons[0], pythons[-1]) == (checks.FIRST_PYTHON, checks.LAST_PYTHON)
    assert (torches[0], torches[-1]) == (checks.FIRST_TORCH, checks.LAST_TORCH)
    assert range_of("train", "torch") == range_of("kernels", "torch")
    assert set(re.findall(r"\(3, \d+\)", makefile)) == {str(pythons[0]), str((3, pythons[-1][1] + 1))}
    for document in ("Makefile", "README.md", "CONTRIBUTING.md", "docs/quickstart.md"):
        assert f"Python {said}" in (ROOT / document).read_text(encoding="utf-8"), document
    assert f"| Python | {said} " in limits
    assert f"| PyTorch | 2.{torches[0][1]} to 2.{torches[-1][1]} " in limits
    assert all(f"Programming Language :: Python :: 3.{minor}" in PROJECT["classifiers"] for _, minor in pythons)


def test_floors_and_ceilings_are_rows_in_which_all_is_well(versions: ModuleType) -> None:
    """Nothing is let in beyond what was held: the committed table has both ends of each range, without a failure."""
    ranges = {
        "Python": minors(PYTHONS, 3),
        "torch": minors(range_of("train", "torch"), 2),
        "Triton": minors(range_of("kernels", "triton"), 3),
    }

    rows = re.findall(r"^(Python .*)\n((?:    .*\n)+)", TABLE, re.MULTILINE)
    well = [facts for facts, results in rows if results.count(" passed") == len(versions.GROUPS)]
    held = {(name, version) for facts in well for name, version in re.findall(r"(\w+) (\d+\.\d+)", facts)}

    for name, allowed in ranges.items():
        for major, minor in (allowed[0], allowed[-1]):
            assert (name, f"{major}.{minor}") in held
    assert "FAILED" not in TABLE


def test_every_release_that_is_let_in_has_a_row(versions: ModuleType) -> None:
    """`make test-versions` leaves none out."""
    pythons, torches = minors(PYTHONS, 3), minors(range_of("train", "torch"), 2)

    assert {row.python for row in versions.ROWS} == {f"{major}.{minor}" for major, minor in pythons}
    assert {row.torch.rpartition(".")[0] for row in versions.ROWS} == {f"{major}.{minor}" for major, minor in torches}


def test_a_group_that_fails_names_its_tests(versions: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    """A table's line says which test failed, or what the program said that could not begin; nothing passes unseen."""
    said = """PASSED tests/unit/recorder/test_a.py::test_one
PASSED tests/unit/recorder/test_a.py::test_two[a b]
FAILED tests/unit/runner/test_b.py::test_three - no
ERROR tests/unit/cli/test_run_options.py::test_four
PASSED tests/unit/runner/test_b.py::test_five
2 failed, 3 passed in 1 s
"""

    def run(command: list[str], _patience_s: float) -> subprocess.CompletedProcess[str]:
        return subprocess.CompletedProcess(command, 1, said, "")

    monkeypatch.setattr(versions, "call", run)
    lines = versions.held(Path("python"))

    assert lines["recorder"] == "2 passed"
    assert lines["runner"] == "2 FAILED: test_b.py::test_three, test_run_options.py::test_four"
    assert lines["sm_90"] == "FAILED: 2 failed, 3 passed in 1 s"


def test_a_row_that_cannot_be_had_says_why(
    versions: ModuleType, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """The rest of the matrix goes on: the line has the installer's reason."""
    monkeypatch.setattr(versions, "FOLDER", tmp_path)

    missing = list(versions.lines_of(versions.Row("3.11", "2.99.0", "3.99.0"), "no-such-uv"))

    reason = "there is no no-such-uv: make test-versions installs it"
    assert missing == [(False, f"Python 3.11, torch 2.99.0, Triton 3.99.0: could not be installed: {reason}")]
