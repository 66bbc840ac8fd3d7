# SPDX-License-Identifier: Apache-2.0
"""Steps that are put by as rows and taken together say what they say one by one."""

import math
import random

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from megascale_ops.controller.history import histories
from megascale_ops.diagnosis.stragglers import step_table
from megascale_ops.diagnosis.stragglers.detector import Watch
from megascale_ops.diagnosis.stragglers.loss import LossWatch
from megascale_ops.diagnosis.stragglers.step_table import StepRows, in_turns
from megascale_ops.schema.history import Place
from megascale_ops.schema.identity import Mesh
from megascale_ops.schema.messages import JobReport
from megascale_ops.schema.policy import JobPolicy
from megascale_ops.schema.progress import RankReport, StepWork
from tests.fakes.controlled_job import World

POLICY = JobPolicy()


def test_the_columns_are_the_fields_of_a_step() -> None:
    """A field that is added to a step, or moved, is noticed here."""
    fields = StepWork.__struct_fields__

    named = [getattr(step_table, name.upper()) for name in fields]

    assert named == list(range(4, 4 + len(fields)))


def test_a_row_holds_what_was_put_by() -> None:
    """Each in its column; a loss that is none or no number is NaN, and told apart."""
    rows = StepRows()
    assert not rows

    rows.put(3, 1 << 41, 2.5, 2.0, StepWork(7, *(float(each) for each in range(1, 10)), loss=0.5))
    rows.put(4, 8, 2.5, 1.0, StepWork(8, 1.0, loss_is_finite=False))
    rows.put(4, 9, 2.5, 1.0, StepWork(9, 1.0))
    table = rows.drain_table()

    assert table[0].tolist() == [3, 1 << 41, 2.5, 2, 7, 1, 2, 3, 4, 5, 6, 7, 8, 9, 0.5, 1]
    assert [(math.isnan(row[step_table.LOSS]), row[step_table.LOSS_IS_FINITE]) for row in table[1:]] == [
        (True, 0),
        (True, 1),
    ]
    assert not rows


@given(st.lists(st.integers(0, 3), max_size=8), st.data())
def test_rows_come_in_the_order_in_which_they_were_put_by(sizes: list[int], data: st.DataObject) -> None:
    """One by one (0) or many at once, by rows or by columns; and any of them can be taken."""
    rows, wanted = StepRows(), []
    for number, size in enumerate(sizes):
        if not size:
            rows.put(number, number, 0.0, 1.0, StepWork(number, 1.0))
            wanted.append(number)
            continue
        many = step_table.columns(size) if number % 2 else np.empty((size, 16))
        many[:] = number
        rows.put_rows(many)
        wanted += [number] * size
    assert bool(rows) == bool(wanted)

    table = rows.drain_table()

    assert table.shape == (len(wanted), 16)
    assert table[:, step_table.RANK].tolist() == wanted
    assert not rows
    assert rows.drain_table().shape == (0, 16)
    places = np.array(data.draw(st.lists(st.integers(0, max(0, len(wanted) - 1)), max_size=len(wanted))), np.intp)
    for each in (table, np.ascontiguousarray(table), np.asfortranarray(table)):
        assert np.array_equal(step_table.rows_at(each, places), table[places], equal_nan=True)


@given(st.lists(st.integers(0, 5), min_size=1, max_size=40))
def test_turns_hold_every_row_once_and_each_ranks_in_order(ranks: list[int]) -> None:
    """A rank occurs once at most in each turn."""
    table = np.zeros((len(ranks), 16))
    table[:, step_table.RANK] = ranks
    table[:, step_table.STEP] = range(len(ranks))

    turns = list(in_turns(table))

    for turn in turns:
        assert len(set(turn[:, step_table.RANK])) == len(turn)
    assert len(turns) == max(ranks.count(rank) for rank in ranks)
    for rank in set(ranks):
        steps = [step for turn in turns for row, step in turn[:, [step_table.RANK, step_table.STEP]] if row == rank]
        assert steps == [step for step, other in enumerate(ranks) if other == rank]


