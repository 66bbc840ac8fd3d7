# SPDX-License-Identifier: Apache-2.0
"""Find the ranks that need longer for their own work than their equals, and make all the others wait.

A synchronous job is as fast as its slowest rank, and every rank shows the same step time: the culprit's is filled with
work, a victim's with waiting. So only *own work* is compared (the step without what was waited for others and without
checkpoints), of the same step, with the median of the other ranks of the same pipeline and tensor coordinates. What is
common to all (long sequences, an evaluation, a slow network) cancels there; what is random averages out.

Three ways to be slow, three tests on each rank's excess over that median, in units of the run's own noise:

- *much*: a cumulative sum with allowance 0.5 (``calibration`` says what that is); 20 % are named after 5 to 10 steps;
- *a little, or creeping*: another whose allowance is half of the smallest excess worth naming;
- *now and then*: single slow steps of a rank, counted against how often all others have such steps.

Each alarm must also be worth it (``straggler_share`` of a step, in the median of the slow steps) and have somebody who
waits for it. A name is taken back when the excess has been below half of that for as long as it took to name it.

Pure: told the steps, answers with who is slow. A step of many ranks is judged in pieces, so that whoever asks can do
something else in between.
"""

import statistics
from collections import deque
from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import islice
from typing import NamedTuple

from megascale_ops.controller import calibration
from megascale_ops.controller.own_work import Held, Jump, MediansOfOthers, Rank, intermittent_steps, own_work_s
from megascale_ops.controller.pieces import Pieces, run_through
from megascale_ops.schema.identity import Mesh
from megascale_ops.schema.messages import JobPolicy
from megascale_ops.schema.progress import StepWork

# The first steps compile, allocate and connect.
WARM_UP = 5
# 8 steps of all ranks: 28 differences on 4 ranks, enough for a first idea of the noise.
LEAST = 8
# 8 slow steps at least: half a second of somebody else's process on the same core is no straggler of 50 ms steps.
PERSISTENT = 8
# 16 steps tell of noise that began of late; the alarm's own steps where they are more.
LATELY = 16
KEPT = 64
# 4,096 steps: three minutes of 50 ms steps, a day of 20 s ones.
REMEMBERED = 4_096
# A step that not all ranks have told is waited for until the newest is so much further.
MOST_PENDING = 64
# The noise is that of at most 64 ranks, looked at again every 8 steps: 0.1 ms a step.
SAMPLED = 64
RECALIBRATED = calibration.BLOCK
# Above 512 ranks less is kept of each: 12,288 ranks take 60 MB.
LARGE, KEPT_LARGE = 512, 32
# 32 names a step: a thousand ranks that become slow at once are named within seconds, and no tick waits for that.
MOST_NAMES = 32
# Values a second that are looked at (1.5 us each); of jobs with more ranks than that only every n-th step is.
MOST_VALUES = 40_000.0
# 1,024 ranks are judged in one piece, 2 to 4 ms.
PIECE = 1_024
# The median of every n-th is within 1 % of the noise of what all would give, and sorted in 3 ms.
MOST_SORTED = 8_192
# A single slow step: far out of the noise and a good part of a step. Four of them, seen among 512 steps.
JUMP_NOISES, JUMP_SHARE, LEAST_JUMPS, JUMP_WINDOW = 8.0, 0.25, 4, 512
_ALLOWANCE = 0.5
_LEAST_ALLOWANCE = 0.2
_UNSURE = 16
# 0.2 % of a step: clocks and schedulers are no better than that, however quiet a run looks.
_LEAST_NOISE = 0.002


class Passed(NamedTuple):
    """A slowness that passed by itself: when it was over, and how many steps it lasted."""

    at: int
    steps: int


