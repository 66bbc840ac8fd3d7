# SPDX-License-Identifier: Apache-2.0
"""The clocks of several GPUs are brought to one, with a bound that holds."""

import pytest
from hypothesis import given
from hypothesis import strategies as st
from megascale_kernels.tracing import Exchange, Offset, align, offset_of

TIMES = st.integers(0, 10**6)


def exchange(offset_ns: int, asked_ns: int, there_ns: int, back_ns: int) -> Exchange:
    """A ping-pong of which we know the truth."""
    return Exchange(asked_ns, asked_ns + there_ns + offset_ns, asked_ns + there_ns + back_ns)


@given(st.integers(-(10**15), 10**15), st.lists(st.tuples(TIMES, TIMES, TIMES), min_size=1, max_size=20))
def test_the_error_is_a_bound(offset_ns: int, trips: list[tuple[int, int, int]]) -> None:
    """However unequal the two ways are, the truth lies within the error."""
    found = offset_of(exchange(offset_ns, *trip) for trip in trips)

    assert abs(found.offset_ns - offset_ns) <= found.error_ns + 1
    assert found.error_ns <= min((there + back + 1) // 2 for _, there, back in trips)


def test_clocks_that_drift_are_judged_by_the_fastest_exchange() -> None:
    """No common interval is left, so the narrowest one counts."""
    assert offset_of([Exchange(0, 1000, 10), Exchange(100, 2000, 400)]) == Offset(995, 5)


@pytest.mark.parametrize("exchanges", [[], [Exchange(10, 0, 9)]])
def test_what_cannot_be_is_refused(exchanges: list[Exchange]) -> None:
    """Nothing measured, or an answer before the question."""
    with pytest.raises(ValueError, match="needs exchanges"):
        offset_of(exchanges)


def test_every_rank_is_measured_against_the_first() -> None:
    """The reference has no offset and no error."""
    found = align(lambda rank: exchange(1000 * rank, 50, 3, 3), [0, 1, 2], rounds=4)

    assert found == {0: Offset(), 1: Offset(1000, 3), 2: Offset(2000, 3)}
    assert align(lambda rank: exchange(rank, 0, 0, 0), []) == {}
