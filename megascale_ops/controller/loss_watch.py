# SPDX-License-Identifier: Apache-2.0
"""Watch the loss: no number any more, or far out of its recent range. Told to people; nothing is stopped for it.

Each rank's loss is compared with its own last 64 values only, because ranks see different data. The range is the median
and the median absolute deviation, which neither a single bad batch nor slow learning moves. A loss that falls is no
spike. What is out of range does not join the recent values until 64 steps have shown that it is the new normal.

Pure: told the steps, answers with verdicts.
"""

from array import array
from collections.abc import Iterable

import msgspec

from megascale_ops.schema.health import Finding, Verdict
from megascale_ops.schema.messages import JobPolicy
from megascale_ops.schema.progress import StepWork

_RECENT = 64
# 20 values: fewer say little of a range; and for so long all must be well before a warning ends.
_LEAST = 20
# 1/8: of 64 values eight must be new before the range is looked at again; sorting them is all that a loss costs.
_RENEWED = 8
# 5 % of the loss itself: a loss that has converged to the last digit would otherwise spike at every batch.
_LEAST_SPREAD = 0.05


class _RankLoss(msgspec.Struct, gc=False):
    """What is kept of one rank's loss. Part of no cycle: 100,000 of them would be half of what each look visits."""

    node: str
    at: int  # where its last values begin in the column of all
    taken: int = 0  # how many came; of more than _RECENT the next one takes the place of the oldest
    bad: int = 0  # values in a row that are no number
    high: int = 0  # values in a row that are out of range
    well: int = 0  # values in a row that are neither
    since: int = -1  # first step of what is not well
    good_for: int = 0  # values for which the range still serves
    center: float = 0.0
    limit: float = 0.0
    worst: float = 0.0


class LossWatch:
    """The losses of one round of one job."""

    def __init__(self) -> None:
        self._ranks: dict[int, _RankLoss] = {}
        self._recent = array("d")  # the last values of all ranks, _RECENT each
        self._nan: set[int] = set()
        self._spike: set[int] = set()

    def take(self, rank: int, node: str, works: Iterable[StepWork], policy: JobPolicy) -> None:
        """Take finished steps of one rank, oldest first."""
        for work in works:
            if work.loss is None and work.loss_is_finite:
                continue
            known = self._ranks.get(rank)
            if known is None:
                known = self._ranks[rank] = _RankLoss(node, len(self._recent))
                self._recent.frombytes(bytes(8 * _RECENT))
            self._judge(rank, known, work, policy)

    def verdicts(self, round_: int) -> dict[str, Verdict]:
        """Return what is not well now, by fault."""
        found = {}
        if self._nan:
            found["loss_nan"] = self._verdict("loss_nan", self._nan, round_)
        if self._spike:
            found["loss_spike"] = self._verdict("loss_spike", self._spike, round_)
        return found

    def _judge(self, rank: int, known: _RankLoss, work: StepWork, policy: JobPolicy) -> None:
        loss = work.loss
        if loss is None:
            known.bad += 1
            known.well = 0
            if known.bad == 1 and rank not in self._nan:
                known.since = work.step
            self._nan.add(rank)
            return
        known.bad = 0
        if self._is_high(known, loss, policy):
            known.high += 1
            known.well = 0
            known.since = work.step if known.high == 1 else known.since
            known.worst = max(known.worst, loss) if known.high > 1 else loss
            if known.high == policy.loss_spike_steps:
                self._spike.add(rank)
            if known.high >= _RECENT:  # no spike, but the new normal
                known.taken = known.high = known.good_for = 0
            return
        known.high = 0
        known.well += 1
        self._recent[known.at + known.taken % _RECENT] = loss
        known.taken += 1
        if known.well >= _LEAST:
            self._nan.discard(rank)
            self._spike.discard(rank)

    def _is_high(self, known: _RankLoss, loss: float, policy: JobPolicy) -> bool:
        kept = min(known.taken, _RECENT)
        if kept < _LEAST:
            return False
        if known.good_for > 0:
            known.good_for -= 1
        elif not known.high:
            known.good_for = kept // _RENEWED
            ordered = sorted(self._recent[known.at : known.at + kept])
            known.center = ordered[len(ordered) // 2]
            spread = 1.4826 * sorted(abs(one - known.center) for one in ordered)[len(ordered) // 2]
            known.limit = known.center + max(
                policy.loss_spike_spreads * spread, _LEAST_SPREAD * policy.loss_spike_spreads * abs(known.center)
            )
        return loss > known.limit

    def _verdict(self, fault: str, ranks: set[int], round_: int) -> Verdict:
        first = min(self._ranks[rank].since for rank in ranks)
        # Gradients are shared, so from the next step on all ranks have what one began.
        began = sorted(rank for rank in ranks if self._ranks[rank].since == first)
        known = self._ranks[began[0]]
        who = f"rank {began[0]}" if len(began) == 1 else f"{len(began)} ranks ({began[0]} and others)"
        if fault == "loss_nan":
            what = f"the loss of {who} is no finite number since step {first}"
        else:
            what = (
                f"the loss of {who} jumped to {known.worst:.4g} at step {first}; it was {known.center:.4g} and up to "
                f"{known.limit:.4g} would be its noise"
            )
        return Verdict(
            fault=fault,
            reason=what + (f"; {len(ranks)} ranks have it now" if len(ranks) > len(began) else ""),
            confidence=0.99 if fault == "loss_nan" else 0.8,
            culprits=tuple(began),
            nodes=tuple(sorted({self._ranks[rank].node for rank in began})),
            since_step=first,
            round=round_,
            evidence=(Finding(fault, what, "black box", began[0], known.node, known.worst),),
            otherwise=f"{_LEAST} steps in a row whose loss is well",
        )
