# SPDX-License-Identifier: Apache-2.0
"""What happens to a job on a real Slurm: nodes that die, preemption, requeues, and the kinds of jobs that there are."""

import re
from collections.abc import Iterator
from pathlib import Path

import pytest

from megascale_ops.engines.slurm.batch import SlurmJob, script
from megascale_ops.engines.slurm.nodes import SlurmNodes
from tests.fakes.slurm import SOON, OneNode
from tests.processes.launch import PLAIN, Launch, until
from tests.processes.slurm_jobs import PROGRAM, Job

# Each takes half a minute of waiting for Slurm's own time-outs; what `make test` holds is in test_slurm_nodes.py.
pytestmark = [pytest.mark.processes, pytest.mark.matrix]

# A node whose slurmd is dead is down after twice SlurmdTimeout.
PARTITIONS = """
SlurmdTimeout=4
MessageTimeout=3
TCPTimeout=2
PreemptType=preempt/partition_prio
PreemptMode=REQUEUE
RebootProgram=/bin/true
PartitionName=low Nodes=ALL PriorityTier=1 PreemptMode=REQUEUE
PartitionName=graceful Nodes=ALL PriorityTier=1 PreemptMode=CANCEL GraceTime=30
PartitionName=high Nodes=ALL PriorityTier=10 PreemptMode=OFF
"""


@pytest.fixture
def slurm() -> Iterator[OneNode]:
    """Three nodes, of which a test may kill some; two partitions, of which one preempts the other."""
    with OneNode(nodes=3, settings=SOON + PARTITIONS, cpus=2) as cluster:
        yield cluster


def _node_of(job: Job, rank: int, round_: int = 1) -> str:
    return job.until(rf"rank {rank} on (n\d) trains from step \d+ in round {round_}\n")[1]


def test_a_spare_steps_in_for_a_node_that_dies(slurm: OneNode, launch: Launch) -> None:
    """Its slurmd and all that it runs, at once; neither the job nor its step ends, with ``--no-kill`` for both."""
    job = Job(slurm, launch, "spare", "--nnodes=2", "--nodes=3 --no-kill", srun="--no-kill")
    dead = _node_of(job, 1)
    job.until("which waits as a spare")

    slurm.kill_node(dead)
    spare = _node_of(job, 1, 2)
    until(lambda: slurm.node_state(dead).startswith("down"), "Slurm to see it")
    state = slurm.job(job.id)["JobState"]
    slurm.ask("scancel", job.id)
    until(lambda: not launch.living(), "all processes to end")

    assert spare != dead
    assert state == "RUNNING"


def test_a_job_whose_first_node_died_goes_on_after_its_requeue(slurm: OneNode, launch: Launch) -> None:
    """The controller and the batch script died with it: Slurm requeues; the name finds folder and checkpoint."""
    job = Job(slurm, launch, "first", "", "--nodes=2 --requeue")
    dead = _node_of(job, 0)

    slurm.kill_node(dead)
    found = job.until(r"rank 0 on (n\d) trains from step ([1-9]\d*) in round (\d+)\n")
    job.end()

    assert found[1] != dead
    assert int(found[3]) > 1
    assert slurm.job(job.id)["Restarts"] == "1"
    assert slurm.job(job.id)["JobState"] == "COMPLETED", job.printed


@pytest.mark.parametrize(
    ("partition", "said"),
    [("low", ""), ("graceful", "another job takes its nodes: a checkpoint, then back into the queue (requeue 1 of 3)")],
)
def test_a_preempted_job_comes_back(slurm: OneNode, launch: Launch, partition: str, said: str) -> None:
    """Another job takes its nodes; it goes back into the queue and on from its checkpoint once they are free.

    Slurm requeues it, or would cancel it after a grace, and we requeue it within that.
    """
    job = Job(slurm, launch, "low", "--requeues=3", f"--nodes=3 --partition={partition}")
    _node_of(job, 2)

    urgent = "#!/bin/bash\n#SBATCH --partition=high --nodes=3 --exclusive\nsleep 1\n"
    other = slurm.submit(urgent, slurm.env, "high.out")
    slurm.until_state(other, "COMPLETED")
    job.until(r"rank 0 on (n\d) trains from step ([1-9]\d*) in round (\d+)\n")
    job.end()

    assert said in job.printed
    assert slurm.job(job.id)["Restarts"] == "1"
    assert slurm.job(job.id)["JobState"] == "COMPLETED", job.printed


