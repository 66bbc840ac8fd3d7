# SPDX-License-Identifier: Apache-2.0
"""The order of contenders: nobody profits from who ran before."""

import itertools
from collections import Counter

import pytest

pytest.importorskip("torch")

from megascale_kernels.autotune.timing import order_of


@pytest.mark.parametrize("number", [2, 3, 4, 5, 6, 8])
def test_everyone_follows_everyone_equally_often(number: int) -> None:
    """Over as many turns as contenders, twice as many when their number is odd."""
    names = [str(place) for place in range(number)]
    turns = [order_of(names, turn) for turn in range(number * (1 + number % 2))]

    pairs = Counter(pair for turn in turns for pair in itertools.pairwise(turn))

    assert all(sorted(turn) == names for turn in turns)
    assert len(pairs) == number * (number - 1)
    assert len(set(pairs.values())) == 1
    assert len(set(Counter(turn[0] for turn in turns).values())) == 1


def test_one_contender_follows_nobody() -> None:
    """Nor does none."""
    assert order_of(["alone"], 5) == ["alone"]
    assert order_of([], 3) == []
