# SPDX-License-Identifier: Apache-2.0
"""Groups that do the same as another one: the tensor parallel pairs of a model, say, or its data parallel groups.

Of two ranks alone that disagree neither is the majority. But what one pair does, the other pairs of the model do at the
same number: a group whose calls were the same so far is expected to go on like it. Groups whose calls differ (another
stage, other batches) tell nothing.

Pure: stands and calls in, what alike groups did out.
"""

from collections.abc import Container, Iterator, Sequence

from megascale_ops.diagnosis.hangs.call_order import Calls, calls, difference
from megascale_ops.diagnosis.hangs.rank_wait import RankWait

# 2: one call alone is alike in many groups.
LEAST_ALIKE = 2
# 128 ranks are compared call by call; more tell no more.
MOST_ASKED = 128


def alike(known: Calls, group: str, seq: int, stands: Sequence[RankWait]) -> Iterator[tuple[RankWait, str, Calls]]:
    """Return ranks outside a group, each with a group of its own that made the same calls below number ``seq``."""
    before = {number: fact for number, fact in known.items() if number < seq}
    if len(before) < LEAST_ALIKE:
        return
    outside = [stand for stand in stands if all(at.group != group for at in stand.positions)]
    for stand in outside[:MOST_ASKED]:
        for own in {fact.group: None for fact in stand.look.recorded if fact.seq >= 0}:
            theirs = calls(stand.look.recorded, own)
            common = before.keys() & theirs.keys()
            if len(common) >= LEAST_ALIKE and not any(difference(before[at], theirs[at]) for at in common):
                yield stand, own, theirs


def first_is_right(one: Calls, other: Calls, group: str, seq: int, stands: Sequence[RankWait]) -> bool | None:
    """Return whether the first of two did what alike groups did as number ``seq``; None: they do not tell."""
    known = {**other, **one}  # below the first difference both are the same
    votes: dict[int, set[bool]] = {}  # by rank
    for stand, _, theirs in alike(known, group, seq, stands):
        if (called := theirs.get(seq)) is None:
            continue
        as_one, as_other = (not difference(called, side[seq]) for side in (one, other))
        if as_one is not as_other:
            votes.setdefault(stand.rank, set()).add(as_one)
    return unanimous(votes)


def has_gone_on(
    known: Calls, group: str, seq: int, stands: Sequence[RankWait], disputed: Container[str]
) -> bool | None:
    """Return whether ranks that wait elsewhere have made call ``seq`` of groups alike; None: they do not tell.

    Groups in ``disputed`` are not asked: some of their members have done otherwise.
    """
    votes: dict[int, set[bool]] = {}
    for stand, own, _ in alike(known, group, seq, stands):
        if own in disputed:
            continue
        entered = next((at.entered for at in stand.positions if at.group == own), -1)
        if entered >= seq - 1:
            votes.setdefault(stand.rank, set()).add(entered >= seq)
    return unanimous(votes)


def unanimous(votes: dict[int, set[bool]]) -> bool | None:
    """Return what all say, if they are two at least."""
    said = set().union(*votes.values())
    return said.pop() if len(said) == 1 and len(votes) > 1 else None