def test_tasks_of_an_array_and_components_are_jobs_of_their_own(slurm: OneNode, launch: Launch) -> None:
    """Each has a number of its own in Slurm, and so a name of its own here."""
    array = Job(slurm, launch, "array", "--requeues=1", "--nodes=1 --array=0-1")
    job = Job(slurm, launch, "het", "", "--nodes=1\n#SBATCH hetjob\n#SBATCH --nodes=2", srun="--het-group=1")

    until(lambda: len(set(re.findall(r"job (trains-\d+): 1 rank on", array.printed))) == 2, "two jobs of the array")
    until(lambda: array.printed.count("rank 0 on n") >= 4, f"both to train:\n{array.printed}")
    slurm.ask("scancel", array.id)
    job.until(r"rank 1 on (n\d) trains from step 0 in round 1\n")
    slurm.ask("scancel", job.id)
    until(lambda: not launch.living(), "all processes to end")

    assert "rank 2" not in job.printed
    assert len(set(re.findall(r"job (trains-\d+): 1 rank on", array.printed))) == 2


def test_the_controller_in_the_batch_script_serves_the_step(slurm: OneNode, launch: Launch) -> None:
    """`submit --batch-controller` as Slurm and bash run it: the nodes meet there, and it ends with the script."""
    env = {name: value for name, value in launch.env.items() if not name.startswith("SLURM_")}
    text = script(SlurmJob(command=(str(PLAIN), "--steps=20"), nodes=2, batch_controller=True), str(PROGRAM))

    job = slurm.submit(text, env, "batch.out")
    slurm.until_state(job, "COMPLETED", "FAILED")
    until(lambda: not launch.living(), "all processes to end")

    assert slurm.job(job)["JobState"] == "COMPLETED", slurm.output("batch.out")
    state = launch.state / "megascale-ops" / f"slurm-{job}"
    assert (state / "journal.db").exists()
    assert "brought up by this run" not in slurm.output("batch.out")


def test_a_node_is_restarted_as_soon_as_it_runs_nothing(slurm: OneNode) -> None:
    """`scontrol reboot ASAP`; the reason is ours, and the node comes back into service by itself."""
    said = SlurmNodes(slurm.ask).reboot("n3", "a GPU needs a reset")
    until(lambda: "reboot issued" in slurm.ask("scontrol", "show", "node", "n3"), "Slurm to restart it")
    shown = slurm.ask("scontrol", "show", "node", "n3")

    slurm.kill_node("n3")
    slurm.start_node("n3", "-b")
    until(lambda: slurm.node_state("n3") == "idle", "the node to be back", 60.0)

    assert said == "node n3 is restarted as soon as it runs nothing"
    assert "megascale-ops: a GPU needs a reset" in shown


def test_a_node_whose_slurmd_died_does_not_train_beside_its_successor(slurm: OneNode, launch: Launch) -> None:
    """Slurm kills nothing there and starts the job anew elsewhere; our controller's last order ends the old rank."""
    job = Job(slurm, launch, "orphan", "", "--nodes=2 --requeue")
    orphan = _node_of(job, 1)
    old = int(job.until(rf"rank 1 on {orphan} has pid (\d+) in round 1")[1])

    slurm.kill_slurmd(orphan)
    found = job.until(r"rank 1 on (n\d) trains from step ([1-9]\d*) in round 2\n")
    is_gone = not Path(f"/proc/{old}").exists()
    job.end()

    assert found[1] != orphan
    assert is_gone
    assert slurm.job(job.id)["JobState"] == "COMPLETED", job.printed
