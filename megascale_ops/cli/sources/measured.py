# SPDX-License-Identifier: Apache-2.0
"""What a job's own record says of the costs of saving and failing; for ``checkpoint plan``."""

from collections.abc import Sequence
from itertools import pairwise
from statistics import median
from typing import TYPE_CHECKING, NamedTuple

from megascale_ops import account
from megascale_ops.checkpoint.interval import failures_seen
from megascale_ops.schema.wording import duration

if TYPE_CHECKING:
    from megascale_ops.ledger import StepTime
    from megascale_ops.trace.report_facts import Report

# What a failure costs besides steps that are made a second time.
_RESTART_ROWS = ("detect", "diagnose", "check", "restart", "reload")


class Input(NamedTuple):
    """One input of the plan, and where it is from; None: not known."""

    seconds: float | None
    source: str
    is_bound: bool = False


class Measured(NamedTuple):
    """What is known of a job; ``now`` is the interval at which it saves."""

    stall: Input
    between_failures: Input
    restart: Input
    step: Input
    now: Input


def measure(report: "Report", saved_s: Sequence[float]) -> Measured:
    """Return the costs of a job.

    Args:
        report: of the job.
        saved_s: wall clocks of the checkpoints that are there, in the order of their steps.
    """
    gathered = report.gathered
    kept = account.kept_in(gathered.history.facts) if gathered.history is not None else None
    steps = kept.steps if kept is not None else ()
    mine = [wall_s for wall_s in saved_s if wall_s >= gathered.began_wall_s]
    gaps = [after - before for before, after in pairwise(mine) if after > before]
    now = Input(median(gaps), f"between {len(mine)} checkpoints that are there") if gaps else Input(None, "not known")
    stall = _stall(steps, now.seconds)
    if now.seconds is None and stall.seconds:
        now = _by_count(steps, stall)
    elif now.seconds is not None and stall.seconds is not None:
        now = now._replace(seconds=max(0.0, now.seconds - stall.seconds))
    observed_s = gathered.until_wall_s - gathered.began_wall_s
    stopped = sum(has_stopped_it(told.incident.marks) for told in gathered.told)
    step_s = report.step_s or (kept.step_s if kept is not None else 0.0)
    return Measured(
        stall=stall,
        between_failures=_between(observed_s, stopped),
        restart=_restart(report, stopped),
        step=Input(step_s, "measured") if step_s else Input(None, "not known"),
        now=now,
    )


def _stall(steps: "Sequence[StepTime]", now_s: float | None) -> Input:
    """Return what a save takes of a step: all time in checkpoints, by the number of saves."""
    total_s, covered_s = sum(one.checkpoint_s for one in steps), sum(one.covered_s for one in steps)
    if not total_s:
        return Input(None, "no step with a checkpoint in it is known")
    if now_s:
        saves = max(1.0, covered_s / now_s)
        return Input(total_s / saves, f"measured: {duration(total_s)} in about {saves:.0f} saves")
    with_one = [one.checkpoint_s for one in steps if one.checkpoint_s]
    if len(with_one) * 2 > len(steps):
        return Input(None, "saves follow so closely that one can't be told from the next")
    return Input(median(with_one), f"measured: median of {len(with_one)} saves")


def _by_count(steps: "Sequence[StepTime]", stall: Input) -> Input:
    ends_s = [one.until_s for one in steps if one.checkpoint_s]
    gaps = [after - before for before, after in pairwise(ends_s)]
    if not gaps:
        return Input(None, "not known")
    return Input(max(0.0, median(gaps) - (stall.seconds or 0.0)), f"between {len(ends_s)} saves")


def has_stopped_it(marks: object) -> bool:
    """Return whether an incident with these marks stopped its job."""
    return any(getattr(marks, name) > 0.0 for name in ("stopped", "formed", "stepped"))


def _between(observed_s: float, stopped: int) -> Input:
    if observed_s <= 0.0:
        return Input(None, "not known")
    seen = failures_seen(observed_s, stopped)
    if seen.is_bound:
        return Input(seen.between_s, f"no failure in {duration(observed_s)}: at least this, with 95 %", is_bound=True)
    failures = "1 failure" if stopped == 1 else f"{stopped} failures"
    return Input(seen.between_s, f"{failures} in {duration(observed_s)}")


def _restart(report: "Report", stopped: int) -> Input:
    rows = report.ledger.rows
    if stopped:
        spent_s = sum(rows[row] for row in _RESTART_ROWS) / 1e6
        return Input(spent_s / stopped, "measured: until the first new step")
    if rows["start"]:
        return Input(rows["start"] / 1e6, "as long as the first start")
    return Input(None, "not known")
