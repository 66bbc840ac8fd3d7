# SPDX-License-Identifier: Apache-2.0
"""When the script's own time-out fires, the rank that never came is named, and no rank that waited."""

import signal

import pytest

from megascale_ops.diagnosis.exits.classify import Ended
from megascale_ops.diagnosis.exits.first_cause import judge_exits
from megascale_ops.schema.health import Verdict
from megascale_ops.schema.messages import CollectiveFact, RankExit
from megascale_ops.schema.progress import RankError

UNBOUND = "[/pytorch/third_party/gloo/gloo/transport/tcp/unbound_buffer.cc:78] "
TIMED_OUT = f"{UNBOUND}Timed out waiting 8000ms for recv operation to complete"
CLOSED = "[/pytorch/third_party/gloo/gloo/transport/tcp/pair.cc:553] Connection closed by peer [127.0.0.1]:9"
MONITORED = "[Rank 0]: Rank 2 failed to pass monitoredBarrier in 8000 ms\n Original exception: \n" + TIMED_OUT
REACHED = "Rank 1 successfully reached monitoredBarrier, but received errors while waiting for send/recv from rank 0."
STORE = "wait timeout after 8000ms, keys: /default_pg/0//k2"

Calls = tuple[CollectiveFact, ...]


def _past(number: int, group: str = "0") -> Calls:
    return tuple(CollectiveFact(group, seq, "all_reduce", bytes_moved=16, done=True) for seq in range(number))


def _in(function: str = "all_reduce", seq: int = 6, group: str = "0", *, done: bool = True) -> CollectiveFact:
    """Return the call that a rank waited in; Gloo counts one that failed as done."""
    return CollectiveFact(group, seq, function, bytes_moved=16, done=done)


def _died(rank: int, text: str, calls: Calls, kind: str = "RuntimeError") -> RankExit:
    error = RankError(kind, text, "train.py:5 f", 40)
    return RankExit(rank, rank, 9, 1, 100.0, step=40, phase="forward", steps_seen=41, error=error, calls=calls)


def _stopped(rank: int, calls: Calls, phase: str = "data") -> RankExit:
    return RankExit(rank, rank, 9, -signal.SIGTERM, 100.0, by_us=True, step=40, phase=phase, calls=calls)


def _judge(*exits: RankExit, world_size: int = 0) -> Verdict:
    ended = [Ended(f"n{exit_.rank // 2}", exit_, 0.1) for exit_ in exits]
    return judge_exits(
        ended, world_size=world_size or len(ended), missing=(), reports={}, hosts={}, round_=1, wall_s=1e6
    )


@pytest.mark.parametrize(
    ("first", "second"),
    [(TIMED_OUT, TIMED_OUT), (MONITORED, REACHED), (TIMED_OUT, CLOSED)],
    ids=["group", "monitored", "one"],
)
def test_who_did_not_come_is_named(first: str, second: str) -> None:
    """Two waited until their patience was over; the third was elsewhere, and is named with where and when."""
    inside = (*_past(6), _in("barrier"))

    verdict = _judge(_died(0, first, inside), _died(1, second, inside), _stopped(2, _past(6)))

    assert (verdict.fault, verdict.culprits, verdict.nodes, verdict.since_step) == ("not_joined", (2,), ("n1",), 40)
    assert verdict.reason == (
        "rank 2 never came to barrier #6 of group 0, for which ranks 0-1 waited until the script's own time-out of "
        "8 s; it was in phase data after step 40"
    )
    assert verdict.confidence >= 0.9


def test_of_two_ranks_the_one_that_waited_is_not_named() -> None:
    """One waited and one did not: that needs no majority."""
    verdict = _judge(_died(0, TIMED_OUT, (*_past(6), _in())), _stopped(1, _past(6)))

    assert verdict.culprits == (1,)


def test_who_waits_for_the_absent_one_elsewhere_is_no_root() -> None:
    """Rank 1 waits for rank 2 in a group of its own or for a message, rank 0 for both: rank 2 holds all up."""
    for inside in (_in("all_reduce", 1, "1", done=False), _in("recv", -1, done=False)):
        verdict = _judge(
            _died(0, TIMED_OUT, (*_past(6), _in())), _died(1, TIMED_OUT, (*_past(6), inside)), _stopped(2, _past(6))
        )

        assert (verdict.fault, verdict.culprits) == ("not_joined", (2,))