def as_table(works: list[tuple[int, StepWork]]) -> "step_table.Table":
    """Return steps as rows."""
    rows = StepRows()
    for rank, work in works:
        rows.put(rank, work.step, 0.0, 1.0, work)
    return rows.drain_table()


def places(ranks: int) -> dict[int, Place]:
    """Return where ranks are: eight a node, two pipeline stages."""
    return {rank: Place(rank, f"node-{rank // 8}", Mesh(pp=rank % 2)) for rank in range(ranks)}


def losses_of(seed: int, ranks: int, steps: int) -> list[tuple[int, StepWork]]:
    """Return noisy losses of ranks, some of which jump, have no number, or tell none."""
    chance = random.Random(seed)  # noqa: S311  no secret
    works = []
    for step in range(steps):
        for rank in range(ranks):
            loss: float | None = 2.0 + chance.gauss(0.0, 0.1)
            finite = True
            if rank == 3 and 100 <= step < 105:
                loss = 50.0 + step
            if rank == 5 and step >= 110:
                loss, finite = None, False
            if rank == 6:
                loss = None
            if rank == 7 and step >= 60:
                loss = 9.0  # a new normal
            works.append((rank, StepWork(step, 0.1, loss=loss, loss_is_finite=finite)))
    return works


@pytest.mark.parametrize("at_once", [8, 20, 64])
def test_losses_as_rows_give_the_verdicts_of_losses_one_by_one(at_once: int) -> None:
    """After every so many of them: the same faults, ranks, steps and figures."""
    one_by_one, as_rows, where = LossWatch(), LossWatch(), places(8)
    works = losses_of(1, 8, 140)
    seen = set()
    for first in range(0, len(works), at_once):
        some = works[first : first + at_once]
        for rank, work in some:
            one_by_one.ingest_losses(rank, where[rank].node, (work,), POLICY)
        as_rows.take_rows(as_table(some), where, POLICY)

        assert as_rows.verdicts(1) == one_by_one.verdicts(1)
        seen |= one_by_one.verdicts(1).keys()
    assert seen == {"loss_nan", "loss_spike"}


@pytest.mark.parametrize("apart", [None, 2])
def test_a_loss_that_all_ranks_share_is_judged_as_each_by_itself(apart: int | None) -> None:
    """All tell the mean of all, which jumps for a while; or one tells its own, which jumps at another time."""
    one_by_one, as_rows, where = LossWatch(), LossWatch(), places(8)
    chance, seen = random.Random(3), []  # noqa: S311  no secret
    for step in range(160):
        shared = 2.0 + chance.gauss(0.0, 0.1) + (40.0 if 100 <= step < 105 else 0.0)
        own = 3.0 + chance.gauss(0.0, 0.5) + (90.0 if 50 <= step < 55 else 0.0)
        some = [(rank, StepWork(step, 0.1, loss=own if rank == apart else shared)) for rank in range(8)]
        for rank, work in some:
            one_by_one.ingest_losses(rank, where[rank].node, (work,), POLICY)
        as_rows.take_rows(as_table(some), where, POLICY)

        found = as_rows.verdicts(1)
        assert found == one_by_one.verdicts(1)
        seen += [verdict.culprits for verdict in found.values()]
    everyone = tuple(rank for rank in range(8) if rank != apart)
    assert set(seen) == ({everyone} if apart is None else {everyone, (apart,)})


def steps_of(ranks: int, steps: int, slow: int) -> list[tuple[int, StepWork]]:
    """Return steps of ranks, one of which needs 30 % longer than its equals."""
    chance = random.Random(5)  # noqa: S311  no secret
    works = []
    for step in range(steps):
        for rank in range(ranks):
            own_s = (0.5 + 0.2 * (rank % 2)) * (1.3 if rank == slow else 1.0) * chance.gauss(1.0, 0.01)
            works.append((rank, StepWork(step, 1.0, waiting_s=1.0 - own_s, forward_s=0.4 * own_s, cpu_s=own_s)))
    return works


