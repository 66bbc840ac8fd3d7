# SPDX-License-Identifier: Apache-2.0
"""The strip of step times, the loss, and the heat map of one job, from the history of its steps.

A column of the map costs 8 ms for 12,288 ranks, so it is made once and kept; only the newest ones, which still grow,
are made again. What is missing is made newest first, a few columns each time, so that a page that opens on a job that
is a week old shows its last hour at once and the rest a moment later.

What ranks did *of late* is the difference of the newest sums to those of some seconds ago: in a job that is a week old
the newest column alone covers an hour.

Pure: given the history, answers with the schema's slots. Everything is a generator that yields between pieces of work
of at most a few milliseconds, so that its driver can let heartbeats in between.
"""

from array import array
from collections.abc import Generator, Sequence
from typing import NamedTuple

from megascale_ops.schema.history import FIELDS, Bucket
from megascale_ops.schema.live import Slot, packed

# 256 rows: more than a screen has lines for. 12,288 ranks become rows of 48.
MOST_ROWS = 256
# 8 ranks a node: rows of more than one rank are made of whole nodes.
NODE_RANKS = 8
# 8 columns at a time: 60 ms of work for 12,288 ranks, in pieces.
COLUMNS_A_TIME = 8
# 2 at first: a page that opens has the verdict 60 ms sooner, and the rest of the map a moment later.
COLUMNS_AT_FIRST = 2
# 5 s for 12,288 ranks, every second for 2,000: how often columns that still grow are made again.
GROW_EACH_RANK_S = 4e-4
# A median of 1,024 ranks is known to 2 % of the ranks' own spread.
SAMPLED = 1024
# 10 s: 20 steps of half a second; own work of fewer steps is more noise than signal.
LATE_S = 10.0
_STEPS, _WALL, _WAITING, _CHECKPOINT, _LONGEST, _OWN = (FIELDS.index(name) for name in (
    "steps", "wall_s", "waiting_s", "checkpoint_s", "longest_s", "longest_own_s"
))  # fmt: skip


class Late(NamedTuple):
    """What ranks did of late, as ``Columns.own`` and ``Columns.waiting``."""

    own: bytes = b""
    waiting: bytes = b""


