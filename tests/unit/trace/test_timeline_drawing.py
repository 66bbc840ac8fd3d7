# SPDX-License-Identifier: Apache-2.0
"""What is drawn of a job: steps with their parts, collectives split into waiting and moving, arrows, and hangs."""

from collections.abc import Sequence
from itertools import pairwise

import msgspec
import pytest

from megascale_ops.blackbox.records import StepRecord
from megascale_ops.trace.clocks import align
from megascale_ops.trace.matching import Key, Meeting, meet, newest_of
from megascale_ops.trace.rank_plan import TAIL
from megascale_ops.trace.rank_records import NS, CollectiveSpan, RankRecords, make_rank_records
from megascale_ops.trace.scene import Event, Mark, Sample, Slice
from megascale_ops.trace.timeline import PARTS, Moment, Scope, Timeline
from tests.fakes.recorded_job import BOOTED_S, MOVING_MS, MS, identity, recorded_job


def timeline(all_records: Sequence[RankRecords], last: int = 20, **scope: object) -> Timeline:
    """Return the timeline of all these ranks."""
    meetings: dict[Key, Meeting] = {}
    for records in all_records:
        meet(meetings, records.identity.rank, newest_of(records).items())
    return Timeline(all_records, align(all_records), Scope(last, meetings, **scope))  # type: ignore[arg-type]  # as given


def events_on(drawn: Timeline, rank: int, name: str) -> list[Event]:
    """Return all events on one track of a rank."""
    (track,) = (one.number for one in drawn.tracks if one.group == rank + 1 and one.name == name)
    return [event for window in drawn.windows for event in drawn.events(window) if event.track == track]


def slices_on(drawn: Timeline, rank: int, name: str) -> list[Slice]:
    """Return the slices on one track of a rank."""
    return [event for event in events_on(drawn, rank, name) if isinstance(event, Slice)]


def with_spans(records: RankRecords, spans: Sequence[CollectiveSpan], **more: object) -> RankRecords:
    """Return the same rank with other collectives."""
    return make_rank_records(records.identity, records.steps, spans, **more)  # type: ignore[arg-type]  # as given


def test_who_waited_least_came_last_and_the_rest_is_waiting() -> None:
    """Rank 2 comes 30 ms late: the others wait 30 ms less their own lateness, and all move data for 2 ms."""
    drawn = timeline(recorded_job(("a", "a", "a"), late={0: 0.0, 1: 5.0, 2: 30.0}))

    for rank, waits_ms in ((0, 30.0), (1, 25.0), (2, 0.0)):
        for one in slices_on(drawn, rank, "group 0 (host calls)"):
            inner = {part.name: part for part in one.inner if isinstance(part, Slice)}
            assert dict(one.args)["last arrival"] == "rank 2"
            assert inner["moving"].end_ns - inner["moving"].begin_ns == MOVING_MS * MS
            waited = inner.get("waiting")
            assert (waited.end_ns - waited.begin_ns if waited else 0) == waits_ms * MS


def test_waiting_needs_no_synchronised_clocks() -> None:
    """A node whose clock cannot be aligned (two ends only) and is wrong by an hour waits as long as before."""
    all_records = recorded_job(("a", "b"), steps=2, late={0: 0.0, 1: 30.0}, ahead_s={"b": 3600.0})
    wrong = msgspec.structs.replace(all_records[1].identity, started_wall_s=0.0)
    all_records[1] = make_rank_records(wrong, all_records[1].steps, all_records[1].spans)

    drawn = timeline(all_records)

    (first, *_) = slices_on(drawn, 0, "group 0 (host calls)")
    waited = next(part for part in first.inner if isinstance(part, Slice) and part.name == "waiting")
    assert waited.end_ns - waited.begin_ns == 30 * MS
    # An arrow would come from another century: there is none, and that is counted.
    assert drawn.arrows.drawn == 0
    assert drawn.arrows.left_out == 2


