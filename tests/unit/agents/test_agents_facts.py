# SPDX-License-Identifier: Apache-2.0
"""Collectives as a judge reads them, from a recorded flight recorder dump and from a black box's ring."""

import json

import pytest
from megascale_agents.evidence import collective_facts, flight_recorder

from megascale_ops.blackbox.calls import function_of, of_ring
from megascale_ops.blackbox.records import CollectiveRecord
from megascale_ops.schema.messages import CollectiveFact
from megascale_ops.schema.progress import CollectivePosition


def entry(seq: int, name: str = "gloo:all_reduce", **more: object) -> dict[str, object]:
    """One entry of a dump, as torch 2.13 writes it on Gloo (without fields that are not read)."""
    return {
        "collective_seq_id": seq,
        "input_dtypes": ["Float"],
        "input_sizes": [[4, 4]],
        "is_p2p": False,
        "output_sizes": [[4, 4]],
        "p2p_seq_id": 0,
        "pg_id": 0,
        "process_group": ["0", "default_pg"],
        "profiling_name": name,
        "retired": True,
        "state": "completed" if name.startswith("nccl:") and more.get("retired", True) else "scheduled",
        "time_discovered_completed_ns": 0,
        **more,
    }


def read(*entries: dict[str, object]) -> tuple[CollectiveFact, ...]:
    """Read a dump with these entries; its ``pg_config`` has the one nameless entry of Gloo."""
    dump = {"version": "2.10", "pg_config": {"": {"desc": "", "name": "", "ranks": "[0, 1]"}}, "entries": entries}
    return flight_recorder.parse(json.dumps(dump).encode()).collectives


def record(seq: int, *, ended: bool = True, function: str = "all_reduce", group: str = "0") -> CollectiveRecord:
    """One slot of the ring."""
    return CollectiveRecord(group, function, seq, 64, 1_000, 1_000, 2_000 if ended else 0)


def done_by_seq(found: list[CollectiveFact]) -> dict[int, bool]:
    """What is over, by number."""
    return {fact.seq: fact.done for fact in found}


def test_an_entry_becomes_a_fact() -> None:
    """Only ``retired`` tells its end: the state of a Gloo entry never changes."""
    found = read(entry(5), entry(6, retired=False))

    assert found == (
        CollectiveFact(group="0", seq=5, function="all_reduce", sizes="[[4, 4]]", dtype="Float", done=True),
        CollectiveFact(group="0", seq=6, function="all_reduce", sizes="[[4, 4]]", dtype="Float", done=False),
    )


def test_what_nccl_says_to_be_completed_is_over() -> None:
    """Its watchdog retires an entry up to a second later."""
    found = read(
        entry(5, "nccl:all_reduce", state="completed", retired=False), entry(6, state="started", retired=False)
    )

    assert [fact.done for fact in found] == [True, False]


def test_what_nccl_gave_up_is_over_only_where_a_later_call_is() -> None:
    """Retired and never completed: the watchdog gave it up, unless its group went on behind it."""
    given_up = {"state": "started", "retired": True}

    last = read(entry(5, "nccl:all_reduce"), entry(6, "nccl:all_reduce", **given_up))
    passed = read(entry(5, "nccl:all_reduce", **given_up), entry(6, "nccl:all_reduce"))

    assert [fact.done for fact in last] == [True, False]
    assert [fact.done for fact in passed] == [True, True]


def test_a_barrier_has_no_tensors() -> None:
    """And that is known, unlike where a source does not say."""
    (found,) = read(entry(2, "gloo:barrier", input_sizes=[], input_dtypes=[]))

    assert (found.function, found.sizes, found.dtype) == ("barrier", "[]", "")


def test_a_send_has_no_number_in_its_group() -> None:
    """Its number counts for its pair of ranks only."""
    (found,) = read(entry(3, "nccl:send 0->1", is_p2p=True, retired=False))

    assert (found.function, found.seq, found.done) == ("send", -1, False)


def batch(number: int, *, over: bool) -> list[dict[str, object]]:
    """A batch of NCCL as torch records it: a send and a receive that never change, and the entry that ends both."""
    shared: dict[str, object] = {"is_p2p": True, "p2p_seq_id": number, "retired": False}
    pieces = [entry(0, name, **shared) for name in ("nccl:send 0->1", "nccl:recv 0<-1")]
    return [*pieces, entry(0, "nccl:coalesced", **shared | {"retired": over, "input_sizes": [], "input_dtypes": []})]


def test_the_pieces_of_a_batch_end_with_it() -> None:
    """A pipeline's sends and receives of all steps so far are over; those of the batch that hangs are not."""
    found = read(*batch(7, over=True), *batch(8, over=False))

    assert [fact.done for fact in found] == [True] * 3 + [False] * 3


