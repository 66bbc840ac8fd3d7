# SPDX-License-Identifier: Apache-2.0
"""One group of equals: steps judged one after the other, which rank is slow in them, and whether it is worth a name.

``detector`` describes the method, and hands the steps on to the group that they belong to.

Pure: steps in. A step of many ranks is judged in pieces, so that the caller can do something else in between.
"""

import statistics
from array import array
from collections import deque
from collections.abc import Iterable, Sequence
from typing import NamedTuple

import numpy as np

from megascale_ops.diagnosis.statistics import false_alarms
from megascale_ops.diagnosis.statistics.accumulated_cost import AccumulatedCost, Threshold
from megascale_ops.diagnosis.statistics.block_means import BlockMeans
from megascale_ops.diagnosis.statistics.cooperative import Pieces
from megascale_ops.diagnosis.statistics.levels import MOST_INNOCENT, Alarm, Levels
from megascale_ops.diagnosis.statistics.noise import noise_of, noise_of_late
from megascale_ops.diagnosis.statistics.sampling import some_of, values_of_some
from megascale_ops.diagnosis.stragglers.own_work import (
    Floats,
    Held,
    Jump,
    MediansOfOthers,
    Places,
    Rank,
    Row,
    Rows,
    Slowest,
    Works,
    intermittent_steps,
    typical_of,
    well_after,
)
from megascale_ops.diagnosis.stragglers.step_table import STEP, Table
from megascale_ops.schema.policy import JobPolicy
from megascale_ops.schema.progress import StepWork

# The first steps compile, allocate and connect.
WARM_UP = 5
# 8 steps of all ranks: 28 differences on 4 ranks, enough for a first idea of the noise.
LEAST = 8
# 8 slow steps at least: half a second of another process on the same core is no straggler of 50 ms steps.
PERSISTENT = 8
# 16 steps show noise that began of late; the alarm's own steps where they are more.
LATELY = 16
KEPT = 64
# A step that not all ranks have reported is waited for until the newest is so much further.
MOST_PENDING = 64
# The noise is that of at most 64 ranks, looked at again every 8 steps: 0.1 ms a step.
SAMPLED = 64
RECALIBRATED = false_alarms.BLOCK
# What a rank did is kept of fewer steps: enough to find what it needs longer for.
WORKS_KEPT = 16
# Above 512 ranks less is kept of each: 2 KB.
LARGE, KEPT_LARGE, WORKS_KEPT_LARGE = 512, 32, 4
# 32 names a step: a thousand ranks that become slow at once are named within seconds, and no tick waits for that.
MOST_NAMES = 32
# 1,024 ranks give the step time: all have the same but for their clocks.
PIECE = 1_024
# 4,096 are judged in one piece; their median is within 2 % of the noise of what all would give, and less than twice as
# many are sorted in 2 ms.
MOST_SORTED = 4_096
# A single slow step: far out of the noise and a good part of a step. Four of them, seen among 512 steps.
JUMP_NOISES, JUMP_SHARE, LEAST_JUMPS, MOST_JUMPS, JUMP_WINDOW = 8.0, 0.25, 4, 32, 512
_ALLOWANCE = 0.5
_LEAST_ALLOWANCE = 0.2
_UNSURE = 16
# 0.2 % of a step: clocks and schedulers are no better than that, however quiet a run looks.
_LEAST_NOISE = 0.002


class _Measure(NamedTuple):
    """How the excesses of a step are measured."""

    others_s: MediansOfOthers
    jump_s: float  # an excess above it strikes by itself
    tests: Sequence[Threshold]


