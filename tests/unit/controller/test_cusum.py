# SPDX-License-Identifier: Apache-2.0
"""The cumulative sums come out the same whoever adds them up, and strike when they should."""

import math
import random
from array import array

import pytest
from hypothesis import given
from hypothesis import strategies as st

from megascale_ops.diagnosis.statistics import arrays
from megascale_ops.diagnosis.stragglers.cusum import Step, Sums, Threshold
from megascale_ops.diagnosis.stragglers.own_work import MediansOfOthers

TESTS = (Threshold(0.5, 9.0), Threshold(0.2, 12.0))


def one_step(at: int, own_s: list[float], unit_s: float = 0.001) -> Step:
    """Return a step of ranks that work so long."""
    return Step(at, MediansOfOthers(own_s), 0.0, unit_s, 0.05, TESTS)


@given(seed=st.integers(0, 10_000), ranks=st.integers(2, 60), missing=st.integers(0, 10))
def test_numpy_and_plain_python_add_up_the_same(seed: int, ranks: int, missing: int) -> None:
    """Sums, since when they rise, excesses and who strikes; also where some have not told, in any order."""
    order = random.Random(seed)  # noqa: S311  no secret
    plain, fast = Sums(2), Sums(2)
    for sums in (plain, fast):
        sums.grow(ranks)

    for at in range(1, 12):
        places = order.sample(range(ranks), max(2, ranks - missing))
        own_s = [0.03 + order.choice([0.0, 0.0, 0.001, 0.004, 0.1]) + order.gauss(0, 0.001) for _ in places]
        step = one_step(at, own_s)
        of_plain, of_fast = (array("d", (math.nan,)) * ranks for _ in range(2))

        struck = plain.add(places, own_s, step, of_plain)
        struck_fast = fast._add_fast(places, own_s, step, of_fast)

        assert struck_fast == struck
        assert of_fast.tobytes() == of_plain.tobytes()
        assert fast.began == plain.began
        for mine, other in zip(fast.totals, plain.totals, strict=True):
            assert list(mine) == pytest.approx(list(other))


@pytest.mark.parametrize("fast", [True, False])
def test_a_sum_is_scaled_and_found_whoever_does_it(monkeypatch: pytest.MonkeyPatch, fast: bool) -> None:
    """Half of the unit, twice the sum; and one that begins anew is not found any more."""
    monkeypatch.setattr(arrays, "is_ready", lambda: fast)
    monkeypatch.setattr(arrays, "LARGE", 1)
    sums = Sums(2)
    sums.grow(3)
    own_s = [0.030, 0.030, 0.033]
    for at in range(1, 4):
        sums.add(range(3), own_s, one_step(at, own_s), array("d", (math.nan,)) * 3)

    sums.scale(2.0)

    assert sums.of(2) == pytest.approx([15.0, 16.8])
    assert (sums.above(0, 14.0), sums.above(1, 17.0)) == ([2], [])
    sums.clear(2)
    assert (sums.above(0, 14.0), sums.of(2)) == ([], [0.0, 0.0])


def test_nothing_is_added_up_before_the_noise_is_known() -> None:
    """The excesses are noted all the same: the noise is learnt from them."""
    sums, excess_s = Sums(2), array("d", (math.nan,)) * 2
    sums.grow(2)

    struck = sums.add([0, 1], [0.03, 0.13], one_step(1, [0.03, 0.13], unit_s=0.0), excess_s)

    assert (struck, list(excess_s), sums.of(1)) == ([], pytest.approx([-0.1, 0.1]), [0.0, 0.0])
