# SPDX-License-Identifier: Apache-2.0
"""How far a round is: which ranks are up, have stepped, have caught up, and since when.

Heartbeats come once a second and steps may take 50 ms, so the moment of a step is reckoned back: a rank that has made
k steps since the one in question made it k typical steps before it last moved.

Each node is looked at when its heartbeat comes, so that 100,000 ranks never have to be looked at in one go.

Pure: ranks' reports in, numbers out.
"""

from collections.abc import Iterable, Mapping
from functools import lru_cache
from typing import NamedTuple

from megascale_ops.diagnosis.rank_view import RankView
from megascale_ops.schema.progress import Progress


class Pace(NamedTuple):
    """One look at a node's share of a round, or at all of it."""

    reported: int  # ranks that an agent reports
    boxes: int  # of them with a black box
    stepped: int  # of them with at least one step in this round
    caught_up: int  # of them as far as the round before, or further
    first_step_wall_s: float  # when the last of them made its first step
    caught_up_wall_s: float  # when the last of them had caught up
    resumed_at: int  # first step made in this round, -1 when the script does not declare its own numbers
    is_absolute: bool
    step_s: float


@lru_cache(maxsize=64)  # nodes have as many ranks as others
def none_stepped(ranks: int) -> Pace:
    """Return how far a node is whose ranks have a black box each, and have made no step in this round."""
    return Pace(ranks, ranks, 0, 0, 0.0, 0.0, -1, is_absolute=False, step_s=0.0)


def alike(ranks: int, progress: Progress, silent_s: float, best_step: int, wall_s: float) -> Pace:
    """Return how far a node is whose ranks all tell the same, heard of just now: as ``measure_pace`` of each of them.

    Args:
        ranks: how many they are.
        progress: what each tells; they have stepped.
        silent_s: since when they have not moved.
        best_step: the round should get at least as far.
        wall_s: now.
    """
    moved_wall_s = wall_s - silent_s
    first_wall_s = max(0.0, moved_wall_s - (progress.steps_seen - 1) * progress.step_p50_s)
    caught_wall_s, is_there, resumed_at = 0.0, True, -1
    if progress.step_is_absolute:
        resumed_at = progress.step - progress.steps_seen + 1
        is_there = progress.step >= best_step
        if is_there:
            over = min(progress.step - best_step, progress.steps_seen - 1)
            caught_wall_s = max(0.0, moved_wall_s - over * progress.step_p50_s)
    return Pace(
        reported=ranks,
        boxes=ranks,
        stepped=ranks,
        caught_up=ranks if is_there else 0,
        first_step_wall_s=first_wall_s,
        caught_up_wall_s=max(caught_wall_s, first_wall_s),
        resumed_at=resumed_at,
        is_absolute=progress.step_is_absolute,
        step_s=max(0.0, progress.step_p50_s),
    )


def measure_pace(ranks: Iterable[RankView], best_step: int, wall_s: float) -> Pace:
    """Return how far a round is that should get at least as far as ``best_step``."""
    reported = boxes = stepped = caught_up = 0
    first_wall_s = caught_wall_s = step_s = 0.0
    resumed_at = -1
    is_absolute = False
    for rank in ranks:
        reported += 1
        progress = rank.report.progress
        if progress is None:
            continue
        boxes += 1
        if progress.steps_seen < 1:
            continue
        stepped += 1
        step_s = max(step_s, progress.step_p50_s)
        moved_wall_s = wall_s - rank.heard_age_s - rank.silent_s
        first_wall_s = max(first_wall_s, moved_wall_s - (progress.steps_seen - 1) * progress.step_p50_s)
        if not progress.step_is_absolute:
            caught_up += 1
            continue
        is_absolute = True
        first = progress.step - progress.steps_seen + 1
        resumed_at = first if resumed_at < 0 else min(resumed_at, first)
        if progress.step >= best_step:
            caught_up += 1
            over = min(progress.step - best_step, progress.steps_seen - 1)
            caught_wall_s = max(caught_wall_s, moved_wall_s - over * progress.step_p50_s)
    return Pace(
        reported=reported,
        boxes=boxes,
        stepped=stepped,
        caught_up=caught_up,
        first_step_wall_s=first_wall_s,
        caught_up_wall_s=max(caught_wall_s, first_wall_s),
        resumed_at=resumed_at,
        is_absolute=is_absolute,
        step_s=step_s,
    )


def total(paces: Mapping[str, Pace]) -> Pace:
    """Return all nodes' paces as one."""
    known = list(paces.values())
    resumed = [pace.resumed_at for pace in known if pace.resumed_at >= 0]
    return Pace(
        reported=sum(pace.reported for pace in known),
        boxes=sum(pace.boxes for pace in known),
        stepped=sum(pace.stepped for pace in known),
        caught_up=sum(pace.caught_up for pace in known),
        first_step_wall_s=max((pace.first_step_wall_s for pace in known), default=0.0),
        caught_up_wall_s=max((pace.caught_up_wall_s for pace in known), default=0.0),
        resumed_at=min(resumed, default=-1),
        is_absolute=any(pace.is_absolute for pace in known),
        step_s=max((pace.step_s for pace in known), default=0.0),
    )
