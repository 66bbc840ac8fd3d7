# SPDX-License-Identifier: Apache-2.0
"""The strip of step times and the heat map, made from histories of jobs that never ran."""

import pytest

from megascale_ops.controller.history.step_history import StepHistory
from megascale_ops.controller.live.heatmap import COLUMNS_AT_FIRST, LATE_S, MOST_ROWS, Times, rows_of
from megascale_ops.schema.history import Bucket, Facts, History, decode, encode
from megascale_ops.schema.identity import Mesh
from megascale_ops.schema.live import numbers
from megascale_ops.schema.progress import StepWork
from tests.fakes.step_histories import history_of


def _look(times: Times, history: History | tuple[Bucket, ...], ranks: int, now_s: float) -> int:
    """Look once and return how often it paused."""
    buckets = history.buckets if isinstance(history, History) else history
    return sum(1 for _pause in times.poll_buckets(buckets, ranks, now_s))


def _look_to_the_end(times: Times, history: History, ranks: int) -> None:
    now_s = 0.0
    while now_s == 0.0 or times.missing:
        _look(times, history, ranks, now_s)
        now_s += 1.0


def test_a_slow_rank_stands_out_in_its_row_while_it_is_slow() -> None:
    """Rank 2 works a quarter longer in steps 20 to 39: its cells say 125 %, before and elsewhere 100 %."""
    history = history_of(4, 60, slow=[2], slow_steps=range(20, 40))
    times = Times()

    _look_to_the_end(times, history, 4)

    by_step = {slot.step: slot for slot in times.slots()}
    assert list(by_step[30].cells) == [100, 100, 125, 100]
    assert list(by_step[50].cells) == [100, 100, 100, 100]
    assert by_step[30].median_s == 1.2
    assert by_step[50].median_s == 1.0


def test_the_newest_columns_come_first_and_all_come() -> None:
    """A page that opens on a long history has its newest columns after one look, and the whole after some."""
    history = history_of(2, 60)
    times = Times()

    _look(times, history, 2, 0.0)
    first = times.slots()
    _look_to_the_end(times, history, 2)

    assert len(first) == COLUMNS_AT_FIRST
    assert first[-1].step == 59
    assert len(times.slots()) == len(history.buckets)
    assert times.missing == 0


def test_old_columns_are_not_made_again() -> None:
    """Only what still grows is looked at once all is made: a look costs two columns, not sixty."""
    history = history_of(2, 60)
    times = Times()
    _look_to_the_end(times, history, 2)
    kept = times.slots()[0]

    _look(times, history, 2, 100.0)

    assert times.slots()[0] is kept


def test_two_columns_that_became_one_are_replaced() -> None:
    """When the history merges buckets, the columns that it no longer has are gone."""
    history = history_of(2, 8)
    times = Times()
    _look_to_the_end(times, history, 2)
    first, second = history.buckets[:2]
    merged = Bucket(first.start_s, first.length_s + second.length_s, second.step, second.cells)

    _look(times, (merged, *history.buckets[2:]), 2, 100.0)

    slots = times.slots()
    assert len(slots) == len(history.buckets) - 1
    assert (slots[0].start_s, slots[0].length_s) == (first.start_s, 2.0)


def test_many_ranks_share_rows_of_whole_nodes() -> None:
    """12,288 ranks make 256 rows of 48; a row shows its slowest rank."""
    history = history_of(1024, 8, slow=[777], slow_steps=range(8))
    times = Times()

    _look_to_the_end(times, history, 1024)

    assert (rows_of(12_288), rows_of(256), rows_of(257)) == (48, 1, 8)
    assert (times.row_ranks, times.rows) == (8, 128)
    cells = times.slots()[-1].cells
    assert [row for row, share in enumerate(cells) if share > 110] == [777 // 8]
    assert -(-12_288 // rows_of(12_288)) <= MOST_ROWS


def test_what_ranks_did_of_late_is_the_difference_of_sums() -> None:
    """In a bucket of hours a rank that has become slow a moment ago shows it at once."""
    history = history_of(4, 4)
    last = history.buckets[-1]
    times = Times()
    _look(times, (last,), 4, 0.0)
    steps, wall_s, waiting_s = last.cells[:3]
    for rank in range(4):
        steps[rank] += 10
        wall_s[rank] += 10.0
        waiting_s[rank] += 0.0 if rank == 3 else 5.0

    _look(times, (last,), 4, LATE_S)

    assert list(numbers("own", times.late.own)) == [100, 100, 100, 200]
    assert list(numbers("waiting", times.late.waiting)) == [50, 50, 50, 0]


def test_ranks_without_steps_are_not_known() -> None:
    """A rank that ended no step has no cell and takes part in no median."""
    history = history_of(2, 8)
    times = Times()

    _look(times, history, 3, 0.0)

    assert list(times.slots()[-1].cells) == [100, 100, 0]


def _told(history: StepHistory, step: int, losses: list[float | None], *, later: bool) -> None:
    """Let each rank end a step of a second with a loss; None: with one that is no number."""
    take = history.put_by if later else history.ingest_steps
    for rank, loss in enumerate(losses):
        work = StepWork(step, 1.0, loss=loss, loss_is_finite=loss is not None)
        take(rank, "a", Mesh(), (work,), 1000.5 + step)


@pytest.mark.parametrize("later", [False, True])
def test_the_loss_of_a_column_is_the_mean_of_what_its_ranks_told(later: bool) -> None:
    """Of a job that is judged step by step and of a large one; what is no number is counted, and no part of it."""
    history = StepHistory(1000.0)
    _told(history, 0, [8.0, 6.0], later=later)
    _told(history, 1, [5.0, None], later=later)
    _told(history, 2, [None, None], later=later)
    for rank in range(2):
        history.ingest_steps(rank, "a", Mesh(), (StepWork(3, 1.0),), 1003.5)
    times = Times()

    _look_to_the_end(times, decode(encode(History(Facts("gpt"), history.buckets()))), 2)

    slots = {slot.step: (slot.loss, slot.astray) for slot in times.slots()}
    assert slots == {0: (7.0, 0), 1: (5.0, 1), 2: (None, 2), 3: (None, 0)}


def test_columns_that_become_one_have_the_mean_of_both() -> None:
    """However long a job lives, its losses take as little room as its columns."""
    history = StepHistory(1000.0, most_buckets=16)
    for step in range(64):
        _told(history, step, [float(step)], later=False)
    times = Times()

    _look_to_the_end(times, History(Facts("gpt"), history.buckets()), 1)

    slots = times.slots()
    assert len(slots) <= 16
    losses = [slot.loss for slot in slots if slot.loss is not None]
    assert losses == sorted(losses)
    assert sum(bucket.losses.total for bucket in history.buckets()) == sum(range(64))
    assert losses[0] == 1.5


def test_a_controller_that_takes_over_goes_on_with_the_losses() -> None:
    """They are kept with the steps."""
    history, later = StepHistory(1000.0), StepHistory(1000.0)
    _told(history, 0, [8.0, None], later=False)
    kept = decode(encode(History(Facts("gpt"), history.buckets()))).buckets

    later.restore((), 0, (), kept)
    _told(later, 0, [6.0], later=False)

    assert (later.buckets()[0].losses.mean, later.buckets()[0].losses.astray) == (7.0, 1)
