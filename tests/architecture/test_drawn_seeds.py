# SPDX-License-Identifier: Apache-2.0
"""A test that draws its input anew tells what draws the same again, whoever runs it and whatever is cut away."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

REPOSITORY = Path(__file__).parents[2]
# What gives another seed at each run; only tests/drawn_seeds.py may, and secrets and damage are no seeds.
_OWN_SEED = re.compile(
    r"SystemRandom|from_bytes\(os\.urandom|time_ns\(\) *%|Random\(\)|default_rng\(\)|random\.seed\(\)"
)
DRAWS = """
import random
import pytest
@pytest.mark.parametrize("time", range(2))
def test_draws(drawn_seed, time):
    drawn = [random.Random(drawn_seed).random() for _ in range(3)]
    print("drawn", drawn[0])
    assert drawn == []
def test_passes(drawn_seed):
    assert drawn_seed >= 0
def test_draws_nothing():
    assert 1 == 2
"""


def _run(folder: Path, *options: str, **variables: str) -> str:
    (folder / "test_it.py").write_text(DRAWS)
    given = ["-p", "tests.drawn_seeds", "-p", "xdist", "-c", os.devnull, "--rootdir=."]
    done = subprocess.run(
        [sys.executable, "-m", "pytest", *given, "-q", "--tb=no", *options, "test_it.py"],
        cwd=folder,
        # No other plugin is loaded: what they import is half of the time, and none of it is asked for.
        env={**os.environ, "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1", "PYTHONPATH": str(REPOSITORY), **variables},
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert done.returncode == 1, done.stdout + done.stderr
    return done.stdout


@pytest.mark.parametrize("workers", ["0", "1"])
def test_a_failure_tells_what_draws_the_same_again(tmp_path: Path, workers: str) -> None:
    """Each time another seed, from workers too; of tests that pass or draw nothing (negative controls) no line."""
    said = re.findall(r"MEGASCALE_TEST_SEED=(\d+) pytest '(.*)' draws", _run(tmp_path, "-n", workers))
    first = said[0][0]
    again = _run(tmp_path, "-n", workers, "-rA", MEGASCALE_TEST_SEED=first)

    assert [name for _, name in said] == ["test_it.py::test_draws[0]", "test_it.py::test_draws[1]"]
    assert said[0][0] != said[1][0]
    for time in (0, 1):
        assert f"MEGASCALE_TEST_SEED={first} pytest 'test_it.py::test_draws[{time}]' draws the same again" in again


def test_no_test_draws_a_seed_that_nobody_is_told() -> None:
    """All of tests/ but the places that tell it: beside a failure, and at a run's begin which tests take their turn."""
    telling = {Path(__file__), *(REPOSITORY / "tests" / name for name in ("drawn_seeds.py", "turns.py"))}
    found = [
        f"{path.relative_to(REPOSITORY)}:{number}: take the fixture drawn_seed"
        for path in sorted((REPOSITORY / "tests").rglob("*.py"))
        if path not in telling
        for number, line in enumerate(path.read_text().splitlines(), 1)
        if _OWN_SEED.search(line)
    ]

    assert found == []


def test_the_rule_finds_what_it_forbids() -> None:
    """The negative control."""
    assert all(
        map(_OWN_SEED.search, ("seed = int.from_bytes(os.urandom(4))", "time.time_ns() % 10", "random.SystemRandom()"))
    )
    assert not _OWN_SEED.search("draw = Random(drawn_seed)")
