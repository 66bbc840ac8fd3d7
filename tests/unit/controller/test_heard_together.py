# SPDX-License-Identifier: Apache-2.0
"""Heartbeats that are taken in as columns come to the same as one by one, whatever is drawn."""

import msgspec
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megascale_ops.controller.cluster.columns import NOWHERE, Columns
from megascale_ops.controller.cluster.node_clocks import NodeClocks
from megascale_ops.controller.cluster.registry import Registry
from megascale_ops.controller.cluster.steady import Signs, Steady, Told
from megascale_ops.controller.history.senders import Senders
from megascale_ops.controller.job.round_progress import alike, measure_pace
from megascale_ops.diagnosis.hangs.suspicion import STALE_BEAT_S
from megascale_ops.diagnosis.rank_view import RankView
from megascale_ops.schema.messages import Heartbeat, JobReport
from megascale_ops.schema.progress import Progress, RankReport

NODES = 100  # more than there is room for at first
TOLD = Told(Progress(state="running", step=7, steps_seen=8, moved_mono_s=-0.5), None)
some_seconds = st.floats(0.0, 200.0).map(lambda value: round(value, 3))


def offset_s(number: int) -> float:
    """By how much a node's clock is ahead of the controller's."""
    return number * 1000.0


def beat(registry: Registry, number: int, seq: int, now_s: float, **changes: object) -> None:
    """Let a node's agent tell of its two ranks."""
    ranks = tuple(
        RankReport(2 * number + local, local, 100 + local, 1, 2 * NODES, progress=Progress(moved_mono_s=0.0))
        for local in (0, 1)
    )
    sent = Heartbeat(
        f"n{number}", f"a{number}", seq, now_s + offset_s(number), 0.0, full=seq == 1,
        jobs=(JobReport("job", 1, "", ranks),),
    )  # fmt: skip
    assert registry.fold(msgspec.structs.replace(sent, **changes), now_s).accepted


def lent(count: int = NODES, now_s: float = 10.0) -> Registry:
    """Nodes whose next heartbeats, the third, can be taken in together."""
    registry = Registry()
    for number in range(count):
        beat(registry, number, 1, now_s)
    for number in range(count):
        view = registry.node(f"n{number}")
        assert view is not None
        view.shares["job"].is_plain = view.shares["job"].is_placed = True
        registry.go_on(view, signs(count, now_s + 1.0, 2).at(number), now_s + 1.0, moves=True)
        registry.lend(view, "job", 1)
    return registry


def signs(count: int, now_s: float, seq: int) -> Signs:
    """The heartbeats of so many nodes."""
    numbers = range(count)
    return Signs(
        [f"n{number}" for number in numbers],
        np.array([f"a{number}" for number in numbers], object),
        np.full(count, seq, np.int64),
        np.array([now_s + offset_s(number) for number in numbers]),
        np.full(count, now_s),
        np.full(count, 2, np.int64),
    )


def steady(told: Told | None = TOLD, **changes: object) -> Steady:
    """The third heartbeats of two nodes."""
    usual = Steady("job", 1, signs(2, 12.0, 3), told, np.arange(4), ())
    return usual._replace(**changes)  # type: ignore[arg-type]  # fields


def awaited(registry: Registry, told: Steady, held: tuple[str, ...] = ()) -> list[bool]:
    """Which of the signs can be taken in together."""
    places = registry.places(told.signs.nodes)
    found = registry.awaits_all(told, places, held).tolist()
    for number, is_awaited in enumerate(found):
        alone = registry.awaits(told.signs.at(number), told.job, told.round, tells=told.tells)
        assert alone is not None or not is_awaited
    return list(found)


def changed(field: str, value: object) -> Steady:
    """Signs of which the second is another one in one field."""
    usual = signs(2, 12.0, 3)
    column = np.array(getattr(usual, field), object if field in ("nodes", "agent_ids") else None)
    column[1] = value
    one = {field: column.tolist() if field == "nodes" else column}
    return steady(signs=usual._replace(**one))  # type: ignore[arg-type]  # fields


@pytest.mark.parametrize(
    ("field", "value"),
    [("nodes", "m"), ("agent_ids", "a9"), ("seq", 2), ("seq", 4), ("mono_s", 1017.0), ("size", 1)],
)
def test_only_the_next_heartbeat_of_a_node_that_is_as_it_was_is_taken_in_together(field: str, value: object) -> None:
    """Another agent, one that is lost, late, or tells of other ranks must come by itself; its neighbour need not."""
    registry = lent()

    assert awaited(registry, steady()) == [True, True]
    assert awaited(registry, changed(field, value)) == [True, False]


