# SPDX-License-Identifier: Apache-2.0
"""Find the rank whose data piles up on its way out, while all the others wait.

A slow link makes a collective slow for every rank of it alike: own work is as ever, waiting grows for all, and no times
show whose link it is. But the data that goes over it waits in one sender's queue only, where the others' queues are
empty. That is either the sender's own link, or the reader at its other end; which of them, the queue does not show.

A link between two nodes may be slow in both directions: then the ranks that send over it have full queues at both ends,
and what they have in common is that pair of nodes. Where several pairs have full queues and all of them share one node,
it is that node's link. A network that is slow for all fills all queues: then no rank is named.

Who sends over a slow link in a collective waits in it like all others. A rank that hardly waits where they do sends for
itself, between two collectives: it uploads a file. As long as its step lasts the two look alike.

Pure: each rank's share of looks with a full queue and its waiting in, verdicts out.
"""

from collections.abc import Callable, Collection, Mapping, Sequence
from statistics import median
from typing import NamedTuple

from megascale_ops.schema.folding import named
from megascale_ops.schema.health import Finding, Verdict
from megascale_ops.schema.progress import StepWork

# 0.4: of 20 looks 8 with at least 16 KiB in the queue; healthy ranks have it in none or one.
LEAST_SHARE = 0.4
# A rank that stands out has three times as many such looks as the next, and the others next to none.
NEXT_SHARE = 1 / 3
MEDIAN_SHARE = 0.15
# 20 % of the step is waited by the median rank: below that a slow link costs too little to warn.
LEAST_WAITING = 0.2
# A quarter of what the median rank waits: less has a rank that was busy with something of its own.
_OWN_WAITING = 0.25
# Half of what names a rank takes its name back.
_KEPT = 0.5
_FEWEST = 3
# 16 findings fit on one screen.
MOST_TOLD = 16
# 1 s: as often as the queues are looked at.
_EVERY_S = 1.0


class Sender(NamedTuple):
    """What is known of one rank; both shares in 0..1, ``sending`` -1.0 where it is not known."""

    node: str
    sending: float
    waiting: float  # of its step
    to: str = ""  # address for which its data waited most often


class Slow(NamedTuple):
    """The ranks whose link is slow, and the nodes at its ends, as far as they are to blame."""

    ranks: tuple[int, ...]
    nodes: tuple[str, ...]


def find(ranks: Mapping[int, Sender], before: Slow | None, places: Mapping[str, str]) -> Slow | None:
    """Return the slow link, None for none.

    Args:
        ranks: all ranks of the round by number.
        before: what is named now; that takes less to go on than to begin.
        places: nodes by the address at which others reach them.
    """
    known = {rank: one for rank, one in ranks.items() if one.sending >= 0.0}
    if len(known) < _FEWEST or len(known) < len(ranks):
        return None
    ease = _KEPT if before is not None else 1.0
    if median(one.waiting for one in known.values()) < LEAST_WAITING * ease:
        return None
    top = max(one.sending for one in known.values())
    if top < LEAST_SHARE * ease:
        return None
    loud = {rank: one for rank, one in sorted(known.items()) if one.sending > NEXT_SHARE * top}
    quiet = [one.sending for rank, one in known.items() if rank not in loud]
    if 2 * len(loud) > len(known) or median(quiet) > MEDIAN_SHARE:
        return None
    if len(loud) == 1:
        return Slow(tuple(loud), tuple(one.node for one in loud.values()))
    return _shared(loud, places)


def sending_alone(ranks: Mapping[int, Sender], full: Collection[int]) -> frozenset[int]:
    """Return those of the ranks with full queues that hardly wait where the others do."""
    waiting = median(one.waiting for one in ranks.values())
    if waiting < LEAST_WAITING * _KEPT:
        return frozenset()
    return frozenset(rank for rank in full if ranks[rank].waiting < _OWN_WAITING * waiting)


def _shared(loud: Mapping[int, Sender], places: Mapping[str, str]) -> Slow | None:
    """Return the link that several ranks send over: between one pair of nodes, or the one of a node in all pairs."""
    pairs = {frozenset({one.node, places.get(one.to, one.node)}) for one in loud.values()}
    if any(len(pair) < 2 for pair in pairs):  # within a node, or to an address of which no node is known
        return None
    shared = frozenset.intersection(*pairs)
    if len(pairs) == 1:
        return Slow(tuple(loud), tuple(sorted(shared)))
    if len(shared) != 1:
        return None
    own = tuple(rank for rank, one in loud.items() if one.node in shared)
    return Slow(own or tuple(loud), tuple(shared))


