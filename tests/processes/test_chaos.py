# SPDX-License-Identifier: Apache-2.0
"""Real faults in real jobs: every row of the matrix is a test, and what `megascale-ops chaos` refuses.

`make test` runs the rows of which no other test here does the like; `make test-matrix` runs the rest (half an hour),
and `megascale-ops chaos score` runs all of them many times and adds up.
"""

import json
import os
import signal
import subprocess
import sys
import time
import uuid
from pathlib import Path

import pytest
from _pytest.mark import ParameterSet

from megascale_ops.chaos import leftovers
from megascale_ops.chaos.faults import BY_NAME, MATRIX
from tests.processes.launch import ENDLESS, PATIENCE_S, PLAIN, Launch, until
from tests.processes.warmed import ask, env_of_programs

pytestmark = pytest.mark.processes

# Half a minute each: the others are held by `make test-matrix`. What most of them need of the judges is in the demo and
# the tests of recovery, evidence, stragglers, nodes, partitions and own faults. These two are named by evidence and not
# by the pace of the job, so other tests may run beside them.
ALWAYS = {"saves_alone": 3, "gather_never_sent": 2}  # on as few ranks as have a right answer; the others on four


# Every process that these tests start carries it, however deep: chaos jobs of other users are not looked at.
OURS = f"TEST_CHAOS_MARK={uuid.uuid4().hex}"


def ours() -> dict[str, str]:
    """Return an environment with the mark."""
    name, _, value = OURS.partition("=")
    return {**env_of_programs(), name: value}


def rows() -> list[ParameterSet]:
    """Return every row that neither takes minutes by its nature nor wants a GPU (``tests/gpu/test_gpu_stuck``)."""
    found = []
    for row in MATRIX:
        marks = [] if row.name in ALWAYS else [pytest.mark.matrix]
        if not (row.long or row.gpu):
            found.append(pytest.param(row.name, marks=marks))
    return found


def run(*arguments: str) -> subprocess.CompletedProcess[str]:
    """Run ``megascale-ops chaos`` to its end."""
    return ask(("chaos", *arguments), ours(), deadline_s=280)


def marked() -> set[int]:
    """Return every process of these tests' chaos jobs."""
    found = set()
    for path in Path("/proc").iterdir():
        if path.name.isdigit():
            try:
                if OURS.encode() in (path / "environ").read_bytes().split(b"\0"):
                    found.add(int(path.name))
            except OSError:
                continue
    return found


def boxes() -> set[Path]:
    """Return the black-box folders of any chaos job."""
    return set(Path("/dev/shm").glob("megascale-chaos-*"))


@pytest.mark.parametrize("fault", rows())
def test_the_verdict_is_the_truth(fault: str) -> None:
    """Right class, right rank, training back where it must come back; no process and no black box is left."""
    if BY_NAME[fault].root and os.geteuid():
        pytest.skip("mounts a file system, which needs root")
    if BY_NAME[fault].kernels:
        pytest.importorskip("triton", minversion="3.6")
    before = marked(), boxes()

    done = run("run", fault, f"--nproc={ALWAYS.get(fault, 4)}", "--json")

    assert done.stdout, done.stderr
    (grade,) = json.loads(done.stdout)
    assert grade["faults"] == [], grade
    assert done.returncode == 0
    until(lambda: marked() <= before[0], "what was killed to be gone")
    assert boxes() <= before[1]


@pytest.mark.matrix  # a minute, of which the rows are other tests'
@pytest.mark.alone  # judged by the pace that the job has learned
def test_the_score_adds_up_real_trials(tmp_path: Path) -> None:
    """A fault and a negative control: precision, recall and the times to detect, name and recover, in a table."""
    table = tmp_path / "table.txt"

    done = run("score", "--only=sigkill,slow_step_once", f"--out={table}")

    assert done.returncode == 0, done.stdout + done.stderr
    text = table.read_text()
    for word in ("sigkill", "slow_step_once", "precision", "recall", "detect", "name", "recover"):
        assert word in text.lower(), text


