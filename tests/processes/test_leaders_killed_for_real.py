# SPDX-License-Identifier: Apache-2.0
"""Leaders killed, paused and cut off at drawn moments, on a real PostgreSQL: no order is lost, none is given twice.

Sessions, locks, transactions and the fence are real, and a process may stop inside a transaction; time is virtual. The
result of a long run is in ``benchmarks/results/leaders_killed.txt``.
"""

from functools import partial

import pytest

from tests.fakes.killed_leaders import run
from tests.fakes.postgres import PostgresServer
from tests.fakes.server_database import ServerDatabase

pytestmark = [pytest.mark.processes, pytest.mark.matrix]


@pytest.mark.parametrize("seed", range(2))
def test_no_order_is_lost_or_doubled(postgres: PostgresServer, seed: int) -> None:
    """Of 300 disasters two in five kill: each need has exactly one order, and the newest one is met."""
    runner, counts = run(seed, disasters=300, database=partial(ServerDatabase, postgres.url))
    print(dict(counts), f"needs {runner.need}, highest number {runner.epoch}")

    gave_way = counts.pop("gave way")
    assert sum(counts.values()) == 300
    assert gave_way > 0
    assert set(runner.done.values()) == {1}, [need for need, count in runner.done.items() if count > 1]
    assert sorted(runner.done) == list(range(runner.need))
    assert runner.need > 90


def test_without_fence_and_number_orders_are_doubled(postgres: PostgresServer) -> None:
    """The control: the same disasters, and nothing that holds a paused leader back."""
    runner, _counts = run(
        7, disasters=200, is_fenced=False, is_heard=False, database=partial(ServerDatabase, postgres.url)
    )

    assert any(count > 1 for count in runner.done.values())
