# SPDX-License-Identifier: Apache-2.0
"""What ranks find in themselves becomes one verdict a class."""

from megascale_ops.diagnosis.own_checks import verdicts
from megascale_ops.schema.progress import RankFinding

CORRUPT = RankFinding("silent_corruption", 40, "rank 1 holds other values than the 3 other replicas in 1 of 9 tensors")
STALE = RankFinding("stale_weights", 40, "no parameter of 'optimizer' has changed by a bit between steps 30 and 40")
PAIR = RankFinding("replicas_differ", 40, "the replicas on ranks 0 and 1 differ in 1 of 9 tensors")


def test_who_tells_is_who_it_is_about() -> None:
    """With its node, and since when; a class that this program does not know is passed over."""
    found = verdicts({1: ("b", (CORRUPT, RankFinding("of a later version", 3, "?")))}, 2)

    (verdict,) = found.values()
    assert (verdict.fault, verdict.culprits, verdict.nodes) == ("silent_corruption", (1,), ("b",))
    assert (verdict.reason, verdict.since_step, verdict.round) == (CORRUPT.text, 40, 2)


def test_what_is_of_the_whole_job_blames_nobody() -> None:
    """One rank speaks for all; a pair that disagrees is named as a pair, with one sentence."""
    found = verdicts({0: ("a", (STALE, PAIR)), 1: ("b", (PAIR,))}, 1)

    assert (found["stale_weights"].culprits, found["stale_weights"].nodes) == ((), ())
    assert (found["replicas_differ"].culprits, found["replicas_differ"].nodes) == ((0, 1), ("a", "b"))
    assert found["replicas_differ"].reason == PAIR.text


def test_nothing_found_is_no_verdict() -> None:
    """Neither of no rank nor of ranks without findings."""
    assert not verdicts({}, 1)
    assert not verdicts({0: ("a", ())}, 1)