def verdict_of(slow: Slow, ranks: Mapping[int, Sender], *, since: tuple[float, int], round_: int) -> Verdict:
    """Return the warning; ``since`` is when it began (wall clock) and at which step."""
    others = [one.sending for number, one in ranks.items() if number not in slow.ranks and one.sending >= 0.0]
    waiting = median(one.waiting for one in ranks.values())
    least = min(ranks[rank].sending for rank in slow.ranks)
    text = (
        f"what {_who(slow, ranks)} waits in TCP queues in {least:.0%} of looks, that of the others in "
        f"{median(others):.0%}; the ranks wait {waiting:.0%} of every step"
    )
    return Verdict(
        fault="slow_link",
        reason=text,
        confidence=0.8,
        culprits=slow.ranks,
        nodes=slow.nodes,
        since_wall_s=since[0],
        since_step=since[1],
        round=round_,
        cause="network",
        cost=waiting,
        evidence=tuple(_finding(rank, ranks[rank]) for rank in slow.ranks[:MOST_TOLD]),
        otherwise=f"nobody, had the queues been empty in {1 - LEAST_SHARE:.0%} of looks, or the others' as full; a "
        "slow reader at the other end looks the same",
    )


def _who(slow: Slow, ranks: Mapping[int, Sender]) -> str:
    if len(slow.ranks) == 1 and len(slow.nodes) == 1:
        one = ranks[slow.ranks[0]]
        return f"rank {slow.ranks[0]} on {one.node} sends{f' to {one.to}' if one.to else ''}"
    if len(slow.nodes) == 1:
        return f"{named(slow.ranks)} send over the link of {slow.nodes[0]}"
    return f"{named(slow.ranks)} send over the link between {' and '.join(slow.nodes)}"


def _finding(rank: int, one: Sender) -> Finding:
    to = f" to {one.to}" if one.to else ""
    text = f"what rank {rank} on {one.node} sends{to} waits in its TCP queues in {one.sending:.0%} of looks"
    return Finding(name="send_queue", text=text, source="process", rank=rank, node=one.node, value=one.sending, unit="")


class LinkWatch:
    """The queues of one round of one job."""

    def __init__(self) -> None:
        self._ranks: dict[int, Sender] = {}
        self._named: Slow | None = None
        self._since = (0.0, -1)  # wall clock, step
        self._loud = False  # a rank with a full queue has been reported since the last look
        self._full: dict[int, bool] = {}  # ranks with a full queue: whether a step of theirs has ended since it filled
        self._own: frozenset[int] = frozenset()  # those that send something of their own, until the queue has emptied
        self._looked_s = 0.0

    def ingest_sending(self, rank: int, node: str, sending: float, works: Sequence[StepWork], to: str = "") -> None:
        """Take a rank's report: its share of looks, its finished steps, and the address for which its data waited."""
        known = self._ranks.get(rank)
        waiting = known.waiting if known is not None else 0.0
        wall_s = sum(work.wall_s for work in works)
        if wall_s > 0.0:
            waiting = sum(work.waiting_s for work in works) / wall_s
        self._ranks[rank] = Sender(node, sending, waiting, to)
        if sending >= LEAST_SHARE * _KEPT:
            self._loud = True
            self._full[rank] = self._full.get(rank, False) or wall_s > 0.0
        else:
            self._full.pop(rank, None)
            self._own -= {rank}

    def poll_queues(
        self, now_s: float, wall_s: float, step: int, round_: int, places: Callable[[], Mapping[str, str]]
    ) -> Verdict | None:
        """Return the warning that holds now; costs next to nothing while all queues are empty.

        Args:
            now_s: monotonic clock.
            wall_s: wall clock.
            step: that the job has finished.
            round_: of the job.
            places: returns nodes by the address at which others reach them; called only when a queue is full.
        """
        if now_s - self._looked_s >= _EVERY_S and (self._loud or self._named is not None):
            self._looked_s, self._loud = now_s, False
            self._own |= sending_alone(self._ranks, self._full)
            nothing = self._own | {rank for rank, has_ended in self._full.items() if not has_ended}
            ranks = {rank: one._replace(sending=0.0) if rank in nothing else one for rank, one in self._ranks.items()}
            found = find(ranks, self._named, places())
            if found is not None and self._named is None:
                self._since = (wall_s, step)
            self._named = found
        if self._named is None:
            return None
        return verdict_of(self._named, self._ranks, since=self._since, round_=round_)