def test_what_is_asked_for_or_has_spoken_for_itself_is_not_taken_in_together() -> None:
    """Another round or job, an order that waits, steps of ranks of which it is not known where they are; a beat."""
    registry = lent()

    assert awaited(registry, steady(round=2)) == [False, False]
    assert awaited(registry, steady(job="other")) == [False, False]
    assert awaited(registry, steady(), ("n1", "m")) == [True, False]
    assert awaited(registry, steady(None)) == [True, True]
    view = registry.node("n0")
    assert view is not None
    view.shares["job"].is_placed = None
    registry.lend(view, "job", 1)
    assert awaited(registry, steady(steps=(np.zeros((4, 12)),))) == [False, True]
    assert awaited(registry, steady()) == [True, True]
    beat(registry, 1, 3, 12.0)
    assert awaited(registry, changed("seq", 4)) == [True, False]


def hear(registry: Registry, beats: Steady, number: int, now_s: float, *, by_itself: bool) -> None:
    """Take one node's heartbeat in alone, as it was sent or as a sign of those that could come together."""
    sign = beats.signs.at(number)
    if by_itself:
        beat(registry, number, sign.seq, now_s)
        return
    view = registry.awaits(sign, "job", 1, tells=beats.tells)
    assert view is not None
    paused = beats.stands and sign.mono_s - view.sent_mono_s + beats.beat_ago_s > STALE_BEAT_S
    registry.go_on(view, sign, now_s, moves=beats.told is not None or paused)
    if beats.told is not None:
        view.shares["job"].go_on(beats.told, sign.mono_s)
    elif beats.stands:
        view.shares["job"].stand(sign.mono_s - beats.beat_ago_s)


@settings(max_examples=40, deadline=None)
@given(
    st.lists(
        st.tuples(st.sampled_from(["go on", "stand", "nothing", "by itself"]), st.sampled_from([0.1, 1.0, 4.0])),
        max_size=8,
    ),
    st.booleans(),
)
def test_nodes_heard_together_are_as_if_each_had_been_heard_alone(told: list[tuple[str, float]], reads: bool) -> None:
    """Their ranks, ages, order and what they tell of news, in any sequence, read meanwhile or not."""
    together, alone = lent(), lent()
    now_s, nodes = 11.0, [f"n{number}" for number in range(NODES)]
    for seq, (what, passed_s) in enumerate(told, 3):
        now_s += passed_s
        beats = Steady(
            "job", 1, signs(NODES, now_s, seq), TOLD if what == "go on" else None, np.arange(2 * NODES), (),
            0.05 if what == "stand" else -1.0,
        )  # fmt: skip
        places = together.places(nodes)
        which = np.flatnonzero(together.awaits_all(beats, places, ()))
        if what == "by itself":
            which = which[:0]
        together.go_on_all(beats, places, which, now_s)
        for number in range(NODES):
            hear(alone, beats, number, now_s, by_itself=what == "by itself")
            if number not in which:
                hear(together, beats, number, now_s, by_itself=what == "by itself")
        if reads:
            assert list(together.ranks("job", 1, nodes, now_s)) == list(alone.ranks("job", 1, nodes, now_s))

    assert list(together.ranks("job", 1, nodes, now_s)) == list(alone.ranks("job", 1, nodes, now_s))
    for one, other in zip(together.nodes(), alone.nodes(), strict=True):
        assert (one.node, one.seq, one.heard_s, one.back_s, one.sent_mono_s, one.floor_mono_s) == (
            *(other.node, other.seq, other.heard_s, other.back_s, other.sent_mono_s, other.floor_mono_s),
        )
    assert list(together.silent(now_s)) == list(alone.silent(now_s)) == [view.node for view in alone.nodes()]


def bare(registry: Registry, number: int, seq: int, now_s: float) -> None:
    """Let a node's agent tell that it is there, and of no job."""
    sent = Heartbeat(f"n{number}", f"a{number}", seq, now_s + offset_s(number), 0.0, full=seq == 1)
    assert registry.fold(sent, now_s).accepted


