# SPDX-License-Identifier: Apache-2.0
"""How long may a rank show no progress, and what does it show of itself meanwhile?

Patience is learned from the run: a multiple of the p99 step, with a floor, and some seconds more than it at most;
long before steps flow.

Pure: a rank's report in, seconds, or yes or no, out.
"""

import msgspec

from megascale_ops.diagnosis.rank_view import RankView
from megascale_ops.schema.policy import JobPolicy
from megascale_ops.schema.progress import RankReport

# 5: fewer steps are no measure of the slow ones, and the first are slowed by caches and compilers.
LEARNED_STEPS = 5
# 0.2 of a core: a waiting rank uses 0.00 to 0.02, a computing one nearly 1.
BUSY = 0.2
# 0.5 of what a step may take: what contradicts itself does not come right by waiting.
CONTRADICTED = 0.5
# 20 s: before steps flow, ranks that have waited in collectives for half of it are looked at; what contradicts itself
# then does not come right by waiting. Ranks that are still on their way into the same call are there within seconds.
STARTUP_LOOK_S = 20.0
# 3 places and a pause of 10 s: a loop in one function stays in one place, and a signal's handler is one more.
LEAST_WANDERED, WANDER_S = 3, 10.0
# 0.1 of a restart's cost: so much doubt is left about what no wait that ended by itself was seen to look like.
STUCK_SHARE = 0.1
# 10 x p50: a single slow step (the first, a checkpoint) may not set the patience for the next thousand.
OUTLIER = 10.0


def patience_s(report: RankReport, policy: JobPolicy) -> float:
    """Return how long this rank may show no progress, by what it has shown of itself."""
    progress = report.progress
    if progress is None or not has_learned(report):
        return policy.startup_patience_s
    p99_s = progress.step_p99_s
    typical_s = min(p99_s, OUTLIER * progress.step_p50_s) if progress.step_p50_s > 0 else p99_s
    learned_s = min(policy.silence_factor * typical_s, typical_s + policy.silence_extra_s)
    # 2 x p99: what happened once in a hundred steps may happen again.
    return max(policy.silence_floor_s, learned_s, 2.0 * p99_s)


def has_learned(report: RankReport) -> bool:
    """Return whether the rank has made enough steps to know what a step may take."""
    return report.progress is not None and report.progress.steps_seen >= LEARNED_STEPS


def raised(policy: JobPolicy, price_s: float) -> JobPolicy:
    """Return the policy with the times for silence at no less than what waiting may be worth.

    Args:
        policy: as the user set it.
        price_s: what a restart costs, seconds.

    A wait for as long as a wrong restart would take never costs more than twice the least possible (ski rental). That
    is for a rank that is absent, and may come. Where what is seen says that the wait will not end by itself, it is a
    share of that (Purohit et al., "Improving online algorithms via ML predictions", 2018): at most so much more than
    without the wait where that is right, at most ``1 + 1 / share`` times the least possible where it is wrong.
    0 stays: the user wants silence acted upon at once.
    """
    if policy.absent_patience_s <= 0.0:
        return policy
    absent_s = max(policy.absent_patience_s, price_s)
    stuck_s = max(policy.stuck_patience_s, STUCK_SHARE * price_s)
    return msgspec.structs.replace(policy, absent_patience_s=absent_s, stuck_patience_s=stuck_s)


def busy_patience_s(base_s: float, policy: JobPolicy) -> float:
    """Return how long a rank that seems to work may take, given what a step may take."""
    return max(policy.busy_factor * base_s, policy.busy_floor_s)


def wanders(rank: RankView) -> int:
    """Return how often a rank's stack was seen in another place since it moved, 0: seldom, or not any more.

    A rank that has wandered for a while may pause for half as long.
    """
    progress = rank.report.progress
    if progress is None or progress.wandered < LEAST_WANDERED:
        return 0
    quiet_s = rank.silent_s + progress.moved_mono_s - progress.wandered_mono_s
    wandered_s = progress.wandered_mono_s - progress.moved_mono_s
    return progress.wandered if quiet_s <= max(WANDER_S, wandered_s / 2) else 0


def is_waiting(report: RankReport) -> bool:
    """Return whether the rank waits inside a collective, or for a tile of another rank."""
    position = report.collective
    if report.tile_peer >= 0:
        return True
    return position is not None and position.enqueued > position.completed


def is_leaving(rank: RankView) -> bool:
    """Return whether the rank's script has ended; its process may still be there."""
    progress = rank.report.progress
    return progress is not None and progress.state == "exited"


def left_by_itself(rank: RankView) -> bool:
    """Return whether a rank has ended without an error; ``os._exit(0)`` leaves no word of it in the black box."""
    progress, error = rank.report.progress, rank.report.error
    return error is None and (rank.left or (progress is not None and progress.state == "exited"))
