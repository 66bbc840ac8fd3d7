# SPDX-License-Identifier: Apache-2.0
"""Whose end the kernel's log explains: by process, and by GPU and host; else it is of no rank."""

from megascale_ops.postmortem.kernel import faults_in, is_kernels, of_ranks

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
