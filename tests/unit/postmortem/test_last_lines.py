# SPDX-License-Identifier: Apache-2.0
"""A complaint that no table knows is a rank's end where all others lost a peer, and nowhere else."""

import pytest

from megascale_ops.postmortem.exits import judge_logs
from megascale_ops.postmortem.last_lines import complaint, odd_ones

LOST = (
    "torch.distributed.DistBackendError: NCCL error in: x.cpp:1, remote process exited or there was a network error\n"
)
STEP = "step 9 loss 2.0\n"


@pytest.mark.parametrize(
    "line",
    [
        "bash: line 1: torchrun: command not found",
        "python: error while loading shared libraries: libx.so: cannot open shared object file",
        "/usr/bin/python3: No module named torch.distributed.run",
        "usage: train.py [-h]\ntrain.py: error: unrecognized arguments: --lrr 1",
        "FATAL:   container creation failed: mount error",
        "git-lfs: smudge filter lfs failed",
        "CPU time limit exceeded (core dumped)",
    ],
)
def test_a_complaint_beside_ranks_that_lost_a_peer_names_its_rank(line: str) -> None:
    """With 65 %: its launcher may have stopped it for another one."""
    verdict = judge_logs({0: STEP + LOST, 1: STEP + LOST, 2: f"{STEP}{line}\n"})

    assert (verdict.fault, verdict.culprits, verdict.confidence) == ("exit_code", (2,), 0.65), verdict.reason


@pytest.mark.parametrize(
    ("of_2", "others"),
    [
        ("WARNING: tokenizer file not found, using the slow one\n", LOST),
        ("INFO cache lookup failed for 3 keys\n", LOST),
        ("[W101 10:00:00.1 x.cpp:3] Warning: peer access denied\n", LOST),
        ("could not open /dev/nvtop\nfalling back to the slow path\n", LOST),
        (f"could not read the cache\n{STEP}", LOST),  # it went on
        ("finished with 0 errors\n", LOST),
        ("bash: line 1: torchrun: command not found\n", STEP),  # nobody lost it
    ],
)
def test_what_only_sounds_bad_names_nobody(of_2: str, others: str) -> None:
    """Levels below an error's, what is skipped, what came before a step; and no complaint where no peer was lost."""
    assert judge_logs({0: STEP + others, 1: STEP + others, 2: STEP + of_2}).culprits == ()


def test_where_most_complain_nobody_is_named() -> None:
    """Their words may be of a lost peer, in words that are new."""
    odd = f"{STEP}xyz: channel 3 failed\n"

    assert judge_logs({0: STEP + LOST, 1: odd, 2: odd}).culprits == ()


def test_the_first_complaint_behind_the_last_step_is_quoted() -> None:
    """What stands before a step is older."""
    assert complaint(f"x failed\n{STEP}y: error: no such device\nz aborted\n") == "y: error: no such device"
    assert complaint(f"x failed\n{STEP}") == ""


@pytest.mark.parametrize(
    ("said", "ranks"),
    [
        (["link 3 failed", "link 9 failed", "cannot open gate", "link 2 failed"], {2}),
        (["link 3 failed", "link 9 failed", "link 4 failed"], set()),  # all alike
        (["link 3 failed", "link 9 failed", "no such gate", "no such gate"], set()),  # no crowd
        (["link 3 failed", "cannot open gate"], set()),  # of two either may be
        (["link 3 failed", "link 9 failed", "", "link 1 failed"], set()),  # who says nothing was stopped
    ],
)
def test_who_ends_with_another_complaint_than_a_crowd(said: list[str], ranks: set[int]) -> None:
    """In words that no table knows."""
    assert odd_ones(dict(enumerate(said))).keys() == ranks
    verdict = judge_logs({rank: f"{STEP}{words}\n" for rank, words in enumerate(said)})
    assert {*verdict.culprits} == ranks


def test_who_complained_is_why_others_were_asked_to_go() -> None:
    """Where nothing else tells of a reason; a rank that says nothing was stopped as well."""
    asked = "slurmstepd: error: *** STEP 1.0 ON n0 CANCELLED AT 2026-03-01T10:00:00 ***\n"
    complains = judge_logs({0: STEP + asked, 1: STEP + asked, 2: f"{STEP}x: FATAL: lane 7 is dead\n", 3: STEP + asked})
    silent = judge_logs({0: STEP + asked, 1: STEP + asked, 2: STEP, 3: STEP + asked})

    assert (complains.fault, complains.culprits, complains.confidence) == ("exit_code", (2,), 0.65)
    assert (silent.fault, silent.culprits) == ("killed", (0, 1, 3))


def test_who_complained_and_was_waited_for_did_not_join_for_that() -> None:
    """The watchdogs alone would say no more than that it is elsewhere."""
    waited = (
        "[rank{0}]:[E1 ProcessGroupNCCL.cpp:632] [Rank {0}] Watchdog caught collective operation timeout: "
        "WorkNCCL(SeqNum=5, OpType=ALLREDUCE, NumelIn=1, NumelOut=1, Timeout(ms)=600000) ran for 600027 milliseconds "
        "before timing out.\n"
    )
    logs = {rank: STEP + waited.format(rank) for rank in (0, 1, 3)}

    complains = judge_logs({**logs, 2: f"{STEP}/usr/bin/env: 'python3': No such file or directory\n"})
    assert (complains.fault, complains.culprits) == ("exit_code", (2,))
    silent = judge_logs({**logs, 2: STEP})
    assert (silent.fault, silent.culprits) == ("not_joined", (2,))


def test_what_only_tuners_print_ends_a_rank_that_ends_with_it() -> None:
    """Behind steps it was a candidate that was too large."""
    raised = (
        'Traceback (most recent call last):\n  File "/w/t.py", line 1, in m\n    f()\n'
        "triton.runtime.errors.OutOfResources: out of resource: shared memory, Required: 294912\n"
    )

    assert judge_logs({0: STEP + LOST, 1: STEP + raised}).culprits == (1,)
    assert judge_logs({0: STEP + LOST, 1: raised + 3 * STEP}).culprits == ()


@pytest.mark.parametrize("level", ["WARNING trainer:", "2026-03-01 10:00:00 INFO", "W tensorflow/core/bfc.cc:296]"])
def test_a_full_gpu_in_a_warning_was_survived(level: str) -> None:
    """One that ends a rank is raised; an error's record may be all there is of it."""
    words = "CUDA out of memory at batch size 8"

    assert judge_logs({0: f"{STEP}{level} {words}\n", 1: STEP}).culprits == ()
    assert judge_logs({0: f"{STEP}ERROR trainer: {words}\n", 1: STEP}).culprits == (0,)