def test_batches_that_ended_hide_no_collective_that_has_not() -> None:
    """A hundred batches leave room for what the rank waits in."""
    found = read(*(piece for number in range(100) for piece in batch(number, over=True)), entry(9, retired=False))

    assert [(fact.function, fact.seq) for fact in found if not fact.done] == [("all_reduce", 9)]


def test_collectives_that_were_coalesced_end_together() -> None:
    """They are one call under one number, which is none of the batches of sends with the same."""
    pieces = [entry(4, "nccl:all_reduce", retired=False), entry(4, "nccl:broadcast", retired=False)]

    found = read(*batch(4, over=False), *pieces, entry(4, "nccl:coalesced", state="completed", retired=False))

    assert [fact.done for fact in found] == [False] * 3 + [True]
    assert (found[-1].function, found[-1].seq, found[-1].sizes) == ("all_reduce+broadcast", 4, "[[4, 4], [4, 4]]")


@pytest.mark.parametrize(
    ("one", "other"),
    [
        ("gloo:all_gather", "all_gather_into_tensor"),
        ("nccl:_all_gather_base", "all_gather_single"),
        ("nccl:_reduce_scatter_base", "reduce_scatter_tensor"),
        ("gloo:all_to_all", "all_to_all_single"),
        ("gloo:broadcast", "broadcast_object_list"),
        ("xccl:all_reduce", "all_reduce"),
    ],
)
def test_both_sources_call_a_collective_by_one_name(one: str, other: str) -> None:
    """Else a rank whose dump is missing would seem to have called something else."""
    assert function_of(one) == function_of(other)


def test_different_collectives_keep_different_names() -> None:
    """What differs in fact is what a judge looks for."""
    names = (
        "all_reduce",
        "all_gather_single",
        "reduce_scatter_tensor",
        "broadcast",
        "barrier",
        "send",
        "recv",
        "gather",
    )

    assert len({function_of(f"gloo:{name}") for name in names}) == len(names)


def test_sizes_of_hundreds_of_tensors_stay_comparable() -> None:
    """A cut that dropped the difference would hide a mismatch."""
    many = [[1000, number] for number in range(300)]
    other = [*many[:-1], [1000, 7]]

    assert len(collective_facts.sizes_of(many)) < 260
    assert collective_facts.sizes_of(many) == collective_facts.sizes_of(list(many))
    assert collective_facts.sizes_of(many) != collective_facts.sizes_of(other)


def test_long_names_of_groups_are_those_of_the_box() -> None:
    """A device mesh names its groups by a hash of 40 characters; the box holds 23."""
    (found,) = read(entry(1, process_group=["a" * 40, "mesh_dp"]))

    assert found.group == "a" * 23


def test_the_newest_are_chosen_when_all_is_well() -> None:
    """What a rank called before tells the pattern of its steps."""
    found = read(*(entry(number) for number in range(1, 41)))

    assert [fact.seq for fact in found] == list(range(25, 41))


def test_the_oldest_unfinished_are_chosen_with_what_came_before() -> None:
    """A rank waits in the oldest; hundreds may be queued behind it."""
    found = read(*(entry(number, retired=number <= 20) for number in range(1, 200)))

    assert [fact.seq for fact in found] == [*range(17, 21), *range(21, 33)]
    assert len(found) == collective_facts.MOST_FACTS


def test_what_began_alike_before_is_told_with_what_followed() -> None:
    """The first step after a checkpoint is not like the one before it: the last checkpoint tells what comes next."""
    saving = ["nccl:all_gather", "nccl:broadcast", "nccl:barrier"]
    names = [*saving, *["nccl:all_reduce"] * 40, *saving, "nccl:all_reduce"]

    found = read(*(entry(number, name, retired=number < len(names)) for number, name in enumerate(names, 1)))

    assert [fact.seq for fact in found][:4] == [1, 2, 3, 4]
    assert [fact.function for fact in found][:4] == ["all_gather", "broadcast", "barrier", "all_reduce"]
    assert [fact.seq for fact in found][-4:] == [44, 45, 46, 47]
    assert len(found) == collective_facts.MOST_FACTS


def test_each_group_tells_how_far_it_is() -> None:
    """A group that was used long ago is not lost behind a busy one."""
    old = entry(1, process_group=["7", "rare"])
    found = read(old, *(entry(number, retired=number < 50) for number in range(1, 51)))

    assert {fact.group for fact in found} == {"0", "7"}
    assert found[0] == CollectiveFact("7", 1, "all_reduce", "[[4, 4]]", "Float", done=True)
    assert not found[-1].done


def test_fewer_facts_still_tell_where_a_rank_is() -> None:
    """As when 64 ranks must fit into one message."""
    found = collective_facts.choose(
        [CollectiveFact("0", number, "barrier", done=number < 9) for number in range(12)], 4
    )

    assert [(fact.seq, fact.done) for fact in found] == [(8, True), (9, False), (10, False), (11, False)]
    assert collective_facts.choose(found, 0) == ()