class Times:
    """The columns of one job's history, kept from frame to frame. Owned by its feed."""

    def __init__(self) -> None:
        self.row_ranks = 1
        self.rows = 0
        self.late = Late()
        self.missing = 0  # columns that are still to be made
        self._slots: dict[tuple[float, float], Slot] = {}
        self._young: set[tuple[float, float]] = set()  # columns that still grew when they were made
        self._grown_s = -LATE_S
        self._late_s = -LATE_S
        self._before: tuple[float, tuple[array[float], ...]] | None = None  # start of a bucket, and its sums back then

    def slots(self) -> tuple[Slot, ...]:
        """Return the columns that are made, oldest first."""
        return tuple(self._slots[key] for key in sorted(self._slots))

    def poll_buckets(self, buckets: Sequence[Bucket], world_size: int, now_s: float) -> Generator[None, None, None]:
        """Make what has changed since the last look.

        Args:
            buckets: the history's, oldest first; their cells may grow meanwhile.
            world_size: ranks of the round; what is known of others is passed over.
            now_s: any clock that only goes forward.
        """
        row_ranks = rows_of(world_size)
        if (row_ranks, world_size) != (self.row_ranks, self.rows * self.row_ranks):
            rows = -(-world_size // row_ranks)
            if (row_ranks, rows) != (self.row_ranks, self.rows):
                self._slots.clear()
            self.row_ranks, self.rows = row_ranks, rows
        keys = [(bucket.start_s, bucket.length_s) for bucket in buckets]
        for gone in self._slots.keys() - set(keys):
            del self._slots[gone]
        self._young &= self._slots.keys()
        newest = set(keys[-2:])
        is_due = now_s - self._grown_s >= world_size * GROW_EACH_RANK_S
        if is_due:
            self._grown_s = now_s
        again = (self._young | newest) if is_due else set()
        wanted = [
            place for place in reversed(range(len(keys))) if keys[place] in again or keys[place] not in self._slots
        ]
        most = COLUMNS_A_TIME if self._slots else COLUMNS_AT_FIRST
        self.missing = max(0, len(wanted) - most)
        for place in wanted[:most]:
            self._slots[keys[place]] = yield from self._slot(buckets[place], world_size)
            # A heartbeat carries steps that ended a second ago: what was new when it was made is made once more.
            (self._young.add if keys[place] in newest else self._young.discard)(keys[place])
        if buckets and now_s - self._late_s >= LATE_S:
            yield from self._look_late(buckets, world_size, now_s)

    def _slot(self, bucket: Bucket, world_size: int) -> Generator[None, None, Slot]:
        cells = [column[:world_size] for column in bucket.cells]
        own_s = _own_s(cells)
        yield
        steps, wall_s = cells[_STEPS], cells[_WALL]
        every = max(1, len(steps) // SAMPLED)
        means = sorted(wall / count for wall, count in zip(wall_s[::every], steps[::every], strict=False) if count)
        yield
        shares = _in_percent(own_s)
        yield
        size = self.row_ranks
        by_row = bytes(max(shares[first : first + size], default=0) for first in range(0, len(shares), size))
        return Slot(
            start_s=bucket.start_s,
            length_s=bucket.length_s,
            step=bucket.step,
            median_s=_rounded(means[len(means) // 2]) if means else 0.0,
            longest_s=_rounded(max(cells[_LONGEST], default=0.0)),
            loss=_shortened(bucket.losses.mean),
            astray=bucket.losses.astray,
            cells=by_row.ljust(self.rows, b"\0"),
        )

    def _look_late(self, buckets: Sequence[Bucket], world_size: int, now_s: float) -> Generator[None, None, None]:
        """Find what ranks did since the last such look."""
        # The newest bucket may have begun a moment ago: then the one before has more.
        newest = buckets[-1] if any(buckets[-1].cells[_STEPS]) or len(buckets) < 2 else buckets[-2]
        sums = tuple(column[:world_size] for column in newest.cells[:_LONGEST])
        before = self._before
        self._before = (newest.start_s, sums)
        self._late_s = now_s
        yield
        if before is not None and before[0] == newest.start_s:
            sums = tuple(array("f", _less(now, old)) for now, old in zip(sums, before[1], strict=True))
            if not any(sums[_STEPS]):
                return  # no step has ended since: what was known of late still is
        yield
        own = packed("own", _in_percent(_own_s(sums)))
        yield
        self.late = Late(own, packed("waiting", _waiting(sums)))


def rows_of(world_size: int) -> int:
    """Return how many neighbouring ranks share a row of the map."""
    if world_size <= MOST_ROWS:
        return 1
    ranks = -(-world_size // MOST_ROWS)
    return -(-ranks // NODE_RANKS) * NODE_RANKS


def _own_s(cells: "Sequence[array[float]]") -> list[float]:
    """Return by rank the mean own work of a step, 0.0 where no step ended."""
    rows = zip(cells[_STEPS], cells[_WALL], cells[_WAITING], cells[_CHECKPOINT], strict=False)
    return [(wall - waited - saved) / steps if steps > 0.0 else 0.0 for steps, wall, waited, saved in rows]


def _in_percent(own_s: list[float]) -> list[int]:
    """Return own work in per cent of the median rank's, 1 to 255; 0 where nothing is known."""
    known = sorted(one for one in own_s if one > 0.0)
    if not known:
        return [0] * len(own_s)
    scale = 100.0 / known[len(known) // 2]
    most_s = 255.0 / scale
    # 1 for the least: what is known is never 0.
    return [(255 if one >= most_s else int(one * scale + 0.5) or 1) if one > 0.0 else 0 for one in own_s]


def _waiting(cells: "Sequence[array[float]]") -> list[int]:
    rows = zip(cells[_WALL], cells[_WAITING], strict=True)
    return [min(100, max(0, round(100.0 * waited / wall))) if wall > 0.0 else 255 for wall, waited in rows]


def _less(now: "array[float]", old: "array[float]") -> list[float]:
    """Return what was added to sums; ranks that are new have added all of theirs."""
    known = [*old, *[0.0] * (len(now) - len(old))]
    return [one - before for one, before in zip(now, known, strict=False)]


def _shortened(loss: float | None) -> float | None:
    """Return a loss to six digits: all that a curve shows, whatever its size."""
    return None if loss is None else float(f"{loss:.6g}")


def _rounded(seconds: float) -> float:
    """Return a time to the tenth of a millisecond, so that a frame does not carry seventeen digits of it."""
    return round(seconds, 4)
