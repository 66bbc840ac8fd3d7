# SPDX-License-Identifier: Apache-2.0
"""Nodes that stand are looked at once; then it is known when one of their ranks looks odd, and how far they are."""

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from megascale_ops.controller.job.stood import Stood
from megascale_ops.diagnosis.rank_view import RankView
from megascale_ops.diagnosis.watchdog import looks_odd
from megascale_ops.schema.policy import JobPolicy
from megascale_ops.schema.progress import CollectivePosition, ProcessReading, Progress, RankReport

POLICY = JobPolicy()
PLACE = 200  # more than there is room for at first
seconds = st.floats(0.0, 60.0).map(lambda value: round(value, 3))
reports = st.builds(
    RankReport,
    rank=st.integers(0, 7),
    local_rank=st.just(0),
    pid=st.just(1),
    round=st.just(1),
    world_size=st.just(8),
    progress=st.builds(
        Progress,
        state=st.just("running"),
        step=st.sampled_from([6, 7]),
        step_is_absolute=st.booleans(),
        steps_seen=st.sampled_from([0, 3, 8]),
        moved_mono_s=seconds,
        step_p50_s=st.sampled_from([0.0, 0.3, 6.34]),
        step_p99_s=st.sampled_from([0.0, 0.4, 7.0]),
    ),
    process=st.just(ProcessReading(state="R")),
    collective=st.sampled_from([None, CollectivePosition(4, 4, ""), CollectivePosition(5, 4, "tp0")]),
)


def noted(told: list[RankReport], floor_mono_s: float = 0.0) -> Stood:
    """What is known of one node after a look at these ranks, in its ninth heartbeat that told of more than time."""
    stood = Stood(POLICY)
    stood.note(PLACE, 9, told, floor_mono_s)
    return stood


def is_odd(report: RankReport, floor_mono_s: float, sent_mono_s: float) -> bool:
    """Whether a rank looks odd in a heartbeat that was sent then."""
    assert report.progress is not None
    silent_s = max(0.0, sent_mono_s - max(report.progress.moved_mono_s, floor_mono_s))
    return looks_odd(RankView("n", report, silent_s, 0.0, 0.0, 0.0), POLICY)


@given(st.lists(reports, min_size=1, max_size=4), seconds, st.lists(seconds, min_size=1))
def test_no_rank_looks_odd_before_it_is_looked_at_again(
    told: list[RankReport], floor_mono_s: float, after_s: list[float]
) -> None:
    """At any later heartbeat, and never more than some milliseconds too early."""
    stood, place = noted(told, floor_mono_s), np.array([PLACE])
    for passed_s in after_s:
        sent_s = 60.0 + passed_s * 20
        may = bool(stood.may_look_odd(place, np.array([sent_s]))[0])
        assert may or not any(is_odd(one, floor_mono_s, sent_s) for one in told)
        assert not may or any(is_odd(one, floor_mono_s, sent_s + 0.01) for one in told)


@given(st.lists(reports, min_size=1, max_size=4))
def test_how_far_a_node_is_is_that_of_its_furthest_ranks(told: list[RankReport]) -> None:
    """Ranks that have made no step in this round do not count, whatever their number says."""
    stood, place = noted(told), np.array([PLACE])
    stepped = [one.progress for one in told if one.progress is not None and one.progress.steps_seen]
    step = max((one.step for one in stepped), default=-1)

    is_there, moved_s = stood.last_moved(place, step)

    assert bool(is_there[0]) == bool(stepped)
    assert moved_s[0] == max((one.moved_mono_s for one in stepped if one.step == step), default=0.0)
    assert not stood.last_moved(place, step + 1)[0][0]


def test_what_is_known_holds_until_a_node_tells_of_more_than_time() -> None:
    """Another number of its last such heartbeat, or another node: it is looked at anew."""
    stood = noted([])

    assert stood.knows(np.array([PLACE]), np.array([9])).all()
    assert not stood.knows(np.array([PLACE]), np.array([10])).any()
    assert not stood.knows(np.array([PLACE + 1, 5000]), np.array([9, 0])).any()


def test_ranks_of_different_pace_have_none_in_common() -> None:
    """One that has made a step less is looked at by itself while its round catches up."""

    def at(step: int, steps_seen: int) -> RankReport:
        return RankReport(0, 0, 1, 1, 8, progress=Progress(step=step, steps_seen=steps_seen))

    assert noted([at(7, 8), at(7, 8)]).progress(PLACE) is not None
    assert noted([at(7, 8), at(6, 7)]).progress(PLACE) is None
    assert noted([]).progress(PLACE) is None
