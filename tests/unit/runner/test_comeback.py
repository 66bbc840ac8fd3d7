# SPDX-License-Identifier: Apache-2.0
"""When a lost host of ``run --hosts`` is looked at again: soon at first, ever more rarely, anew after a steady time."""

from megascale_ops.runner.hosts.comeback import EARLY_S, FIRST_S, MOST_S, STEADY_S, Comeback


def test_pauses_grow_up_to_a_minute_and_begin_anew_after_a_steady_run() -> None:
    """A machine that boots is not asked all the time; one that was back for long is asked as at first."""
    host = Comeback()
    host.begin(0.0)
    never = host.is_due(1e9)

    pauses = [host.lose(100.0 + k) for k in range(6)]
    due = host.is_due(105.0 + pauses[-1] - 0.1), host.is_due(105.0 + pauses[-1])
    host.begin(200.0)
    again = host.is_due(1e9)
    flaps = host.lose(200.0 + STEADY_S - 1.0)
    host.begin(300.0)
    steady = host.lose(300.0 + STEADY_S)

    assert not never
    assert pauses == [FIRST_S, 2 * FIRST_S, 4 * FIRST_S, 8 * FIRST_S, MOST_S, MOST_S]
    assert due == (False, True)
    assert not again
    assert (flaps, steady) == (MOST_S, FIRST_S)


def test_an_early_end_is_one_of_a_run_that_was_started_again() -> None:
    """What ends by itself at the first start has failed; soon after a comeback its forerunner may still be there."""
    host = Comeback()
    host.begin(0.0)
    first = host.is_early(1.0)
    host.lose(10.0)
    lost_s = host.lost_s
    host.begin(20.0)

    assert not first
    assert lost_s == 10.0
    assert (host.is_early(20.0 + EARLY_S - 1.0), host.is_early(20.0 + EARLY_S)) == (True, False)
    assert host.lost_s is None
