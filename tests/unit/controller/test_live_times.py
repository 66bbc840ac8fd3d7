# SPDX-License-Identifier: Apache-2.0
"""The strip of step times and the heat map, made from histories of jobs that never ran."""

from megascale_ops.controller.live.heatmap import COLUMNS_AT_FIRST, LATE_S, MOST_ROWS, Times, rows_of
from megascale_ops.schema.history import Bucket, History
from megascale_ops.schema.live import numbers
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
