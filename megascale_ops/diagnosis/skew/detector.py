# SPDX-License-Identifier: Apache-2.0
"""Find the ranks that hold the others up, from all ranks' collectives: culprits apart from victims, and slow links.

A collective ends for all its ranks at about the same moment. The duration of a rank's collective, by its own clock,
is waiting for the last to arrive and then moving the data; the rank that waits least came last, and the shortest
duration is the time of moving. That shows which rank is late, and not which is to blame: a rank may be late in its
data-parallel group because it waited for another one in its tensor-parallel group. So the evidence is *own work*: the
time between the end of a rank's collective before, of whatever group, and the start of this one. A victim's is no
longer than its equals'; the culprit's is. Only ranks of one class (the same pipeline stage) are compared.

Each pass cuts its time into blocks of about a step; a rank's own work beyond the median of its equals, as a share of
the block, goes through the cumulative sums of ``cusum``, which learn the run's own noise and set their thresholds
for the false alarms that are granted. A name must be worth it (``straggler_share``) and have equals that wait. Single
late starts are counted against how often all others have them. Transfers of lines are compared with their siblings' in
the same way: a slow link shows there and nowhere else.

Pure: grids in, a report out.
"""

from collections import deque
from collections.abc import Mapping, Sequence

import numpy as np

from megascale_ops.diagnosis.skew.cusum import KEPT, PERSISTENT, Sums
from megascale_ops.diagnosis.skew.late_starts import LateStarts
from megascale_ops.diagnosis.skew.measure import JUMP_SHARE, Pass, measure
from megascale_ops.diagnosis.skew.report import Culprit, SkewReport
from megascale_ops.diagnosis.skew.tables import Floats, Grid, Ints, Line, Longs
from megascale_ops.diagnosis.skew.transfers import TransferWatch
from megascale_ops.diagnosis.statistics import false_alarms
from megascale_ops.diagnosis.statistics.cooperative import Pieces, run_through
from megascale_ops.schema.policy import JobPolicy

MOST_BLOCKS = 256
# Where the length of a step is not known, a pass is cut into so many.
_BLOCKS = 8
# What was seen 16 blocks ago weighs a third: as long as it takes to name a rank.
_MEMORY_BLOCKS = 16.0
# Passes: of large jobs each has a block or two, and eight of them make a name.
_RECENT = 16
# 400,000 values of lateness, in order within 3 ms: 16 passes of 12,288 ranks, 4 of 100,000.
_MOST_LATE, _LEAST_LATE = 400_000, 4
# Two sums of three tests, and the single late starts: each has a share of the false alarms that are granted.
_TESTS = 7


