# SPDX-License-Identifier: Apache-2.0
"""Who speaks for many ranks is like all of them."""

import pytest

from megascale_ops.diagnosis.statistics.sampling import some_of


@pytest.mark.parametrize("count", [0, 1, 2, 63, 64, 65, 127])
def test_of_few_all_speak(count: int) -> None:
    """There is nothing to save below twice as many as are wanted."""
    assert list(some_of(count, 64)) == list(range(count))


@pytest.mark.parametrize("count", [128, 160, 1_000, 1_024, 8_192, 12_288, 100_000])
def test_who_speaks_for_many_is_spread_evenly(count: int) -> None:
    """Over the ranks, and over the places within a node, whatever number of GPUs that has."""
    some = some_of(count, 64)

    assert 56 <= len(some) <= 64
    assert list(some) == sorted(set(some))
    assert set(some) <= set(range(count))
    assert max(map(int.__sub__, some[1:], some)) <= 3 * count / 64
    for gpus in (2, 4, 8):
        within = [sum(place % gpus == one for place in some) for one in range(gpus)]
        assert min(within) >= len(some) / gpus / 4, within
        assert max(within) <= 2.5 * len(some) / gpus, within


@pytest.mark.parametrize("count", [1_024, 2_048, 12_288])
def test_nobody_speaks_for_a_node_alone(count: int) -> None:
    """An even stride would ask local rank 0 of every node and no other."""
    some = some_of(count, 64)

    assert len({place % 16 for place in some}) >= 12
