# SPDX-License-Identifier: Apache-2.0
"""A framework's observer kills the rest of its node: those are no causes, and kills of other nodes are."""

import signal

import pytest

from megascale_ops.diagnosis.exits.classify import Ended, Judged
from megascale_ops.diagnosis.exits.observers import excuse
from megascale_ops.schema.messages import RankExit

NOTE = "[rank: 1] Child process with PID 81 terminated with code 1. Forcefully terminating all other processes to avoid"


def _killed(rank: int, number: int, *, node: str = "n0", says: str = "") -> Judged:
    exit_ = RankExit(rank, rank % 4, 9, -number, 0.0, stderr_tail=says)
    return Judged(Ended(node, exit_, 0.1), "killed", "killed by SIGKILL from outside")


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM])
def test_the_observed_are_excused(number: int) -> None:
    """Of the node whose first rank wrote the note, all but the one that it names."""
    ends = [_killed(0, number, says=NOTE), _killed(1, number), _killed(2, number), _killed(4, number, node="n1")]

    faults = [one.fault for one in excuse(ends)]

    assert faults == ["peer", "killed", "peer", "killed"]


def test_without_a_note_a_kill_is_a_cause() -> None:
    """And a memory fault is one beside any note."""
    crashed = _killed(2, signal.SIGSEGV)._replace(fault="segfault")

    assert [one.fault for one in excuse([_killed(0, signal.SIGKILL)])] == ["killed"]
    assert [one.fault for one in excuse([_killed(0, signal.SIGKILL, says=NOTE), crashed])] == ["peer", "segfault"]
