# SPDX-License-Identifier: Apache-2.0
"""A save in flight goes where its table says, and an illegal move changes nothing."""

from typing import get_args

import pytest

from megascale_ops.checkpoint.background.flight import ENDED, MOVES, Event, Flight, State

EVENTS: tuple[Event, ...] = get_args(Event)
STATES: tuple[State, ...] = get_args(State)


def flight_in(state: State) -> Flight:
    """A flight that began at 100 s and has come so far."""
    flight = Flight("token", 7, 100.0)
    path: dict[State, tuple[Event, ...]] = {
        "copying": (),
        "writing": ("copied",),
        "waiting": ("copied", "written"),
        "sealed": ("copied", "written", "sealed"),
        "failed": ("failed",),
        "left": ("left",),
    }
    for event in path[state]:
        flight.move(event, 101.0, "the disk is full")
    return flight


@pytest.mark.parametrize("state", STATES)
@pytest.mark.parametrize("event", EVENTS)
def test_every_move_is_in_the_table_or_raises_and_changes_nothing(state: State, event: Event) -> None:
    """All 20 pairs: six are moves; a report that comes after the end never brings a save back."""
    flight = flight_in(state)
    before = dict(vars(flight))

    if (state, event) in MOVES:
        flight.move(event, 103.0)
        assert flight.state == MOVES[state, event]
        return
    with pytest.raises(ValueError, match="the save of step 7"):
        flight.move(event, 103.0)
    assert vars(flight) == before


def test_nothing_leaves_an_end_and_every_state_can_be_reached() -> None:
    """Of the table itself."""
    assert not {state for state, _ in MOVES} & ENDED
    assert {"copying", *MOVES.values()} == set(STATES)
    assert all((state, "failed") in MOVES for state in STATES if state not in ENDED)


def test_times_count_from_the_copy_and_stop_at_the_end() -> None:
    """The background begins where the copy ends; silence is counted from the last sign of life."""
    flight = Flight("token", 7, 100.0)
    flight.move("copied", 102.0)
    flight.touch(104.0)

    assert (flight.age_s(105.0), flight.background_s(105.0), flight.quiet_s(105.0)) == (5.0, 3.0, 1.0)
    assert not flight.share_is_over
    flight.move("written", 106.0)
    assert flight.share_is_over
    flight.move("sealed", 107.0)
    assert (flight.age_s(200.0), flight.background_s(200.0), flight.quiet_s(200.0)) == (7.0, 5.0, 0.0)


def test_a_failure_keeps_its_reason() -> None:
    """And says it as a sentence; a save that goes on says where it is."""
    flight, other = flight_in("writing"), flight_in("waiting")
    flight.move("failed", 103.0, "No space left on device", is_echo=True)

    assert (flight.reason, flight.is_echo) == ("No space left on device", True)
    assert flight.sentence(110.0) == "the save of step 7 failed: No space left on device"
    assert other.sentence(104.0) == ("the save of step 7 waits for the files of other ranks and its seal after 4.0 s")
