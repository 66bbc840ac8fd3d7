# SPDX-License-Identifier: Apache-2.0
"""`srun megascale-ops run -- train.py`, no more, under Slurm's own daemons: the nodes of the step find each other."""

from collections.abc import Iterator

import pytest

from tests.fakes.slurm import OneNode
from tests.processes.launch import PLAIN, Launch
from tests.processes.warmed import stand_in

pytestmark = pytest.mark.processes


@pytest.fixture(scope="module")
def slurm() -> Iterator[OneNode]:
    """Two nodes."""
    with OneNode(nodes=2, cpus=2) as cluster:
        yield cluster


def _batch(srun: str, *options: str) -> str:
    run = " ".join((stand_in(), "run", *options, "--", str(PLAIN), "--steps=20"))
    return f"#!/bin/bash\n#SBATCH --nodes=2\nexec srun {srun} {run}\n"


def _env(launch: Launch) -> dict[str, str]:
    return {name: value for name, value in launch.env.items() if not name.startswith("SLURM_")}


def test_the_nodes_of_a_step_train_as_one_job(slurm: OneNode, launch: Launch) -> None:
    """One controller, on the first node, two nodes in its round; the second found its token in the run folder."""
    job = slurm.submit(_batch("--ntasks-per-node=1"), _env(launch), "one.out")
    slurm.until_state(job, "COMPLETED", "FAILED")
    state, printed = slurm.job(job)["JobState"], slurm.output("one.out")

    assert state == "COMPLETED", printed
    assert printed.count("the nodes meet at n1:") == 2, printed
    assert printed.count("brought up by this run") == 1
    assert f"job plain-{job}" in printed
    assert "rank 0 done" in printed, printed
    assert "rank 1 done" in printed, printed
    assert (launch.state / "megascale-ops" / f"plain-{job}").is_dir()


def test_trials_side_by_side_stay_apart(slurm: OneNode, launch: Launch) -> None:
    """The opposite: `--nnodes 1` on each node of the step is two jobs, which do not meet."""
    job = slurm.submit(_batch("--ntasks-per-node=1", "--nnodes=1"), _env(launch), "apart.out")
    slurm.until_state(job, "COMPLETED", "FAILED")
    state, printed = slurm.job(job)["JobState"], slurm.output("apart.out")

    assert state == "COMPLETED", printed
    assert "the nodes meet" not in printed
    assert len([*(launch.state / "megascale-ops").glob("plain-*")]) == 2, printed


def test_a_task_a_rank_is_one_job_too(slurm: OneNode, launch: Launch) -> None:
    """A script for plain srun, `--ntasks-per-node=2`, with its `--wait` and `--kill-on-bad-exit`: four ranks."""
    job = slurm.submit(_batch("--ntasks-per-node=2 --wait=5 --kill-on-bad-exit=1"), _env(launch), "ranks.out")
    slurm.until_state(job, "COMPLETED", "FAILED")
    state, printed = slurm.job(job)["JobState"], slurm.output("ranks.out")

    assert state == "COMPLETED", printed
    assert printed.count("the others wait for it") == 2, printed
    assert [one for one in range(4) if f"rank {one} done" not in printed] == [], printed
    assert len([*(launch.state / "megascale-ops").glob("plain-*")]) == 1, printed
