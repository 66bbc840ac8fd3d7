# SPDX-License-Identifier: Apache-2.0
"""Which ranks are worth drawing: of thousands a person reads sixteen. Pure.

The culprit, or without a verdict the slowest; those that share a communicator with it, the smallest communicator first
(a tensor-parallel group is more specific than the whole world); and a healthy one to compare with.
"""

from collections import Counter
from collections.abc import Collection, Iterable, Sequence
from statistics import median, median_low
from typing import NamedTuple

import msgspec

from megascale_ops.blackbox.records import StepRecord
from megascale_ops.errors import UsageError
from megascale_ops.schema.folding import named

MOST_CHOSEN = 16
# 4: a verdict that blames more blames a node or a network, of which four ranks show as much as forty.
MOST_CULPRITS = 4
# 18 digits: more than there will ever be ranks, and still a number that Python makes at once.
MOST_DIGITS = 18


class Known(NamedTuple):
    """What the choice needs to know of a rank."""

    rank: int
    node: str
    own_work_s: float  # -1: no step was seen
    communicators: Collection[tuple[str, str]] = frozenset()


class Chosen(msgspec.Struct, frozen=True):
    """A rank with the reason why it is drawn."""

    rank: int
    why: str


def own_work_s(steps: Sequence[StepRecord], last: int) -> float:
    """Return the median of what a rank worked by itself in its last steps, without waiting and checkpoints; or -1."""
    works = [step.wall_s - step.waiting_s - step.checkpoint_s for step in steps[-last:]]
    return median(works) if works else -1.0


def choose(wanted: str, known: Sequence[Known], culprits: Collection[int] = ()) -> tuple[Chosen, ...]:
    """Return the ranks to draw, the most important first.

    Args:
        wanted: ``auto``, ``all``, or numbers and ranges (``0,3-5``).
        known: All ranks of which there is a black box; at least one.
        culprits: The ranks that the incident's verdict blames; empty without one.

    Raises:
        UsageError: ``wanted`` is none of these, or names a rank of which there is no black box.
    """
    by_rank = {one.rank: one for one in sorted(known)}
    if wanted == "all":
        return tuple(Chosen(rank, "asked for") for rank in by_rank)
    if wanted != "auto":
        return tuple(Chosen(rank, "asked for") for rank in listed(wanted, by_rank, "auto, all, or "))
    blamed = [rank for rank in sorted(culprits) if rank in by_rank][:MOST_CULPRITS]
    first = [Chosen(rank, "culprit") for rank in blamed]
    if not blamed:
        slowest = max(by_rank.values(), key=lambda one: (one.own_work_s, -one.rank))
        works = slowest.own_work_s >= 0.0
        why = f"slowest: {slowest.own_work_s * 1000:.1f} ms of own work a step" if works else "no step seen, the lowest"
        first = [Chosen(slowest.rank if works else min(by_rank), why)]
    suspects = [by_rank[one.rank] for one in first]
    control = _control(suspects, by_rank.values())
    room = MOST_CHOSEN - len(first) - (control is not None)
    peers = [one for one in _peers(suspects, by_rank.values()) if control is None or one.rank != control.rank]
    chosen = [*first, *([control] if control else []), *peers[:room]]
    return tuple(chosen)


def sentence(chosen: Sequence[Chosen]) -> str:
    """Return which ranks were chosen and why, in one line, the most important first."""
    by_why: dict[str, list[int]] = {}
    for one in chosen:
        by_why.setdefault(one.why, []).append(one.rank)
    return "; ".join(f"{named(ranks)} ({why})" for why, ranks in by_why.items())


def listed(wanted: str, known: Collection[int], words: str = "") -> list[int]:
    """Return the ranks of a list such as ``0,3-5``, each once; ``words`` may be given instead of one.

    Raises:
        UsageError: it is no such list, or names a rank that is not known.
    """
    found: dict[int, None] = {}
    for part in wanted.split(","):
        low, dash, high = part.strip().partition("-")
        whole = _is_rank(low) and (_is_rank(high) if dash else not high)
        lowest, highest = (int(low), int(high if dash else low)) if whole else (1, 0)
        if lowest > highest:
            raise UsageError(f"--ranks {wanted!r} can't be read: give {words}ranks such as 0,3-5")
        missing = [rank for rank in (lowest, highest) if rank not in known]
        if missing:
            raise UsageError(f"there is no black box of rank {missing[0]} here; there are those of {named(known)}")
        # A range covers the boxes that there are: one missing inside it is reported already.
        within = [rank for rank in sorted(known) if lowest <= rank <= highest]
        found |= dict.fromkeys(within)
    return list(found)


def _is_rank(text: str) -> bool:
    """Return whether a text may be a rank; Python refuses to make a number of some thousand digits."""
    return text.isdecimal() and len(text) <= MOST_DIGITS


def _peers(suspects: Sequence[Known], known: Iterable[Known]) -> list[Chosen]:
    """Return the ranks that share a communicator with a suspect: smallest communicator first, then the nearest rank."""
    everybody = list(known)
    sizes = Counter(communicator for one in everybody for communicator in one.communicators)
    taken = {one.rank for one in suspects}
    found = []
    for one in everybody:
        if one.rank in taken:
            continue
        shared = [
            (sizes[communicator], abs(one.rank - suspect.rank))
            for suspect in suspects
            for communicator in set(suspect.communicators) & set(one.communicators)
        ]
        nearest = min(abs(one.rank - suspect.rank) for suspect in suspects)
        # Without a common communicator (none was seen, or it was long ago) the neighbours by number are all there is.
        place = min(shared) if shared else (len(everybody) + 1, nearest)
        found.append((place, one.rank, "shares a communicator" if shared else "neighbour by number"))
    return [Chosen(rank, why) for _, rank, why in sorted(found)]


def _control(suspects: Sequence[Known], known: Iterable[Known]) -> Chosen | None:
    """Return a healthy rank: the nearest to the median of own work, on a node without a suspect if there is one."""
    taken = {one.rank for one in suspects}
    nodes = {one.node for one in suspects}
    others = [one for one in known if one.rank not in taken and one.own_work_s >= 0.0]
    if not others:
        return None
    middle_s = median_low([one.own_work_s for one in others])
    best = min(others, key=lambda one: (one.node in nodes, abs(one.own_work_s - middle_s), one.rank))
    return Chosen(best.rank, "healthy control")
