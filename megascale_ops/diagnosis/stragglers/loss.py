# SPDX-License-Identifier: Apache-2.0
"""Watch the loss: no number any more, or far out of its recent range. A warning; nothing is stopped for it.

Each rank's loss is compared with its own last 64 values only, because ranks see different data. The range is the median
and the median absolute deviation, which neither a single bad batch nor slow learning moves. A loss that falls is no
spike. What is out of range does not join the recent values until 64 steps have shown that it is the new normal.

Pure: steps in, verdicts out.
"""

from array import array
from collections.abc import Iterable, Mapping

import numpy as np
import numpy.typing as npt

from megascale_ops.diagnosis.stragglers.step_table import LOSS, LOSS_IS_FINITE, RANK, STEP, Table, in_turns
from megascale_ops.schema.health import Finding, Verdict
from megascale_ops.schema.history import Place
from megascale_ops.schema.policy import JobPolicy
from megascale_ops.schema.progress import StepWork

Places = npt.NDArray[np.intp]
Values = npt.NDArray[np.float64]

_RECENT = 64
# 20 values: fewer give no range; and for so long all must be well before a warning ends.
_LEAST = 20
# 1/8: of 64 values eight must be new before the range is looked at again; sorting them is all that a loss costs.
_RENEWED = 8
# 5 % of the loss itself: a loss that has converged to the last digit would otherwise spike at every batch.
_LEAST_SPREAD = 0.05
# Of normal noise the standard deviation is so many times the median absolute deviation.
_SPREAD = 1.4826