def test_nodes_that_report_no_job_are_heard_together_as_each_alone() -> None:
    """Order and silence are as after the heartbeats themselves; who reports a job, or has an order, comes by itself."""
    together, alone = Registry(), Registry()
    for registry in (together, alone):
        for number in range(3):
            bare(registry, number, 1, 10.0)
        beat(registry, 3, 1, 10.0)
    of_none = Steady("", 0, signs(4, 11.0, 2), None, np.arange(0), ())
    assert together.awaits_all(of_none, together.places(of_none.signs.nodes), ()).tolist() == [False] * 4
    for number in range(3):
        view = together.awaits(of_none.signs.at(number), "", 0, tells=False)
        assert view is not None
        together.go_on(view, of_none.signs.at(number), 11.0, moves=False)
        together.lend(view, "", 0)
        bare(alone, number, 2, 11.0)
    assert together.awaits(of_none.signs.at(3), "", 0, tells=False) is None

    of_none = of_none._replace(signs=signs(4, 20.0, 3))
    places = together.places(of_none.signs.nodes)
    assert together.awaits_all(of_none, places, ("n1",)).tolist() == [False] * 4  # all were silent for too long
    of_none = of_none._replace(signs=signs(4, 12.0, 3))
    assert together.awaits_all(of_none, places, ("n1",)).tolist() == [True, False, True, False]
    together.go_on_all(of_none, places, np.array([0, 2]), 12.0)
    for number in (0, 2):
        bare(alone, number, 3, 12.0)
    for one, other in zip(together.nodes(), alone.nodes(), strict=True):
        assert (one.node, one.seq, one.heard_s, one.stirred) == (other.node, other.seq, other.heard_s, other.stirred)
    beat(together, 0, 4, 13.0)  # it has ranks again
    assert together.awaits_all(of_none._replace(signs=signs(4, 14.0, 5)), places, ()).tolist() == [False] * 4
    assert together.share("n0", "job", 1) is not None


def test_a_node_that_is_forgotten_leaves_nothing_to_the_next_one_in_its_place() -> None:
    """Places are given again; who was heard since stays, and a node that comes anew begins anew."""
    registry = lent(3)
    beat(registry, 1, 3, 50.0)
    registry.forget(40.0)
    assert [view.node for view in registry.nodes()] == ["n1"]
    assert registry.places(["n0", "n2", "m"]).tolist() == [NOWHERE] * 3

    beat(registry, 5, 1, 60.0)

    view = registry.node("n5")
    assert view is not None
    assert (view.seq, view.heard_s, view.back_s) == (1, 60.0, 0.0)
    assert awaited(registry, changed("nodes", "n5")) == [False, False]


def test_there_is_room_for_any_number() -> None:
    """Columns grow, and nobody is put nowhere."""
    columns = Columns()

    places = [columns.add() for _ in range(1000)]

    assert len(set(places)) == 1000
    assert NOWHERE not in places


@settings(max_examples=60, deadline=None)
@given(st.lists(st.tuples(st.lists(st.integers(0, 4), min_size=1, unique=True), some_seconds, some_seconds)))
def test_clocks_heard_together_are_as_if_each_had_been_heard_alone(
    beats: list[tuple[list[int], float, float]],
) -> None:
    """Of nodes, and of senders: agents come anew, clocks are late, minutes pass."""
    clocks, each = NodeClocks(), NodeClocks()
    senders, one_by_one = Senders(), Senders()
    now_s = 0.0
    for numbers, passed_s, late_s in beats:
        now_s += passed_s
        nodes = [f"n{number}" for number in numbers]
        mono_s = np.array([now_s - late_s + offset_s(number) for number in numbers])
        ahead_s = np.array([late_s * (number - 2) for number in numbers])
        agents = np.array([f"a{number * (late_s > 100.0)}" for number in numbers], object)
        clocks.note_all(nodes, ahead_s, now_s)
        found = senders.sent_wall_s_all([(node, "") for node in nodes], agents, mono_s, now_s)
        for place, node in enumerate(nodes):
            each.note(node, ahead_s.item(place), now_s)
            alone_s = one_by_one.sent_wall_s((node, ""), agents[place], mono_s.item(place), now_s)
            assert found.item(place) == alone_s

    assert sorted(clocks.ahead_s(now_s)) == sorted(each.ahead_s(now_s))


@given(
    st.integers(1, 8),
    st.builds(
        Progress,
        state=st.just("running"),
        step=st.integers(0, 40),
        step_is_absolute=st.booleans(),
        steps_seen=st.integers(1, 30),
        step_p50_s=st.sampled_from([0.0, 0.3, 6.34]),
    ),
    some_seconds,
    st.integers(-1, 40),
)
def test_the_pace_of_ranks_that_tell_the_same_is_that_of_each(
    ranks: int, progress: Progress, silent_s: float, best_step: int
) -> None:
    """First steps, and when they had caught up, reckoned once for all ranks of a node."""
    views = [
        RankView("n", RankReport(rank, rank, 1, 1, ranks, progress=progress), silent_s, 0.0, 0.0, 0.0)
        for rank in range(ranks)
    ]

    assert alike(ranks, progress, silent_s, best_step, 1e9) == measure_pace(views, best_step, 1e9)
