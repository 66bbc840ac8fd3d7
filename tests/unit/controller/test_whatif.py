# SPDX-License-Identifier: Apache-2.0
"""What a step would take without the fault, against the same job simulated without it."""

import numpy as np
import pytest

from megascale_ops.diagnosis.skew.whatif import (
    Graph,
    Operations,
    build,
    if_links_were_as_fast,
    if_ranks_were_as_fast,
)
from megascale_ops.errors import UsageError
from tests.fakes.traffic import DP, Fault, Shape, Traffic, slower

SHAPES = {
    "data parallel": Shape(dp=4),
    "three axes": Shape(tp=4, pp=2, dp=4),
    "a deep pipeline": Shape(tp=2, pp=4, dp=2, microbatches=4),
}
# 1 %: of the step of the run without the fault.
ERROR = 0.01


def operations(traffic: Traffic, fault: Fault | None = None, steps: int = 20) -> Operations:
    """Return what the ranks recorded in some steps."""
    met = [traffic.step(spread=fault) for _ in range(steps)]
    columns = traffic.columns([one for step in met for one in step])
    numbers = [
        np.full(one.ranks.size, step, np.int32) for step, ones in enumerate(met) for one in ones if one.kind >= 0
    ]
    return Operations(
        columns.rank, columns.communicator, columns.function, columns.seq, columns.start_ns, columns.end_ns,
        np.concatenate(numbers),
    )  # fmt: skip


def graph(traffic: Traffic, fault: Fault | None = None) -> Graph:
    """Return the graph of some steps."""
    return build(operations(traffic, fault))


@pytest.mark.parametrize("name", SHAPES)
def test_nothing_changed_replays_what_was_measured(name: str) -> None:
    """To a ten-thousandth of the step, although every rank's clock is its own."""
    shape = SHAPES[name]

    found = if_ranks_were_as_fast(graph(Traffic(shape, 1)), {1}, Traffic(shape).classes)

    assert found.error < 1e-4
    assert found.saved == pytest.approx(0, abs=0.005)


def test_steps_without_a_collective_count() -> None:
    """Ranks that meet in every tenth step only: a step is a tenth of the time between two meetings."""
    told = operations(Traffic(SHAPES["data parallel"], 1))

    every, tenth = build(told), build(told._replace(step=told.step * 10))

    assert tenth.measured_s == pytest.approx(every.measured_s / 10)
    found = if_ranks_were_as_fast(tenth, {1})
    assert found.replayed_s == pytest.approx(tenth.measured_s, rel=1e-3)


@pytest.mark.parametrize("name", SHAPES)
def test_a_slow_rank_as_fast_as_its_peers(name: str) -> None:
    """Within 1 % of the same run without the fault."""
    shape = SHAPES[name]
    clean_s = graph(Traffic(shape, 1)).measured_s

    found = if_ranks_were_as_fast(graph(Traffic(shape, 1), slower(shape.ranks, 1, 0.2)), {1}, Traffic(shape).classes)

    assert found.predicted_s == pytest.approx(clean_s, rel=ERROR)
    assert found.saved == pytest.approx(1 - clean_s / found.measured_s, abs=ERROR)


@pytest.mark.parametrize("name", ["three axes", "a deep pipeline"])
def test_a_slow_stage_as_fast_as_the_others(name: str) -> None:
    """The whole stage has no equals left to be compared with: its work becomes as much as the other stages'."""
    traffic = Traffic(SHAPES[name], 1)
    clean_s = graph(Traffic(SHAPES[name], 1)).measured_s
    more = 0.3 * (traffic.classes == 1)

    found = if_ranks_were_as_fast(
        graph(traffic, lambda _step: more), np.flatnonzero(traffic.classes == 1).tolist(), traffic.classes
    )

    assert found.predicted_s == pytest.approx(clean_s, rel=ERROR)


def test_a_slow_link_as_fast_as_the_others() -> None:
    """One data ring moves its data eight times more slowly."""
    traffic = Traffic(SHAPES["three axes"], 1)
    clean_s = graph(Traffic(SHAPES["three axes"], 1)).measured_s
    traffic.slow_links[DP, 1] = 8.0

    found = if_links_were_as_fast(graph(traffic), {2_000_001})

    assert found.predicted_s == pytest.approx(clean_s, rel=ERROR)
    assert found.saved > 0.1


def test_a_victim_made_faster_saves_nothing() -> None:
    """A rank that waits gains nothing by being faster."""
    shape = SHAPES["three axes"]

    found = if_ranks_were_as_fast(graph(Traffic(shape, 1), slower(shape.ranks, 1, 0.2)), {2}, Traffic(shape).classes)

    assert found.saved == pytest.approx(0, abs=0.002)


def test_what_cannot_be_replayed_is_refused() -> None:
    """Too few steps, a clock that was set back, unknown ranks, contradicting orders: one sentence each."""
    traffic = Traffic(Shape(dp=4), 1)
    known = operations(traffic)
    back = known.end_ns.copy()
    back[7] -= 10**12
    crossed_seq = known.seq.copy()
    first, second = np.flatnonzero(known.rank == 1)[:2]
    crossed_seq[[first, second]] = crossed_seq[[second, first]]

    with pytest.raises(UsageError, match="at least three whole steps"):
        build(operations(Traffic(Shape(dp=4), 1), steps=2))
    with pytest.raises(UsageError, match="the clock was set back"):
        build(known._replace(end_ns=back))
    with pytest.raises(UsageError, match="another order"):
        build(known._replace(seq=crossed_seq))
    with pytest.raises(UsageError, match="none of these ranks"):
        if_ranks_were_as_fast(build(known), {99})
    with pytest.raises(UsageError, match="none of these communicators"):
        if_links_were_as_fast(build(known), {5})
