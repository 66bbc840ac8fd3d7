# SPDX-License-Identifier: Apache-2.0
"""How many collectives could not be timed: those that C++ starts, as DDP does in each backward pass.

Where no profiler times them (Gloo, NCCL without its plugin) the black box sees only what goes through Python. Each
group counts all of its collectives, though, and the recorder's heartbeat has that number. Its excess over those that
were reported is what the arrival-skew engine can't see: the time that ranks wait in them looks like their own work, so
"no rank is late" means little.

Pure: counts in, a share and a sentence out.
"""

from collections.abc import Container

from megascale_ops.schema.collectives import CollectiveSample
from megascale_ops.schema.progress import CollectivePosition

# 20 collectives: of fewer, one that is on its way makes too much of a difference.
_FEWEST = 20
# 10 %: sampling by heartbeats reports some a second late; more than that is another kind of collective.
_MANY = 0.1
# 4 ranks stand for all: every rank of a group counts the same collectives.
_MOST_RANKS = 4


class _Count:
    """One rank's: its group's own number when that was first heard, and how many were reported since."""

    __slots__ = ("first", "last", "name", "told")

    def __init__(self, position: CollectivePosition) -> None:
        self.name, self.first, self.last, self.told = position.name, position.enqueued, position.enqueued, 0


class Unseen:
    """Collectives that are counted and not reported, of a few ranks of one round."""

    def __init__(self) -> None:
        self._ranks: dict[int, _Count] = {}
        self._host_timed = True

    def know(self, rank: int, position: CollectivePosition | None) -> None:
        """Note how far a rank's group is."""
        known = self._ranks.get(rank)
        if known is None and len(self._ranks) >= _MOST_RANKS:
            return  # nearly always, of a large job
        if position is None or position.enqueued < 0:
            return
        if known is None or known.name != position.name or position.enqueued < known.last:
            self._ranks[rank] = _Count(position)
        else:
            known.last = position.enqueued

    def go_on(self, ranks: Container[int], position: CollectivePosition | None) -> None:
        """Note how far those of some ranks are that are known."""
        for rank in [rank for rank in self._ranks if rank in ranks]:
            self.know(rank, position)

    def ingest_sample(self, sample: CollectiveSample) -> None:
        """Count what a rank has reported."""
        self._host_timed = sample.host_timed
        known = self._ranks.get(sample.rank)
        if known is not None:
            known.told += sample.finished - sample.point_to_point + sample.lost

    @property
    def share(self) -> float:
        """Return the least share that any of the ranks knows of, 0..1; 0 where a profiler times all there are."""
        counts = [one for one in self._ranks.values() if one.last - one.first >= _FEWEST]
        if not counts or not self._host_timed:
            return 0.0
        return min(max(0.0, 1.0 - one.told / (one.last - one.first)) for one in counts)

    def sentence(self) -> str:
        """Return what people should know, "" where nearly all is seen."""
        share = self.share
        if share < _MANY:
            return ""
        return (
            f"{share:.0%} of the collectives are started below Python (as DDP's reductions are) and can't be seen: "
            "waiting in them counts as a rank's own work, and who is late only there is not named"
        )
