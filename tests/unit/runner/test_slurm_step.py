# SPDX-License-Identifier: Apache-2.0
"""What srun tells a task becomes the nodes of the job and the place where they meet."""

import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

from megascale_ops.runner.config import RunConfig
from megascale_ops.runner.plan import Machine, Plan, make_plan
from megascale_ops.runner.slurm_step import Step, first_host, node_name, read_step, stands_by, tasks_of, within

# As Slurm 22.05 and 24.11 set them in a task of `srun -N4 --ntasks-per-node=1 --gpus-per-node=8`.
TASK = {
    "SLURM_JOB_ID": "4711",
    "SLURM_STEP_ID": "0",
    "SLURM_STEP_NUM_NODES": "4",
    "SLURM_STEP_NUM_TASKS": "4",
    "SLURM_STEP_TASKS_PER_NODE": "1(x4)",
    "SLURM_STEP_NODELIST": "gpu[007-009,012]",
    "SLURM_NODEID": "2",
    "SLURM_PROCID": "2",
    "SLURM_GPUS_ON_NODE": "8",
}
KEY_FILE = "/key"
SCRIPT = ("train.py", "--steps", "3")


def plan(config: RunConfig, **task: str) -> Plan:
    """The plan of this task, with some of its variables changed."""
    step = read_step({**TASK, **task})
    machine = Machine(hostname="gpu009", cores=64, gpus=8, state_root="/s", stamp="now-1", python="/python", step=step)
    return make_plan(config, SCRIPT, machine, threads_set=False)


def test_a_task_knows_its_step() -> None:
    """Nodes, the place among them, the first of them, and its GPUs."""
    assert read_step(TASK) == Step(4711, 0, 4, 2, "gpu007", 1, 8, rank=2, all_tasks=4)


@pytest.mark.parametrize("left_out", ["SLURM_JOB_ID", "SLURM_STEP_ID", "SLURM_STEP_NODELIST", "SLURM_NODEID"])
def test_outside_of_a_step_there_is_none(left_out: str) -> None:
    """A batch script has the job's variables and no step's; neither do a shell and what an agent starts."""
    assert read_step({name: value for name, value in TASK.items() if name != left_out}) is None


@pytest.mark.parametrize("number", ["4294967290", "4294967291", "4294967292"])
def test_an_interactive_shell_is_no_step(number: str) -> None:
    """What a user types in a shell that Slurm has opened was started by nobody on the other nodes."""
    assert read_step({**TASK, "SLURM_STEP_ID": number}) is None


@pytest.mark.parametrize("wrong", [{"SLURM_NODEID": "x"}, {"SLURM_STEP_NUM_NODES": ""}, {"SLURM_STEP_NODELIST": "]["}])
def test_what_cannot_be_read_is_no_step(wrong: dict[str, str]) -> None:
    """Variables that somebody has set by hand end in a run on one node, not in a traceback."""
    assert read_step({**TASK, **wrong}) is None


@pytest.mark.parametrize(
    ("hosts", "first"),
    [
        ("n1", "n1"),
        ("n1,n2", "n1"),
        ("n[1-3,7]", "n1"),
        ("gpu[001-004,7],login1", "gpu001"),
        ("rack[1-2]n[1-8]", "rack1n1"),
        ("a[5],b[1-2]", "a5"),
        ("n[08,10-12].cluster", "n08.cluster"),
        ("", ""),
    ],
)
def test_the_first_host_of_a_list(hosts: str, first: str) -> None:
    """As `scontrol show hostnames` gives them, the first."""
    assert first_host(hosts) == first


@given(st.text(alphabet="n[]-,01.x", max_size=30))
def test_any_list_gives_a_host_or_none(hosts: str) -> None:
    """Never an error, and never a name that is still a list."""
    assert not re.search(r"[\[\],]", first_host(hosts))


def test_the_nodes_of_a_step_are_the_nodes_of_the_job() -> None:
    """`srun megascale-ops run -- train.py` and no more: all meet at the first, under one name, a rank a GPU."""
    plans = [plan(RunConfig(), SLURM_NODEID=str(node)) for node in range(4)]

    assert {(one.min_nodes, one.max_nodes, one.nproc, one.job) for one in plans} == {(4, 4, 8, "train-4711")}
    [url] = {one.meeting.controller for one in plans}
    assert url.startswith("http://gpu007:")
    assert [bool(one.meeting.serve) for one in plans] == [True, False, False, False]
    assert [one.meeting.node_rank for one in plans] == [0, 1, 2, 3]
    assert "Slurm's step 4711.0: node 2 of 4" in plans[2].meeting.said