def test_arrows_lead_from_the_last_rank_to_those_that_waited() -> None:
    """One arrow for each victim of each collective; the last rank's mark begins it, "moving" of the victim ends it."""
    drawn = timeline(recorded_job(("a", "a", "b", "b"), steps=5, late={3: 9.0}, ahead_s={"b": 50.0}))

    begins, ends = {}, {}
    for window in drawn.windows:
        for event in drawn.events(window):
            for part in event.inner if isinstance(event, Slice) else ():
                if isinstance(part, Mark):
                    begins.update(dict.fromkeys(part.leads_to, (event.track, part.at_ns)))
                elif part.follows:
                    ends[part.follows] = (event.track, part.begin_ns)
    assert len(begins) == 5 * 3
    assert begins.keys() == ends.keys()
    assert {track for track, _ in begins.values()} == {
        one.number for one in drawn.tracks if one.group == 4 and one.name.startswith("group 0")
    }
    assert all(ends[arrow][1] >= at_ns for arrow, (_, at_ns) in begins.items())


def test_one_collective_has_the_same_number_on_all_ranks() -> None:
    """So a viewer gives it one colour; different collectives have different numbers."""
    drawn = timeline(recorded_job(("a", "a"), steps=4))

    first, second = (slices_on(drawn, rank, "group 0 (host calls)") for rank in (0, 1))
    assert [one.kin for one in first] == [one.kin for one in second]
    assert len({one.kin for one in first}) == 4


def test_parts_lie_inside_their_step_in_the_usual_order_and_say_that_it_is_nominal() -> None:
    """Whatever their sum: also of a step whose parts are longer than the whole."""
    (records, _) = recorded_job(("a", "a"))
    long = StepRecord(3, BOOTED_S + 0.4, 0.1, data_s=0.09, forward_s=0.09, backward_s=0.09, checkpoint_s=1.0)
    records = make_rank_records(records.identity, [*records.steps, long], records.spans)

    drawn = timeline([records])

    steps = slices_on(drawn, 0, "steps")
    assert [one.name for one in steps] == ["step 0", "step 1", "step 2", "step 3"]
    assert all(before.end_ns <= after.begin_ns for before, after in pairwise(steps))
    parts = slices_on(drawn, 0, "parts of the step")
    for step in steps:
        inside = [part for part in parts if step.begin_ns <= part.begin_ns < step.end_ns]
        assert [part.name for part in inside] == [name for name in PARTS if name in {part.name for part in inside}]
        assert all(part.end_ns <= step.end_ns for part in inside)
    assert all("nominal" in str(dict(part.args)["place"]) for part in parts)
    assert [part.name for part in parts[-2:]] == ["data", "forward"]


def test_steps_that_damage_made_overlap_are_drawn_one_after_the_other() -> None:
    """One seems to last three steps, one ends before the one before it: slices neither cross nor run backwards."""
    (records, _) = recorded_job(("a", "a"), steps=6)
    steps = list(records.steps)
    steps[3] = msgspec.structs.replace(steps[3], wall_s=0.3)
    steps[4] = msgspec.structs.replace(steps[4], ended_mono_s=BOOTED_S + 50.0)

    drawn = timeline([make_rank_records(records.identity, steps, records.spans)])

    whole = slices_on(drawn, 0, "steps")
    assert [one.name for one in whole] == ["step 0", "step 1", "step 2", "step 3", "step 5"]
    assert all(before.end_ns <= after.begin_ns for before, after in pairwise(whole))
    calls = slices_on(drawn, 0, "group 0 (host calls)")
    assert [one.seq for one in calls] == list(range(6))


def test_only_the_last_steps_are_drawn_with_what_happened_in_them() -> None:
    """Of nine steps the last two; a rank that is three steps behind has none there, and its end is drawn still."""
    all_records = recorded_job(("a", "a"), steps=9)
    all_records[1] = with_spans(
        all_records[1], all_records[1].spans[:6], pulse_ns=round((BOOTED_S + 0.95) * NS), phase="forward"
    )
    all_records[1] = make_rank_records(
        all_records[1].identity,
        all_records[1].steps[:6],
        all_records[1].spans,
        phase="data",
        pulse_ns=round((BOOTED_S + 0.95) * NS),
        phase_since_ns=round((BOOTED_S + 0.6) * NS),
    )

    drawn = timeline(all_records, last=2)

    assert drawn.windows == [7, 8, TAIL]
    assert [one.name for one in slices_on(drawn, 0, "steps")] == ["step 7", "step 8"]
    assert [one.seq for one in slices_on(drawn, 0, "group 0 (host calls)")] == [7, 8]
    (behind,) = slices_on(drawn, 1, "steps")
    assert dict(behind.args) == {"phase": "data"}
    assert behind.end_ns - behind.begin_ns == pytest.approx(0.35 * NS, abs=2)


