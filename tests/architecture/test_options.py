# SPDX-License-Identifier: Apache-2.0
"""Options are read without the controller: import-linter names who may import it, and here is what is really loaded.

A verb that needs the controller (it serves one, reads its journal, decides again) imports it inside its function.
"""

import os
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]
LOADED = "sorted(name for name in sys.modules if name.startswith('megascale_ops.controller'))"


def loaded_after(probe: str) -> str:
    """Return which modules of the controller a fresh interpreter has loaded after ``probe``."""
    program = f"import sys\n{probe}\nprint({LOADED})"
    env = {**os.environ, "XDG_STATE_HOME": "/nonexistent"}  # `run` tidies up what old runs of this user have left
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, timeout=120, check=False, env=env
    )
    assert done.returncode == 0, done.stderr
    return done.stdout.splitlines()[-1]


def test_no_verb_and_no_part_of_the_runner_loads_the_controller_by_being_imported() -> None:
    """Every module of both rooms, one after the other in one process."""
    names = [
        ".".join(path.relative_to(ROOT).with_suffix("").parts)
        for room in ("cli", "runner")
        for path in sorted((ROOT / "megascale_ops" / room).rglob("*.py"))
        if path.stem not in {"__init__", "__main__"}
    ]
    assert len(names) > 60

    assert loaded_after(f"import importlib\nfor name in {names!r}: importlib.import_module(name)") == "[]"


def test_a_policy_is_read_without_the_controller(tmp_path: Path) -> None:
    """From options, a file and the environment, by ``run`` and by ``policy set``, right or wrong."""
    file = tmp_path / "ops.toml"
    file.write_text('[run.policy.actions]\nfrozen = "warn"\n')
    probe = f"""
import megascale_ops.runner.main as runner
from megascale_ops.cli.main import main
runner.run = lambda config, *_, **__: 10 + len(config.policy.actions)
assert main(["run", "--policy", "silent=stop", "--config", {str(file)!r}, "x.py"]) == 12
assert main(["run", "--policy", "silent=stpo", "x.py"]) == 2
assert main(["policy", "set", "job", "silent=stpo"]) == 2
"""

    assert loaded_after(probe) == "[]"


def test_a_verb_that_reads_the_controller_s_settings_is_seen() -> None:
    """The control, and the bound: ``config show`` needs the table of its settings, and nothing else of it."""
    probe = "from megascale_ops.cli.main import main\nassert main(['config', 'show']) == 0"

    assert loaded_after(probe) == "['megascale_ops.controller', 'megascale_ops.controller.config']"