def test_a_requeued_job_keeps_its_name_and_another_job_has_another() -> None:
    """So it goes on from its checkpoints, and two jobs with one script do not meet."""
    again, other = plan(RunConfig(), SLURM_RESTART_COUNT="1"), plan(RunConfig(), SLURM_JOB_ID="4712")

    assert again.job == "train-4711"
    assert other.job == "train-4712"
    assert other.meeting.controller != again.meeting.controller


@given(st.integers(1, 10**9), st.integers(0, 1000), st.integers(0, 3))
def test_ports_are_of_those_that_are_given_to_nobody(job: int, number: int, node: int) -> None:
    """Not for root, not given away by the kernel, and another one for the next step and the next job."""
    here = Step(job, number, 4, node, "a", 1, 0)
    steps = (here, here._replace(number=number + 1), here._replace(job=job + 1, node=0))
    ports = [int(within(RunConfig(), step)[0].rdzv_endpoint.rpartition(":")[2]) for step in steps]

    assert len(set(ports)) == 3
    assert all(20_000 <= port < 32_000 for port in ports)


def test_what_the_user_names_stays() -> None:
    """A controller, an endpoint, a number of nodes or of ranks are not second-guessed."""
    assert plan(RunConfig(controller="http://c:7070")).meeting.controller == "http://c:7070"
    assert plan(RunConfig(controller="http://c:7070")).max_nodes == 4  # who they are, the step says all the same
    assert plan(RunConfig(rdzv_endpoint="h:1234", token_file=KEY_FILE)).meeting.controller == "http://h:1234"
    assert plan(RunConfig(nnodes="3:4")).min_nodes == 3
    assert plan(RunConfig(nproc_per_node="2")).nproc == 2
    assert plan(RunConfig(job="mine")).job == "mine"


def test_one_node_on_request_meets_nobody() -> None:
    """`srun -N4 megascale-ops run --nnodes 1`: four trials side by side, each with a controller of its own."""
    alone = plan(RunConfig(nnodes="1"))

    assert (alone.max_nodes, alone.meeting.controller, alone.job) == (1, "", "train-now-1")


def test_the_first_task_of_a_node_starts_the_ranks_of_all() -> None:
    """`srun --ntasks-per-node=8`, a task a rank, as scripts for plain srun have it: one job, and the others wait."""
    task = {"SLURM_STEP_TASKS_PER_NODE": "8(x3),4", "SLURM_STEP_NUM_TASKS": "28", "SLURM_LOCALID": "0"}
    first, last = plan(RunConfig(), **task, SLURM_NODEID="0"), plan(RunConfig(), **task, SLURM_NODEID="3")

    assert [(one.max_nodes, one.nproc) for one in (first, last)] == [(4, 8), (4, 4)]
    assert first.meeting.controller == last.meeting.controller
    assert first.job == "train-4711"
    assert "starts all ranks of the node (8) and the others wait for it" in first.meeting.said[0]


@pytest.mark.parametrize(
    ("config", "task", "waits"),
    [
        (RunConfig(), {"SLURM_LOCALID": "1", "SLURM_STEP_TASKS_PER_NODE": "2(x4)"}, True),
        (RunConfig(), {"SLURM_LOCALID": "0", "SLURM_STEP_TASKS_PER_NODE": "2(x4)"}, False),
        (RunConfig(nnodes="1"), {"SLURM_LOCALID": "1", "SLURM_STEP_TASKS_PER_NODE": "2(x4)"}, False),
        (
            RunConfig(),
            {"SLURM_LOCALID": "1", "SLURM_STEP_TASKS_PER_NODE": "2(x4)", "SLURM_GPUS_PER_TASK": "1"},
            False,
        ),
        (RunConfig(), {"SLURM_LOCALID": "1", "SLURM_STEP_NODELIST": ""}, False),
        (
            RunConfig(),
            {
                "SLURM_LOCALID": "1",
                "SLURM_STEP_TASKS_PER_NODE": "2(x4)",
                "SLURM_GPUS_ON_NODE": "2",
                "CUDA_VISIBLE_DEVICES": "0,1",
            },
            True,
        ),
    ],
    ids=["another task", "the first", "trials", "GPUs of its own", "no step", "all see all GPUs"],
)
def test_who_waits(config: RunConfig, task: dict[str, str], *, waits: bool) -> None:
    """Every task of a node but the first, unless each is to be a run, or a node, of its own."""
    assert stands_by(config, read_step({**TASK, **task})) is waits