def test_a_rank_that_hangs_shows_the_open_collective_and_who_had_not_come() -> None:
    """Ranks 0 and 1 are in number 3, rank 2 is not: an open slice to the end, and a mark on the culprit."""
    all_records = recorded_job(("a", "a", "a"), steps=3)
    now_ns = round((BOOTED_S + 5.0) * NS)
    stuck = CollectiveSpan("0", "all_reduce", 3, 4096, round((BOOTED_S + 0.38) * NS), 0)
    all_records = [
        with_spans(records, [*records.spans, *([stuck] if records.identity.rank < 2 else [])], pulse_ns=now_ns)
        for records in all_records
    ]

    drawn = timeline(all_records)

    for rank in (0, 1):
        last = slices_on(drawn, rank, "group 0 (host calls)")[-1]
        assert (last.seq, last.end_ns, last.inner) == (3, now_ns, ())
        assert dict(last.args)["had not come"] == "rank 2"
    marks = [event for event in events_on(drawn, 2, "steps") if isinstance(event, Mark)]
    assert [mark.name for mark in marks] == ["had not come to all_reduce #3 of group 0"]
    assert not [event for event in events_on(drawn, 0, "steps") if isinstance(event, Mark)]


def test_a_rank_whose_box_was_read_before_the_others_came_is_not_absent() -> None:
    """Boxes of running ranks are read one after the other: rank 1's last sign of life is older than the call."""
    all_records = recorded_job(("a", "a"), steps=3)
    call = CollectiveSpan("0", "all_reduce", 3, 4096, round((BOOTED_S + 0.38) * NS), 0)
    all_records[0] = with_spans(all_records[0], [*all_records[0].spans, call], pulse_ns=call.started_ns + MS)
    all_records[1] = with_spans(all_records[1], all_records[1].spans, pulse_ns=call.started_ns - MS)

    drawn = timeline(all_records)

    assert "had not come" not in dict(slices_on(drawn, 0, "group 0 (host calls)")[-1].args)
    assert not [event for event in events_on(drawn, 1, "steps") if isinstance(event, Mark)]


def test_collectives_that_overlap_get_lanes_of_their_own() -> None:
    """Slices of one track nest or the viewer cuts them; two threads in one group are drawn below each other."""
    (records, _) = recorded_job(("a", "a"), steps=1)
    start_ns = round(BOOTED_S * NS)
    crossing = [
        CollectiveSpan("0", "all_reduce", seq, 8, start_ns + seq * MS, start_ns + (seq + 3) * MS) for seq in range(4)
    ]

    drawn = timeline([with_spans(records, crossing)])

    lanes = [one.name for one in drawn.tracks if one.name.startswith("group 0")]
    assert lanes == ["group 0 (host calls)", "group 0 (host calls) (2)", "group 0 (host calls) (3)"]
    assert [one.seq for one in slices_on(drawn, 0, lanes[0])] == [0, 3]


def test_asynchronous_calls_are_marks_without_an_end() -> None:
    """Their end is not seen from Python, and later calls show that the rank went on."""
    (records, _) = recorded_job(("a", "a"), steps=1)
    started_ns = records.spans[0].started_ns - MS
    call = CollectiveSpan("0", "all_gather", 7, 8, started_ns, 0)

    drawn = timeline([with_spans(records, [call, *records.spans])])

    (mark,) = [event for event in events_on(drawn, 0, "group 0 (host calls)") if isinstance(event, Mark)]
    assert (mark.name, mark.at_ns) == ("all_gather", started_ns)
    assert dict(mark.args)["end"] == "not seen"


