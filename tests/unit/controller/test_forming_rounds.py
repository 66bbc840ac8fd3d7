# SPDX-License-Identifier: Apache-2.0
"""When a round is formed, and from whom."""

from megascale_ops.controller.recovery.formation import Formation, form


def _ask(joined: dict[str, float], **changes: object) -> Formation:
    facts: dict[str, object] = {
        "min_nodes": 2,
        "max_nodes": 3,
        "before": (),
        "alive": (),
        "now_s": 100.0,
        "waiting_since_s": 90.0,
        "last_call_s": 2.0,
        "straggler_s": 15.0,
    }
    return form(joined, **{**facts, **changes})


def test_a_full_set_starts_at_once() -> None:
    """No node waits when all are there."""
    assert _ask({"b": 100.0, "a": 99.0, "c": 100.0}).nodes == ("a", "b", "c")


def test_too_few_are_no_round() -> None:
    """Below min_nodes nothing starts, and the reason has both numbers."""
    formation = _ask({"a": 10.0})

    assert formation.nodes == ()
    assert "1 of at least 2" in formation.reason


def test_the_first_round_waits_a_last_call() -> None:
    """Between min and max, the first round waits last_call_s after the last join."""
    early = _ask({"a": 90.0, "b": 99.0})
    late = _ask({"a": 90.0, "b": 98.0})

    assert early.nodes == ()
    assert early.again_in_s == 1.0
    assert late.nodes == ("a", "b")


def test_a_restart_waits_for_no_strangers() -> None:
    """After a failure the round starts as soon as every living node of the round before has joined."""
    formation = _ask({"a": 100.0, "b": 100.0}, before=("a", "b", "c"), alive=("a", "b"))

    assert formation.nodes == ("a", "b")


def test_a_restart_waits_for_living_members_but_not_for_ever() -> None:
    """A living member that has not joined is waited for, up to the straggler's deadline."""
    waiting = _ask({"a": 100.0, "b": 100.0}, before=("a", "b", "c"), alive=("a", "b", "c"))
    given_up = _ask({"a": 100.0, "b": 100.0}, before=("a", "b", "c"), alive=("a", "b", "c"), now_s=106.0)

    assert waiting.nodes == ()
    assert "c lives" in waiting.reason
    assert given_up.nodes == ("a", "b")


def test_nodes_keep_their_order() -> None:
    """Node ranks stay as they were; newcomers come last."""
    formation = _ask({"new": 1.0, "a": 100.0, "b": 99.0}, before=("b", "a"), alive=("a", "b"))

    assert formation.nodes == ("b", "a", "new")


def test_more_than_max_are_not_used() -> None:
    """Spare nodes wait; members of the round before come first."""
    formation = _ask({"s1": 1.0, "s2": 2.0, "a": 100.0, "b": 100.0}, before=("a", "b"), alive=("a", "b"))

    assert formation.nodes == ("a", "b", "s1")


def test_a_launch_line_may_ask_for_places_among_the_nodes() -> None:
    """In the first round, the first to come; a node that requests none comes after. A round before counts for more."""
    joined = {"a": 97.0, "b": 98.0, "c": 99.0}

    assert _ask(joined, asked={"c": 0, "b": 1}).nodes == ("c", "b", "a")
    assert _ask(joined, asked={"c": 0}, before=("a", "b", "c"), alive=("a", "b", "c")).nodes == ("a", "b", "c")
