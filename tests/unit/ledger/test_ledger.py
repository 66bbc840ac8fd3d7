# SPDX-License-Identifier: Apache-2.0
"""Where the wall time of a job went: every microsecond in one row, and unknown time in its own."""

import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import replace

from megascale_ops.ledger import EFFECTIVE, ROWS, US, Ledger, Painted, StepTime, keep_ledger
from megascale_ops.schema.courses import Course
from megascale_ops.schema.events import OVER, Incident, Marks
from megascale_ops.schema.history import Turn

STATES = ("replacing", "restarting", "catching_up", "running", "suspect", "confirming", "stopping", "diagnosing")
T0 = 1_790_000_000.0


def turns(*pairs: tuple[float, str, int]) -> list[Turn]:
    """Return states with their times after the start."""
    return [Turn(T0 + at, state, round_) for at, state, round_ in pairs]


def steps(begin: int, until: int, **parts: float) -> list[StepTime]:
    """Return seconds that are filled with steps."""
    given_parts = {"covered_s": 1.0, "straggle_s": 0.0, "checkpoint_s": 0.0, **parts}
    return [StepTime(T0 + at, T0 + at + 1, **given_parts) for at in range(begin, until)]


def seconds(ledger: Ledger) -> dict[str, float]:
    """Return the rows that are not empty."""
    return {row: round(us / US, 3) for row, us in ledger.rows.items() if us}


CLEAN = turns((0, "replacing", 0), (1, "restarting", 1), (4, "catching_up", 1), (6, "running", 1))
KILLED = [
    *CLEAN,
    *turns(
        (30, "stopping", 1), (31, "diagnosing", 1), (31.1, "replacing", 1), (31.5, "restarting", 2),
        (34, "catching_up", 2), (41, "running", 2), (60, "finished", 2),
    ),
]  # fmt: skip
RECOVERED = Incident(
    id="gpt-1",
    job="gpt",
    round=1,
    state="recovered",
    marks=Marks(
        began=T0 + 28, detected=T0 + 29, named=T0 + 29.5, ordered=T0 + 30, stopped=T0 + 31, formed=T0 + 31.5,
        stepped=T0 + 36, caught_up=T0 + 40,
    ),
    step_before=90,
    step_after=80,
)  # fmt: skip


def test_a_clean_run_is_start_and_training() -> None:
    """What steps do not cover is told apart."""
    ledger = keep_ledger(T0, T0 + 26, CLEAN, [], steps(6, 26, covered_s=0.9, straggle_s=0.2, checkpoint_s=0.1))

    assert seconds(ledger) == {
        "idle": 1.0, "start": 5.0, "train": 12.0, "straggle": 4.0, "checkpoint": 2.0, "other": 2.0,
    }  # fmt: skip


def test_an_incident_is_divided_by_its_marks() -> None:
    """Until noticed, until decided, until ranks run again, until their first step, until training was where it was."""
    ledger = keep_ledger(T0, T0 + 60, KILLED, [RECOVERED], [*steps(6, 28), *steps(36, 60)])

    assert seconds(ledger) == {
        "idle": 1.4, "start": 5.0, "train": 22.0 + 20.0, "detect": 1.0, "diagnose": 1.0, "restart": 3.6, "reload": 2.0,
        "recompute": 4.0,
    }  # fmt: skip


@pytest.mark.parametrize(("step_after", "made_again"), [(80, 6.0), (-1, 0.0)], ids=["its own numbers", "no numbers"])
def test_steps_that_were_made_again_until_the_next_fault_are_no_progress(step_after: int, made_again: float) -> None:
    """Killed again before it was where it had been: all that its second round made was made before.

    A script that does not say its own step numbers can't be told so.
    """
    again = turns(
        (42, "stopping", 2), (43, "diagnosing", 2), (43.5, "restarting", 3), (45, "catching_up", 3), (52, "running", 3)
    )
    first = replace(RECOVERED, state="ended", step_after=step_after, marks=replace(RECOVERED.marks, caught_up=0.0))
    second = Incident(
        id="gpt-2", job="gpt", round=2, state="recovered", step_before=90, step_after=80,
        marks=Marks(
            began=T0 + 42, detected=T0 + 42, named=T0 + 42, ordered=T0 + 42, stopped=T0 + 43, formed=T0 + 43.5,
            stepped=T0 + 46, caught_up=T0 + 51,
        ),
    )  # fmt: skip

    ledger = keep_ledger(
        T0, T0 + 60, [*KILLED[:9], *again], [first, second], [*steps(6, 28), *steps(36, 42), *steps(46, 60)]
    )

    told = seconds(ledger)
    assert told["recompute"] == made_again + 5.0
    assert told["train"] == 22.0 + 9.0 + 6.0 - made_again


@pytest.mark.parametrize("state", ["harmless", "watching", "over", "open"])
def test_what_stopped_nothing_costs_nothing_of_its_own(state: str) -> None:
    """A warning, or a hang that was left alone: what it cost is in the steps."""
    incident = Incident("gpt-1", "gpt", 1, state=state, marks=Marks(T0 + 8, T0 + 9, T0 + 10))

    ledger = keep_ledger(T0, T0 + 20, CLEAN, [incident], steps(6, 20))

    assert seconds(ledger) == {"idle": 1.0, "start": 5.0, "train": 14.0}