@pytest.mark.parametrize(
    ("told", "gpus"),
    [
        ({"SLURM_GPUS_PER_TASK": "1"}, 1),
        ({"SLURM_GPUS_PER_TASK": "h200:2"}, 2),
        ({"SLURM_TRES_PER_TASK": "cpu=4,gres/gpu:1"}, 1),
        ({"SLURM_TRES_PER_TASK": "gres:gpu:h100:2"}, 2),
        # As Slurm 22.05 sets them by `srun --gpus-per-task=1 -n2` on a node with two, and by `--gpu-bind`.
        ({"SLURMD_TRES_BIND": "gpu:per_task:1", "CUDA_VISIBLE_DEVICES": "1", "SLURM_GPUS_ON_NODE": "2"}, 1),
        ({"SLURMD_TRES_BIND": "gpu:single:1", "CUDA_VISIBLE_DEVICES": "3"}, 1),
        ({"SLURMD_TRES_BIND": "gpu:closest", "CUDA_VISIBLE_DEVICES": "0,1,2,3,4"}, 4),
    ],
)
def test_tasks_with_gpus_of_their_own_are_nodes(told: dict[str, str], gpus: int) -> None:
    """The first task could not use the others' GPUs; in each Slurm's LOCAL_RANK is that of what it sees."""
    task = {"SLURM_STEP_TASKS_PER_NODE": "2(x4)", "SLURM_STEP_NUM_TASKS": "8", "SLURM_PROCID": "5", **told}
    one = plan(RunConfig(), **task, SLURM_LOCALID="1")

    assert (one.max_nodes, one.nproc, one.meeting.node_rank) == (8, gpus, 5)
    assert one.node == "gpu009"
    assert "has GPUs of its own (--gpus-per-task) and is a node of the job" in one.meeting.said[0].replace("\n", " ")


def test_tasks_of_one_node_meet_on_its_loopback() -> None:
    """Its name need not be known there, and no other machine reaches what they meet at."""
    task = {"SLURM_STEP_NUM_NODES": "1", "SLURM_STEP_TASKS_PER_NODE": "2", "SLURM_STEP_NUM_TASKS": "2"}
    one = plan(RunConfig(), **task, SLURM_NODEID="0", SLURM_PROCID="1", SLURM_GPUS_PER_TASK="1")

    assert (one.max_nodes, one.job) == (2, "train-4711")
    assert one.meeting.controller.startswith("http://127.0.0.1:")


def test_tasks_stay_runs_of_their_own_on_request() -> None:
    """`--nnodes 1`: trials side by side, a rank each."""
    one = plan(RunConfig(nnodes="1"), SLURM_STEP_TASKS_PER_NODE="2(x3),1")

    assert (one.max_nodes, one.nproc, one.meeting.controller, one.job) == (1, 1, "", "train-now-1")


@given(st.text(alphabet="0123456789(x),", max_size=30))
def test_any_list_of_tasks_is_read(text: str) -> None:
    """Never an error, and never more than there can be."""
    assert len(tasks_of(text)) <= 65_536


def test_outside_of_slurm_nothing_changes() -> None:
    """One rank on one node."""
    config, said = within(RunConfig(), None)

    assert (config.nnodes, config.nproc_per_node, said) == ("1", "1", ())


@pytest.mark.parametrize(
    ("task", "name"),
    [
        ({"SLURMD_NODENAME": "n3"}, "n3"),
        ({"SLURMD_NODENAME": "gpu009"}, "gpu009.cluster"),
        ({}, "gpu009.cluster"),
        ({"SLURMD_NODENAME": "n3", "SLURM_STEP_NUM_NODES": "1"}, "gpu009.cluster"),
        ({"SLURMD_NODENAME": "n3", "SLURM_STEP_TASKS_PER_NODE": "2(x4)"}, "gpu009.cluster"),
    ],
    ids=["another name", "its host name", "not told", "one node", "several tasks a node"],
)
def test_a_node_has_the_name_by_which_slurm_drains_it(task: dict[str, str], name: str) -> None:
    """Its host name stays where that begins with Slurm's, for the node's agent knows it by that."""
    assert node_name(read_step({**TASK, **task}), "gpu009.cluster") == name


@pytest.mark.parametrize(
    ("requeues", "task", "job"),
    [
        (3, {"SLURM_STEP_NUM_NODES": "1"}, "train-4711"),
        (0, {"SLURM_STEP_NUM_NODES": "1"}, "train-now-1"),
        (3, {"SLURM_STEP_NUM_NODES": "1", "SLURM_STEP_TASKS_PER_NODE": "2"}, "train-4711"),
    ],
    ids=["may be requeued", "may not", "two tasks"],
)
def test_a_job_of_one_node_keeps_its_name_through_a_requeue(requeues: int, task: dict[str, str], job: str) -> None:
    """Otherwise it would begin anew in another folder; without requeues each try is a run of its own, as ever."""
    assert plan(RunConfig(requeues=requeues), **task).job == job


def test_a_negative_budget_is_refused() -> None:
    """Wherever it was set."""
    with pytest.raises(ValueError, match="requeues = -1 can't be"):
        RunConfig(requeues=-1)
