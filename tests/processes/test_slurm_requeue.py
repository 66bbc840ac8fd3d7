# SPDX-License-Identifier: Apache-2.0
"""Slurm says that a job's time is up: it saves, goes back into the queue and goes on, as often as its budget allows."""

from collections.abc import Iterator

import pytest

from tests.fakes.slurm import SOON, OneNode
from tests.processes.launch import PATIENCE_S, Launch, until
from tests.processes.test_slurm import PROGRAM
from tests.processes.warmed import stand_in

pytestmark = pytest.mark.processes

# Saves when it gets SIGUSR1, at the end of a step, and goes on from there.
SAVES = """
import os, pathlib, signal, time
from megascale_ops.recorder import recorder
wanted = []
signal.signal(signal.SIGUSR1, lambda *_: wanted.append(1))
rank = os.environ["RANK"]
file = pathlib.Path(os.environ["MEGASCALE_CHECKPOINT_DIR"], "saved-" + rank)
first = int(file.read_text()) + 1 if file.exists() else 0
for step in range(first, 10**6):
    time.sleep(0.02)
    if wanted:
        wanted.clear()
        with recorder.phase("checkpoint"):
            file.write_text(str(step))
    recorder.step(step)
    if step == first + 20:
        print(f"rank {rank} trains, from step {first}", flush=True)
"""


@pytest.fixture(scope="module")
def slurm() -> Iterator[OneNode]:
    """Two nodes, on which a requeued job starts again soon."""
    with OneNode(nodes=2, settings=SOON, cpus=2) as cluster:
        yield cluster


def _submit(
    slurm: OneNode,
    launch: Launch,
    name: str,
    options: str,
    *,
    nodes: int = 2,
    head: str = "",
    program: str = str(PROGRAM),
) -> str:
    script = launch.tmp_path / "saves.py"
    script.write_text(SAVES)
    env = {key: value for key, value in launch.env.items() if not key.startswith("SLURM_")}
    run = f"srun --ntasks-per-node=1 {program} run {options} -- {script}"
    return slurm.submit(f"#!/bin/bash\n#SBATCH --nodes={nodes}\n{head}\nexec {run}\n", env, name)


def _until_printed(slurm: OneNode, name: str, text: str, times: int = 1, deadline_s: float = PATIENCE_S) -> None:
    try:
        until(lambda: slurm.output(name).count(text) >= times, f"{text!r}", deadline_s)
    except AssertionError as error:  # whether a signal got to a step is in slurmd's log
        error.add_note(f"so far:\n{slurm.output(name)}\n{slurm.logs()}")
        raise


def _until_trains(slurm: OneNode, name: str, times: int) -> None:
    _until_printed(slurm, name, " trains, from step ", times)


def test_a_warned_job_saves_and_comes_back_until_its_budget_is_spent(slurm: OneNode, launch: Launch) -> None:
    """SIGUSR1 as `--signal=USR1@120` sends it: all ranks save, a requeue; the second time it ends instead."""
    job = _submit(slurm, launch, "warned.out", "--requeues=1")
    saved = launch.run_dir(f"saves-{job}") / "checkpoints" / "saved-1"
    _until_trains(slurm, "warned.out", 2)

    slurm.ask("scancel", "--signal=USR1", job)
    _until_printed(slurm, "warned.out", "is requeued")
    first = int(saved.read_text())
    restarts = until(lambda: slurm.job(job)["Restarts"] == "1" and slurm.job(job)["Restarts"], "the requeue")
    _until_trains(slurm, "warned.out", 4)
    slurm.ask("scancel", "--signal=USR1", job)
    slurm.until_state(job, "COMPLETED", "FAILED")
    printed, ended = slurm.output("warned.out"), slurm.job(job)

    assert f"rank 1 trains, from step {first + 1}" in printed
    assert int(saved.read_text()) > first + 20
    assert "back into the queue (requeue 1 of 1)" in printed
    assert restarts == "1"
    assert "it was requeued 1 times, which is its budget (--requeues 1): it ends" in printed
    assert (ended["JobState"], ended["ExitCode"]) == ("FAILED", "138:0")


def test_a_cancelled_job_does_not_come_back(slurm: OneNode, launch: Launch) -> None:
    """The negative control: `scancel` sends SIGTERM, too, and means it."""
    job = _submit(slurm, launch, "cancelled.out", "--requeues=3", program=stand_in())
    _until_trains(slurm, "cancelled.out", 2)

    slurm.ask("scancel", job)
    slurm.until_state(job, "CANCELLED")
    until(lambda: not launch.living(), "all processes to end")

    assert slurm.job(job)["Restarts"] == "0"
    assert "requeue" not in slurm.output("cancelled.out")


@pytest.mark.matrix
@pytest.mark.parametrize(
    ("head", "said"),
    [
        ("#SBATCH --time=1 --signal=USR1@30", "SIGUSR1 from Slurm to job {job}: its time limit is near"),
        ("#SBATCH --time=1", "SIGTERM from Slurm to job {job}: its time limit is reached"),
    ],
    ids=["warned", "not warned"],
)
def test_a_job_at_its_time_limit_comes_back(slurm: OneNode, launch: Launch, head: str, said: str) -> None:
    """Slurm's own signals, a minute and a half of real time; without a warning there is no checkpoint to wait for."""
    name = f"limit-{len(head)}.out"
    job = _submit(slurm, launch, name, "--requeues=1", head=head)
    _until_trains(slurm, name, 2)

    # A minute, and Slurm looks at limits each half a minute.
    _until_printed(slurm, name, "is requeued", deadline_s=60.0 + 30.0 + PATIENCE_S)
    until(lambda: slurm.job(job)["Restarts"] == "1", "the requeue")
    _until_trains(slurm, name, 4)
    slurm.ask("scancel", job)
    until(lambda: not launch.living(), "all processes to end")

    assert said.format(job=job) in slurm.output(name)
