# SPDX-License-Identifier: Apache-2.0
"""How often to save: what a save costs against what a failure costs.

A job that saves often pays the stall often; one that saves seldom makes more steps a second time after a failure. With
a stall of ``s`` seconds a save and failures that come by chance every ``M`` seconds on average, the least is lost at

    sqrt(2 s M)                                                            Young 1974
    sqrt(2 s M) (1 + sqrt(s / 2M) / 3 + (s / 2M) / 9) - s,  M from s >= 2M on     Daly 2006, equation 37

seconds of training between two saves (J. W. Young, "A first order approximation to the optimum checkpoint interval",
CACM 17(9), 1974; J. T. Daly, "A higher order estimate of the optimum checkpoint interval for restart dumps", Future
Generation Computer Systems 22(3), 2006). What is lost then follows from Daly's complete model (his equation 20):
failures of a Poisson process, also while it restarts.

A write that goes on while training does (``write_s``) stalls nothing, but until it is done a failure falls back to the
save before. That costs ``write_s`` a failure whatever the interval is, like a longer restart; and two writes do not
overlap, so the interval is not below it. Pure.
"""

import math
from typing import NamedTuple

from megascale_ops.errors import UsageError

# 95 %: of a time without a failure, the mean time between two is at least a third of it (-ln 0.05 = 3.0).
_SURE = 0.95


class Costs(NamedTuple):
    """What a job pays; all in seconds.

    Attributes:
        stall_s: training stands still for each save.
        write_s: a save is being written after that, beside training; 0: it is on disk when training goes on.
        between_failures_s: mean time between two failures of the job as a whole.
        restart_s: from a failure until ranks step again, steps made a second time apart.
        step_s: one step; 0: not known.
    """

    stall_s: float
    write_s: float
    between_failures_s: float
    restart_s: float = 0.0
    step_s: float = 0.0


class Plan(NamedTuple):
    """When to save.

    Attributes:
        interval_s: training from the end of one save to the beginning of the next.
        steps: the same in steps, 0 where a step's time is not known.
        lost_share: of the time, saves and failures together; 0..1.
        young_s, daly_s: what the formulas say by themselves.
        bound_by: ``daly``, or what else decided: ``write`` or ``step``.
    """

    interval_s: float
    steps: int
    lost_share: float
    young_s: float
    daly_s: float
    bound_by: str


class Failures(NamedTuple):
    """How often a job fails. ``is_bound``: none was seen, and this is the least that the time without one allows."""

    between_s: float
    is_bound: bool


def failures_seen(observed_s: float, count: int) -> Failures:
    """The mean time between failures, of so many in so long a time.

    Raises:
        UsageError: nothing was observed.
    """
    if not observed_s > 0.0 or count < 0:
        raise UsageError("the time between failures is not known: no time was observed")
    if count:
        return Failures(observed_s / count, is_bound=False)
    return Failures(observed_s / -math.log(1.0 - _SURE), is_bound=True)


def young(stall_s: float, between_failures_s: float) -> float:
    """Seconds of training between two saves, by Young."""
    return math.sqrt(2.0 * stall_s * between_failures_s)


def daly(stall_s: float, between_failures_s: float) -> float:
    """Seconds of training between two saves, by Daly's higher order estimate."""
    if stall_s >= 2.0 * between_failures_s:
        return between_failures_s
    half = stall_s / (2.0 * between_failures_s)
    return young(stall_s, between_failures_s) * (1.0 + math.sqrt(half) / 3.0 + half / 9.0) - stall_s


def lost_share(costs: Costs, interval_s: float) -> float:
    """The share of the time that is no progress when one saves so often: stalls, steps made twice, restarts; 0..1."""
    mean_s = costs.between_failures_s
    if not interval_s > 0.0:
        return 1.0 if costs.stall_s > 0.0 else _lost_to_restarts(costs)
    around = (costs.restart_s + costs.write_s) / mean_s
    segment = (interval_s + costs.stall_s) / mean_s
    if around + segment > 700.0:  # the exponential of more is no float; no progress is made
        return 1.0
    return 1.0 - interval_s / (mean_s * math.exp(around) * math.expm1(segment))


def _lost_to_restarts(costs: Costs) -> float:
    """What is lost where saving costs nothing and is always done."""
    return -math.expm1(-(costs.restart_s + costs.write_s) / costs.between_failures_s)


def plan(costs: Costs) -> Plan:
    """The interval at which the least is lost.

    Raises:
        UsageError: a cost is no number, below zero, or failures never come.
    """
    for name, value in costs._asdict().items():
        if not math.isfinite(value) or value < 0.0:
            raise UsageError(f"{name} is {value:g}; it must be a number of seconds, 0 or more")
    if costs.between_failures_s <= 0.0:
        raise UsageError("between_failures_s is 0; the time between two failures must be more than that")
    young_s, daly_s = young(costs.stall_s, costs.between_failures_s), daly(costs.stall_s, costs.between_failures_s)
    bounds = {"daly": daly_s, "write": costs.write_s, "step": costs.step_s}
    bound_by = max(bounds, key=lambda name: bounds[name])  # of equal ones the first
    steps = max(1, round(bounds[bound_by] / costs.step_s)) if costs.step_s else 0
    interval_s = bounds[bound_by]
    return Plan(interval_s, steps, lost_share(costs, interval_s), young_s, daly_s, bound_by)
