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
