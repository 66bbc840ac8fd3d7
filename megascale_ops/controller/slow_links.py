# SPDX-License-Identifier: Apache-2.0
"""Find the rank whose data piles up on its way out, while all the others wait.

A slow link makes a collective slow for every rank of it alike: own work is as ever, waiting grows for all, and no times
tell whose link it is. But the data that goes over it waits in one sender's queue only, where the others' queues are
empty. That is either the sender's own link, or whoever reads at its other end; which, the queue does not tell.

A network that is slow for all fills all queues: then nobody is named.

Pure: told each rank's share of looks with a full queue and its waiting, answers with verdicts.
"""

from collections.abc import Mapping, Sequence
from statistics import median
from typing import NamedTuple

from megascale_ops.schema.health import Finding, Verdict
from megascale_ops.schema.progress import StepWork

# 0.4: of 20 looks 8 with at least 16 KiB in the queue; healthy ranks have it in none or one.
LEAST_SHARE = 0.4
# A rank that is told from its equals has three times as many such looks as the next, and they next to none.
NEXT_SHARE = 1 / 3
MEDIAN_SHARE = 0.15
# 20 % of the step is waited by the median rank: below that a slow link costs nobody anything worth a word.
LEAST_WAITING = 0.2
# Half of what names a rank takes its name back.
_KEPT = 0.5
_FEWEST = 3
# 1 s: as often as the queues are looked at.
_EVERY_S = 1.0


class Sender(NamedTuple):
    """What is known of one rank; both shares in 0..1, ``sending`` -1.0 where it is not known."""

    node: str
    sending: float
    waiting: float  # of its step


def find(ranks: Mapping[int, Sender], named: int | None) -> int | None:
    """Return the rank whose link is slow, None for nobody.

    Args:
        ranks: all ranks of the round by number.
        named: who is named now; that takes less to go on than to begin.
    """
    known = {rank: one for rank, one in ranks.items() if one.sending >= 0.0}
    if len(known) < _FEWEST or len(known) < len(ranks):
        return None
    ease = _KEPT if named is not None else 1.0
    if median(one.waiting for one in known.values()) < LEAST_WAITING * ease:
        return None
    first, second = sorted(known, key=lambda rank: -known[rank].sending)[:2]
    shares = [one.sending for one in known.values()]
    top = known[first].sending
    if top < LEAST_SHARE * ease or known[second].sending > NEXT_SHARE * top or median(shares) > MEDIAN_SHARE:
        return None
    return first


def verdict_of(rank: int, ranks: Mapping[int, Sender], *, since: tuple[float, int], round_: int) -> Verdict:
    """Return the warning; ``since`` is when it began (wall clock) and at which step."""
    own = ranks[rank]
    others = [one.sending for number, one in ranks.items() if number != rank and one.sending >= 0.0]
    waiting = median(one.waiting for one in ranks.values())
    text = (
        f"what rank {rank} on {own.node} sends waits in its TCP queues in {own.sending:.0%} of looks, that of the "
        f"others in {median(others):.0%}; the ranks wait {waiting:.0%} of every step"
    )
    return Verdict(
        fault="slow_link",
        reason=text,
        confidence=0.8,
        culprits=(rank,),
        nodes=(own.node,),
        since_wall_s=since[0],
        since_step=since[1],
        round=round_,
        cause="network",
        cost=waiting,
        evidence=(
            Finding(
                name="send_queue", text=text, source="process", rank=rank, node=own.node, value=own.sending, unit=""
            ),
        ),
        otherwise=f"nobody, had its queue been empty in {1 - LEAST_SHARE:.0%} of looks, or the others' as full; a slow "
        "reader at the other end looks the same",
    )


class LinkWatch:
    """The queues of one round of one job."""

    def __init__(self) -> None:
        self._ranks: dict[int, Sender] = {}
        self._named: int | None = None
        self._since = (0.0, -1)  # wall clock, step
        self._loud = False  # a rank with a full queue has been told of since the last look
        self._looked_s = 0.0

    def take(self, rank: int, node: str, sending: float, works: Sequence[StepWork]) -> None:
        """Take a rank's report: its share of looks, and the steps that it has finished."""
        known = self._ranks.get(rank)
        waiting = known.waiting if known is not None else 0.0
        wall_s = sum(work.wall_s for work in works)
        if wall_s > 0.0:
            waiting = sum(work.waiting_s for work in works) / wall_s
        self._ranks[rank] = Sender(node, sending, waiting)
        self._loud = self._loud or sending >= LEAST_SHARE * _KEPT

    def look(self, now_s: float, wall_s: float, step: int, round_: int) -> Verdict | None:
        """Return the warning that holds now; costs next to nothing while all queues are empty."""
        if now_s - self._looked_s >= _EVERY_S and (self._loud or self._named is not None):
            self._looked_s, self._loud = now_s, False
            found = find(self._ranks, self._named)
            if found is not None and found != self._named:
                self._since = (wall_s, step)
            self._named = found
        if self._named is None:
            return None
        return verdict_of(self._named, self._ranks, since=self._since, round_=round_)
