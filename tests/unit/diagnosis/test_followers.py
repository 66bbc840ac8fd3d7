# SPDX-License-Identifier: Apache-2.0
"""Who only felt that another rank had gone is not named, in whatever words it says so; alone it is."""

import pytest

from megascale_ops.diagnosis.exits.classify import Ended
from megascale_ops.diagnosis.exits.first_cause import judge_exits
from megascale_ops.schema.health import Verdict
from megascale_ops.schema.messages import RankExit

TRACEBACK = 'Traceback (most recent call last):\n  File "/w/t.py", line 9, in train\n    out = step(batch)\n{}\n'
OWN = "KeyError: 'x'"
FELT = [
    "RuntimeError: Application timeout caused pair closure",
    "mpi4py.MPI.Exception: MPI_ERR_PROC_FAILED: Process Failure",
    "RuntimeError: oneCCL: coll_param.cpp:88 failed: connection closed by peer",
    "TimeoutError: timed out waiting for 4 ranks at barrier save-900, 3 came",
    "deepspeed.comm.CommTimeout: barrier timed out after 1800 s",
    "RuntimeError: remote rank 3 died",
    "ucxx.exceptions.UCXConnectionResetError: Connection reset by remote peer",
    "BrokenPipeError: [Errno 32] Broken pipe",
    "ConnectionResetError: [Errno 104] Connection reset by peer",
    "EOFError",
    "RuntimeError: DataLoader worker (pid 3312) is killed by signal: Terminated. ",
]


def judged(
    raised: dict[int, str], *, own_age_s: float = 0.1, has_time: bool = False, stopped: tuple[int, ...] = ()
) -> Verdict:
    """Judge ranks by what each raised; rank 3 ended so long ago, the others 0.1 s."""
    ended = [
        Ended(
            "", RankExit(rank, rank, 9, 1, 0.0, stderr_tail=TRACEBACK.format(text)),
            own_age_s if rank == 3 else 0.1, has_time=has_time,
        )
        for rank, text in raised.items()
    ]  # fmt: skip
    ended += [Ended("", RankExit(rank, rank, 9, -15, 0.0, by_us=True), 0.1, has_time=False) for rank in stopped]
    return judge_exits(ended, world_size=4, missing=(), reports={}, hosts={}, round_=0, wall_s=0.0)


@pytest.mark.parametrize("felt", FELT)
@pytest.mark.parametrize("has_time", [False, True])
def test_many_that_felt_it_are_not_named_beside_the_one_that_died(felt: str, has_time: bool) -> None:
    """Where no times are known, and where all ended within a second."""
    verdict = judged({**dict.fromkeys(range(3), felt), 3: OWN}, own_age_s=0.3, has_time=has_time)

    assert (verdict.fault, verdict.culprits) == ("exception", (3,)), verdict.reason


@pytest.mark.parametrize("felt", [text for text in FELT if "DataLoader" not in text])
def test_many_that_felt_something_name_nobody_beside_one_without_a_word(felt: str) -> None:
    """That one is what they have in common."""
    assert judged(dict.fromkeys(range(3), felt), stopped=(3,)).culprits == ()


@pytest.mark.parametrize(
    "own",
    [
        "ConnectionResetError: [Errno 104] Connection reset by peer",
        "EOFError",
        "requests.exceptions.ConnectionError: HTTPSConnectionPool(host='hub.co', port=443): Connection reset by peer",
        "RuntimeError: failed to fetch s3://c/0812.tar: Generic S3 error: Connection reset by peer",
    ],
)
def test_the_only_one_whose_connection_broke_is_named(own: str) -> None:
    """A connection of its own: the others were stopped for it."""
    assert judged({3: own}, stopped=(0, 1, 2)).culprits == (3,)


def test_a_connection_that_broke_long_before_is_a_cause() -> None:
    """More than a second before the others ended, by times that are known."""
    verdict = judged({**dict.fromkeys(range(3), OWN), 3: "EOFError"}, own_age_s=9.0, has_time=True)

    assert verdict.culprits == (3,)


def test_a_service_that_fails_for_some_names_them() -> None:
    """An address of a service in it: no rank is at its other end."""
    gone = "requests.exceptions.ConnectionError: HTTPSConnectionPool(host='hub.co', port=443): Read timed out"

    assert judged({1: gone, 3: gone}, stopped=(0,)).culprits == (1, 3)


def test_of_two_errors_without_times_the_rarer_one_came_first() -> None:
    """The many may have died of it in words that are not known; how sure that is is said."""
    verdict = judged({**dict.fromkeys(range(3), "ValueError: no answer from the group"), 3: OWN})

    assert verdict.culprits == (3,)
    assert verdict.confidence <= 0.6


CHAIN = (
    'Traceback (most recent call last):\n  File "/w/t.py", line 9, in train\n    out = step(batch)\n{}\n\n'
    "The above exception was the direct cause of the following exception:\n\n"
    'Traceback (most recent call last):\n  File "/w/t.py", line 31, in main\n    train()\ntrain.StepFailed: step 40\n'
)
GONE = "RuntimeError: [../third_party/gloo/gloo/transport/tcp/pair.cc:553] Connection closed by peer [10.0.0.4]:3318"


@pytest.mark.parametrize(
    ("root", "ranks", "culprits"),
    [
        (GONE, (0, 1, 2), ()),
        (GONE, (0,), (0,)),  # alone it may have another reason
        ("ValueError: bad record", (0, 1, 2), (0, 1, 2)),
    ],
)
def test_several_that_raised_over_a_lost_peer_are_victims(
    root: str, ranks: tuple[int, ...], culprits: tuple[int, ...]
) -> None:
    """By the exception at the root of the chain."""
    ended = [Ended("", RankExit(rank, rank, 9, 1, 0.0, stderr_tail=CHAIN.format(root)), 0.1) for rank in ranks]
    ended.append(Ended("", RankExit(3, 3, 9, -15, 0.0, by_us=True), 0.1))

    verdict = judge_exits(ended, world_size=4, missing=(), reports={}, hosts={}, round_=0, wall_s=0.0)

    assert verdict.culprits == culprits, verdict.reason
