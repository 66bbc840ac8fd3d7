# SPDX-License-Identifier: Apache-2.0
"""A real run is ended by ``megascale-ops stop``, with and without a checkpoint first, and compared with another one."""

import json

import pytest

from tests.processes.launch import ENDLESS, PLAIN, Launch, until

pytestmark = pytest.mark.processes

# Saves when it gets SIGUSR1, at the end of a step, as scripts under a batch system do.
SAVES = """
import os, pathlib, signal, time
from megascale_ops.recorder import recorder
wanted = []
signal.signal(signal.SIGUSR1, lambda *_: wanted.append(1))
folder = pathlib.Path(os.environ["MEGASCALE_CHECKPOINT_DIR"])
for step in range(10**6):
    time.sleep(0.02)
    if wanted:
        wanted.clear()
        with recorder.phase("checkpoint"):
            time.sleep(0.1)
            (folder / f"saved-{os.environ['RANK']}").touch()
    recorder.step(step)
"""


def test_a_job_is_stopped_in_order_and_its_result_says_so(launch: Launch) -> None:
    """One command, no signal to any process by hand: the run ends, nothing is left, `jobs` calls it stopped."""
    run = launch.run(*ENDLESS, script=PLAIN)
    launch.until_step(20)

    none_there = launch.command("stop", "tpy")
    refused = launch.command("stop", "toy", "--checkpoint", "--wait=20")
    still = launch.until_more_steps(5)
    done = launch.command("stop", "toy", is_cold=True)
    code = launch.finish(run)

    assert none_there.returncode == 1
    assert refused.returncode == 1
    assert "nothing was stopped: rank 0 (and 1 more): SIGUSR1 not sent: the script has no handler" in refused.stderr
    assert still.state in ("running", "catching_up")
    assert done.returncode == 0, done.stderr
    assert "toy has ended" in done.stdout
    assert code == 0, launch.output()
    listed = json.loads(launch.command("jobs", "--json").stdout)
    runs = listed if isinstance(listed, list) else listed["runs"]
    assert [(one["result"], one["reason"]) for one in runs] == [("stopped", "stopped by hand: megascale-ops stop")]
    assert launch.command("stop", "toy").returncode == 1
    launch.assert_nothing_left()


def test_a_checkpoint_comes_first_where_it_is_asked_for(launch: Launch) -> None:
    """Every rank that takes the signal saves, the stop waits for it, and two runs can be compared afterwards."""
    script = launch.tmp_path / "saves.py"
    script.write_text(SAVES)
    run = launch.run(script=script)
    launch.until_step(20)

    done = launch.command("stop", "toy", "--checkpoint", "--wait=60")
    code = launch.finish(run)
    other = launch.run("--steps=60", script=PLAIN, job="other")
    assert launch.finish(other) == 0
    compared = launch.command("compare", "toy", str(launch.run_dir("other")), is_cold=True)

    assert done.returncode == 0, done.stderr
    assert "a checkpoint was written" in done.stdout
    assert code == 0, launch.output()
    assert all((launch.run_dir() / "checkpoints" / f"saved-{rank}").exists() for rank in (0, 1))
    assert compared.returncode == 0, compared.stderr
    assert "typical step" in compared.stdout
    assert "training (goodput)" in compared.stdout
    until(lambda: not launch.living(), "all processes to end")