class Skew:
    """All ranks of one round of one job.

    Args:
        lines: the lines that rows refer to; grows as new ones are met.
    """

    def __init__(self, lines: Sequence[Line]) -> None:
        self.span_s = 0.0
        self.block_s = 0.0
        self.matched = self.unmatched = 0
        self._lines = lines
        self._ranks = 0
        self._classes: dict[int, Sums] = {}
        self._places: dict[int, Ints] = {}  # class -> its ranks
        self._transfers = TransferWatch()
        self.late_starts = LateStarts()
        self._recent: deque[tuple[int, Floats]] = deque(maxlen=_RECENT)  # blocks of a pass, and what each rank waited
        self._waiting = self._last = np.zeros(0)
        self._late: deque[tuple[Floats, Floats]] = deque(maxlen=_RECENT)  # of a pass: each rank's p50 and p99
        self._late_each: deque[float] = deque(maxlen=_RECENT)  # of a pass: collectives that a rank met in
        self._met = np.zeros(0, np.int64)
        self._met_before: deque[Longs] = deque(maxlen=_RECENT)  # as of the newest passes

    def add(self, grids: Sequence[Grid], classes: Ints, span_s: float, step_s: float, policy: JobPolicy) -> None:
        """Take one pass in and judge (see ``adding``)."""
        run_through(self.adding(grids, classes, span_s, step_s, policy))

    def adding(
        self, grids: Sequence[Grid], classes: Ints, span_s: float, step_s: float, policy: JobPolicy
    ) -> Pieces[None]:
        """Take one pass in and judge, piece by piece.

        Args:
            grids: what met since the pass before.
            classes: by rank; equal numbers for equals, the same in every pass; negative: it has none.
            span_s: how long the pass covers.
            step_s: how long a step takes; 0: not known.
            policy: what is worth a name, and how many false ones a day are granted.
        """
        if not grids or span_s <= 0:
            return
        blocks = min(MOST_BLOCKS, max(1, round(span_s / step_s))) if step_s > 0 else _BLOCKS
        blocks = min(blocks, max(len(grid.seq) for grid in grids))
        self.block_s = span_s / blocks
        found = yield from measure(grids, classes, blocks, JUMP_SHARE * (step_s or self.block_s))
        yield
        self.span_s += span_s
        self.matched += int(found.met.sum())
        self._note(found, span_s)
        between = false_alarms.steps_between_alarms(
            len(classes), self.block_s, policy.straggler_false_alarms_per_day / _TESTS
        )
        present = np.unique(classes[classes >= 0]).tolist()
        for number in self._classes.keys() - set(present):
            del self._classes[number], self._places[number]  # its ranks have other equals now: it accuses no rank
        for number in present:
            ranks = np.flatnonzero(classes == number).astype(np.int32)
            self._judge_class(number, ranks, found.excess_s[ranks] / np.float32(self.block_s), policy, between)
            yield
        for transfers in found.transfers:
            self._transfers.add(transfers, self._lines, self.block_s, policy.straggler_share, between)
        self.late_starts.add(
            found.jumps,
            blocks,
            ranks=len(classes),
            block_s=self.block_s,
            a_day=policy.straggler_false_alarms_per_day / _TESTS,
            worth=policy.straggler_share,
        )

    def _note(self, found: Pass, span_s: float) -> None:
        """Remember which ranks waited; newer passes weigh more."""
        ranks = len(found.met)
        if ranks > self._ranks:
            more = np.zeros(ranks - self._ranks)
            self._waiting, self._last = (np.concatenate([known, more]) for known in (self._waiting, self._last))
            self._met = np.concatenate([self._met, more.astype(np.int64)])
            self._ranks = ranks
        keep = np.where(self._met > 0, np.exp(-span_s / (_MEMORY_BLOCKS * self.block_s)), 0.0)
        told = found.met > 0
        waiting = np.minimum(found.waited_s / span_s, 1.0)
        last = found.last / np.maximum(found.met, 1)
        self._waiting = np.where(told, keep * self._waiting + (1 - keep) * waiting, self._waiting)
        self._last = np.where(told, keep * self._last + (1 - keep) * last, self._last)
        self._met_before.append(self._met.copy())
        self._met += found.met
        self._recent.append((found.excess_s.shape[1], waiting.astype(np.float32)))
        self._late.append((found.late_p50_s, found.late_p99_s))
        self._late_each.append(float(np.median(found.met[told])) if told.any() else 0.0)
        while len(self._late) > max(_LEAST_LATE, _MOST_LATE // max(1, ranks)):
            self._late.popleft()
            self._late_each.popleft()

    def _judge_class(self, number: int, ranks: Ints, excess: Floats, policy: JobPolicy, between: float) -> None:
        sums = self._classes.get(number)
        known = self._places.get(number)
        if sums is None or known is None:
            sums = self._classes[number] = Sums(len(ranks))
        elif not np.array_equal(known, ranks):
            if len(ranks) < len(known) or not np.array_equal(ranks[: len(known)], known):
                sums = self._classes[number] = Sums(len(ranks))  # other ranks: what is known of them is void
            sums.grow(len(ranks))
        self._places[number] = ranks
        worth = policy.straggler_share
        for unit in sums.add(excess, worth, between):
            window = sums.window(unit, worth, between)
            if unit in sums.held or window < PERSISTENT:
                continue
            if max(sums.median(unit, window), sums.recurring(unit, window)) < worth + sums.usual(unit):
                continue
            if not sums.stands(unit, window, worth, between):
                continue
            if self._waited_by_equals(ranks, unit, window) >= worth / 2:
                sums.hold(unit, window, worth)
        sums.release(worth)

    def _waited_by_equals(self, ranks: Ints, unit: int, blocks: int) -> float:
        """Return the share of the time that a typical equal waited in the newest blocks."""
        others = np.delete(ranks, unit)
        total, seen = 0.0, 0
        for number, waiting in reversed(self._recent):
            known = waiting[others[others < len(waiting)]]
            total += number * (float(np.median(known)) if len(known) else 0.0)
            seen += number
            if seen >= blocks:
                break
        return total / seen if seen else 0.0

    def report(self, world_size: int = 0, nodes: Mapping[int, str] | None = None) -> SkewReport:
        """Return what is known now.

        Args:
            world_size: how many ranks there should be; 0: those that were seen.
            nodes: which rank is where, as far as it is known.
        """
        size = max(world_size, self._ranks)
        more = size - self._ranks
        excess = np.zeros(size, np.float32)
        late_p50_s, late_p99_s = self._lateness(size)
        culprits: list[Culprit] = []
        for number, sums in self._classes.items():
            ranks = self._places[number]
            if sums.count:
                excess[ranks] = np.nan_to_num(np.nanmean(np.where(np.isnan(last := sums.last(KEPT)), 0, last), axis=1))
            culprits += [
                self._culprit(ranks, unit, sums, late_p50_s)
                for unit in sorted(sums.held)
                if int(ranks[unit]) not in self.late_starts.named or sums.is_steady(unit)
            ]
        steady = {culprit.rank for culprit in culprits}
        culprits = [culprit._replace(together=tuple(sorted(steady - {culprit.rank}))) for culprit in culprits]
        culprits += [
            self._erratic_culprit(rank, late_p50_s) for rank in sorted(self.late_starts.named) if rank not in steady
        ]
        met = np.concatenate([self._met, np.zeros(more, np.int64)])
        before = np.zeros(size, np.int64)
        if len(self._met_before) == _RECENT:
            before[: len(self._met_before[0])] = self._met_before[0]
        return SkewReport(
            span_s=self.span_s,
            block_s=self.block_s,
            waiting=np.concatenate([self._waiting, np.zeros(more)]),
            excess=excess,
            late_p50_s=late_p50_s,
            late_p99_s=late_p99_s,
            last=np.concatenate([self._last, np.zeros(more)]),
            culprits=tuple(culprits),
            links=self._transfers.links(nodes or {}),
            silent=tuple(np.flatnonzero(met - before == 0).tolist()),
            matched=self.matched,
            unmatched=self.unmatched,
            noise=max((sums.noise for sums in self._classes.values()), default=0.0),
        )

    def _lateness(self, size: int) -> tuple[Floats, Floats]:
        """Return each rank's median and 99th percentile of lateness over the newest passes, 0 where nothing is known.

        A pass may hold a single collective, of which both are the same. Of n in a pass the 99th percentile is the
        largest, and that of all is the one that n are below with 0.99 to the power of n.
        """
        if not self._late:
            return np.zeros(size, np.float32), np.zeros(size, np.float32)
        padded = [
            np.stack([np.concatenate([one, np.full(size - len(one), np.nan, np.float32)]) for one in column])
            for column in zip(*self._late, strict=True)
        ]
        each = sum(self._late_each) / len(self._late_each)
        share = max(0.5, 0.99**each)
        return _quantile(padded[0], 0.5), _quantile(padded[1], share)

    def _culprit(self, ranks: Ints, unit: int, sums: Sums, late_p50_s: Floats) -> Culprit:
        held = sums.held[unit]
        blocks = sums.count - held.named_at + held.window
        window = max(PERSISTENT, min(KEPT, blocks))
        excess = sums.excess(unit, window)
        waited = self._waited_by_equals(ranks, unit, window)
        rank = int(ranks[unit])
        slope = sums.slope(unit, blocks)
        # Half of what it is late by came up while it was watched: it grows.
        grows = slope * min(blocks, sums.trend_count * sums.trend_blocks) >= excess / 2 > 0
        return Culprit(
            rank=rank,
            excess=excess,
            cost=max(0.0, min(excess - sums.next_highest(window), waited)),
            waited=waited,
            late_p50_s=float(late_p50_s[rank]),
            last=float(self._last[rank]),
            noise=sums.noise,
            blocks=blocks,
            since_s=blocks * self.block_s,
            a_minute=slope * 60.0 / self.block_s if grows else 0.0,
        )

    def _erratic_culprit(self, rank: int, late_p50_s: Floats) -> Culprit:
        began, every, jump_s = self.late_starts.of(rank)
        lost = self.late_starts.lost(rank, self.block_s)
        blocks = self.late_starts.blocks - began
        return Culprit(
            rank=rank,
            excess=lost,
            cost=lost,
            waited=float(np.median(np.delete(self._waiting, rank))) if self._ranks > 1 else 0.0,
            late_p50_s=float(late_p50_s[rank]),
            last=float(self._last[rank]),
            noise=max((sums.noise for sums in self._classes.values()), default=0.0),
            blocks=blocks,
            since_s=blocks * self.block_s,
            every=every,
            jump_s=jump_s,
        )


def _quantile(values: Floats, share: float) -> Floats:
    """Return over the first axis, without NaN, the value that a share of them does not exceed; 0: none known."""
    ordered = np.sort(values, axis=0)  # NaN last
    high = np.maximum(np.count_nonzero(~np.isnan(ordered), axis=0) - 1, 0)
    found: Floats = np.nan_to_num(ordered[np.ceil(share * high).astype(np.int64), np.arange(values.shape[1])])
    return found
