# SPDX-License-Identifier: Apache-2.0
"""A leader's connection to the database without a database: what it sees is what a test has put there."""

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

from megascale_ops.controller.leadership.hearing import Petition
from megascale_ops.controller.leadership.rule import Seen

if TYPE_CHECKING:
    from megascale_ops.controller.journal.fence import Leader


class LockSession:
    """What ``Candidate`` asks of a ``Session``; the lock is free until it is taken, and again when it is closed."""

    def __init__(self) -> None:
        self.pid = 7
        self.is_held = False
        self.others_pid = 0  # of another one that holds the lock
        self.leader: Leader | None = None
        self.epoch = 0
        self.standbys: dict[str, str] = {}
        self.asked: dict[str, tuple[str, ...]] = {}  # nodes by standby
        self.ages_s: list[float] = []
        self._words = 0
        self.written: list[tuple[str, ...]] = []  # petitions of this one

    def look(self) -> Seen:
        """Return what there is to see."""
        holder = self.others_pid or (self.pid if self.is_held else 0)
        self._words += 1
        return Seen(holder, str(self._words), self.leader, self.epoch, 1e6, dict(self.standbys))

    def try_lock(self) -> bool:
        """Take the lock."""
        self.is_held = not self.others_pid
        return self.is_held

    def put_standby(self, *, is_waiting: bool) -> None:
        """Nobody looks for it."""

    def put_petition(self, nodes: Sequence[str]) -> None:
        """Keep it."""
        self.written.append(tuple(nodes))

    def petitions(self, standbys: Mapping[str, str]) -> list[Petition]:
        """Return what standbys are asked by, as of a moment ago."""
        return [
            Petition(one, url, frozenset(self.asked[one]), 1.0) for one, url in standbys.items() if one in self.asked
        ]

    def given_way_ages_s(self) -> list[float]:
        """Return how long ago leaders gave way."""
        return self.ages_s

    def close(self) -> None:
        """Free the lock."""
        self.is_held = False
