# SPDX-License-Identifier: Apache-2.0
"""Thousands of leaders killed, paused and cut off, in virtual time: no order is lost, and none is given twice.

The model is ``tests/fakes/killed_leaders.py``; the same against a real server is a process test.
"""

import pytest
import sqlalchemy as sa

from megascale_ops.controller.journal.fence import Leader, take_epoch
from megascale_ops.controller.journal.tables import META
from tests.fakes.killed_leaders import Database, run
from tests.matrix import wide


@pytest.mark.parametrize("seed", wide(range(4), keep=[0]))
def test_no_order_is_lost_or_doubled(seed: int) -> None:
    """Each need has exactly one order, and the newest need is met soon after the last disaster."""
    runner, counts = run(seed, disasters=600)

    gave_way = counts.pop("gave way")
    assert sum(counts.values()) == 600
    assert min(counts.values()) > 10
    assert gave_way > 5
    assert set(runner.done.values()) == {1}, [need for need, count in runner.done.items() if count > 1]
    assert sorted(runner.done) == list(range(runner.need))
    assert runner.need > 400


def test_without_fence_and_number_orders_are_doubled() -> None:
    """The control: the same disasters, and nothing that holds a paused leader back."""
    assert any(
        count > 1
        for seed in range(2)
        for count in run(seed, disasters=600, is_fenced=False, is_heard=False)[0].done.values()
    )


def test_the_tables_are_those_of_the_journal() -> None:
    """What the model writes is what a controller reads."""
    database = Database()
    with database.engine.begin() as connection:
        epoch = take_epoch(connection, Leader("a", "http://a:1"), 0)
    with database.engine.connect() as connection:
        keys = set(connection.scalars(sa.select(META.c.key)))
    database.engine.dispose()

    assert epoch == 1
    assert keys == {"leader", "leader_epoch"}
