# SPDX-License-Identifier: Apache-2.0
"""Whose end the kernel's log explains: by process, and by GPU and host; else it is of no rank."""

import pytest

from megascale_ops.postmortem.kernel import faults_in, in_storage, is_kernels, of_ranks, since

XID = "Oct 25 11:02:10 nodeb kernel: NVRM: Xid (PCI:0000:9b:00): 79, pid='<unknown>', GPU has fallen off the bus."
OOM = "[812711.9] Out of memory: Killed process 911 (python3) total-vm:8kB"
NCCL = "node{}:7:9 [3] NCCL INFO ncclCommInitRank comm 0x1 rank {} nranks 16 cudaDev 3 nvmlDev 3 busId 9b000 - Init\n"


def test_a_kernels_log_is_told_by_its_lines() -> None:
    """A job's log with a few of them is none."""
    assert is_kernels(f"{XID}\n{OOM}\n")
    assert not is_kernels(f"step 1\nstep 2\nstep 3\n{OOM}\n")
    assert faults_in(f"[1.0] usb 1-1: new device\n{OOM}") == [OOM]


def test_a_process_is_the_rank_that_a_launcher_names() -> None:
    """A process that no launcher has named is of no rank."""
    assert of_ranks([OOM], {}, "", {911: 10}) == {10: [OOM]}
    assert of_ranks([OOM], {}, "", {912: 10}) == {-1: [OOM]}
    assert of_ranks([OOM], {2: "RuntimeError: DataLoader worker (pid 911) is killed"}, "", {}) == {2: [OOM]}


def test_a_gpu_is_the_rank_on_its_host() -> None:
    """The bus alone is on two hosts; with the host it is one rank's."""
    both = NCCL.format("a", 3) + NCCL.format("b", 11)
    without_host = "[1.5] NVRM: Xid (PCI:0000:9b:00): 79, GPU has fallen off the bus."

    assert of_ranks([XID], {}, both, {}) == {11: [XID]}
    assert of_ranks([without_host], {}, both, {}) == {-1: [without_host]}
    assert of_ranks([without_host], {}, NCCL.format("a", 3), {}) == {3: [without_host]}


@pytest.mark.parametrize(
    ("begins", "is_kept"),
    [
        ("2025-09-03T08:00:00+00:00 step 0", False),
        ("2025-09-02 23:00:00 step 0", True),
        ("step 0", True),
    ],
)
def test_what_came_days_before_a_job_is_not_its_end(begins: str, is_kept: bool) -> None:
    """By the first date that the job printed; within what zones may be apart, and without a date, it counts."""
    line = "[Mon Sep  1 22:40:51 2025] NVRM: Xid (PCI:0000:1b:00): 31, pid=2, name=python, Ch 00000008"

    assert since([line], [begins]) == ([line] if is_kept else [])
    assert since([OOM], [begins]) == [OOM]


def test_a_rank_that_sleeps_in_a_file_system_is_told_by_its_pid() -> None:
    """By its own words of its pid; where the kernel tells of no file system it may sleep for another reason."""
    hung = "[346.1] INFO: task pt_main_thread:48213 blocked for more than 122 seconds.\n"
    lustre = "[221.5] Lustre: scratch-OST0007: Connection to scratch-OST0007 was lost\n"
    logs = {5: "pid 48212 ready", 6: "pid 48213 ready"}

    assert in_storage(lustre + hung, logs) == {6}
    assert in_storage(hung, logs) == set()
    assert in_storage(lustre, logs) == set()
