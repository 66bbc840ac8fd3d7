# SPDX-License-Identifier: Apache-2.0
"""Decisions are journaled with all of their inputs: asked again, they come out the same."""

from hypothesis import given
from hypothesis import strategies as st

from megascale_ops.controller.policy.answer import answer
from megascale_ops.controller.policy.decision import (
    MOST_OLD_RESTARTS,
    Eviction,
    Failure,
    Question,
    Restart,
    Tab,
    from_event,
    remembered,
    to_event,
)
from megascale_ops.controller.policy.replay import replay
from megascale_ops.schema.events import Event
from megascale_ops.schema.fault_classes import FAULTS
from megascale_ops.schema.health import Verdict
from megascale_ops.schema.policy import ACTION_WORDS, JobPolicy

_TIMES = st.floats(0.0, 20_000.0)
_NODES = st.sampled_from(["a", "b", "c"])
_FAULTS = st.sampled_from(sorted(FAULTS))
_FAILURES = st.none() | st.builds(Failure, st.sampled_from(["X at a.py:1", "Y at b.py:2"]), st.integers(-1, 3))
_POLICIES = st.builds(
    JobPolicy,
    max_restarts=st.integers(-1, 3),
    restarts_per_hour=st.integers(0, 5),
    restarts_per_cause_per_hour=st.integers(0, 3),
    evictions_per_hour=st.integers(0, 3),
    dry_run=st.booleans(),
    actions=st.dictionaries(_FAULTS, st.sampled_from(sorted(ACTION_WORDS)), max_size=4),
    warning_hold_s=st.floats(0.0, 100.0),
)
QUESTIONS = st.builds(
    Question,
    kind=st.sampled_from(["end", "hang", "warning"]),
    wall_s=_TIMES,
    verdict=st.builds(
        Verdict,
        fault=_FAULTS,
        reason=st.just("why"),
        confidence=st.just(0.9),
        culprits=st.sampled_from([(), (1,), (1, 2)]),
        nodes=st.lists(_NODES, max_size=2, unique=True).map(tuple),
        cause=st.sampled_from(["", "gc", "compute"]),
        cost=st.floats(0.0, 1.0),
    ),
    policy=_POLICIES,
    restarts=st.lists(st.builds(Restart, _TIMES, _FAULTS, _NODES, st.booleans()), max_size=8).map(tuple),
    restarts_in_all=st.integers(0, 20),
    evictions=st.lists(st.builds(Eviction, _NODES, _TIMES, _TIMES), max_size=4).map(tuple),
    failure=_FAILURES,
    failure_before=_FAILURES,
    progressed=st.booleans(),
    members=st.integers(1, 4),
    min_nodes=st.integers(1, 4),
    share=st.floats(0.0, 1.0),
    spares=st.integers(0, 2),
    tab=st.none() | st.builds(Tab, _TIMES, _TIMES, st.floats(0.0, 200.0), st.integers(-1, 9), st.integers(0, 3)),
    prices_s=st.lists(st.floats(0.1, 100.0), max_size=3).map(tuple),
)


@given(QUESTIONS)
def test_a_replay_equals_what_was_recorded(question: Question) -> None:
    """Whatever was asked: through the journal and back, the same functions give the same decision."""
    event = to_event(question, answer(question), job="j", round_=1, incident="j-1")

    (replayed,) = replay([event])

    assert replayed.question == question
    assert replayed.now == replayed.recorded == answer(question)
    assert not replayed.differs


@given(QUESTIONS)
def test_every_decision_is_a_word_a_reason_and_nodes_that_were_blamed(question: Question) -> None:
    """No node is evicted that was not blamed, nothing acts in a dry run, a warning never ends a job unasked."""
    decision = answer(question)

    assert decision.action in ACTION_WORDS
    assert decision.reason
    assert set(decision.nodes) <= set(question.verdict.nodes)
    assert (decision.action == "evict") == bool(decision.nodes)
    assert not (question.policy.dry_run and decision.acts)
    if question.kind == "warning" and decision.action == "stop":
        own = question.policy.actions.get(decision.fault) == "stop"
        assert own or decision.fault in {"duplicate_rank", "script_bug"}


def _killed() -> Event:
    question = Question("end", 100.0, Verdict("killed", "rank 1 was killed", 0.9, culprits=(1,)), JobPolicy())
    return to_event(question, answer(question), job="j", round_=2, incident="j-1")


def test_another_policy_shows_what_it_would_have_changed() -> None:
    """Asked again with a budget of none, the restart would have been a stop; with another patience nothing changes."""
    (same,) = replay([_killed()], {"silence_floor_s": "9"})
    (other,) = replay([_killed()], {"max_restarts": "0"})

    assert not same.differs
    assert other.differs
    assert (other.recorded.action, other.now.action) == ("restart", "stop")


def test_a_dry_run_is_another_decision() -> None:
    """What would only have been said is told apart from what was done."""
    (replayed,) = replay([_killed()], {"dry_run": "true"})

    assert replayed.differs


def test_what_is_no_decision_is_passed_over() -> None:
    """Other events, and decisions of an unknown version, are no reason to fail."""
    strange = Event(1.0, "j", "decision", data={"question": "{", "decision": "{}"})

    assert replay([Event(1.0, "j", "silence"), strange]) == []
    assert from_event(strange) is None


def test_the_event_says_the_same_to_people_and_has_its_numbers() -> None:
    """A line of the journal is a sentence, with class, action and cost as data."""
    event = _killed()

    assert event.text.startswith("restart: ")
    assert (event.data["fault"], event.data["action"], event.rank) == ("killed", "restart", 1)


def test_old_restarts_are_left_out_of_the_question() -> None:
    """Years of restarts do not make a decision's event large: the last hour, and a bounded number before it."""
    restarts = tuple(Restart(float(wall_s), "killed") for wall_s in (*range(100_000, 100_200), 200_000))

    long_after, older_then = remembered(restarts, 200_000.0)
    within_the_hour, older = remembered(restarts, 100_200.0)

    assert len(long_after) == len(within_the_hour) == MOST_OLD_RESTARTS
    assert older_then == {}
    assert older == {"killed@": len(restarts) - MOST_OLD_RESTARTS}
