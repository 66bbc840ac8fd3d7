# SPDX-License-Identifier: Apache-2.0
"""Every launcher gets the same workload with the same fault, and its log is read for the rank it names."""

from pathlib import Path

import pytest

from megascale_ops.chaos.faults import BY_NAME
from megascale_ops.chaos.job import Plan
from megascale_ops.chaos.launchers import rival, rival_named, workload_arguments
from megascale_ops.chaos.trial import hold

KILLED = (
    "E1121 12:33:22.100000 1 torch/distributed/elastic/multiprocessing/api.py:1010] "
    "failed (exitcode: -9) local_rank: 2 (pid: 77) of binary: /usr/bin/python"
)


def test_an_outside_fault_is_not_told_to_the_workload() -> None:
    """A rank that is killed from outside does not know beforehand."""
    assert not [word for word in workload_arguments(BY_NAME["sigkill"], Path("/x"), 2) if "--fault" in word]
    assert "--fault=gil_held" in workload_arguments(BY_NAME["gil_held"], Path("/x"), 2)


def test_what_happens_everywhere_chooses_no_rank() -> None:
    """-1 means every rank."""
    assert "--rank=-1" in workload_arguments(BY_NAME["exception_all"], Path("/x"), 2)
    assert "--rank=2" in workload_arguments(BY_NAME["exception_one"], Path("/x"), 2)


def test_a_rival_names_the_first_rank_that_failed() -> None:
    """Rivals log the local rank and its exit code; a log without one names no rank."""
    assert rival_named(KILLED) == ("killed", (2,))
    assert rival_named(KILLED.replace("-9", "1")) == ("exception", (2,))
    assert rival_named("Restarting worker group") == ("", ())


def test_rivals_may_restart_as_often() -> None:
    """Both get three restarts, and ft_launcher the interpreter that it was installed for."""
    assert "--max-restarts=3" in rival("torchrun", "", Path("/x/ft.yaml"))
    command = rival("ft_launcher", "/venv/bin/ft_launcher", Path("/x/ft.yaml"))
    assert command[:2] == ["/venv/bin/python", "/venv/bin/ft_launcher"]
    assert "--max-restarts=3" in command


NOT_THEIRS = [
    "agent_killed",
    "controller_killed",
    "runner_killed",
    "partition_controller",
    "node_killed",
    "duplicate_rank",
]


@pytest.mark.parametrize("name", NOT_THEIRS)
def test_a_rival_is_not_asked_to_break_what_it_has_not(tmp_path: Path, name: str) -> None:
    """No job is started; the trial says why it was not held, and the score goes on."""
    outcome = hold(BY_NAME[name], Plan(lambda: None, launcher="torchrun"), tmp_path)

    why = {"node_killed": "needs a second node, and torchrun is started on one"}
    assert outcome.problem == f"{name} {why.get(name, 'breaks a part of MegaScale Ops that torchrun does not have')}"
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("name", ["saves_alone", "group_not_created"])
def test_two_ranks_that_disagree_are_not_asked_who_is_right(tmp_path: Path, name: str) -> None:
    """Nothing tells it, so there is no right answer to be held against."""
    outcome = hold(BY_NAME[name], Plan(lambda: None, nproc=2), tmp_path)

    assert "no right answer with fewer than 3 ranks" in outcome.problem


def test_ranks_without_a_gpu_can_t_have_it_stuck(tmp_path: Path) -> None:
    """A kernel without an end needs a GPU to run on: over Gloo that is said, and nothing is started."""
    outcome = hold(BY_NAME["kernel_endless"], Plan(lambda: None), tmp_path)

    assert outcome.problem == ("kernel_endless is done to a GPU, and ranks over gloo use none: give --backend nccl")
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("name", ["compute_20", "eval_declared", "agent_killed"])
def test_ranks_of_one_gpu_are_not_asked_who_is_slow(tmp_path: Path, name: str) -> None:
    """It runs them by turns, so a rank that is named as a straggler is one, and none is to blame."""
    outcome = hold(BY_NAME[name], Plan(lambda: None, backend="nccl", shared_gpus=1), tmp_path)

    assert outcome.problem == "of 4 ranks over nccl on 1 GPU that take turns one is slower without any fault"
    assert not list(tmp_path.iterdir())
