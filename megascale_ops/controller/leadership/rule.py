# SPDX-License-Identifier: Apache-2.0
"""When a standby takes over: pure, told the time and what was seen of the lock.

The leader holds a lock in the database, on a connection of its own, and says something on it once a second.

- The lock is free and the leader has resigned, or there never was one: at once. Where it has given way to one of the
  standbys (``hearing``), that one has ``HEIR_S`` before all others.
- The lock is free, and no leader has resigned: it was killed, or has lost its connection. It is given ``FREE_S`` to
  take the lock again; after the database was away, ``RETURN_S``, for the leader may have ordered restarts
  meanwhile that only it knows of.
- The lock is held by a connection on which nothing was said for ``SILENT_S``: the process is paused or its machine
  gone, and the database has not noticed. Its connections are ended, by force.

A leader that is slow but speaks is never replaced, and neither is one of which nothing can be told. Silence counts only
as long as this standby has looked itself: one that was paused begins anew.
"""

from enum import Enum
from typing import NamedTuple

from megascale_ops.controller.journal.fence import Leader

# 0.5 s between two looks.
LOOK_S = 0.5
# 1 s between two words of the leader.
BEAT_S = 1.0
# 1.5 s: a leader whose connection was ended has a new one within a second.
FREE_S = 1.5
# 6 s: after an outage the leader tries each second, and connecting may take 3 s.
RETURN_S = 6.0
# 6 s: six words that were not said; with two looks and the reading of the journal a standby leads within 10 s.
SILENT_S = 6.0
# 5 s: ten looks of the standby that a leader has given way to.
HEIR_S = 5.0
# 2.5 s: a look has 2 s to be answered. Longer than that between two looks, and this process was away itself.
GAP_S = 2.5


class Step(Enum):
    """What a standby does now."""

    WAIT = "wait"
    TAKE = "take"
    FORCE = "force"


class Seen(NamedTuple):
    """What a look at the database has shown.

    Attributes:
        holder: the server's process behind the connection that holds the lock; 0: it is free.
        word: changes with each word of that connection; "" where it can't be seen (another role's connection).
        leader: the newest one, None where there never was one.
        epoch: its number.
        up_s: for how long the database has been up.
        standbys: address by identity of those that wait and are connected.
    """

    holder: int
    word: str
    leader: Leader | None
    epoch: int
    up_s: float
    standbys: dict[str, str]


class _Watch:
    """What was seen in one watch without a gap: since when the lock is free, and the last word that was heard."""

    def __init__(self) -> None:
        self.free_s: float | None = None
        self.word: tuple[int, str] | None = None
        self.word_s = 0.0


class Succession:
    """What one standby has seen so far. ``me``: its identity, by which a leader names it that gives way to it."""

    def __init__(self, me: str = "") -> None:
        self._me = me
        self._looked_s: float | None = None
        self._back_s: float | None = None  # since when the database answers again
        self._was_away = False
        self._watch = _Watch()

    def look(self, seen: Seen | None, now_s: float) -> Step:
        """Take in a look, and say what to do.

        Args:
            seen: None where the database did not answer, or takes no writes.
            now_s: monotonic seconds.
        """
        if seen is None:
            self._was_away = True
            self._watch = _Watch()
            return Step.WAIT
        if self._was_away:
            self._was_away, self._back_s = False, now_s
        elif self._looked_s is None and seen.up_s < RETURN_S:
            self._back_s = now_s - seen.up_s
        if self._looked_s is not None and now_s - self._looked_s > GAP_S:
            self._watch = _Watch()
        self._looked_s = now_s
        return self._listen(seen, now_s) if seen.holder else self._free(seen, now_s)

    def _free(self, seen: Seen, now_s: float) -> Step:
        watch = self._watch
        watch.word = None
        if watch.free_s is None:
            watch.free_s = now_s
        if seen.leader is None or seen.leader.resigned:
            heir = seen.leader.heir if seen.leader is not None else ""
            is_anothers = heir != self._me and heir in seen.standbys
            return Step.WAIT if is_anothers and now_s - watch.free_s < HEIR_S else Step.TAKE
        if self._back_s is not None and now_s - self._back_s < RETURN_S:
            return Step.WAIT
        return Step.TAKE if now_s - watch.free_s >= FREE_S else Step.WAIT

    def _listen(self, seen: Seen, now_s: float) -> Step:
        watch, word = self._watch, (seen.holder, seen.word)
        watch.free_s = None
        if word != watch.word:
            watch.word, watch.word_s = word, now_s
            return Step.WAIT
        return Step.FORCE if seen.word and now_s - watch.word_s >= SILENT_S else Step.WAIT
