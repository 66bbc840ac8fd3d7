# SPDX-License-Identifier: Apache-2.0
"""Large imports without the garbage collector: off meanwhile, as it was afterwards, and nothing of a script's lost."""

import gc
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from megascale_ops.garbage_kept import GarbageKept, is_start_of_script


@pytest.fixture(autouse=True)
def _collector_as_it_was() -> Iterator[None]:
    """Nothing that a test froze stays so, and the collector is on before and after."""
    gc.enable()
    yield
    gc.unfreeze()
    gc.enable()


def test_nobody_looks_meanwhile() -> None:
    """The collector is off inside, on afterwards, and what lived at the end is left out of later looks."""
    before = gc.get_freeze_count()
    held = []

    with GarbageKept():
        held.append({"imported": []})
        was_on = gc.isenabled()

    assert not was_on
    assert gc.isenabled()
    assert gc.get_freeze_count() > before
    assert not any(one is held[0] for one in gc.get_objects())


def test_a_collector_that_was_off_stays_off() -> None:
    """Scripts that look for garbage by hand (every N steps) go on doing so."""
    gc.disable()

    with GarbageKept():
        pass

    assert not gc.isenabled()


def test_what_may_be_garbage_is_looked_at_as_ever() -> None:
    """Where nothing shall be left out, nothing is."""
    before = gc.get_freeze_count()

    with GarbageKept(freezes=False):
        pass

    assert gc.isenabled()
    assert gc.get_freeze_count() <= before  # nothing was left out; what was before, may have died


def test_an_import_that_fails_leaves_nothing_out() -> None:
    """What a failed import leaves behind is garbage, and the collector is on again."""
    before = gc.get_freeze_count()

    with pytest.raises(ImportError), GarbageKept():
        raise ImportError("no such thing")

    assert gc.isenabled()
    assert gc.get_freeze_count() <= before  # nothing was left out; what was before, may have died


def test_inside_a_function_the_script_has_begun() -> None:
    """A test is a function, and what calls it are functions."""
    assert not is_start_of_script()


@pytest.mark.parametrize(
    ("script", "told"),
    [
        ("import probe\n", "True"),
        ("import outer\n", "True"),
        ("def main():\n    import probe\nmain()\n", "False"),
        ("import threading\nt = threading.Thread(target=__import__, args=('probe',))\nt.start()\nt.join()\n", "False"),
    ],
    ids=["at the top", "by a module at the top", "in a function", "in a thread"],
)
def test_only_modules_are_being_executed_at_the_top_of_a_script(script: str, told: str, tmp_path: Path) -> None:
    """What a script imports in its first lines comes before all its work, also through other modules."""
    (tmp_path / "outer.py").write_text("import probe\n")
    (tmp_path / "probe.py").write_text(
        "from megascale_ops.garbage_kept import is_start_of_script\nprint(is_start_of_script())\n"
    )
    (tmp_path / "script.py").write_text(script)

    done = subprocess.run(
        [sys.executable, "script.py"], cwd=tmp_path, capture_output=True, text=True, timeout=60, check=True
    )

    assert done.stdout.strip() == told
