# SPDX-License-Identifier: Apache-2.0
"""Ranks that only felt what happened to another one are not named beside it, where something parts the two."""

from pathlib import Path

import pytest

from megascale_ops.postmortem.examine import examine
from megascale_ops.schema.health import Verdict

# How a line of the kernel's log and one of NCCL's begin, with the buses of ranks 0 to 2.
BUSES = ("1a", "3b", "5d")
NCCL = "n7:4{0}:5{0} [{0}] NCCL INFO ncclCommInitRank comm 0x1 rank {0} nranks 8 cudaDev {0} nvmlDev {0} busId {1}000\n"
XID = "Nov 12 03:14:09 n7 kernel: NVRM: Xid (PCI:0000:{}:00): {}, pid=7, name=python3, Ch 00000002\n"
NVLINK = "[rank{}]: torch.AcceleratorError: CUDA error: uncorrectable NVLink error detected during the execution\n"
PORT_DOWN = "n{0}:7:9 [0] NCCL WARN NET/IB : mlx5_4:1 Got async event : port error\n"
NO_ANSWER = (
    "n{0}:7:9 [0] NCCL WARN NET/IB: Got completion from peer 10.4.0.1<44102> with status=12 opcode=0 len=0 "
    "vendor err 129 (Send) localGid fe80::4 remoteGid fe80::14 hca mlx5_4\n"
    "torch.distributed.DistBackendError: NCCL error in: x.cpp:1, remote process exited or there was a network error\n"
)
WATCHDOG = (
    "[rank{0}]:[E x ProcessGroupNCCL.cpp:616] [Rank {0}] Watchdog caught collective operation timeout: "
    "WorkNCCL(SeqNum=9, OpType=ALLREDUCE, NumelIn=1, NumelOut=1, Timeout(ms)=600000) ran for 600010 milliseconds\n"
)
LOADING = (
    "step 8 loss 3.2\nTimeout (0:09:00)!\nThread 0x00007f22f1c40740 (most recent call first):\n"
    '  File "/usr/lib/python3.10/site-packages/torch/utils/data/dataloader.py", line 1133 in _try_get_data\n'
    '  File "/w/train.py", line 77 in main\n'
)


def judged(folder: Path, files: dict[str, str]) -> Verdict:
    """Judge a folder of files."""
    for name, text in files.items():
        (folder / name).write_text(text)
    return examine([folder]).verdicts[0]


@pytest.mark.parametrize(
    ("xids", "named"),
    [
        ({0: 45, 1: 145, 2: 45}, (1,)),  # the others' channels were only cleared
        ({0: 145, 1: 145, 2: 45}, (0, 1)),
        ({0: 45, 1: 45, 2: 45}, (0, 1, 2)),  # none of them parts them
        ({1: 145}, (0, 1, 2)),  # the log of one may be missing
    ],
)
def test_a_gpu_whose_channels_were_only_cleared_is_not_named(
    tmp_path: Path, xids: dict[int, int], named: tuple[int, ...]
) -> None:
    """The kernel's log tells whose GPU failed; where it knows nothing of a rank, that one is not let off."""
    job = "".join(NCCL.format(rank, BUSES[rank]) + NVLINK.format(rank) for rank in range(3))
    kernel = "".join(XID.format(BUSES[rank], xid) for rank, xid in xids.items())

    assert judged(tmp_path, {"job.log": job, "n7.kern.log": kernel}).culprits == named


@pytest.mark.parametrize(("of_2", "named"), [(PORT_DOWN, (2,)), ("", (0, 2))])
def test_the_end_whose_own_port_went_down_is_named_alone(tmp_path: Path, of_2: str, named: tuple[int, ...]) -> None:
    """Both ends have no answer; without a port's own word it may be either."""
    files = {
        "rank_0.log": NO_ANSWER.format(0),
        "rank_1.log": "torch.distributed.DistBackendError: NCCL error: remote process exited\n",
        "rank_2.log": of_2.format(2) + NO_ANSWER.format(2),
    }

    verdict = judged(tmp_path, files)

    assert (verdict.fault, verdict.culprits) == ("link_cut", named)


def test_a_stack_beside_watchdogs_tells_who_is_elsewhere(tmp_path: Path) -> None:
    """Ranks whose watchdogs gave up stood in a collective, so one stack is enough."""
    files = {f"rank_{rank}.log": WATCHDOG.format(rank) for rank in (0, 1, 3)}

    verdict = judged(tmp_path, {**files, "rank_2.log": LOADING})

    assert (verdict.fault, verdict.culprits) == ("data_stall", (2,))


def test_a_stack_beside_a_rank_that_died_of_its_own_names_nobody_else(tmp_path: Path) -> None:
    """Who has a cause of its own is it, also where a stack of another one shows its loader."""
    files = {f"rank_{rank}.log": WATCHDOG.format(rank) for rank in (0, 1)}
    raised = (
        '[rank3]: Traceback (most recent call last):\n[rank3]:   File "/x.py", line 1, in f\n[rank3]: KeyError: 7\n'
    )

    verdict = judged(tmp_path, {**files, "rank_2.log": LOADING, "rank_3.log": raised})

    assert (verdict.fault, verdict.culprits) == ("exception", (3,))


@pytest.mark.parametrize(
    ("why", "fault"), [("NODE FAILURE, SEE SLURMCTLD LOG FOR DETAILS", "node_lost"), ("TIME LIMIT", "killed")]
)
def test_a_step_that_lost_a_node_is_no_cancelled_one(tmp_path: Path, why: str, fault: str) -> None:
    """Slurm says for which reason it ended a step; no rank is named by it."""
    line = f"slurmstepd: error: *** STEP 7.0 ON n1 CANCELLED AT 2026-05-01T11:20:00 DUE TO {why} ***\n"

    verdict = judged(tmp_path, {"job.log": f"step 3 loss 2.1\n{line}srun: error: n1: tasks 0-3: Terminated\n"})

    assert (verdict.fault, verdict.culprits) == (fault, ())
