# SPDX-License-Identifier: Apache-2.0
"""Tests are rewritten once before all workers begin (``.ci/rewrite_tests.py``): pytest must find that and use it."""

import os
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]
TEST = "def test_it():\n    found = [1, 2]\n    assert found == [1, 3]\n"


def run(*arguments: str | Path) -> str:
    """Run a program of Python that keeps byte code; return what it printed."""
    env = {name: value for name, value in os.environ.items() if not name.startswith(("PYTHONDONT", "PYTEST_"))}
    env["PYTEST_DISABLE_PLUGIN_AUTOLOAD"] = "1"  # their imports are half of the time
    done = subprocess.run(
        [sys.executable, *arguments], env=env, capture_output=True, text=True, timeout=120, check=False
    )
    return done.stdout + done.stderr


def pytest_of(file: Path) -> str:
    """Hold a file's tests, with nothing of ours."""
    return run("-m", "pytest", "-q", "-c", os.devnull, f"--rootdir={file.parent}", "-p", "no:cacheprovider", file)


def test_pytest_uses_what_was_rewritten_before_it(tmp_path: Path) -> None:
    """Its asserts explain themselves, and its byte code stays; the control: of another text pytest writes its own."""
    file = tmp_path / "test_it.py"
    file.write_text(TEST)

    told = run(ROOT / ".ci/rewrite_tests.py", tmp_path)
    (written,) = (tmp_path / "__pycache__").iterdir()
    first = written.stat().st_ino, written.stat().st_mtime_ns
    said = pytest_of(file)
    second = written.stat().st_ino, written.stat().st_mtime_ns
    again = run(ROOT / ".ci/rewrite_tests.py", tmp_path)
    file.write_text(TEST + "\n# another text\n")
    pytest_of(file)
    third = written.stat().st_ino, written.stat().st_mtime_ns

    assert told == "1 test files rewritten\n"
    assert "assert [1, 2] == [1, 3]" in said
    assert second == first
    assert again == "0 test files rewritten\n"
    assert third != first