def test_ctrl_c_leaves_nothing_behind() -> None:
    """In the midst of a trial: exit code 130, every process and black box of it gone."""
    before = marked(), boxes()
    command = [sys.executable, "-m", "megascale_ops.cli.main", "chaos", "run", "sleep_syscall"]
    with subprocess.Popen(command, env=ours(), stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL) as proc:
        until(lambda: len(marked() - before[0]) >= 4, "the ranks to start")
        time.sleep(1.0)

        proc.send_signal(signal.SIGINT)

        assert proc.wait(PATIENCE_S) == 130
    until(lambda: marked() <= before[0], "what was killed to be gone")
    assert boxes() <= before[1]


def test_what_a_killed_chaos_left_is_ended_by_the_next_one() -> None:
    """Only processes whose chaos is gone: those of one that runs, and marks that nobody can read, are left alone."""
    with subprocess.Popen(["true"]) as gone:
        ticks = leftovers.start_ticks(gone.pid)
    gone_mark, own_mark = f"{gone.pid}-{ticks or 1}-{uuid.uuid4().hex[:12]}", leftovers.new_mark()
    leftovers.box_root(gone_mark).mkdir()
    procs = [
        subprocess.Popen(["sleep", "600"], env={**ours(), leftovers.MARK: mark})
        for mark in (gone_mark, own_mark, "somebody's own")
    ]
    try:
        # `Popen` returns a moment before the kernel shows the new environment.
        until(lambda: procs[0].pid in leftovers.marked(gone_mark), "the mark to be seen")
        ended = leftovers.end_leftovers()

        assert procs[0].pid in ended
        assert procs[0].wait(PATIENCE_S) == -signal.SIGKILL
        assert [proc.poll() for proc in procs[1:]] == [None, None]
        assert not leftovers.box_root(gone_mark).exists()
    finally:
        for proc in procs:
            proc.kill()
            proc.wait(PATIENCE_S)


def test_a_running_job_can_be_hurt(launch: Launch) -> None:
    """``--job``: without a yes nothing is done; with it, the deed and the verdict of the job's controller are told."""
    job = launch.run(*ENDLESS, script=PLAIN)
    launch.until_step(25)

    where = (f"--run-dir={launch.run_dir()}", f"--box-root={launch.box_root}")
    unanswered = launch.command("chaos", "run", "--job=toy", "--rank=1", *where, "sigkill")
    before = launch.incidents()
    done = launch.command("chaos", "run", "--job=toy", "--rank=1", "--yes", *where, "sigkill")
    launch.enough()

    assert unanswered.returncode != 0
    assert before == []
    assert done.returncode == 0, done.stdout + done.stderr
    assert "SIGKILL to rank 1 of job toy" in done.stdout
    assert "right: killed rank 1" in done.stdout
    assert launch.finish(job) == 0
    launch.assert_nothing_left()


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (("run", "sigkil"), "unknown fault 'sigkil': did you mean 'sigkill'?"),
        (("run", "sigkill", "--rank=7"), "rank 7 can't suffer: a job of 4 has ranks 0 to 3"),
        (("run", "sigkill", "--job=nowhere", "--yes"), "no job 'nowhere' runs on this machine"),
        (("run", "gil_held", "--job=nowhere"), "gil_held can't be done to a job that runs already"),
        (("score", "--only=hangs"), "unknown kind 'hangs': did you mean 'hang'?"),
        (("score", "--launcher=torchrum"), "unknown launcher 'torchrum': did you mean 'torchrun'?"),
        (("score", "--out=/nowhere/table.txt", "--only=data"), "--out /nowhere/table.txt can't be written"),
        (("scor",), "unknown word behind chaos 'scor': did you mean 'score'?"),
    ],
)
def test_bad_input_is_one_sentence(arguments: tuple[str, ...], sentence: str) -> None:
    """Exit code 2, one line, and no job was started."""
    done = run(*arguments)

    assert done.returncode == 2
    (line,) = done.stderr.strip().splitlines()
    assert line.startswith(f"megascale-ops: {sentence}")


def test_the_list_is_for_people_and_for_programs() -> None:
    """One line a fault, or JSON with the culprits of the job that was asked for."""
    people, programs = run("list"), run("list", "--json", "--rank=2")

    assert people.returncode == programs.returncode == 0
    rows = json.loads(programs.stdout)
    assert len(people.stdout.splitlines()) == len(rows)
    assert next(row for row in rows if row["name"] == "gil_held")["culprits"] == [2]
