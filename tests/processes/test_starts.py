# SPDX-License-Identifier: Apache-2.0
"""How runs begin: many at once, from any folder, with scripts of any name, and after one that was killed."""

import os
import signal
import time

import pytest

from tests.processes.launch import Launch, until

pytestmark = pytest.mark.processes


# A script that leaves its folder, prints two variables, and fails once.
WANDERER = """
import os, sys
os.chdir("/")
print("kept at", os.environ["MEGASCALE_CHECKPOINT_DIR"], os.environ["TORCHELASTIC_RESTART_COUNT"], flush=True)
sys.exit(3 if os.environ["TORCHELASTIC_RESTART_COUNT"] == "0" and "--fail" in sys.argv else 0)
"""


def test_launches_of_one_script_in_the_same_second_are_runs_of_their_own(launch: Launch) -> None:
    """Two at once, of a script without an ending: each gets a name, a folder and an end of its own."""
    launch.is_cold = True  # as a user starts them: imports are part of the story
    script = launch.tmp_path / "train"
    script.write_text(WANDERER)
    while time.time() % 1 > 0.2:  # so that both begin within one second
        time.sleep(0.01)

    runs = [launch.spawn("run", "--", str(script), log=f"{number}.log") for number in range(2)]

    assert [launch.finish(run) for run in runs] == [0, 0], launch.output("0.log")
    folders = [path for path in (launch.state / "megascale-ops").iterdir() if path.is_dir()]
    assert len(folders) == 2
    said = "".join(launch.output(f"{number}.log") for number in range(2))
    assert [said.count(f"kept at {folder}/checkpoints 0") for folder in folders] == [1, 1], said
    launch.assert_nothing_left()


def test_a_relative_folder_stays_where_the_user_stood(launch: Launch) -> None:
    """A folder with __main__.py runs, changes its own folder and is restarted; everything is in the folder named."""
    package = launch.tmp_path / "package"
    package.mkdir()
    (package / "__main__.py").write_text(WANDERER)

    done = launch.command("run", "--run-dir=here", "--", "package", "--fail", cwd=launch.tmp_path)

    assert done.returncode == 0, done.stderr
    for restarts in range(2):
        assert f"kept at {launch.tmp_path}/here/checkpoints {restarts}" in done.stdout
    assert (launch.tmp_path / "here" / "logs" / "round-2" / "rank-0" / "stdout.log").is_file()
    assert (launch.tmp_path / "here" / "journal.db").is_file()
    launch.assert_nothing_left()


def test_what_a_killed_run_left_in_memory_goes_with_the_next(launch: Launch) -> None:
    """The next start is of another job, since a name has the time in it; it removes the boxes of the one before."""
    script = launch.tmp_path / "train"
    script.write_text("import time\nprint('runs', flush=True)\ntime.sleep(600)\n")
    run = launch.spawn("run", "--", str(script))
    until(lambda: "runs" in launch.output(), "the script to run")
    os.kill(run.pid, signal.SIGKILL)
    launch.finish(run)
    until(lambda: not launch.living(), "the ranks and companions to end with their runner")
    left = {path.name.partition(".")[2] for path in launch.box_root.rglob("*") if path.parent != launch.box_root}

    done = launch.command("run", "--no-python", "--", "true")

    assert "round.json" in left
    assert done.returncode == 0, done.stderr
    launch.assert_nothing_left()


def test_the_same_name_twice_is_refused_by_one_sentence(launch: Launch) -> None:
    """However soon one comes after the other: who holds the place is named."""
    script = launch.tmp_path / "train"
    enough = launch.tmp_path / "enough"
    script.write_text(f"import os, time\nwhile not os.path.exists({str(enough)!r}): time.sleep(0.05)\n")
    runs = [launch.spawn("run", "--job=same", "--", str(script), log=f"{number}.log") for number in range(2)]
    refused = until(lambda: next((run for run in runs if run.poll() is not None), None), "one of them to be refused")
    enough.touch()

    (other,) = (run for run in runs if run is not refused)

    assert (launch.finish(refused), launch.finish(other)) == (2, 0)
    said = launch.output(f"{runs.index(refused)}.log").strip()
    assert said.startswith("megascale-ops: job same already runs on ")
    assert f"(runner process {other.pid})" in said
    launch.assert_nothing_left()