def test_a_warning_that_was_acted_upon_costs_from_then_on() -> None:
    """A slow rank is watched while steps are made: what it costs until it is evicted is in the steps."""
    watched = replace(RECOVERED, course=Course(), marks=replace(RECOVERED.marks, began=T0 + 10, detected=T0 + 12))

    ledger = keep_ledger(T0, T0 + 60, KILLED, [watched], [*steps(6, 30), *steps(36, 60)])

    assert seconds(ledger) == {
        "idle": 1.4, "start": 5.0, "train": 24.0 + 20.0, "restart": 3.6, "reload": 2.0, "recompute": 4.0,
    }  # fmt: skip


def test_an_incident_that_goes_on_costs_until_now() -> None:
    """No rank steps while it is judged."""
    incident = Incident("gpt-1", "gpt", 1, marks=Marks(T0 + 12, T0 + 13))

    ledger = keep_ledger(
        T0, T0 + 20, [*CLEAN, *turns((13, "suspect", 1), (14, "stopping", 1))], [incident], steps(6, 12)
    )

    assert seconds(ledger) == {"idle": 1.0, "start": 5.0, "train": 6.0, "detect": 1.0, "diagnose": 7.0}


def test_time_without_recorded_steps_is_not_known() -> None:
    """A script without black boxes, or a lost history: nothing is guessed, and it is said."""
    no_steps = keep_ledger(T0, T0 + 60, KILLED, [RECOVERED], [])
    nothing = keep_ledger(T0, T0 + 60, [], [RECOVERED], [])

    assert seconds(no_steps)["unknown"] == 22.0 + 20.0
    assert "train" not in seconds(no_steps)
    assert any("no finished steps" in note for note in no_steps.notes)
    assert seconds(nothing)["unknown"] == 60.0 - 12.0
    assert any("states of the job are not known" in note for note in nothing.notes)


def test_a_round_of_which_no_step_is_known_is_not_known() -> None:
    """The round before it is."""
    ledger = keep_ledger(T0, T0 + 60, KILLED, [RECOVERED], steps(6, 28))

    assert seconds(ledger)["train"] == 22.0
    assert seconds(ledger)["unknown"] == 20.0


def test_ranks_that_start_long_after_they_were_thought_to_train_are_starting() -> None:
    """A script that imports for twenty seconds before its first collective trains from its first step on."""
    ledger = keep_ledger(T0, T0 + 40, CLEAN, [], steps(24, 40))

    assert seconds(ledger) == {"idle": 1.0, "start": 23.0, "train": 16.0}


def test_one_step_longer_than_its_bucket_covers_the_time_before_it() -> None:
    """Steps of ten seconds, told in buckets of one."""
    long = [StepTime(T0 + at, T0 + at + 1, 10.0, 0.0, 0.0) for at in (15, 25)]

    ledger = keep_ledger(T0, T0 + 26, CLEAN, [], long)

    assert seconds(ledger)["train"] == pytest.approx(11.0, abs=1.1)


def test_steps_made_twice_that_nobody_can_count_are_told() -> None:
    """A script that does not say its own step numbers."""
    incident = replace(RECOVERED, step_after=-1)

    ledger = keep_ledger(T0, T0 + 60, KILLED, [incident], [*steps(6, 28), *steps(36, 60)])

    assert any("does not say its own step numbers" in note for note in ledger.notes)


def test_what_a_restart_waited_for_nodes_is_idle() -> None:
    """An hour without a spare is no slow restart: the two are told apart, whatever the incident's marks say."""
    late = [replace(turn, wall_s=turn.wall_s + 3600) if turn.wall_s > T0 + 31.2 else turn for turn in KILLED]
    formed = RECOVERED.marks.formed + 3600
    marks = replace(RECOVERED.marks, formed=formed, stepped=formed + 4.5, caught_up=formed + 8.5)

    ledger = keep_ledger(T0, T0 + 3660, late, [replace(RECOVERED, marks=marks)], [])

    assert seconds(ledger)["idle"] == 1.0 + 3600.4
    assert seconds(ledger)["restart"] == 3.6


def test_a_window_is_divided_like_the_whole() -> None:
    """The last half minute of a killed job; a window that begins before the job did is the whole of it."""
    painted = Painted(T0, T0 + 60, KILLED, [RECOVERED], [*steps(6, 28), *steps(36, 60)])

    late = painted.ledger(T0 + 30.5)
    whole = painted.ledger(T0 - 3600)

    assert seconds(late) == {"idle": 0.4, "restart": 3.1, "reload": 2.0, "recompute": 4.0, "train": 20.0}
    assert whole.rows == painted.ledger().rows
    assert painted.ledger(T0 + 99).rows == dict.fromkeys(ROWS, 0)