def test_stragglers_as_rows_are_those_of_steps_one_by_one() -> None:
    """The same rank is named at the same step, with what it did."""
    one_by_one, as_rows, where = Watch(), Watch(), places(64)
    works = steps_of(64, 40, slow=21)
    named = []
    for first in range(0, len(works), 100):
        some = works[first : first + 100]
        for rank, work in some:
            one_by_one.ingest_steps(rank, where[rank].node, where[rank].mesh, (work,))
        as_rows.take_rows(as_table(some), where, ())
        one_by_one.advance(POLICY, 64)
        as_rows.advance(POLICY, 64)

        assert list(map(str, (rank for _group, rank, _held in as_rows.held()))) == list(
            map(str, (rank for _group, rank, _held in one_by_one.held()))
        )
        named += [(rank.rank, rank.node, group.count, held) for group, rank, held in as_rows.held()]
    assert {(rank, node) for rank, node, _count, _held in named} == {(21, "node-2")}
    for mine, other in zip(as_rows.groups.values(), one_by_one.groups.values(), strict=True):
        assert (mine.places, mine.count, mine.noise_s) == (other.places, other.count, other.noise_s)
        assert mine.rows.works(3, 4) == other.rows.works(3, 4)


def test_a_rank_that_comes_late_or_moves_is_judged_among_its_new_equals() -> None:
    """It has a place in the group that its coordinates name now."""
    watch, where = Watch(), places(4)
    watch.take_rows(as_table([(0, StepWork(1, 1.0)), (2, StepWork(1, 1.0))]), where, ())
    where[2] = Place(2, "node-9", Mesh(pp=1))

    watch.take_rows(as_table([(2, StepWork(2, 1.0)), (9, StepWork(2, 1.0))]), where | {9: Place(9, "n", Mesh())}, {2})

    assert {key: group.places for key, group in watch.groups.items()} == {
        (0, -1): {0: 0, 2: 1},
        (1, -1): {2: 0},
        (-1, -1): {9: 0},
    }


def test_a_rank_that_is_known_from_before_and_does_not_speak_is_nobodys_equal() -> None:
    """After a restart of the controller with fewer ranks than its history knows: those that speak are judged."""
    watch, where = Watch(), places(4)

    watch.take_rows(as_table([(rank, StepWork(1, 1.0)) for rank in (0, 1, 2)]), where, {0, 1, 2, 3})

    assert sorted(rank for group in watch.groups.values() for rank in group.places) == [0, 1, 2]
    assert not watch.advance(POLICY, 4)


async def test_a_large_job_is_judged_by_rows_and_a_new_round_begins_anew(monkeypatch: pytest.MonkeyPatch) -> None:
    """What was put by in a round that is over is in the history, and says nothing of the next one."""
    monkeypatch.setattr(histories, "LARGE", 2)
    world = World()
    await world.up("a")
    job = world.loop.jobs["job"]
    history = world.loop.histories
    slowness = world.loop.slowness
    taken: list[int] = []
    monkeypatch.setattr(LossWatch, "take_rows", lambda _self, rows, _places, _policy: taken.append(len(rows)))
    works = (StepWork(5, 0.5), StepWork(6, 0.5))
    reports = tuple(RankReport(rank, rank, 1, world.round, work=works) for rank in range(2))
    assert history.ingest_report(job, "a", JobReport("job", world.round, "/run", reports), 1000.0)
    world.loop.tick()
    assert taken == [4]

    late = (RankReport(0, 0, 1, world.round, work=(StepWork(7, 0.5),)),)
    assert history.ingest_report(job, "a", JobReport("job", world.round, "/run", late), 1001.0)
    slowness.take_rows(job, world.round - 1, as_table([(0, StepWork(7, 0.5))]), places(1), ())
    job.change(round=world.round + 1)
    world.loop.tick()

    assert taken == [4]
    assert sum(sum(bucket.cells[0]) for bucket in history.of(job).buckets()) == 5
