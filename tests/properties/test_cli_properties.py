# SPDX-License-Identifier: Apache-2.0
"""The command line against any input: what is printed obeys nothing, what is suggested exists, what is set arrives."""

from datetime import UTC

import msgspec
from hypothesis import given
from hypothesis import strategies as st

from megascale_ops.cards import WIDTH, plain_incident
from megascale_ops.cli.config.configuration import load_struct
from megascale_ops.runner.config import RunConfig
from megascale_ops.schema.events import Incident, Marks
from megascale_ops.schema.fault_classes import FAULTS
from megascale_ops.schema.health import Finding, Verdict
from megascale_ops.schema.messages import EvidenceItem
from megascale_ops.schema.policy import JobPolicy
from megascale_ops.schema.wording import duration, printable
from megascale_ops.suggest import nearest, unknown

TEXT = st.text(max_size=200)
WALL_S = st.one_of(st.just(0.0), st.floats(1.0e9, 4.0e9))

VERDICTS = st.builds(
    Verdict,
    fault=st.one_of(st.sampled_from(sorted(FAULTS)), TEXT),
    reason=TEXT,
    confidence=st.floats(0, 1),
    culprits=st.lists(st.integers(0, 98_303), max_size=20).map(tuple),
    nodes=st.lists(TEXT, max_size=3).map(tuple),
    since_wall_s=WALL_S,
    since_step=st.integers(-1, 10**9),
    evidence=st.lists(st.builds(Finding, TEXT, TEXT, TEXT), max_size=12).map(tuple),
    otherwise=TEXT,
)
INCIDENTS = st.builds(
    Incident,
    id=st.just("gpt-1"),
    job=st.just("gpt"),
    round=st.integers(0, 1000),
    state=st.sampled_from(["open", "recovered", "ended", "harmless"]),
    marks=st.builds(Marks, began=WALL_S, detected=WALL_S, named=WALL_S, stopped=WALL_S, stepped=WALL_S),
    verdict=st.one_of(st.none(), VERDICTS),
    done=TEXT,
    step_before=st.integers(-1, 10**9),
    step_after=st.integers(-1, 10**9),
    evidence=st.lists(
        st.builds(EvidenceItem, kind=TEXT, ok=st.booleans(), rank=st.integers(-1, 10), text=TEXT, path=TEXT), max_size=4
    ).map(tuple),
)


@given(TEXT)
def test_whatever_a_rank_says_is_one_printable_line(text: str) -> None:
    """No control character of a rank's words reaches a terminal."""
    assert printable(text).isprintable()


@given(INCIDENTS)
def test_every_incident_makes_a_card(incident: Incident) -> None:
    """Whatever is known or not known of an incident, its card is printable, narrow and has a next command.

    A line is wider only when a single word is: then it holds a label, a bullet and that word.
    """
    lines = plain_incident(incident, UTC).splitlines()

    assert all(line.isprintable() for line in lines)
    assert all(len(line) <= WIDTH or len(line.split()) <= 3 for line in lines[:-1])
    assert lines[-1].split()[0] == "next"


@given(st.floats(0, 1e9))
def test_every_duration_is_short(seconds: float) -> None:
    """A duration never takes more room than a column has."""
    assert len(duration(seconds)) <= 16


@given(TEXT, st.lists(st.text(min_size=1, max_size=20), max_size=10))
def test_a_suggestion_exists(name: str, known: list[str]) -> None:
    """What is suggested is one of the names that exist, and the sentence is one line of text."""
    assert nearest(name, known) in {None, *known}
    assert "\n" not in unknown("option", name, known)


@given(
    st.builds(
        JobPolicy,
        max_restarts=st.integers(-1, 1000),
        frozen_grace_s=st.floats(0, 1e6),
        silence_factor=st.floats(0, 1e6),
    )
)
def test_what_is_set_arrives_from_either_side(policy: JobPolicy) -> None:
    """A policy given on the command line or in the environment loads as it was given."""
    given_values = msgspec.to_builtins(policy)
    variables = {f"MEGASCALE_RUN_POLICY_{name.upper()}": str(value) for name, value in given_values.items()}

    from_options, _ = load_struct(RunConfig, "run", {"policy": given_values}, None, {})
    from_variables, _ = load_struct(RunConfig, "run", {}, None, variables)

    assert from_options.policy == from_variables.policy == policy
