# SPDX-License-Identifier: Apache-2.0
"""A framework's observer kills the rest of its node: those are no causes, and kills of other nodes are."""

import signal

import pytest

from megascale_ops.diagnosis.exits.classify import Ended, Judged
from megascale_ops.diagnosis.exits.observers import excuse, excuse_lost_connections, excuse_wrapped
from megascale_ops.schema.messages import RankExit
from megascale_ops.schema.progress import RankError

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


class _Unequal(Judged):
    """One that may be looked at, and not searched for among all others."""

    def __eq__(self, other: object) -> bool:
        raise AssertionError("ends were compared with each other")

    __hash__ = Judged.__hash__


def _lost(rank: int) -> Judged:
    error = RankError("ConnectionResetError", "[Errno 104] Connection reset by peer")
    exit_ = RankExit(rank, rank % 4, 9, 1, 0.0, error=error)
    return _Unequal(Ended("n0", exit_, 0.1), "exception", "ConnectionResetError")


def test_who_lost_a_connection_is_not_searched_for_among_all() -> None:
    """A hundred thousand may have lost one peer: what that costs grows with their number, not with its square."""
    crashed = _Unequal(*_killed(2, signal.SIGSEGV)._replace(fault="segfault"))
    ends = [_lost(0), _lost(1), crashed, _lost(3)]

    assert [one.fault for one in excuse_lost_connections(ends)] == ["peer", "peer", "segfault", "peer"]
    assert [one.fault for one in excuse_wrapped(ends)] == ["exception", "exception", "segfault", "exception"]
