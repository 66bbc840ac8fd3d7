# SPDX-License-Identifier: Apache-2.0
"""The choices of a job, and what each loses: the same arithmetic chooses and answers "what if it is otherwise".

Each choice stands between two losses, one of which falls as the other grows:

    checkpoints   stalls                      against steps made a second time     Daly 2006 (``checkpoint.interval``)
    patience      hangs that are waited out   against restarts of what was only slow
    spares        GPUs that idle              against a job that waits for a repair
    checks        time in them                against work on results that are wrong

Silences of nothing wrong come ``n`` a day and last longer than p with exp(-p / m); hangs come ``h`` a day and cost p
each; a needless restart costs C. So p = m ln(n C / (h m)), as long as failures are rare. A check that takes c finds
faults that come every M: as with checkpoints, one every sqrt(2 c M) loses the least.

Losses are shares of time and add up as they are small; the sum is no more than 1. Pure.
"""

import math
from typing import NamedTuple

from megascale_ops.checkpoint.interval import Costs, lost_share
from megascale_ops.checkpoint.interval import plan as plan_interval
from megascale_ops.diagnosis.statistics.spares import DAY_S, spares_for
from megascale_ops.planning.inputs import Job
from megascale_ops.schema.policy import JobPolicy

# A rank is not looked at sooner (``silence_floor_s``), and two steps of silence are none.
LEAST_PATIENCE_S = JobPolicy().silence_floor_s
_LEAST_STEPS = 2.0
# 1 h: a hang that is waited out for longer should be looked at by a person anyway.
MOST_PATIENCE_S = 3600.0
# 64 values from the least to the most, 11 % apart: beside the best of them no other loses much less.
_TRIED = 64


class Choices(NamedTuple):
    """What is chosen.

    Attributes:
        interval_s: training between two checkpoints.
        patience_s: for a rank that keeps others waiting without proof that it can't come (``absent_patience_s``).
        spares: nodes that wait.
        check_every_s: between two quick checks of all nodes; infinite: none beside those after faults.
    """

    interval_s: float
    patience_s: float
    spares: int
    check_every_s: float


class Lost(NamedTuple):
    """Shares of time that are lost, by what loses them; ``idle`` is of the GPUs paid for and not of the time."""

    checkpoints_and_failures: float
    needless_restarts: float
    waiting_for_repairs: float
    checks_and_hidden_faults: float
    idle: float

    @property
    def time(self) -> float:
        """All that is lost of the time of the job."""
        return min(1.0, sum(self[:4]))

    @property
    def price(self) -> float:
        """All of it, with the GPUs that idle: what choices are compared by."""
        return min(1.0, sum(self))


def choose(job: Job) -> Choices:
    """Return the choices that lose the least."""
    interval_s = plan_interval(_costs(job, 0.0)).interval_s  # what a failure costs besides does not move it
    return Choices(interval_s, _patience_s(job, interval_s), cheapest_spares(job), _check_every_s(job))


def lost(job: Job, choices: Choices) -> Lost:
    """Return what a job loses with these choices."""
    hidden_a_s = job.nodes * job.hidden / DAY_S
    every_s = choices.check_every_s
    checks = job.check_s / every_s + hidden_a_s * every_s / 2 if math.isfinite(every_s) else hidden_a_s * DAY_S / 2
    return Lost(
        checkpoints_and_failures=lost_share(_costs(job, choices.patience_s), choices.interval_s),
        needless_restarts=_needless(job, choices.interval_s, choices.patience_s),
        waiting_for_repairs=_unfilled(job, choices.spares),
        checks_and_hidden_faults=min(1.0, checks),
        idle=choices.spares / (job.nodes + choices.spares),
    )


def cheapest_spares(job: Job) -> int:
    """Return how many spares cost the least: GPUs that idle, and a job that waits where they are not enough."""
    known = spares_for(round(job.nodes), _machines(job), job.repair_s, enough=0.999999)
    prices = [1.0 - share + k / (job.nodes + k) for k, share in enumerate(known.shares)]
    return min(range(len(prices)), key=prices.__getitem__)


def sure_spares(job: Job, enough: float = 0.99) -> int:
    """Return with how many spares all places are filled so much of the time."""
    return spares_for(round(job.nodes), _machines(job), job.repair_s, enough=enough).spares


def _machines(job: Job) -> float:
    """Machines that fail, of a node and day."""
    return job.failures * job.machine_share


def _unfilled(job: Job, spares: int) -> float:
    """Return the share of time in which more machines are away than there are spares."""
    known = spares_for(round(job.nodes), _machines(job), job.repair_s, enough=0.999999)
    return 1.0 - known.shares[min(spares, len(known.shares) - 1)]


def _costs(job: Job, patience_s: float) -> Costs:
    seen_s = (1.0 - job.hang_share) * job.detect_s + job.hang_share * patience_s
    return Costs(job.stall_s, job.write_s, job.between_failures_s, job.restart_s + seen_s, job.step_s)


def _restart_costs_s(job: Job, interval_s: float) -> float:
    return job.restart_s + job.write_s + interval_s / 2


def _patience_s(job: Job, interval_s: float) -> float:
    """Return the patience that loses the least: the formula's, moved where the job fails so often that it is rough."""
    least_s = max(LEAST_PATIENCE_S, _LEAST_STEPS * job.step_s)
    most_s = max(least_s, MOST_PATIENCE_S)
    hangs = job.failures_a_day * job.hang_share
    if not hangs:
        return most_s
    ratio = job.silences * _restart_costs_s(job, interval_s) / (hangs * job.silence_s)
    formula_s = job.silence_s * math.log(ratio) if ratio > 1.0 else least_s
    spread = (most_s / least_s) ** (1.0 / _TRIED)
    tried = {least_s * spread**n for n in range(_TRIED + 1)} | {min(max(least_s, formula_s), most_s)}
    return min(sorted(tried), key=lambda patience_s: _failing(job, interval_s, patience_s))


def _failing(job: Job, interval_s: float, patience_s: float) -> float:
    """Return what is lost to failures and to restarts that were not needed."""
    return lost_share(_costs(job, patience_s), interval_s) + _needless(job, interval_s, patience_s)


def _needless(job: Job, interval_s: float, patience_s: float) -> float:
    a_day = job.silences * math.exp(-patience_s / job.silence_s)
    return min(1.0, a_day * _restart_costs_s(job, interval_s) / DAY_S)


def _check_every_s(job: Job) -> float:
    hidden_a_s = job.nodes * job.hidden / DAY_S
    if not hidden_a_s:
        return math.inf
    return max(job.check_s, job.step_s, math.sqrt(2.0 * job.check_s / hidden_a_s))
