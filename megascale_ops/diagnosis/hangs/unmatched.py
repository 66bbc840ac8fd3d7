# SPDX-License-Identifier: Apache-2.0
"""A send or a receive that its peer never made, because it has gone on to a collective in which it waits.

The rank waits for the peer, and the peer with all others for the rank: a circle through a pair and a group. Which of
the two is wrong is not known: one left its half of an exchange out, or the other asks for one that was not meant.

Told only where the peer's newest batch with that rank was recorded and has no counterpart. A send that has ended is one
that the receiver may still wait for.

Pure: where ranks wait in, the pair out.
"""

from collections.abc import Sequence
from typing import NamedTuple

from megascale_ops.diagnosis.hangs.wait_graph import RankWait
from megascale_ops.schema.messages import CollectiveFact

_OTHER_HALF = {"send": "recv", "recv": "send"}


class Unmatched(NamedTuple):
    """``rank`` waits in ``call``, whose other half ``peer`` has not made; it is inside ``inside``."""

    rank: int
    peer: int
    call: CollectiveFact
    inside: CollectiveFact


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
    return None


def _has_left_out(calls: Sequence[CollectiveFact], rank: int, half: str) -> bool:
    """Return whether the newest batch with a rank is known, is over and has no such half."""
    shared = [call for call in calls if call.function in _OTHER_HALF and call.peer == rank]
    if not shared:
        return False
    newest = [call for call in shared if (call.group, call.batch) == (shared[-1].group, shared[-1].batch)]
    return all(call.done and call.function != half for call in newest)
