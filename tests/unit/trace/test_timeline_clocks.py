# SPDX-License-Identifier: Apache-2.0
"""Nodes' clocks are brought to one by the common ends of collectives; what is left over is told."""

import random

import msgspec
import pytest

from megascale_ops.trace.clocks import align
from megascale_ops.trace.rank_records import RankRecords, make_rank_records
from tests.fakes.recorded_job import recorded_job


def jittered(all_records: list[RankRecords], most_ns: int, seed: int = 1) -> list[RankRecords]:
    """Let every rank see each end later by up to ``most_ns``, as a scheduler does; one in fifty by a hundred times."""
    randomness = random.Random(seed)  # noqa: S311  jitter is no secret
    found = []
    for records in all_records:
        spans = [
            msgspec.structs.replace(
                span,
                ended_ns=span.ended_ns + randomness.randrange(most_ns) * (100 if randomness.random() < 0.02 else 1),
            )
            for span in records.spans
        ]
        found.append(make_rank_records(records.identity, records.steps, spans))
    return found


def test_a_clock_that_is_a_day_ahead_is_found_to_the_microsecond() -> None:
    """Ends that scatter by 50 us, with rare ones 5 ms late, give an offset within 10 us of the truth."""
    all_records = jittered(recorded_job(("a", "a", "b", "b"), steps=400, ahead_s={"b": 86_400.0}), 50_000)

    clocks = align(all_records)

    offsets = clocks.offsets()
    assert offsets["a"] == 0
    assert abs(offsets["b"] - 86_400 * 10**9) < 10_000
    assert [clock.method for clock in clocks.nodes] == ["reference", "collectives"]
    assert clocks.nodes[1].common_ends == 400


def test_what_is_left_over_is_told() -> None:
    """The residual is the 99th percentile of how far ends lie from their median; without scatter it is nothing."""
    exact = align(recorded_job(("a", "b"), steps=50, ahead_s={"b": -3.0}))
    scattered = align(jittered(recorded_job(("a", "b", "c", "d"), steps=400), 50_000))

    assert exact.residual_p99_ns == 0
    # 2 % are up to 5 ms late, so the 99th percentile lies among these and far above the 50 us of the others.
    assert 50_000 < scattered.residual_p99_ns < 5_000_000
    assert scattered.compared_ends == 4 * 400
    assert f"{scattered.residual_p99_ns / 1000:.1f} us" in scattered.sentences()[0]


def test_nodes_without_a_common_collective_are_joined_over_others() -> None:
    """Nodes a and c share nothing, but both share with b: c's offset is the sum of both."""
    world = {"b": 10.0, "c": 25.0}
    first = recorded_job(("a", "b", "c"), steps=9, ahead_s=world, communicator="left")
    second = recorded_job(("a", "b", "c"), steps=9, ahead_s=world, communicator="right")
    both = make_rank_records(first[1].identity, first[1].steps, [*first[1].spans, *second[1].spans])

    clocks = align([first[0], both, second[2]])
    # The same with c before b: now the way to c leads against the order in which nodes are looked at.
    last = msgspec.structs.replace(both.identity, rank=5)
    turned = align([first[0], make_rank_records(last, both.steps, both.spans), second[2]])

    assert clocks.offsets() == {"a": 0, "b": 10 * 10**9, "c": 25 * 10**9}
    assert turned.offsets() == clocks.offsets()


def test_a_node_that_shares_nothing_falls_back_to_its_wall_clock_and_it_is_said() -> None:
    """Better half a clock than none; the sentence names the node."""
    all_records = recorded_job(("a", "b"), steps=5, ahead_s={"b": 7.0})
    alone = make_rank_records(all_records[1].identity, all_records[1].steps, ())

    clocks = align([all_records[0], alone])

    assert clocks.offsets()["b"] == 7 * 10**9
    assert [clock.method for clock in clocks.nodes] == ["reference", "wall clock"]
    assert "aligned by wall clock only, for want of common collectives: b" in clocks.sentences()


def test_two_common_ends_are_too_few() -> None:
    """With two of them one late wake-up would be the offset: the wall clock it is."""
    clocks = align(recorded_job(("a", "b"), steps=2, ahead_s={"b": 7.0}))

    assert clocks.nodes[1].method == "wall clock"


@pytest.mark.parametrize("function", ["broadcast", "send", "gather", "Broadcast"])
def test_calls_that_do_not_end_together_align_nothing(function: str) -> None:
    """The root of a broadcast leaves before the others have come: its end says nothing about theirs."""
    all_records = [
        make_rank_records(
            records.identity,
            records.steps,
            [msgspec.structs.replace(span, function=function) for span in records.spans],
        )
        for records in recorded_job(("a", "b"), steps=9)
    ]

    clocks = align(all_records)

    assert clocks.nodes[1].method == "wall clock"
    assert clocks.residual_p99_ns == -1
    assert "nothing says how well the clocks agree" in clocks.sentences()[0]


def test_one_node_has_one_clock() -> None:
    """Ranks of the same boot share CLOCK_MONOTONIC; there is nothing to align."""
    clocks = align(recorded_job(("a", "a", "a"), steps=4))

    assert [(clock.node, clock.offset_ns) for clock in clocks.nodes] == [("a", 0)]
    assert clocks.sentences()[0].startswith("one node, one clock")


def test_without_a_rank_there_is_no_clock() -> None:
    """Fitting the clocks of no rank is a mistake of the caller."""
    with pytest.raises(ValueError, match="no rank, no clock"):
        align([])
