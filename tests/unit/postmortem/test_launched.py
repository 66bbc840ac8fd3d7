# SPDX-License-Identifier: Apache-2.0
"""Who ended how, in the sentences of any launcher; and what names no rank."""

import pytest

from megascale_ops.postmortem.launched import told_in, why_ended


@pytest.mark.parametrize(
    ("line", "codes"),
    [
        ("srun: error: n12: task 5: Segmentation fault (core dumped)", {5: -11}),
        ("srun: error: n12: tasks 4,6-7: Exited with exit code 3", {4: 3, 6: 3, 7: 3}),
        ("mpirun noticed that process rank 3 with PID 0 on node n4 exited on signal 9 (Killed).", {3: -9}),
        (
            "prterun noticed that process rank 3 with PID 8 on node a exited on\nsignal 11 (Segmentation fault).",
            {3: -11},
        ),
        ("=   RANK 6 PID 2211 RUNNING AT n03\n=   KILLED BY SIGNAL: 9 (Killed)", {6: -9}),
        ("MPI_ABORT was invoked on rank 7 in communicator MPI_COMM_WORLD", {7: 1}),
        ("ERROR:  One or more process (first noticed rank 11) terminated with signal 9", {11: -9}),
        ("[NID 00312] PE RANK 17 exit signal Segmentation fault", {17: -11}),
        ("Container rank 1 status failed cmd ['python', 'x.py'] code -9 log log/workerlog.1", {1: -9}),
        ("ERROR:composer.cli.launcher:Global rank 5 (PID 2088) exited with code -11", {5: -11}),
        ("-- Process 3 terminated with the following error:", {3: 1}),
        ("ProcessExitedException: process 5 terminated with signal SIGKILL", {5: -9}),
        ("[rank: 2] Child process with PID 4321 terminated with code -9. Forcefully", {2: -9}),
        ("the trainer process with rank=[1, 2] was aborted. Please check its log.", {1: 1, 2: 1}),
        ("Worker 2 has failed.", {2: 1}),
        ("A launcher of tomorrow: rank #4 on host b7 was lost, exit status 139", {4: 139}),
    ],
)
def test_sentences_of_launchers_name_ranks_and_how_they_ended(line: str, codes: dict[int, int]) -> None:
    """Who and how are looked for, so that the last one, which nobody writes, is read as well."""
    told = told_in(f"step 1\n{line}\n")

    assert told.codes == codes
    assert told.first == tuple(codes)


@pytest.mark.parametrize(
    "line",
    [
        "Sending process 1300 closing signal SIGTERM",
        "Process 1234 got signal: 1",
        "worker 3 exited with code 1, will restart it (attempt 2)",
        "rank 3 finished with exit code 0",
        "['python', 'main.py', '--local_rank=3'] exits with return code = -9",
        "task 4 of 9 is done",
    ],
)
def test_other_sentences_name_no_rank(line: str) -> None:
    """Numbers of processes, what goes on, what went well, and DeepSpeed's command of another process."""
    assert told_in(line).first == ()


def test_what_a_cancelled_steps_tasks_did_is_a_consequence() -> None:
    """The first failure stands before the cancellation, and with a reason there is none."""
    cancel = "slurmstepd: error: *** STEP 9.0 ON n1 CANCELLED AT 2026-01-01T00:00:00{} ***\n"
    after = "srun: error: n1: tasks 0-3: Killed\n"

    assert told_in(f"srun: error: n2: task 5: Bus error\n{cancel.format('')}{after}").codes == {5: -7}
    assert told_in(cancel.format(" DUE TO TIME LIMIT") + after).codes == {}
    assert "TIME LIMIT" in why_ended(cancel.format(" DUE TO TIME LIMIT") + after)
    assert why_ended(cancel.format("") + after) == ""


def test_nodes_that_fail_alike_fail_together() -> None:
    """A script that fails everywhere is told of node by node; one task that fails first is not joined by the others."""
    node = "srun: error: n{}: {}: Exited with exit code {}\n"

    assert told_in(node.format(1, "tasks 0-1", 1) + node.format(2, "tasks 2-3", 1)).first == (0, 1, 2, 3)
    assert told_in(node.format(1, "tasks 0-1", 1) + node.format(2, "tasks 2-3", 2)).first == (0, 1)
    assert told_in(node.format(1, "task 0", 1) + node.format(2, "tasks 2-3", 1)).first == (0,)


def test_torchruns_report_counts_before_its_local_ranks() -> None:
    """And its first failure is the root, whichever it lists first."""
    local = "failed (exitcode: -6) local_rank: 1 (pid: 71) of binary: python\n"
    report = "rank      : 9 (local_rank: 1)\n  exitcode  : -6 (pid: 71)\n"

    assert told_in(local).is_local
    assert told_in(local).codes == {1: -6}
    told = told_in(local + report)
    assert (told.codes, told.first, dict(told.pids), told.is_local) == ({9: -6}, (9,), {71: 9}, False)


CARRIED = "ActorDiedError: in its task, ray::p-{0}:W.__init__() (pid=7, ip=10.6.6.13, actor_id=79f3, repr={1})\n"


def test_an_error_that_ray_carries_is_of_the_rank_in_its_actors_name() -> None:
    """An actor that prints no rank of itself names none, and a line that only mentions one neither."""
    assert told_in(CARRIED.format(2, "Worker[rank=2]")).first == (2,)
    assert told_in(CARRIED.format(2, "<w.Worker object at 0x7f>")).codes == {}
    assert told_in("all of ray::W are ready, the first has repr=Worker[rank=2])").codes == {}
