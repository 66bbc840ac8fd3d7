# SPDX-License-Identifier: Apache-2.0
"""Records of ranks that were not taken at one moment of a hang: calls have ended that one of the ranks had not made.

An all_reduce ends when all members have entered it. So where it has ended on one rank, and by another one's record that
one had not come to it yet, the other one has gone on since its record was taken, or the job was not standing still.

A collective that is the oldest unfinished call of all its members does not wait for a rank that is missing elsewhere:
a rank that is named for that does not explain the hang, or the records are of several moments.

Only records without a time are compared: of those that agents take, it is known who moved since (``hangs/verdict``).

Pure: where ranks wait in, those whose records are older out, and calls that no rank is missing in.
"""

from collections.abc import Sequence

from megascale_ops.diagnosis.hangs.rank_wait import RankWait
from megascale_ops.schema.messages import CollectiveFact
from megascale_ops.schema.progress import UNSEEN

# What ends on no rank before all have come; a broadcast's root waits for no rank.
_OF_ALL = frozenset({"all_reduce", "all_gather", "reduce_scatter", "all_to_all", "barrier"})


def taken_before(stands: Sequence[RankWait]) -> tuple[list[int], CollectiveFact | None]:
    """Return the ranks that had not come to a call when their records were taken, and the call, which has ended."""
    if any(stand.look.seen_mono_s for stand in stands):
        return [], None
    ended: dict[str, CollectiveFact] = {}
    for stand in stands:
        for fact in stand.look.recorded:
            if fact.done and fact.seq > 0 and fact.function in _OF_ALL:
                known = ended.get(fact.group)
                ended[fact.group] = fact if known is None or fact.seq > known.seq else known
    found: dict[int, CollectiveFact] = {}
    for stand in stands:
        for at in stand.positions:
            if at.group in ended and 0 <= at.entered < ended[at.group].seq:
                found.setdefault(stand.rank, ended[at.group])
    return sorted(found), next(iter(found.values()), None)


def are_left(stands: Sequence[RankWait]) -> bool:
    """Return whether files are all that is left of the ranks: no agent has looked at their processes."""
    return any(stand.view.report.process.state == UNSEEN for stand in stands)


def met_by_all(stands: Sequence[RankWait]) -> CollectiveFact | None:
    """Return a call that has not ended although it is the oldest unfinished one of all its members; None: none is.

    A record counts that reaches back to a call which has ended: a full ring may have lost an older one.
    """
    members = {one.group: set(one.ranks()) for stand in stands for one in stand.look.members}
    met: dict[tuple[str, int], set[int]] = {}
    for stand in stands:
        oldest = next((fact for fact in stand.look.recorded if not fact.done), None)
        if oldest is None or oldest.seq <= 0 or not stand.look.recorded[0].done:
            continue
        there = met.setdefault((oldest.group, oldest.seq), set())
        there.add(stand.rank)
        if oldest.function in _OF_ALL and there == members.get(oldest.group):
            return oldest
    return None