class LossWatch:
    """The losses of one round of one job.

    What is kept of a rank is a place in columns, not an object: 100,000 of them would be half of what each look for
    garbage visits, and NumPy can judge the losses of a large job together.
    """

    def __init__(self) -> None:
        self._places: dict[int, int] = {}  # by rank, in the order in which they came
        self._by_rank = array("q")  # the same of a large job, -1 for none
        self._nodes: list[str] = []
        self._recent = array("d")  # the last values, _RECENT each
        self._taken = array("q")  # how many came; of more than _RECENT the next one takes the place of the oldest
        self._bad = array("q")  # values in a row that are no number
        self._high = array("q")  # values in a row that are out of range
        self._well = array("q")  # values in a row that are neither
        self._since = array("q")  # first step of what is not well
        self._good_for = array("q")  # values for which the range still serves
        self._center, self._limit, self._worst = array("d"), array("d"), array("d")
        self._nan: set[int] = set()
        self._spike: set[int] = set()

    def ingest_losses(self, rank: int, node: str, works: Iterable[StepWork], policy: JobPolicy) -> None:
        """Take finished steps of one rank, oldest first."""
        for work in works:
            if work.loss is None and work.loss_is_finite:
                continue
            self._judge(rank, self._place(rank, node), work, policy)

    def take_rows(self, rows: Table, places: Mapping[int, Place], policy: JobPolicy) -> None:
        """Take finished steps of many ranks, as ``step_table`` has them; ``places`` has the place of every rank."""
        is_left_out = np.isnan(rows[:, LOSS]) & (rows[:, LOSS_IS_FINITE] != 0)
        told = rows[~is_left_out] if is_left_out.any() else rows
        for turn in in_turns(told) if len(told) else ():
            at = self._places_of(turn[:, RANK].astype(np.intp), places)
            is_none = np.isnan(turn[:, LOSS])
            if is_none.any():
                for row, place in zip(turn[is_none], at[is_none].tolist(), strict=True):
                    self._judge_none(int(row[RANK]), place, int(row[STEP]))
                self._judge_rows(at[~is_none], turn[~is_none], policy)
            else:
                self._judge_rows(at, turn, policy)

    def _places_of(self, ranks: Places, places: Mapping[int, Place]) -> Places:
        missing = int(ranks.max()) + 1 - len(self._by_rank)
        self._by_rank.extend([-1] * max(0, missing))
        for rank in ranks[np.frombuffer(self._by_rank, np.int64)[ranks] < 0].tolist():
            self._by_rank[rank] = self._place(rank, places[rank].node)
        return np.frombuffer(self._by_rank, np.int64)[ranks]

    def _place(self, rank: int, node: str) -> int:
        """Return a rank's place, a new one where it has none."""
        place = self._places.get(rank)
        if place is None:
            place = self._places[rank] = len(self._nodes)
            self._nodes.append(node)
            self._recent.frombytes(bytes(8 * _RECENT))
            for counts in (self._taken, self._bad, self._high, self._well, self._good_for):
                counts.append(0)
            self._since.append(-1)
            for values in (self._center, self._limit, self._worst):
                values.append(0.0)
        return place

    def verdicts(self, round_: int) -> dict[str, Verdict]:
        """Return what is not well now, by fault."""
        found = {}
        if self._nan:
            found["loss_nan"] = self._verdict("loss_nan", self._nan, round_)
        if self._spike:
            found["loss_spike"] = self._verdict("loss_spike", self._spike, round_)
        return found

    def _judge(self, rank: int, at: int, work: StepWork, policy: JobPolicy) -> None:
        loss = work.loss
        if loss is None:
            self._judge_none(rank, at, work.step)
            return
        self._bad[at] = 0
        if self._is_high(at, loss, policy):
            self._judge_high(rank, at, work.step, loss, policy)
            return
        self._high[at] = 0
        self._well[at] += 1
        self._recent[at * _RECENT + self._taken[at] % _RECENT] = loss
        self._taken[at] += 1
        if self._well[at] >= _LEAST:
            self._nan.discard(rank)
            self._spike.discard(rank)

    def _judge_high(self, rank: int, at: int, step: int, loss: float, policy: JobPolicy) -> None:
        self._high[at] += 1
        high = self._high[at]
        self._well[at] = 0
        self._since[at] = step if high == 1 else self._since[at]
        self._worst[at] = max(self._worst[at], loss) if high > 1 else loss
        if high == policy.loss_spike_steps:
            self._spike.add(rank)
        if high >= _RECENT:  # no spike, but the new normal
            self._taken[at] = self._high[at] = self._good_for[at] = 0

    def _judge_none(self, rank: int, at: int, step: int) -> None:
        self._bad[at] += 1
        self._well[at] = 0
        if self._bad[at] == 1 and rank not in self._nan:
            self._since[at] = step
        self._nan.add(rank)

    def _is_high(self, at: int, loss: float, policy: JobPolicy) -> bool:
        kept = min(self._taken[at], _RECENT)
        if kept < _LEAST:
            return False
        if self._good_for[at] > 0:
            self._good_for[at] -= 1
        elif not self._high[at]:
            self._good_for[at] = kept // _RENEWED
            ordered = sorted(self._recent[at * _RECENT : at * _RECENT + kept])
            center = self._center[at] = ordered[kept // 2]
            spread = _SPREAD * sorted(abs(one - center) for one in ordered)[kept // 2]
            self._limit[at] = center + max(
                policy.loss_spike_spreads * spread, _LEAST_SPREAD * policy.loss_spike_spreads * abs(center)
            )
        return loss > self._limit[at]

    def _judge_rows(self, at: Places, rows: Table, policy: JobPolicy) -> None:
        """Do what :meth:`_judge` does with the numbers of many ranks, one of each."""
        loss = rows[:, LOSS]
        np.frombuffer(self._bad, np.int64)[at] = 0
        is_high = self._are_high(at, loss, policy)
        for row, place in zip(rows[is_high], at[is_high].tolist(), strict=True):  # seldom, and of few
            self._judge_high(int(row[RANK]), place, int(row[STEP]), float(row[LOSS]), policy)
        ranks = rows[:, RANK]
        if is_high.any():
            at, loss, ranks = at[~is_high], loss[~is_high], ranks[~is_high]
        np.frombuffer(self._high, np.int64)[at] = 0
        well, taken = np.frombuffer(self._well, np.int64), np.frombuffer(self._taken, np.int64)
        well[at] += 1
        np.frombuffer(self._recent)[at * _RECENT + taken[at] % _RECENT] = loss
        taken[at] += 1
        if self._nan or self._spike:
            are_well = ranks[well[at] >= _LEAST].tolist()
            self._nan.difference_update(are_well)
            self._spike.difference_update(are_well)

    def _are_high(self, at: Places, loss: Values, policy: JobPolicy) -> npt.NDArray[np.bool_]:
        kept = np.minimum(np.frombuffer(self._taken, np.int64)[at], _RECENT)
        knows = kept >= _LEAST
        good_for = np.frombuffer(self._good_for, np.int64)
        serves = knows & (good_for[at] > 0)
        good_for[at[serves]] -= 1
        is_due = knows & ~serves & (np.frombuffer(self._high, np.int64)[at] == 0)
        for count in np.unique(kept[is_due]):
            self._renew(at[is_due & (kept == count)], int(count), policy)
        return knows & (loss > np.frombuffer(self._limit)[at])

    def _renew(self, at: Places, kept: int, policy: JobPolicy) -> None:
        """Look at the range of ranks of which so many values are known."""
        np.frombuffer(self._good_for, np.int64)[at] = kept // _RENEWED
        recent = np.frombuffer(self._recent).reshape(-1, _RECENT)[at, :kept]
        if (recent == recent[0]).all():  # all ranks tell the mean of all: what is found for one holds for each
            recent = recent[:1]
        center = np.partition(recent, kept // 2)[:, kept // 2]
        spread = _SPREAD * np.partition(np.abs(recent - center[:, None]), kept // 2)[:, kept // 2]
        least = _LEAST_SPREAD * policy.loss_spike_spreads * np.abs(center)
        np.frombuffer(self._center)[at] = center
        np.frombuffer(self._limit)[at] = center + np.maximum(policy.loss_spike_spreads * spread, least)

    def _verdict(self, fault: str, ranks: set[int], round_: int) -> Verdict:
        first = min(self._since[self._places[rank]] for rank in ranks)
        # Gradients are shared, so from the next step on all ranks have what one began.
        began = sorted(rank for rank in ranks if self._since[self._places[rank]] == first)
        at = self._places[began[0]]
        who = f"rank {began[0]}" if len(began) == 1 else f"{len(began)} ranks ({began[0]} and others)"
        if fault == "loss_nan":
            what = f"the loss of {who} is no finite number since step {first}"
        else:
            what = (
                f"the loss of {who} jumped to {self._worst[at]:.4g} at step {first}; it was {self._center[at]:.4g} and "
                f"up to {self._limit[at]:.4g} would be its noise"
            )
        return Verdict(
            fault=fault,
            reason=what + (f"; {len(ranks)} ranks have it now" if len(ranks) > len(began) else ""),
            confidence=0.99 if fault == "loss_nan" else 0.8,
            culprits=tuple(began),
            nodes=tuple(sorted({self._nodes[self._places[rank]] for rank in began})),
            since_step=first,
            round=round_,
            evidence=(Finding(fault, what, "black box", began[0], self._nodes[at], self._worst[at]),),
            otherwise=f"{_LEAST} steps in a row whose loss is well",
        )