def test_an_incident_pays_for_what_lies_between_its_marks() -> None:
    """Its rows are those of the whole; of two over each other the later one pays, and nothing is paid twice."""
    again = replace(RECOVERED, id="gpt-2", marks=Marks(*(T0 + at for at in (37, 38, 38, 39, 40, 41, 43, 44))))
    painted = Painted(T0, T0 + 60, KILLED, [RECOVERED, again], [*steps(6, 28), *steps(44, 60)])

    costs = painted.by_incident()

    assert {row: us / US for row, us in costs["gpt-1"].items()} == {
        "detect": 1.0, "diagnose": 1.0, "restart": 3.6, "idle": 0.4, "reload": 2.0, "recompute": 1.0,
    }  # fmt: skip
    assert sum(costs["gpt-2"].values()) == 7 * US
    rows = painted.ledger().rows
    assert sum(sum(one.values()) for one in costs.values()) == sum(
        rows[row] for row in ("detect", "diagnose", "restart", "reload", "recompute")
    ) + round(0.4 * US)


def test_checks_of_nodes_are_a_row_of_their_own() -> None:
    """Between the first node that is asked to measure itself and the last result; no other row gets longer."""
    marks = RECOVERED.marks
    checked = replace(RECOVERED, marks=replace(marks, checking=marks.stopped + 0.125, checked=marks.stopped + 0.375))

    before = Painted(T0, T0 + 60, KILLED, [RECOVERED], [*steps(6, 28), *steps(44, 60)]).by_incident()["gpt-1"]
    after = Painted(T0, T0 + 60, KILLED, [checked], [*steps(6, 28), *steps(44, 60)]).by_incident()["gpt-1"]

    assert after["check"] == round(0.25 * US)
    assert sum(after.values()) == sum(before.values())
    assert after["restart"] + after.get("idle", 0) + after["check"] == before["restart"] + before.get("idle", 0)


def test_shares_of_several_rows() -> None:
    """What counts as effective is training however slow it was."""
    ledger = keep_ledger(T0, T0 + 26, CLEAN, [], steps(6, 26, covered_s=0.9, straggle_s=0.2, checkpoint_s=0.1))

    assert ledger.share("train") == pytest.approx(12 / 26)
    assert ledger.share(*EFFECTIVE) == pytest.approx(18 / 26)


times = st.floats(min_value=-50, max_value=500, allow_nan=False)
marks = st.builds(
    Marks,
    **{name: st.one_of(st.just(0.0), times.map(lambda at: T0 + at)) for name in Marks.__struct_fields__},
)
incidents_any = st.builds(
    Incident,
    id=st.just("gpt-1"),
    job=st.just("gpt"),
    round=st.integers(0, 5),
    state=st.sampled_from(["open", "recovered", "ended", "harmless", "watching", "over"]),
    marks=marks,
    step_before=st.integers(-1, 9),
    step_after=st.integers(-1, 9),
)
turns_any = st.lists(
    st.builds(
        Turn,
        times.map(lambda at: T0 + at),
        st.sampled_from([*STATES, *OVER, "degraded"]),
        st.integers(0, 5),
    ),
    max_size=12,
)
steps_any = st.lists(
    st.builds(
        lambda at, length, *parts: StepTime(T0 + at, T0 + at + length, *parts),
        times, st.floats(0, 20), st.floats(0, 90), st.floats(0, 90), st.floats(0, 90),
    ),
    max_size=12,
)  # fmt: skip


@given(span=st.tuples(times, times), told=turns_any, happened=st.lists(incidents_any, max_size=5), made=steps_any)
def test_the_rows_add_up_to_the_wall_time_whatever_happened(
    span: tuple[float, float], told: list[Turn], happened: list[Incident], made: list[StepTime]
) -> None:
    """Marks missing, out of order, outside of the run, incidents over each other, clocks that went back: exactly."""
    ledger = keep_ledger(T0 + span[0], T0 + span[1], told, happened, made)

    assert ledger.wall_us == max(0, round((T0 + span[1]) * US) - round((T0 + span[0]) * US))
    assert sum(ledger.rows.values()) == ledger.wall_us
    assert min(ledger.rows.values()) >= 0
    assert list(ledger.rows) == list(ROWS)


@given(
    span=st.tuples(times, times),
    since=times,
    told=turns_any,
    happened=st.lists(incidents_any, max_size=5),
    made=steps_any,
)
def test_every_window_adds_up_and_no_incident_costs_more_than_there_was(
    span: tuple[float, float], since: float, told: list[Turn], happened: list[Incident], made: list[StepTime]
) -> None:
    """Since any moment: exactly the time that lies behind it; what incidents cost is part of the whole."""
    begin, end = round((T0 + span[0]) * US), max(round((T0 + span[0]) * US), round((T0 + span[1]) * US))
    painted = Painted(T0 + span[0], T0 + span[1], told, happened, made)

    ledger = painted.ledger(T0 + since)
    paid = sum(us for rows in painted.by_incident().values() for us in rows.values())

    assert sum(ledger.rows.values()) == ledger.wall_us == end - min(end, max(begin, round((T0 + since) * US)))
    assert min(ledger.rows.values()) >= 0
    assert paid <= end - begin
