# SPDX-License-Identifier: Apache-2.0
"""A rank without torch whose log takes nothing more is told with its last words, and with the log's place."""

from pathlib import Path

import pytest

from tests.processes.launch import Launch
from tests.processes.small_disk import small_disk

pytestmark = pytest.mark.processes

FILLS = 'print("begin", flush=True)\nwhile True:\n    print("x" * 1000, flush=True)\n'
CLOSES = 'import os\nos.close(1)\nos.close(2)\nraise ValueError("nobody hears this")\n'


def _run(launch: Launch, script: str, *options: str) -> str:
    path = launch.tmp_path / "script.py"
    path.write_text(script)
    run = launch.run(options=("--max-restarts=0", *options), nproc=1, script=path)
    assert launch.finish(run) == 1
    return launch.output()


def test_a_full_disk_of_the_logs_is_named(launch: Launch, tmp_path: Path) -> None:
    """The exception from memory, and which log took no more."""
    with small_disk(tmp_path / "small") as is_small:
        if not is_small:
            pytest.skip("no file system can be mounted here")
        told = _run(launch, FILLS, f"--log-dir={tmp_path / 'small' / 'logs'}")

    assert "disk_full" in [one.verdict.fault for one in launch.incidents() if one.verdict is not None]
    assert "OSError: [Errno 28] No space left on device" in told
    assert f"{tmp_path / 'small' / 'logs'}" in told
    assert "without a word" not in told
    launch.assert_nothing_left()


def test_a_script_that_closes_its_own_outputs_is_heard_all_the_same(launch: Launch) -> None:
    """No disk is to blame: the exception is the verdict."""
    told = _run(launch, CLOSES)

    assert "ValueError: nobody hears this" in told
    assert "took no more" not in told
    assert [one.verdict.fault for one in launch.incidents() if one.verdict is not None] == ["exception"]
    launch.assert_nothing_left()