@pytest.mark.parametrize("function", ["send", "broadcast", "reduce", "gather_object"])
def test_calls_that_do_not_end_together_are_not_split(function: str) -> None:
    """Of these, some may leave before others have come: nothing says who waited."""
    all_records = [
        with_spans(records, [msgspec.structs.replace(span, function=function) for span in records.spans])
        for records in recorded_job(("a", "a"))
    ]

    drawn = timeline(all_records)

    assert all(one.inner == () and one.kin == 0 for one in slices_on(drawn, 0, "group 0 (host calls)"))
    assert drawn.arrows.drawn == 0


def test_a_group_that_was_made_anew_is_compared_by_its_newest_numbers() -> None:
    """The same number came twice on one rank: the older one is drawn whole, the newer is split."""
    all_records = recorded_job(("a", "a"), steps=2)
    early = [
        msgspec.structs.replace(span, started_ns=span.started_ns - 40 * MS, ended_ns=span.ended_ns - 40 * MS)
        for span in all_records[0].spans[:1]
    ]

    drawn = timeline([with_spans(all_records[0], [*early, *all_records[0].spans]), all_records[1]])

    first, *others = slices_on(drawn, 0, "group 0 (host calls)")
    assert first.inner == ()
    assert all(one.inner for one in others)


def test_counters_leave_out_what_is_no_number() -> None:
    """A loss of NaN has no place on an axis; step time and waiting are drawn all the same."""
    (records, _) = recorded_job(("a", "a"), steps=3)
    steps = [msgspec.structs.replace(step, loss=float("nan") if step.step == 1 else 2.0) for step in records.steps]

    drawn = timeline([make_rank_records(records.identity, steps, records.spans)])

    assert [one.value for one in events_on(drawn, 0, "loss") if isinstance(one, Sample)] == [2.0, 2.0]
    assert [one.value for one in events_on(drawn, 0, "step time") if isinstance(one, Sample)] == [100.0] * 3


def test_an_incident_has_a_track_with_what_happened_when() -> None:
    """Moments are wall-clock seconds of the controller; they stand on the same axis as the ranks."""
    all_records = recorded_job(("a", "a"))
    wall_of_boot_s = 1_800_000_000.0 - (BOOTED_S - 5.0)

    drawn = timeline(
        all_records, culprits=(1,), incident="toy-1", moments=[Moment("detected", wall_of_boot_s + BOOTED_S + 0.25)]
    )

    (track,) = (one.number for one in drawn.tracks if one.name == "incident toy-1")
    (mark,) = (event for window in drawn.windows for event in drawn.events(window) if event.track == track)
    assert isinstance(mark, Mark)
    assert mark.name == "detected"
    assert mark.at_ns == pytest.approx((BOOTED_S + 0.25) * NS, abs=1000)
    assert [group.name for group in drawn.groups] == [
        "job toy", "rank 0 (node a, local rank 0, dp 0 tp 0)", "rank 1 (node a, local rank 1, dp 0 tp 1), culprit",
    ]  # fmt: skip


def test_an_empty_box_is_drawn_as_a_rank_without_events() -> None:
    """A rank that died before its first step has a name, and that it was starting."""
    records = make_rank_records(
        identity(0, 1), (), (), phase="startup", pulse_ns=round(BOOTED_S * NS), phase_since_ns=round(BOOTED_S * NS) - NS
    )

    drawn = timeline([records])

    assert drawn.windows == [TAIL]
    (starting,) = slices_on(drawn, 0, "steps")
    assert (starting.name, dict(starting.args)) == ("before the first step shown", {"phase": "startup"})


def test_damaged_times_are_left_out_and_counted() -> None:
    """Bits that were flipped would stretch the picture over centuries."""
    (records, _) = recorded_job(("a", "a"))
    wild = [
        CollectiveSpan("0", "all_reduce", 90, 1, 1 << 61, 0),
        CollectiveSpan("0", "all_reduce", 91, 1, -5, 7),
        CollectiveSpan("0", "all_reduce", 92, 1, round(BOOTED_S * NS), 5),
    ]
    steps = [*records.steps, StepRecord(99, 1e300, 0.1), StepRecord(100, BOOTED_S, 1e9)]

    found = make_rank_records(records.identity, steps, [*records.spans, *wild], pulse_ns=round((BOOTED_S + 1) * NS))

    assert found.impossible == 5
    assert (found.steps, found.spans) == (records.steps, records.spans)
