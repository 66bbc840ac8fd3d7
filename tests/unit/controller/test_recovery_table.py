# SPDX-License-Identifier: Apache-2.0
"""The recovery table: complete, without traps, and drawn in its notes as it is."""

import re
from pathlib import Path

import pytest

import megascale_ops.controller
from megascale_ops.controller.record.state_machine import (
    ACTIVE,
    FINAL,
    ILLEGAL,
    TABLE,
    Act,
    EventKind,
    IllegalMoveError,
    State,
    diagram,
    is_legal,
    react,
)

README = Path(megascale_ops.controller.__file__).parent / "README.md"
PAGE = README.parents[2] / "docs" / "explanation" / "recovery.md"
BLOCK = re.compile(r"<!-- recovery -->\s*```mermaid\n(.*?)\n```\s*<!-- /recovery -->", re.DOTALL)


def test_every_state_and_event_is_a_row_or_illegal_with_a_reason() -> None:
    """The table covers every event in every state of a job."""
    for state in State:
        for event in EventKind:
            assert is_legal(state, event) or ILLEGAL[event]


@pytest.mark.parametrize("state", State)
@pytest.mark.parametrize("event", EventKind)
def test_an_illegal_move_raises_and_names_both(state: State, event: EventKind) -> None:
    """An illegal move is refused with a sentence that names event, state and reason."""
    if is_legal(state, event):
        assert react(state, event) == TABLE[state, event]
        return

    with pytest.raises(IllegalMoveError, match=f"{event} .* {state}: "):
        react(state, event)


def test_the_straight_road() -> None:
    """A new job forms, starts, catches up and runs."""
    road = [EventKind.NODES_READY, EventKind.RANKS_UP, EventKind.CAUGHT_UP]

    state = State.REPLACING
    for event in road:
        state = react(state, event).state

    assert state is State.RUNNING


def test_a_lost_rank_is_confirmed_before_anything_is_stopped() -> None:
    """Between suspicion and stop there is always evidence."""
    suspect = react(State.RUNNING, EventKind.SILENCE)
    confirming = react(suspect.state, EventKind.LOST)
    stopping = react(confirming.state, EventKind.EVIDENCE_COMPLETE)

    assert suspect.acts == ()
    assert confirming.acts == (Act.DUMP_STACKS, Act.DUMP_FLIGHT_RECORDER)
    assert stopping.acts == (Act.PRESERVE, Act.KILL_CULPRITS, Act.RESTART)


def test_every_state_can_be_reached_and_left() -> None:
    """No state is a trap: from each one the end can be reached."""
    reached = {State.REPLACING}
    for _ in State:
        reached |= {move.state for (state, _event), move in TABLE.items() if state in reached}

    assert reached == set(State)
    assert all(is_legal(state, EventKind.CANCELLED) for state in State if state not in FINAL)
    assert all(is_legal(state, EventKind.STARTED_AGAIN) for state in FINAL)


def test_death_needs_no_confirmation_in_any_active_state() -> None:
    """A failed rank or a lost node stops the round at once, wherever it stands."""
    for state in ACTIVE:
        assert react(state, EventKind.RANK_FAILED).state is State.STOPPING
        assert react(state, EventKind.NODE_LOST).state is State.STOPPING


def test_the_readme_shows_the_table() -> None:
    """The diagram in the controller's README is printed from the table."""
    found = BLOCK.search(README.read_text(encoding="utf-8"))

    assert found is not None
    assert found.group(1) == diagram()


def test_the_page_of_the_site_shows_the_table() -> None:
    """A reader of the documentation sees the same diagram."""
    found = BLOCK.search(PAGE.read_text(encoding="utf-8"))

    assert found is not None
    assert found.group(1) == diagram()
