# SPDX-License-Identifier: Apache-2.0
"""Who called another collective than all others, when only those that died of it ended with an error."""

import signal

import msgspec
import pytest

from megascale_ops.diagnosis.exits.classify import Ended
from megascale_ops.diagnosis.exits.first_cause import judge_exits
from megascale_ops.schema.health import Verdict
from megascale_ops.schema.messages import CollectiveFact, RankExit

USUAL = (("all_reduce", 1024), ("all_gather", 64))


def _calls(*last: tuple[str, int], steps: int = 3) -> tuple[CollectiveFact, ...]:
    """Return the calls of ``steps`` usual steps and then ``last``, which never ended."""
    past = [CollectiveFact("0", seq, *_of(USUAL[seq % 2]), done=True) for seq in range(2 * steps)]
    now = [CollectiveFact("0", 2 * steps + at, *_of(call)) for at, call in enumerate(last)]
    return (*past, *now)[-8:]


def _of(call: tuple[str, int]) -> tuple[str, str, str, int]:
    function, bytes_moved = call
    return function, "", "", bytes_moved


def _judge(*calls: tuple[CollectiveFact, ...], died: int = 0, failed: int = -1) -> Verdict:
    """Judge a round in which Gloo aborted rank ``died`` over sizes, and the runner stopped the others.

    Rank ``failed`` raised before that: its connection to the dead one was closed.
    """
    ended = [
        Ended(
            f"n{rank // 2}",
            RankExit(rank, rank, 9, -signal.SIGABRT, 0.0, step=10, last_words=("gloo_mismatch",), calls=own)
            if rank == died
            else RankExit(rank, rank, 9, 1, 0.0, step=10, last_words=("gloo_peer_closed",), calls=own)
            if rank == failed
            else RankExit(rank, rank, 9, -signal.SIGTERM, 0.0, by_us=True, step=10, calls=own),
            0.1,
        )
        for rank, own in enumerate(calls)
    ]
    return judge_exits(ended, world_size=len(ended), missing=(), reports={}, hosts={}, round_=1, wall_s=1e6)


@pytest.mark.parametrize("world_size", [3, 4, 9])
@pytest.mark.parametrize("odd", [0, 1, 2])
def test_the_one_that_called_otherwise_is_named_and_not_the_one_that_died(world_size: int, odd: int) -> None:
    """Any rank may be the odd one, also the first and the one that died itself."""
    calls = [_calls(("all_reduce", 2048 if rank == odd else 1024)) for rank in range(world_size)]

    verdict = _judge(*calls)

    assert (verdict.fault, verdict.culprits, verdict.nodes) == ("collective_mismatch", (odd,), (f"n{odd // 2}",))
    assert "2,048 bytes, the others with 1,024 bytes" in verdict.reason
    assert "rank 0 was sent data of another size" in verdict.reason


def test_a_skipped_collective_is_called_that() -> None:
    """Where the wrong sizes come from calling the next collective too early, the class is the skipped one."""
    right = _calls(("all_reduce", 1024))
    calls = [right, right, _calls(("all_gather", 64)), right]

    verdict = _judge(*calls)

    assert verdict.fault in {"not_joined", "collective_order"}
    assert verdict.culprits == (2,)


def test_without_a_majority_nobody_is_named() -> None:
    """Of two ranks, or two against two, nothing tells who is wrong."""
    one, other = _calls(("all_reduce", 1024)), _calls(("all_reduce", 2048))

    assert _judge(one, other).culprits == ()
    assert _judge(one, other, one, other).culprits == ()
    assert _judge((), (), ()).culprits == ()


def test_uneven_sizes_that_ended_well_accuse_nobody() -> None:
    """A script whose batches are uneven called other sizes before, and no harm came of it."""
    calls = [_calls(("all_reduce", 1024)) for _ in range(4)]
    before = CollectiveFact("0", 3, "all_gather", bytes_moved=32, done=True)
    calls[1] = tuple(before if fact.seq == before.seq else fact for fact in calls[1])

    assert _judge(*calls).culprits == ()


def test_the_only_one_that_is_elsewhere_is_named_also_where_its_call_is_not_seen() -> None:
    """DDP's collectives are started from C++ and stand in no ring: the one that is in none the others are in did it."""
    waiting, elsewhere = _calls(("all_reduce", 4)), _calls()

    verdict = _judge(waiting, waiting, elsewhere, waiting)

    assert (verdict.fault, verdict.culprits) == ("collective_order", (2,))
    assert "where all others were in all_reduce #6 of group 0" in verdict.reason


@pytest.mark.parametrize("failed", [-1, 1])
def test_a_call_that_gloo_has_completed_since_it_failed_counts_as_waiting(failed: int) -> None:
    """The first to die closes its connections: a peer's call in the same collective is over, raised or not yet."""
    waiting, elsewhere = _calls(("all_reduce", 4)), _calls()
    over = (*waiting[:-1], msgspec.structs.replace(waiting[-1], done=True))

    verdict = _judge(waiting, over, waiting, elsewhere, failed=failed)

    assert (verdict.fault, verdict.culprits) == ("collective_order", (3,))


def test_a_call_that_is_over_for_all_who_made_it_accuses_nobody() -> None:
    """Nobody waits in it: the one that has not called it yet is late, and the data was of something else."""
    over, late = _calls(), _calls(steps=2)

    assert _judge(over, over, over, late).culprits == ()


def test_a_call_that_is_only_counted_shows_nobody_elsewhere() -> None:
    """DDP's own are counted by heartbeats: a rank whose last one is older has not called something else."""
    counted = (CollectiveFact("0", 6, "", done=True), CollectiveFact("0", 7, ""))
    begun = (*_calls(), *counted)
    waiting = (*begun, CollectiveFact("0", 8, "all_reduce", bytes_moved=4))
    older = (*_calls(), CollectiveFact("0", 8, "all_reduce", bytes_moved=4))

    assert _judge(waiting, waiting, older, begun).culprits == (3,)
    assert _judge(begun, begun, _calls(), begun).culprits == ()


def test_a_rank_that_is_not_of_the_group_is_not_elsewhere() -> None:
    """Three of four ranks form a group of their own: the fourth never calls what they do."""
    own = (*_calls(), CollectiveFact("three", 0, "all_reduce", bytes_moved=4))

    assert _judge(own, own, own, _calls()).culprits == ()


def test_of_two_that_are_elsewhere_nobody_is_named() -> None:
    """One of them may only have been late."""
    waiting, elsewhere = _calls(("all_reduce", 4)), _calls()

    assert _judge(waiting, waiting, elsewhere, waiting, elsewhere).culprits == ()


def test_each_group_has_its_own_majority() -> None:
    """Twelve ranks in groups of three: a rank that differs in one of them is compared with its own group."""
    for odd in range(12):
        calls = [
            tuple(
                CollectiveFact(f"tp{rank // 3}", fact.seq, fact.function, "", "", fact.bytes_moved, fact.done)
                for fact in _calls(("all_reduce", 2048 if rank == odd else 1024))
            )
            for rank in range(12)
        ]

        verdict = _judge(*calls, died=odd // 3 * 3 + (odd + 1) % 3)

        assert (verdict.fault, verdict.culprits) == ("collective_mismatch", (odd,))


def test_who_sends_what_the_others_receive_is_in_no_other_collective() -> None:
    """Sends and receives have no number in their group: that one rank is in none of them says nothing of it."""
    waiting = (*_calls(), CollectiveFact("0", -1, "recv"))

    assert _judge(waiting, waiting, _calls(), waiting).culprits == ()