class Group:
    """Ranks that do the same work: equal pipeline and tensor coordinates, or all where no mesh is known."""

    def __init__(self) -> None:
        self.places: dict[int, int] = {}  # by rank
        self.rows = Rows(KEPT, WORKS_KEPT)
        self.held: dict[int, Held] = {}  # by place
        self.jumps: dict[int, deque[Jump]] = {}  # by place
        self.walls_s: deque[float] = deque(maxlen=KEPT)
        self._owns_s: deque[float] = deque(maxlen=KEPT)  # the typical rank's own work
        self.count = 0  # steps judged
        self.noise_s = 0.0
        self.center_s = 0.0
        self.step_s = 0.0
        self.names = 0  # how often a rank was named
        self._numbers = array("q")  # by place: the rank
        self._nodes: list[str] = []
        self._costs = AccumulatedCost(tests=2)
        self.levels = Levels()
        self._blocks_s = BlockMeans(KEPT)  # of ranks that give the noise
        self._jumps = 0  # of all ranks
        self._jumped: dict[int, int] = {}  # by place: the count at the last step that was as slow as a jump
        self._now: tuple[int, Floats] = (-1, np.empty((0, 0)))  # as of which count, what others exceed
        self._late: dict[int, tuple[int, float]] = {}  # noise of so many last steps: as of which count, and how much
        self._pending: dict[int, Works] = {}  # by step
        self._done = -1
        self._seen = 0
        self._slowest = Slowest()
        self._equal: StepWork | None = None  # a typical rank's share of the step that is being judged, once computed

    def __len__(self) -> int:
        """How many ranks there are."""
        return len(self._numbers)

    def rank(self, place: int) -> Rank:
        """Return the rank at a place."""
        return Rank(place, self._numbers[place], self._nodes[place])

    def ingest_steps(self, rank: int, node: str, works: Iterable[StepWork], stride: int) -> None:
        """Take finished steps of one rank."""
        place = self.admit(rank, node)
        for work in works:
            if work.step > self._done and work.step % stride == 0:
                self._told(work.step).put(place, work)

    def take_rows(self, places: Places, rows: Table, stride: int) -> None:
        """Take finished steps of many ranks: the place of each, and its row."""
        steps = rows[:, STEP]
        newest = int(steps[0])
        if (steps == newest).all():  # nearly always
            if newest > self._done and newest % stride == 0:
                self._told(newest).put_rows(places, rows)
            return
        for step in np.unique(steps[(steps > self._done) & (steps % stride == 0)]):
            of_step = steps == step
            self._told(int(step)).put_rows(places[of_step], rows[of_step])

    def admit(self, rank: int, node: str) -> int:
        """Return the place of a rank, a new one where it has none."""
        place = self.places.get(rank)
        if place is None:
            place = self.places[rank] = len(self._numbers)
            self._numbers.append(rank)
            self._nodes.append(node)
        return place

    def _told(self, step: int) -> Works:
        told = self._pending.get(step)
        if told is None:
            told = self._pending[step] = Works(step, len(self))
        return told

    def advance(self, policy: JobPolicy) -> Pieces[bool]:
        """Judge every step that all have reported, piece by piece; return whether any was."""
        moved = False
        newest = max(self._pending, default=0)
        for step in sorted(self._pending):
            told = self._pending.get(step)
            if told is None:
                continue
            if len(told) < len(self) and newest - step < MOST_PENDING:
                continue
            self._done = step
            # Ranks report their steps in order: what is older and not whole will never be.
            self._pending = {later: works for later, works in self._pending.items() if later > step}
            if len(told) >= 2 and 2 * len(told) >= len(self):
                self._seen += 1
                if self._seen > WARM_UP:
                    yield from self._judge_step(told, policy)
                moved = True
        return moved

    def _judge_step(self, told: Works, policy: JobPolicy) -> Pieces[None]:
        self.count += 1
        places = told.places()
        parts = []
        for first in range(0, len(places), MOST_SORTED):
            if first:
                yield
            parts.append(told.own_s(told.which(places, first, MOST_SORTED)))
        own_s = np.concatenate(parts) if len(parts) > 1 else parts[0]
        others_s = MediansOfOthers(values_of_some(own_s, MOST_SORTED))
        # All have the same step time but for the clocks: a thousand of them give it.
        walls_s = told.walls_s(values_of_some(places, PIECE))
        self.walls_s.append(float(np.partition(walls_s, len(walls_s) // 2)[len(walls_s) // 2]))
        self._owns_s.append(others_s.below)
        self._equal = None
        self._costs.grow(len(self), began=self.count - 1)
        self.levels.grow(len(self))
        ready = self.noise_s > 0
        heights = self.heights(policy) if ready else (0.0, 0.0)
        tests = (Threshold(_ALLOWANCE, heights[0]), Threshold(self._small_allowance(policy), heights[1]))
        measure = _Measure(others_s, max(JUMP_NOISES * self.noise_s, JUMP_SHARE * self.step_s), tests)
        row = self.rows.add(told, len(self))
        striking: list[int] = []
        for first in range(0, len(places), MOST_SORTED):
            if len(places) > MOST_SORTED:  # what came before was one, too
                yield
            here = told.which(places, first, MOST_SORTED)
            strikes = self._strike(here, own_s[first : first + MOST_SORTED], measure, row)
            striking += places[first + strikes].tolist()
        # Not before noise is known: one large garbage collection among eight steps is no level.
        most_s, worth_s = false_alarms.CUT * self.noise_s, policy.straggler_share * self.step_s
        is_block = ready and self.levels.add(row.excess_s - self.center_s, most_s, worth_s)
        if self.count >= LEAST and (not ready or self.count % RECALIBRATED == 0):
            self._calibrate(heights, policy)
            self.levels.most_innocent = MOST_INNOCENT * statistics.median(self._owns_s)
        if is_block:
            more_s = self.levels.settle(self._costs.are_calm(heights), list(self.held))
            self._costs.shift(more_s, self.noise_s, self.count)
        if ready:
            self._take_names_back(policy)
            self._name(striking, policy)

    def _strike(self, places: Places | slice, own_s: Floats, measure: _Measure, row: Row) -> Places:
        """Add up some ranks' own work in a step; return which of them, by number, it makes suspicious."""
        excess_s = own_s - measure.others_s.of(own_s)
        row.excess_s[places] = excess_s
        if not self.noise_s:
            return np.zeros(0, np.intp)
        excess_s -= self.levels.usual[places]  # not the row's, which is as it was measured
        noises = (excess_s - self.center_s) / self.noise_s
        above = self._costs.add(noises, measure.tests, self.count, places, self.noise_s)
        are_jumps = excess_s > measure.jump_s
        for at in np.flatnonzero(are_jumps).tolist():
            place = places.start + at if isinstance(places, slice) else int(places[at])
            are_jumps[at] = self._note_jump(place, float(excess_s[at]), row.works)
        return np.flatnonzero(above | are_jumps)

    def _note_jump(self, place: int, excess_s: float, works: Works) -> bool:
        """Note a single slow step of a rank, unless it is one with the step before."""
        jumps = self.jumps.setdefault(place, deque(maxlen=MOST_JUMPS))
        before, self._jumped[place] = self._jumped.get(place, 0), self.count
        if jumps and (self.count - jumps[-1].at <= 3 or before == self.count - 1):
            return False
        # Once a step, not once a rank: when a thousand jump together, sorting takes seconds.
        self._equal = self._equal or typical_of(works, MOST_SORTED)
        jumps.append(Jump(self.count, excess_s, works[place], self._equal))
        self._jumps += 1
        return True

    def _small_allowance(self, policy: JobPolicy) -> float:
        """Return half of the smallest excess worth naming, in units of the noise."""
        half = policy.straggler_share * self.step_s / 2 / self.noise_s if self.noise_s else _ALLOWANCE
        return min(max(half, _LEAST_ALLOWANCE), _ALLOWANCE)

    def _calibrate(self, heights: Sequence[float], policy: JobPolicy) -> None:
        """Learn the noise and the typical step from what is kept."""
        self.rows.keep(*((KEPT_LARGE, WORKS_KEPT_LARGE) if len(self) > LARGE else (KEPT, WORKS_KEPT)))
        sampled = np.array(self.sampled(), np.intp)
        self.step_s = sorted(self.walls_s)[len(self.walls_s) // 2]
        rows = self.rows.excesses_of(sampled)
        means = self._note_blocks(sampled, rows)
        # Not from ranks that have just become slow: where a third of all have, their change would pass for noise.
        known = self._costs.calm_of(sampled, heights)
        calm = rows if len(known) == len(sampled) else rows[np.isin(sampled, known)]
        noise_s = noise_of(calm, self._blocks_s.of(known), all_of_them=False)
        # The first steps are uncertain: three times their noise after 8 steps, a quarter more after 64.
        noise_s = max(noise_s, _LEAST_NOISE * self.step_s) * (1 + _UNSURE / self.count)
        if noise_s > false_alarms.RISE * self.noise_s:
            self._know(noise_s, policy)
        self.noise_s = noise_s
        # Skewed noise (a few long sequences) lifts every rank's mean above the median: that is no rank's excess.
        means.sort()
        self.center_s = max(0.0, means[(len(means) - 1) // 2]) if len(means) > 2 else 0.0

    def _note_blocks(self, sampled: Places, rows: Floats) -> list[float]:
        """Note the means of the newest block of some ranks; return what each of them is above its equals."""
        are_whole = ~np.isnan(rows).any(axis=1)
        means: list[float] = []
        if are_whole.any():  # nearly always all
            whole = rows[are_whole]
            ordered = np.sort(whole, axis=1)
            self._blocks_s.add(sampled[are_whole], false_alarms.block_means(whole, ordered))
            means = false_alarms.trimmed_means(ordered).tolist()
        for place, row in zip(sampled[~are_whole].tolist(), rows[~are_whole], strict=True):
            told = row[~np.isnan(row)].tolist()
            if told:
                self._blocks_s.add(np.array([place]), np.array([false_alarms.block_mean(told)]))
            means.append(false_alarms.trimmed_mean(told))
        return means

    def sampled(self) -> Sequence[int]:
        """Return the places that stand for all, fewer than twice SAMPLED."""
        return some_of(len(self), SAMPLED)

    def heights(self, policy: JobPolicy) -> tuple[float, float]:
        """Return the thresholds of both sums."""
        between = false_alarms.steps_between_alarms(len(self), self.step_s, policy.straggler_false_alarms_per_day / 3)
        small = self._small_allowance(policy)
        return false_alarms.threshold(_ALLOWANCE, between), false_alarms.threshold(small, between)

    def _name(self, striking: Iterable[int], policy: JobPolicy) -> None:
        """Name those of the striking ranks that are slow enough, for long or often enough."""
        striking = list(striking)
        if not striking:
            return
        names = self.names
        noise_s, heights = self.noise_s, self.heights(policy)
        are_slow = self._are_slow_now(striking, policy)
        for place in striking:
            if noise_s != self.noise_s:  # the one before has shown that the job is noisier than was known
                noise_s, heights = self.noise_s, self.heights(policy)
            if place in self.held:
                continue
            if self.names - names >= MOST_NAMES:
                break  # the others strike again in the next step
            if (self._costs.totals[:, place] > heights).any():
                if place in are_slow:
                    self._hold_if_worth(place, heights, policy)
            elif self.jumps.get(place) and self._jumps_too_often(place, policy):
                since = self.jumps[place][0].at
                self._hold(place, policy.straggler_share, intermittent=True, window=max(2, self.count - since))

    def _are_slow_now(self, places: Sequence[int], policy: JobPolicy) -> set[int]:
        """Return those whose newest excesses are worth a name, and those that have not told all of theirs.

        A sum comes down slowly, and a rank that was slow may be well again. And this comes first: of machines that are
        not quite alike, some hundreds in ten thousand are above the thresholds all the time.
        """
        newest_s = self._unusual_s(np.array(places, np.intp), PERSISTENT)
        if newest_s.shape[1] < PERSISTENT:
            return set(places)
        middle = np.partition(newest_s, PERSISTENT // 2, axis=1)[:, PERSISTENT // 2]
        are_slow = ~(middle < policy.straggler_share * self.step_s) | np.isnan(newest_s).any(axis=1)
        return {place for place, is_slow in zip(places, are_slow.tolist(), strict=True) if is_slow}

    def _take_names_back(self, policy: JobPolicy) -> None:
        """Take back the names of ranks that are as fast as their equals again, or no longer slow enough."""
        share = policy.straggler_share
        for place, held in list(self.held.items()):
            if self._is_well_again(place, held, share * self.step_s):
                del self.held[place]
                self._costs.clear(place)
                self.jumps.pop(place, None)
            elif share > held.share and not self._is_worth(place, held, share * self.step_s):
                del self.held[place]  # as slow as it was: were the share lowered again, it would be named at once

    def _hold_if_worth(self, place: int, heights: Sequence[float], policy: JobPolicy) -> None:
        worth_s = policy.straggler_share * self.step_s
        is_above = self._costs.totals[:, place] > heights
        window = self.count - int(self._costs.began[is_above, place].min())
        if window < PERSISTENT:
            return
        # Now, too (``_are_slow_now``), also where some steps are missing.
        worth_s += self.levels.usual[place]
        if statistics.median_high(self.rows.newest_s(place, min(PERSISTENT, window))) < worth_s:
            return
        middle_s = statistics.median_high(self.rows.excesses_s(place)[-window:])
        if middle_s < worth_s:
            return
        worth_s -= self.levels.usual[place]
        outlasts = self.levels.outlasts(place, window, middle_s - self.levels.usual[place], worth_s)
        if not outlasts or not self._stands(place, window, heights, policy):
            return
        # Of many equals one is slow by chance in every step: who is no slower than that holds no rank up.
        if len(self) > 2 * SAMPLED and self.gained_s(place, window, policy.straggler_share) < worth_s / 2:
            return
        if not self._strays(place, heights, policy):
            return
        if self.waited_s(place, window) >= worth_s / 2:
            self._hold(place, policy.straggler_share, intermittent=False, window=window)

    def _stands(self, suspect: int, window: int, heights: Sequence[float], policy: JobPolicy) -> bool:
        """Hold an alarm against the noise of late; where that is larger than what was known, it may be none."""
        # Of two ranks one alone shows it: steps before the alarm's would halve what eight uneven steps show.
        steps = max(LATELY, -(-window // LATELY) * LATELY) if len(self) > 2 else window + 1
        noise_s = self._noise_of_late_s(suspect, steps, heights)
        if noise_s <= self.noise_s:
            return True
        self._know(noise_s, policy)
        return bool((self._costs.totals[:, suspect] > self.heights(policy)).any())

    def _strays(self, suspect: int, heights: Sequence[float], policy: JobPolicy) -> bool:
        """Return whether a suspect is further out, on the mean of its alarm, than innocent ranks stray."""
        between = false_alarms.steps_between_alarms(len(self), self.step_s, policy.straggler_false_alarms_per_day / 3)
        alarms = [
            Alarm(self.count - int(self._costs.began[test, suspect]), float(self._costs.since[test, suspect]))
            for test in np.flatnonzero(self._costs.totals[:, suspect] > heights)
        ]
        own_s = self._unusual_s(np.array([suspect], np.intp))[0] - self.center_s
        others_s = self._others_now_s(suspect, heights)
        return self.levels.strays(suspect, alarms, between, own_s, others_s, false_alarms.CUT * self.noise_s)

    def _others_now_s(self, suspect: int, heights: Sequence[float]) -> Floats:
        """Return what ranks without suspicion exceed their usual levels by; of many one sample does for a step."""
        if self._now[0] == self.count and len(self) > 2 * SAMPLED:
            return self._now[1]
        free = np.ones(len(self), bool)
        free[[suspect, *self.held]] = False
        calm = self._costs.calm_of(np.flatnonzero(free), heights)
        calm = calm[np.array(some_of(len(calm), SAMPLED), np.intp)]
        excesses_s = self.rows.excesses_of(calm) - self.levels.own[calm][:, None]
        self._now = self.count, excesses_s - self.center_s
        return self._now[1]

    def _unusual_s(self, places: Places, most: int | None = None) -> Floats:
        """Return by how much ranks exceeded their usual levels in the newest steps (places, steps)."""
        return self.rows.excesses_of(places, most) - self.levels.usual[places][:, None]

    def _know(self, noise_s: float, policy: JobPolicy) -> None:
        """Take over a new noise; the sums are in its units, so a larger one makes them less."""
        before_s, self.noise_s = self.noise_s, noise_s
        tests = list(map(Threshold, (_ALLOWANCE, self._small_allowance(policy)), self.heights(policy)))
        high = [self._costs.above(test, one.height / 2) for test, one in enumerate(tests)]
        if before_s > 0:
            self._costs.scale(before_s / noise_s)
        for test, (places, one) in enumerate(zip(high, tests, strict=True)):
            remembered = places[self.count - self._costs.began[test, places] <= len(self.rows)]
            noises = (self._unusual_s(remembered) - self.center_s) / self.noise_s
            self._costs.add_again(test, remembered, noises, one, self.count, self.noise_s)

    def _noise_of_late_s(self, suspect: int, steps: int, heights: Sequence[float]) -> float:
        """Return the noise of the ranks without an alarm in the last steps.

        Of few ranks these are all but the suspect; of many one sample will do for all suspects of a step.
        """
        free = np.ones(len(self), bool)
        free[list(self.held)] = False
        if len(self) <= 2 * SAMPLED:
            free[suspect] = False
            calm = self._costs.calm_of(np.flatnonzero(free), heights)
            return noise_of_late(self.rows.excesses_of(calm), steps)
        known = self._late.get(steps)
        if known is not None and known[0] == self.count:
            return known[1]
        # Twice as many as are needed, since some may not be calm.
        some = np.array(some_of(len(self), 2 * SAMPLED), np.intp)
        calm = self._costs.calm_of(some[free[some]], heights)
        noise_s = noise_of_late(self.rows.excesses_of(calm[np.array(some_of(len(calm), SAMPLED), np.intp)]), steps)
        self._late[steps] = self.count, noise_s
        return noise_s

    def _hold(self, place: int, share: float, *, intermittent: bool, window: int) -> None:
        since_step = self.rows.step_back(window)
        kept = window if intermittent else min(window, KEPT)
        self.held[place] = Held(intermittent, since_step, self.count, kept, share)
        self.names += 1

    def _is_well_again(self, place: int, held: Held, worth_s: float) -> bool:
        window = well_after(held)
        if self.count - held.named_at < window:
            return False
        if held.intermittent:
            return self.count - self.jumps[place][-1].at > window
        return self._typical_s(place, window) < worth_s / 2

    def _is_worth(self, place: int, held: Held, worth_s: float) -> bool:
        """Return whether what a rank is named for is worth so much."""
        if held.intermittent:
            return self._lost_in_jumps_s(place) >= worth_s
        return self._typical_s(place, self.count - held.named_at + held.window) >= worth_s

    def _typical_s(self, place: int, window: int) -> float:
        """Return by how much a rank typically exceeded its usual level in the newest steps."""
        return false_alarms.trimmed_mean(self.rows.excesses_s(place)[-window:]) - float(self.levels.usual[place])

    def _lost_in_jumps_s(self, place: int) -> float:
        """Return what a rank's single slow steps cost each step."""
        jumps = self.jumps[place]
        return sum(jump.excess_s for jump in jumps) / intermittent_steps(jumps, self.count)

    def _jumps_too_often(self, place: int, policy: JobPolicy) -> bool:
        """Return whether a rank's single slow steps are more, and cost more, than chance explains."""
        jumps = self.jumps[place]
        while jumps and jumps[0].at <= self.count - JUMP_WINDOW:
            jumps.popleft()
        if len(jumps) < LEAST_JUMPS:
            return False
        window = min(self.count, JUMP_WINDOW)
        rate = (self._jumps - len(jumps) + 1) / (self.count * max(1, len(self) - 1))
        windows_a_day = len(self) * 86_400.0 / max(window * self.step_s, 1e-6)
        chance = false_alarms.chance_of_at_least(len(jumps), rate * window)
        too_often = chance * windows_a_day < policy.straggler_false_alarms_per_day / 3
        return too_often and self._lost_in_jumps_s(place) >= policy.straggler_share * self.step_s

    def gained_s(self, place: int, window: int, share: float) -> float:
        """Return what a step would gain if a rank were as fast as the slowest of its equals in that step.

        Equals that are slow all the time, by ``share`` of a step, do not count: each of them would hide the others.
        """
        mine_s = self.rows.excesses_of(np.array([place], np.intp))[0]
        slowest_s = self._slowest.of(self.rows, len(self), share * self.step_s, self.count, list(self.held))
        gains_s = np.maximum(mine_s - slowest_s, 0.0)[-window:]
        told = gains_s[~np.isnan(gains_s)]
        return float(told.mean()) if len(told) else 0.0

    def waited_s(self, place: int, window: int) -> float:
        """Return what a typical other rank waits in a step."""
        others = (self.rows.works(other, window) for other in self.sampled() if other != place)
        waits = sorted(sum(work.waiting_s for work in works) / len(works) for works in others if works)
        return waits[len(waits) // 2] if waits else 0.0
