# SPDX-License-Identifier: Apache-2.0
"""Medians that ask for less are NumPy's own to the last digit; blocks are kept as queues would keep them."""

from collections import deque

import numpy as np
import pytest

from megascale_ops.diagnosis.statistics.block_means import BlockMeans
from megascale_ops.diagnosis.statistics.medians import (
    median,
    median_and_quantile,
    medians_of_columns,
    medians_of_sorted,
)


@pytest.mark.parametrize("count", [1, 2, 3, 4, 5, 8, 64, 191, 192, 1500])
@pytest.mark.parametrize("kind", [np.float32, np.float64])
def test_medians_are_those_of_numpy(count: int, kind: type) -> None:
    """Whatever the number of values: the same bits as ``numpy.median`` and ``numpy.quantile``, ties among them."""
    chance = np.random.default_rng(count)
    for values in (chance.standard_normal(count).astype(kind), chance.integers(0, 3, count).astype(kind)):
        assert median(values) == float(np.median(values))
        exact = values.astype(float)
        for share in (0.2, 0.5, 0.8):
            assert median_and_quantile(exact, share) == (float(np.median(exact)), float(np.quantile(exact, share)))


def test_medians_of_rows_and_columns_are_those_of_numpy() -> None:
    """Of even and odd numbers of values alike."""
    chance = np.random.default_rng(5)
    for count in (1, 2, 7, 8):
        rows = chance.standard_normal((9, count)).astype(np.float32)

        assert (medians_of_sorted(np.sort(rows, axis=1)) == np.median(rows, axis=1)).all()
        assert (medians_of_columns(rows.T) == np.median(rows.T, axis=0)).all()


def test_blocks_are_kept_as_a_queue_of_each_unit_keeps_them() -> None:
    """The newest of each unit stand last; a unit that came later has NaN before its first, one without any only NaN."""
    chance, kept = np.random.default_rng(3), 4
    blocks, queues = BlockMeans(kept), {place: deque[float](maxlen=kept) for place in range(5)}
    everyone = np.array([3, 0, 4, 1, 2])

    assert blocks.of(everyone).shape == (5, 0)
    for turn in range(9):
        some = everyone[: 1 + turn % 4]
        means = chance.standard_normal(len(some))
        blocks.add(some, means)
        for place, mean in zip(some.tolist(), means.tolist(), strict=True):
            queues[place].append(mean)

        longest = max(map(len, queues.values()))
        wanted = [[np.nan] * (longest - len(queue)) + list(queue) for queue in map(queues.get, everyone.tolist())]
        np.testing.assert_array_equal(blocks.of(everyone), wanted)