def test_who_was_stopped_while_it_waited_is_not_named() -> None:
    """Ranks that the runner stopped inside the call, before their own time-out, waited as well."""
    waiting = _stopped(1, (*_past(6), _in(done=False)))

    verdict = _judge(_died(0, TIMED_OUT, (*_past(6), _in())), waiting, _stopped(2, _past(6)), _stopped(3, _past(6)))

    assert verdict.culprits == (2, 3)


def test_collectives_that_only_a_count_tells_of_name_it_too() -> None:
    """DDP's reductions run below Python: the black box knows how many, and no name."""
    verdict = _judge(_died(0, TIMED_OUT, (*_past(6), _in("", 6))), _stopped(1, _past(6)))

    assert verdict.culprits == (1,)


def test_a_caught_time_out_counts_by_the_last_words() -> None:
    """A script that catches it and leaves with a code of its own has waited no less."""
    left = RankExit(0, 0, 9, 4, 100.0, step=40, last_words=("gloo_timeout",), calls=(*_past(6), _in("barrier")))

    assert _judge(left, _stopped(1, _past(6))).culprits == (1,)


def test_the_watchdog_of_nccl_ends_ranks_that_waited() -> None:
    """They are aborted without an exception; those behind their calls are named."""
    words = ("nccl_timeout", "aborted")
    aborted = RankExit(
        0, 0, 9, -signal.SIGABRT, 100.0, step=40, phase="forward", last_words=words,
        calls=(*_past(6), _in(done=False), _in(seq=7, done=False)),
    )  # fmt: skip

    assert _judge(aborted, _stopped(1, _past(6))).culprits == (1,)


def test_calls_that_never_meet_are_told_and_the_history_says_who_is_wrong() -> None:
    """Both waited, in different calls of one number: no rank was absent."""
    right, wrong = (*_past(6), _in()), (*_past(6), _in("barrier"))

    verdict = _judge(_died(0, TIMED_OUT, wrong), _died(1, TIMED_OUT, right))

    assert (verdict.fault, verdict.culprits) == ("collective_order", (0,))
    assert "rank 0 waited in barrier #6 of group 0 and rank 1 in all_reduce #6 of group 0" in verdict.reason


def test_the_stores_time_out_names_the_only_other_rank_and_is_less_sure() -> None:
    """No call tells who did not set the key; of three ranks two died of waiting for it."""
    kind = "torch.distributed.DistStoreError"

    three = _judge(_died(0, STORE, _past(6), kind), _died(1, STORE, _past(6), kind), _stopped(2, _past(6)))
    two = _judge(_died(0, STORE, _past(6), kind), _stopped(1, _past(6)))

    assert (three.fault, three.culprits, three.confidence) == ("not_joined", (2,), 0.5)
    assert (two.fault, two.culprits) == ("unknown", ())


@pytest.mark.parametrize(
    "exits",
    [
        (_died(0, TIMED_OUT, (*_past(6), _in())), _died(1, TIMED_OUT, (*_past(6), _in()))),  # the network
        (_died(0, CLOSED, (*_past(6), _in())), _stopped(1, _past(6))),  # a lost connection: no deadline had passed
    ],
    ids=["all-waited", "no-time-out"],
)
def test_nobody_is_named_where_nobody_is_known_to_be_absent(exits: tuple[RankExit, ...]) -> None:
    """The negative controls."""
    assert (_judge(*exits).fault, _judge(*exits).culprits) == ("unknown", ())


def test_nobody_is_named_before_all_ends_are_known() -> None:
    """Another node may hold the one that all wait for."""
    exits = _died(0, TIMED_OUT, (*_past(6), _in())), _stopped(1, _past(6))

    assert _judge(*exits, world_size=4).culprits == ()


def test_a_killed_rank_is_the_cause_whatever_timed_out_after_it() -> None:
    """A time-out is a consequence."""
    killed = RankExit(1, 1, 9, -signal.SIGKILL, 100.0, step=40, calls=_past(6))

    assert _judge(_died(0, TIMED_OUT, (*_past(6), _in())), killed).fault == "killed"
