# SPDX-License-Identifier: Apache-2.0
"""Ranks that were asked to go beside ranks that lost a peer: who was first by more than chance, or nobody."""

import pytest

from megascale_ops.diagnosis.exits.classify import Ended
from megascale_ops.diagnosis.exits.first_cause import judge_exits
from megascale_ops.schema.health import Verdict
from megascale_ops.schema.messages import RankExit

LOST = (
    'Traceback (most recent call last):\n  File "/x.py", line 6, in run\n'
    "RuntimeError: [gloo/transport/tcp/pair.cc:534] Connection closed by peer [10.0.0.7]:4021\n"
)
CANCELLED = "slurmstepd: error: *** STEP 21.1 ON c2 CANCELLED AT 2026-01-05T14:27:50 ***\n"


def judged(victim_s: float, asked_s: float, code: int = -15, said: str = CANCELLED) -> Verdict:
    """Judge a rank that lost a peer so long ago, and two that ended by a signal so long ago."""
    ended = [Ended("n0", RankExit(1, 1, 2, 1, 0.0, stderr_tail=LOST), victim_s)]
    ended += [Ended("n0", RankExit(rank, rank, rank + 1, code, 0.0, stderr_tail=said), asked_s) for rank in (0, 2)]
    return judge_exits(ended, world_size=3, missing=(), reports={}, hosts={}, round_=1, wall_s=1e6)


@pytest.mark.parametrize("victim_s", [1.0, 0.3, 9.0])
def test_who_was_asked_to_go_with_its_step_behind_a_victim_is_not_named(victim_s: float) -> None:
    """A batch system ends the rest of a step in which a rank has failed, be it 0.1 s or 9 s later."""
    assert judged(victim_s, 0.2).culprits == ()


def test_a_signal_of_unknown_senders_is_doubted_where_a_victim_ended_just_before() -> None:
    """It may have been the first or have followed; 9 s later it has followed."""
    near = judged(1.0, 0.2, said="")

    assert (near.fault, near.culprits) == ("killed", (0, 2))
    assert near.confidence <= 0.6
    assert judged(9.0, 0.2, said="").culprits == ()


def test_who_was_asked_to_go_before_its_peers_is_named() -> None:
    """A batch system takes ranks away, and the others lose them."""
    assert judged(0.2, 1.0).culprits == (0, 2)


def test_a_signal_that_stops_nobody_is_a_cause_whenever_it_was_seen() -> None:
    """The kernel tears a killed process down for long, so it may be seen to end after its peers."""
    assert judged(1.0, 0.2, code=-9).culprits == (0, 2)
