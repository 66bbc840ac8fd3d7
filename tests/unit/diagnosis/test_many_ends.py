# SPDX-License-Identifier: Apache-2.0
"""Ends of a hundred thousand ranks: what a verdict costs grows with their number, not with its square."""

import signal
from collections.abc import Callable

import msgspec
import pytest

from megascale_ops.diagnosis.exits.classify import Ended, Judged
from megascale_ops.diagnosis.exits.first_cause import judge_exits
from megascale_ops.schema.messages import RankExit
from megascale_ops.schema.progress import RankError

RANKS = 24


def _raised(rank: int, kind: str, says: str) -> RankExit:
    return RankExit(rank, rank % 4, 100 + rank, 1, 0.0, step=7, error=RankError(kind, says))


def _same(rank: int) -> RankExit:
    return _raised(rank, "KeyError", "'schedule at 7'")


def _each_its_own(rank: int) -> RankExit:
    return _raised(rank, "ValueError", f"sample {'abcdefghijklmnopqrstuvwxyz'[rank]} can't be read")


def _lost_one(rank: int) -> RankExit:
    return _raised(rank, "ConnectionResetError", "[Errno 104] Connection reset by peer")


def _killed(rank: int) -> RankExit:
    return RankExit(rank, rank % 4, 100 + rank, -signal.SIGKILL, 0.0, step=7)


def _asked_to_go(rank: int) -> RankExit:
    return RankExit(rank, rank % 4, 100 + rank, -signal.SIGTERM, 0.0, step=7)


def _one_crashed(rank: int) -> RankExit:
    return RankExit(5, 1, 105, -signal.SIGSEGV, 0.0, step=7) if rank == 5 else _lost_one(rank)


class Counted:
    """How often a value was compared, or hashed, which reads as much."""

    def __init__(self) -> None:
        self.times = 0

    def of(self, method: Callable[..., object]) -> Callable[..., object]:
        """The same method, counted."""

        def counted(one: object, *others: object) -> object:
            self.times += 1
            return method(one, *others)

        return counted


@pytest.mark.parametrize("end", [_same, _each_its_own, _lost_one, _killed, _asked_to_go, _one_crashed])
def test_ends_are_not_searched_for_among_all_others(
    end: Callable[[int], RankExit], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each may be compared a few times; all with all would be 276 pairs of 24."""
    counted = Counted()
    monkeypatch.setattr(Judged, "__eq__", counted.of(tuple.__eq__), raising=False)
    monkeypatch.setattr(Judged, "__hash__", counted.of(tuple.__hash__), raising=False)
    ended = [Ended(f"n{rank // 4}", end(rank), 0.1) for rank in range(RANKS)]

    verdict = judge_exits(ended, world_size=RANKS, missing=(), reports={}, hosts={}, round_=1, wall_s=1e6)

    assert verdict.fault
    assert counted.times <= 2 * RANKS


def test_the_same_of_all_ranks_is_named_as_that_of_all() -> None:
    """No rival is left over, and one that differs is one."""
    alike = [Ended("n0", _same(rank), 0.1) for rank in range(RANKS)]
    other = [*alike[:-1], Ended("n0", msgspec.structs.replace(_each_its_own(0), rank=RANKS - 1), 0.1)]

    def judged(ended: list[Ended]) -> tuple[str, int, bool]:
        found = judge_exits(ended, world_size=RANKS, missing=(), reports={}, hosts={}, round_=1, wall_s=1e6)
        return found.fault, len(found.culprits), str(RANKS - 1) in found.otherwise

    assert judged(alike) == ("exception_everywhere", RANKS, False)
    assert judged(other) == ("exception", RANKS - 1, True)
