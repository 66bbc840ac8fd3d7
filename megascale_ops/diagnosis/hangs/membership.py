# SPDX-License-Identifier: Apache-2.0
"""Members of a group of whose calls there nothing is known: they have not come to the one in which the others wait.

A recorder keeps the newest calls only. A rank that is busy in one group loses its last call of another, and one that
never called anything in a group has nothing to lose. By its calls alone neither belongs to the group, and no
rank would wait for it. But torch notes the members of a group, and a collective that all others are in lacks a member.

Pure: where ranks wait in, the same with what membership adds out.
"""

from collections.abc import Iterable, Sequence

from megascale_ops.diagnosis.hangs.evidence import Look, Position
from megascale_ops.diagnosis.hangs.rank_wait import RankWait

# 12: so many unfinished calls an agent names before the last finished call of each group; 16 in all.
_MOST_UNFINISHED, _MOST_FACTS = 12, 16


def with_members(stands: Sequence[RankWait]) -> list[RankWait]:
    """Add to each rank the groups that wait and have it for a member, where it was never seen in them."""
    waited_in = {stand.inside.group for stand in stands if stand.inside is not None}
    told = {one for stand in stands for one in stand.look.members if one.group in waited_in}
    groups: dict[int, set[str]] = {}
    for one in told:
        for rank in one.ranks():
            groups.setdefault(rank, set()).add(one.group)
    return [_added(stand, groups.get(stand.rank, ())) if groups else stand for stand in stands]


def _added(stand: RankWait, groups: Iterable[str]) -> RankWait:
    if not stand.positions or not _is_whole(stand.look):
        return stand
    seen = {position.group for position in stand.positions}
    unseen = tuple(Position(group, -1) for group in sorted(groups) if group not in seen)
    return stand._replace(positions=(*stand.positions, *unseen)) if unseen else stand


def _is_whole(look: Look) -> bool:
    """Whether a rank's recorder was read, and all groups in which it has called anything are among what was told."""
    unfinished = sum(not fact.done for fact in look.recorded)
    over = {(fact.group, fact.seq < 0) for fact in look.recorded if fact.done}
    return bool(look.recorded) and min(unfinished, _MOST_UNFINISHED) + len(over) < _MOST_FACTS