def test_the_ring_tells_what_has_no_end() -> None:
    """With the bytes that it knows, and without the sizes that it does not."""
    found = of_ring([record(5), record(6, ended=False)], None)

    assert found == [
        CollectiveFact("0", 5, "all_reduce", bytes_moved=64, done=True),
        CollectiveFact("0", 6, "all_reduce", bytes_moved=64, done=False),
    ]


def test_an_asynchronous_one_is_over_when_a_later_one_is() -> None:
    """Its own end is not seen; collectives of a group end in order."""
    found = of_ring([record(5, ended=False), record(6), record(7, ended=False)], None)

    assert done_by_seq(found) == {5: True, 6: True, 7: False}


def test_another_group_says_nothing_of_it() -> None:
    """Groups do not wait for each other."""
    found = of_ring([record(5, ended=False), record(6, group="1")], None)

    assert [fact.done for fact in found] == [False, True]


def test_the_count_of_the_group_tells_the_end_of_the_last_one() -> None:
    """The recorder's beat asks torch for it."""
    found = of_ring([record(7, ended=False)], CollectivePosition(7, 7, "pg 0"))

    assert done_by_seq(found) == {7: True}


def test_the_count_tells_of_collectives_that_the_ring_has_not_seen() -> None:
    """DDP's all-reduces are started from C++: how far the rank came is known, their names are not."""
    waiting = of_ring([record(3)], CollectivePosition(9, 8, "pg 0"))
    idle = of_ring([record(3)], CollectivePosition(9, 9, "pg 0"))
    deep = of_ring([], CollectivePosition(9, 6, "pg 0"))

    assert waiting[1:] == [CollectiveFact("0", 9, "", done=False)]
    assert idle[1:] == [CollectiveFact("0", 9, "", done=True)]
    assert deep == [CollectiveFact("0", 7, "", done=False), CollectiveFact("0", 9, "", done=False)]


def test_the_count_repeats_nothing_that_the_ring_knows() -> None:
    """One fact for one collective, by its name; a count that lags behind takes nothing back."""
    same = of_ring([record(5), record(6, ended=False)], CollectivePosition(6, 5, "pg 0"))
    late = of_ring([record(5), record(6)], CollectivePosition(4, 4, "pg 0"))

    assert [fact.seq for fact in same] == [5, 6]
    assert done_by_seq(late) == {5: True, 6: True}


def test_a_receive_that_never_ends_is_unfinished_whatever_its_group_does() -> None:
    """Sends and receives take no number, so no later one ends them."""
    found = of_ring([record(6, ended=False, function="recv"), record(6)], CollectivePosition(6, 6, "pg 0"))

    assert [(fact.function, fact.seq, fact.done) for fact in found] == [("recv", -1, False), ("all_reduce", 6, True)]


def test_an_object_that_was_received_ends_no_collective() -> None:
    """It shows the number that the next collective takes, in which the rank may wait."""
    found = of_ring([record(6), record(7, function="recv_object_list"), record(7, ended=False)], None)

    assert [(fact.function, fact.done) for fact in found] == [
        ("all_reduce", True),
        ("recv", True),
        ("all_reduce", False),
    ]


def test_a_group_that_was_made_anew_counts_from_one_again() -> None:
    """A script that starts its groups again has two by one name: what the first called is no part of the second."""
    again = [(40, True), (41, False), (1, True), (2, False)]

    told = read(*(entry(number, retired=over) for number, over in again), entry(7, process_group=["9", "other"]))
    kept = of_ring([record(number, ended=over) for number, over in again], None)

    assert [(fact.group, fact.seq, fact.done) for fact in told] == [("0", 1, True), ("0", 2, False), ("9", 7, True)]
    assert done_by_seq(kept) == {1: True, 2: False}


def test_the_text_of_a_group_that_was_made_anew_tells_of_the_new_one() -> None:
    """What hangs is named by its own number and time."""
    text = collective_facts.describe_ring([record(40), record(1), record(2, ended=False)], None, 7_300_001_000)

    assert "not finished: all_reduce 2 of group 0, 64 bytes, for 7.3 s" in text


def test_the_text_says_for_how_long() -> None:
    """For people, on the clock of the machine that wrote it."""
    text = collective_facts.describe_ring(
        [record(5), record(6, ended=False)], CollectivePosition(6, 5, "pg 0"), 7_300_001_000
    )

    assert text.splitlines() == [
        "2 collectives in the black box",
        "pg 0: entered 6, finished 5",
        "not finished: all_reduce 6 of group 0, 64 bytes, for 7.3 s",
    ]