class Group:
    """Ranks that do the same work: equal pipeline and tensor coordinates, or all where no mesh is known."""

    def __init__(self) -> None:
        self.ranks: dict[int, Rank] = {}
        self.steps: deque[int] = deque(maxlen=KEPT)
        self.walls_s: deque[float] = deque(maxlen=KEPT)
        self.count = 0  # steps judged
        self.noise_s = 0.0
        self.center_s = 0.0
        self.step_s = 0.0
        self.names = 0  # how often a rank was named
        self._jumps = 0  # of all ranks
        self._passed: deque[Passed] = deque(maxlen=16)
        self._late: dict[int, tuple[int, float]] = {}  # noise of so many last steps: as of which count, and how much
        self._pending: dict[int, dict[int, StepWork]] = {}
        self._done = -1
        self._seen = 0
        self._equal: StepWork | None = None  # a typical rank's share of the step that is being judged, once asked for

    def take(self, rank: int, node: str, works: Iterable[StepWork], stride: int) -> None:
        """Take finished steps of one rank."""
        if rank not in self.ranks:
            self.ranks[rank] = Rank(rank, node, KEPT)
        for work in works:
            if work.step > self._done and work.step % stride == 0:
                self._pending.setdefault(work.step, {})[rank] = work

    def advance(self, policy: JobPolicy) -> Pieces[bool]:
        """Judge every step that all have told, piece by piece; tell whether any was."""
        moved = False
        newest = max(self._pending, default=0)
        for step in sorted(self._pending):
            told = self._pending.get(step)
            if told is None:
                continue
            if len(told) < len(self.ranks) and newest - step < MOST_PENDING:
                continue
            self._done = step
            # Ranks tell their steps in order: what is older and not whole will never be.
            self._pending = {later: works for later, works in self._pending.items() if later > step}
            if len(told) >= 2 and 2 * len(told) >= len(self.ranks):
                yield from self._judge_step(step, told, policy)
                moved = True
        return moved

    def _judge_step(self, step: int, told: dict[int, StepWork], policy: JobPolicy) -> Pieces[None]:
        self._seen += 1
        if self._seen <= WARM_UP:
            return
        self.count += 1
        numbers = list(told)
        own_s: list[float] = []
        for first in range(0, len(numbers), MOST_SORTED):
            if first:
                yield
            own_s += [own_work_s(told[number]) for number in numbers[first : first + MOST_SORTED]]
        others_s = MediansOfOthers(own_s[:: -(-len(own_s) // MOST_SORTED)])
        self.steps.append(step)
        # All have the same step time but for the clocks: a thousand of them tell it.
        walls_s = sorted(work.wall_s for work in islice(told.values(), 0, None, max(1, len(told) // PIECE)))
        self.walls_s.append(walls_s[len(walls_s) // 2])
        self._equal = None
        ready = self.noise_s > 0
        heights = self.heights(policy) if ready else (0.0, 0.0)
        tests = ((0, _ALLOWANCE, heights[0]), (1, self._small_allowance(policy), heights[1])) if ready else ()
        striking: dict[int, Rank] = {}
        # Two lists, not one of pairs: thousands of new pairs are work for the garbage collector.
        for first in range(0, len(numbers), PIECE):
            if len(numbers) > PIECE:  # what came before was one, too
                yield
            pairs = zip(numbers[first : first + PIECE], own_s[first : first + PIECE], strict=True)
            self._judge_some(pairs, told, others_s, tests, striking)
        if self.count >= LEAST and (not ready or self.count % RECALIBRATED == 0):
            self._calibrate(heights, policy)
        if ready:
            self._take_names_back(policy)
            self._name(striking.values(), policy)

    def _judge_some(
        self,
        pairs: Iterable[tuple[int, float]],
        told: Mapping[int, StepWork],
        others_s: MediansOfOthers,
        tests: Sequence[tuple[int, float, float]],
        striking: dict[int, Rank],
    ) -> None:
        """Judge some ranks' own work in a step; add to ``striking`` whom it makes suspicious.

        ``tests`` are number, allowance and height of each sum; none before the noise is known.
        """
        unit_s, center_s = self.noise_s, self.center_s
        jump_s = max(JUMP_NOISES * unit_s, JUMP_SHARE * self.step_s)
        for number, own in pairs:
            rank = self.ranks[number]
            excess_s = own - others_s(own)
            rank.excess_s.append(excess_s)
            rank.works.append(told[number])
            if not tests:
                continue
            x = (excess_s - center_s) / unit_s
            x = min(max(x, -calibration.CUT), calibration.CUT)
            sums = rank.sums
            for test, allowance, height in tests:
                total = sums[test] + x - allowance
                if total <= 0.0:
                    rank.began[test] = self.count
                    total = 0.0
                elif total > height:
                    striking[number] = rank
                    # Twice the threshold is enough to know; a higher sum would only take longer to come down.
                    total = min(total, 2 * height)
                sums[test] = total
            if excess_s > jump_s and (not rank.jumps or self.count - rank.jumps[-1].at > 3):
                # Once a step, not once a rank: when a thousand jump together, sorting takes seconds.
                self._equal = self._equal or sorted(told.values(), key=own_work_s)[(len(told) - 1) // 2]
                rank.jumps.append(Jump(self.count, excess_s, told[number], self._equal))
                self._jumps += 1
                striking[number] = rank

    def _small_allowance(self, policy: JobPolicy) -> float:
        """Return half of the smallest excess worth naming, in units of the noise."""
        half = policy.straggler_share * self.step_s / 2 / self.noise_s if self.noise_s else _ALLOWANCE
        return min(max(half, _LEAST_ALLOWANCE), _ALLOWANCE)

    def _calibrate(self, heights: Sequence[float], policy: JobPolicy) -> None:
        """Learn the noise and the typical step from what is kept."""
        ranks = list(self.ranks.values())
        if len(ranks) > LARGE and ranks[0].excess_s.maxlen == KEPT:
            for rank in ranks:
                rank.excess_s = deque(rank.excess_s, KEPT_LARGE)
                rank.works = deque(rank.works, KEPT_LARGE // 4)
        sampled = ranks[:: max(1, len(ranks) // SAMPLED)]
        self.step_s = sorted(self.walls_s)[len(self.walls_s) // 2]
        for rank in sampled:
            last_s = list(rank.excess_s)[-calibration.BLOCK :]
            rank.blocks_s.append(sum(last_s) / len(last_s))
        # Not from those who have just become slow: where a third of all have, their change would pass for noise.
        known = _calm_of(sampled, heights)
        noise_s = calibration.noise_s([list(rank.excess_s) for rank in known], [list(rank.blocks_s) for rank in known])
        # The first steps know little: three times their noise after 8 steps, a quarter more after 64.
        noise_s = max(noise_s, _LEAST_NOISE * self.step_s) * (1 + _UNSURE / self.count)
        if noise_s > calibration.RISE * self.noise_s:
            self._know(noise_s, policy)
        self.noise_s = noise_s
        # Skewed noise (a few long sequences) lifts everybody's mean above the median: that is nobody's excess.
        means = sorted(calibration.trimmed_mean(rank.excess_s) for rank in sampled)
        self.center_s = max(0.0, means[(len(means) - 1) // 2]) if len(means) > 2 else 0.0

    def heights(self, policy: JobPolicy) -> tuple[float, float]:
        """Return the thresholds of both sums."""
        between = calibration.steps_between_alarms(
            len(self.ranks), self.step_s, policy.straggler_false_alarms_per_day / 3
        )
        small = self._small_allowance(policy)
        return calibration.threshold(_ALLOWANCE, between), calibration.threshold(small, between)

    def _name(self, striking: Iterable[Rank], policy: JobPolicy) -> None:
        """Name those of the ranks that strike who are slow enough, for long or often enough."""
        names = self.names
        noise_s, heights = self.noise_s, self.heights(policy)
        for rank in striking:
            sums = rank.sums
            if noise_s != self.noise_s:  # the one before has shown that the job is noisier than was known
                noise_s, heights = self.noise_s, self.heights(policy)
            if rank.held is not None:
                continue
            if self.names - names >= MOST_NAMES:
                break  # the others strike again in the next step
            if sums[0] > heights[0] or sums[1] > heights[1]:
                self._hold_if_worth(rank, heights, policy)
            elif rank.jumps and self._jumps_too_often(rank, policy):
                self._hold(rank, intermittent=True, window=max(2, self.count - rank.jumps[0].at))

    def _take_names_back(self, policy: JobPolicy) -> None:
        """Take back the names of those who are as fast as their equals again."""
        for rank in self.ranks.values():
            if rank.held is not None and self._is_well_again(rank, rank.held, policy.straggler_share * self.step_s):
                self._learn(rank.held)
                rank.held = None
                rank.sums[:] = [0.0, 0.0]
                rank.jumps.clear()

    def _hold_if_worth(self, rank: Rank, heights: Sequence[float], policy: JobPolicy) -> None:
        worth_s = policy.straggler_share * self.step_s
        began = min(rank.began[test] for test in (0, 1) if rank.sums[test] > heights[test])
        window = self.count - began
        excesses = list(rank.excess_s)[-window:]
        # Now, too: a sum comes down slowly, and who was slow for half of the window may be well again.
        typical_s = min(statistics.median_high(excesses), statistics.median_high(excesses[-PERSISTENT:]))
        if window < self._persistent() or typical_s < worth_s:
            return
        if not self._stands(rank, window, heights, policy):
            return
        if self.waited_s(rank, window) >= worth_s / 2:
            self._hold(rank, intermittent=False, window=window)

    def _persistent(self) -> int:
        """Return for how many steps a rank must be slow: twice as many as have passed by themselves in this job."""
        while self._passed and self._passed[0].at <= self.count - REMEMBERED:
            self._passed.popleft()
        return min(max([PERSISTENT, *(2 * one.steps for one in self._passed)]), KEPT)

    def _stands(self, suspect: Rank, window: int, heights: Sequence[float], policy: JobPolicy) -> bool:
        """Hold an alarm against the noise of late; where that is larger than what was known, it may be none."""
        # Of two ranks one alone tells it: steps before the alarm's would halve what eight uneven steps show.
        steps = max(LATELY, -(-window // LATELY) * LATELY) if len(self.ranks) > 2 else window + 1
        noise_s = self._noise_of_late_s(suspect, steps, heights)
        if noise_s <= self.noise_s:
            return True
        self._know(noise_s, policy)
        return any(total > height for total, height in zip(suspect.sums, self.heights(policy), strict=True))

    def _know(self, noise_s: float, policy: JobPolicy) -> None:
        """Take over a new noise; the sums are in its units, so a larger one makes them less."""
        before_s, self.noise_s = self.noise_s, noise_s
        tests = list(zip((_ALLOWANCE, self._small_allowance(policy)), self.heights(policy), strict=True))
        for rank in self.ranks.values():
            for test, (allowance, height) in enumerate(tests):
                if 2 * rank.sums[test] > height and self.count - rank.began[test] <= len(rank.excess_s):
                    self._add_up_again(rank, test, allowance, height)
                else:
                    rank.sums[test] *= before_s / noise_s

    def _add_up_again(self, rank: Rank, test: int, allowance: float, height: float) -> None:
        """Add a sum up from what is kept: what was cut at four noises may be as far out of a larger noise."""
        last_s = list(rank.excess_s)[rank.began[test] - self.count :]
        total = 0.0
        for back, excess_s in zip(range(len(last_s) - 1, -1, -1), last_s, strict=True):
            x = (excess_s - self.center_s) / self.noise_s
            total += min(max(x, -calibration.CUT), calibration.CUT) - allowance
            if total <= 0.0:
                total = 0.0
                rank.began[test] = self.count - back
        rank.sums[test] = min(total, 2 * height)

    def _noise_of_late_s(self, suspect: Rank, steps: int, heights: Sequence[float]) -> float:
        """Return how noisy those were in the last steps who raise no alarm.

        Of few ranks these are all but the suspect; of many one sample will do for all suspects of a step.
        """
        if len(self.ranks) <= 2 * SAMPLED:
            others = [rank for rank in self.ranks.values() if rank.held is None and rank is not suspect]
            return calibration.noise_of_late_s([rank.excess_s for rank in _calm_of(others, heights)], steps)
        known = self._late.get(steps)
        if known is not None and known[0] == self.count:
            return known[1]
        calm = _calm_of([rank for rank in self.ranks.values() if rank.held is None], heights)
        calm = calm[:: max(1, len(calm) // SAMPLED)]
        noise_s = calibration.noise_of_late_s([rank.excess_s for rank in calm], steps)
        self._late[steps] = self.count, noise_s
        return noise_s

    def _hold(self, rank: Rank, *, intermittent: bool, window: int) -> None:
        back = min(window, len(self.steps))
        rank.held = Held(intermittent, self.steps[-back], self.count, min(window, KEPT) if not intermittent else window)
        self.names += 1

    def _learn(self, held: Held) -> None:
        """A slowness that passed soon after it was named was a neighbour's, and another one as short will pass, too."""
        well = _well_after(held)
        if not held.intermittent and self.count - held.named_at <= 2 * well:
            # A fifth of the steps that count as well may still have been slow: the trimmed mean is blind to them.
            self._passed.append(Passed(self.count, self.count - well + well // 5 - held.named_at + held.window))

    def _is_well_again(self, rank: Rank, held: Held, worth_s: float) -> bool:
        window = _well_after(held)
        if self.count - held.named_at < window:
            return False
        if held.intermittent:
            return self.count - rank.jumps[-1].at > window
        return calibration.trimmed_mean(list(rank.excess_s)[-window:]) < worth_s / 2

    def _jumps_too_often(self, rank: Rank, policy: JobPolicy) -> bool:
        """Say whether a rank's single slow steps are more, and cost more, than chance explains."""
        while rank.jumps[0].at <= self.count - JUMP_WINDOW:
            rank.jumps.popleft()
        jumps = rank.jumps
        if len(jumps) < LEAST_JUMPS:
            return False
        window = min(self.count, JUMP_WINDOW)
        rate = (self._jumps - len(jumps) + 1) / (self.count * max(1, len(self.ranks) - 1))
        windows_a_day = len(self.ranks) * 86_400.0 / max(window * self.step_s, 1e-6)
        chance = calibration.chance_of_at_least(len(jumps), rate * window)
        lost_s = sum(jump.excess_s for jump in jumps) / intermittent_steps(rank, self.count)
        too_often = chance * windows_a_day < policy.straggler_false_alarms_per_day / 3
        return too_often and lost_s >= policy.straggler_share * self.step_s

    def waited_s(self, rank: Rank, window: int) -> float:
        """Return what a typical other rank waits in a step."""
        others = [other for other in self.ranks.values() if other is not rank and other.works]
        others = others[:: max(1, len(others) // SAMPLED)]
        waits = sorted(_mean([work.waiting_s for work in list(other.works)[-window:]]) for other in others)
        return waits[len(waits) // 2] if waits else 0.0


class Watch:
    """All ranks of one round of one job."""

    def __init__(self) -> None:
        self.groups: dict[tuple[int, int], Group] = {}
        self._seen: set[int] = set()
        self._stride = 1

    def take(self, rank: int, node: str, mesh: Mesh, works: Sequence[StepWork]) -> None:
        """Take finished steps of one rank."""
        self._seen.add(rank)
        group = self.groups.get((mesh.pp, mesh.tp))
        if group is None:
            group = self.groups[mesh.pp, mesh.tp] = Group()
        group.take(rank, node, works, self._stride)

    def advance(self, policy: JobPolicy, world_size: int) -> bool:
        """Judge what has come in; tell whether anything was judged. Nobody is, until all ranks were seen."""
        return run_through(self.pieces(policy, world_size))

    def pieces(self, policy: JobPolicy, world_size: int) -> Pieces[bool]:
        """Do the same piece by piece; more steps may be taken in between."""
        if len(self._seen) < world_size:
            return False
        moved = False
        for group in list(self.groups.values()):
            if (yield from group.advance(policy)):
                moved = True
                yield
        step_s = max((group.step_s for group in self.groups.values()), default=0.0)
        if step_s:
            self._stride = max(1, round(world_size / (MOST_VALUES * step_s)))
        return moved

    def held(self) -> Iterator[tuple[Group, Rank, Held]]:
        """Yield who is named now."""
        for group in self.groups.values():
            for rank in group.ranks.values():
                if rank.held is not None:
                    yield group, rank, rank.held


def _calm_of(ranks: Sequence[Rank], heights: Sequence[float]) -> Sequence[Rank]:
    """Return the ranks that are not half as suspicious as one that is named, all where those are too few."""
    calm = [rank for rank in ranks if all(2 * total <= top for total, top in zip(rank.sums, heights, strict=True))]
    return calm if len(calm) >= 2 and 2 * len(calm) >= len(ranks) else ranks


def _well_after(held: Held) -> int:
    """Return for how many steps a named rank must be as fast as its equals."""
    return max(20, held.window)


def _mean(values: Sequence[float]) -> float:
    return sum(values) / len(values) if values else 0.0
