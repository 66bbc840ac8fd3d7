# SPDX-License-Identifier: Apache-2.0
"""The recovery table under every sequence of events."""

from hypothesis import given
from hypothesis import strategies as st

from megascale_ops.controller.record.state_machine import ACTIVE, FINAL, Act, EventKind, IllegalMoveError, State, react


@given(st.lists(st.sampled_from(list(EventKind)), max_size=60))
def test_no_sequence_of_events_leads_astray(events: list[EventKind]) -> None:
    """Whatever happens in whatever order: the state is always one of the table's, illegal moves change nothing."""
    state = State.REPLACING

    for event in events:
        try:
            move = react(state, event)
        except IllegalMoveError:
            continue
        assert move.state in State
        assert set(move.acts) <= set(Act)
        state = move.state


@given(st.lists(st.sampled_from(list(EventKind)), max_size=60))
def test_ranks_only_run_in_a_round_that_was_formed(events: list[EventKind]) -> None:
    """Between a stop and the next running round there is always a verdict and a formed round."""
    state, formed = State.REPLACING, False

    for event in events:
        try:
            state = react(state, event).state
        except IllegalMoveError:
            continue
        if event is EventKind.NODES_READY:
            formed = True
        if state in (State.STOPPING, *FINAL):
            formed = False
        assert (state in ACTIVE) <= formed
