# SPDX-License-Identifier: Apache-2.0
"""A send or a receive that its peer never made, or makes later, because it waits in a collective before it.

The rank waits for the peer, and the peer with all others for the rank: a circle through a pair and a group. Which of
the two is wrong is not known: one left its half of an exchange out, or the other asks for one that was not meant.

Told only where the peer's newest batch with that rank was recorded and has no counterpart, or where the peer has queued
the counterpart behind the collective. There the rank is wrong if others have queued sends and receives behind the same
collective as well. A send that has ended is one that the receiver may still wait for.

Pure: where ranks wait in, the pair out.
"""

from collections.abc import Sequence
from typing import NamedTuple

from megascale_ops.diagnosis.hangs.rank_wait import RankWait
from megascale_ops.diagnosis.hangs.siblings import LEAST_ALIKE
from megascale_ops.schema.messages import CollectiveFact

_OTHER_HALF = {"send": "recv", "recv": "send"}


class Unmatched(NamedTuple):
    """``rank`` waits in ``call``, whose other half ``peer`` has not made; it is inside ``inside``."""

    rank: int
    peer: int
    call: CollectiveFact
    inside: CollectiveFact
    order: tuple[int, ...] = ()  # the peer and others that have queued such a half behind the collective
    against: int = 0  # ranks of that group that have not come to the collective

    @property
    def is_early(self) -> bool:
        """Whether ranks besides the peer tell that the collective comes first, and most have called it."""
        return len(self.order) > LEAST_ALIKE and len(self.order) > self.against


def unmatched(held: Sequence[RankWait], stands: Sequence[RankWait]) -> Unmatched | None:
    """Return the first of the ranks held up whose peer is in a collective without the other half of its call."""
    by_rank = {stand.rank: stand for stand in stands}
    for stand in held:
        for call in stand.look.recorded:
            peer = by_rank.get(call.peer)
            if call.function not in _OTHER_HALF or call.done or peer is None or peer.inside is None:
                continue
            if _has_left_out(peer.look.recorded, stand.rank, _OTHER_HALF[call.function]):
                return Unmatched(stand.rank, peer.rank, call, peer.inside)
            if _is_behind(peer, stand.rank, _OTHER_HALF[call.function]):
                place = (peer.inside.group, peer.inside.seq)
                there = [
                    one for one in stands if one.inside is not None and place == (one.inside.group, one.inside.seq)
                ]
                order = tuple(one.rank for one in there if _is_behind(one))
                against = sum(at.group == place[0] and at.entered < place[1] for one in stands for at in one.positions)
                return Unmatched(stand.rank, peer.rank, call, peer.inside, order, against)
    return None


def _is_behind(stand: RankWait, rank: int = -1, half: str = "") -> bool:
    """Return whether it has queued a send or a receive (that half, with that rank) behind the call that it is in."""
    unfinished = [call for call in stand.look.recorded if not call.done]
    return (
        bool(unfinished)
        and unfinished[0].seq >= 0
        and any(
            call.function in _OTHER_HALF and (not half or (call.function, call.peer) == (half, rank))
            for call in unfinished
        )
    )


def _has_left_out(calls: Sequence[CollectiveFact], rank: int, half: str) -> bool:
    """Return whether the newest batch with a rank is known, is over and has no such half."""
    shared = [call for call in calls if call.function in _OTHER_HALF and call.peer == rank]
    if not shared:
        return False
    newest = [call for call in shared if (call.group, call.batch) == (shared[-1].group, shared[-1].batch)]
    return all(call.done and call.function != half for call in newest)
