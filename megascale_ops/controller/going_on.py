# SPDX-License-Identifier: Apache-2.0
"""Take in many heartbeats at once that tell nothing but that ranks went on, or stand still (``cluster.steady``).

Everything comes to be as it is after the same heartbeats one by one. What would need a look at a rank by itself is not
taken: those nodes are asked to speak for themselves.
"""

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from megascale_ops.controller.cluster.registry import NodeView, Share, view_rank
from megascale_ops.controller.cluster.steady import Fields, Steady, Taken
from megascale_ops.controller.job import round_progress
from megascale_ops.controller.job.job import Job
from megascale_ops.controller.job.suspected import SUSPECTING
from megascale_ops.controller.job.transitions import again_in_s
from megascale_ops.controller.loop import Loop
from megascale_ops.controller.record.state_machine import State
from megascale_ops.controller.recovery import starting
from megascale_ops.diagnosis.hangs.suspicion import STALE_BEAT_S
from megascale_ops.diagnosis.rank_view import GONE
from megascale_ops.diagnosis.stragglers.step_table import LARGE
from megascale_ops.schema.progress import MOST_WORK, RankReport

# In all others something is looked for in every report.
_TAKEN_IN = (State.RUNNING, State.DEGRADED, State.CATCHING_UP, State.RESTARTING)


class _Heard(NamedTuple):
    """What became of some signs."""

    refused: list[str]
    places: list[int]  # which of the signs were taken, and what else is known of them, in the same order
    views: list[NodeView]
    sent_wall_s: list[float]  # of those that tell of ranks


def take(loop: Loop, steady: Steady) -> Taken:
    """Take heartbeats in; those that are not taken must come as they are."""
    job = loop.jobs.get(steady.job)
    if job is None or not _may_take(loop, job, steady):
        return Taken([sign.node for sign in steady.signs])
    heard = _hear(loop, steady)
    if steady.stands:
        return Taken(heard.refused, again_in_s(job.state, loop.clock() - job.entered_s, len(loop.registry)))
    if steady.told is not None and heard.views:
        _judge(loop, job, steady, heard)
    return Taken(heard.refused)


def _may_take(loop: Loop, job: Job, steady: Steady) -> bool:
    is_calm = (
        job.record.world_size >= LARGE
        and job.record.round == steady.round
        and job.state in (SUSPECTING if steady.stands else _TAKEN_IN)
        and len(steady.steps) < MOST_WORK
        and not loop.faults.is_paused(job.name)
        and not loop.slowness.skewing.has_samples(job.name)
        and not loop.slowness.own_checks.has_findings(job.name)
    )
    if not is_calm or steady.told is None:
        return is_calm
    progress = steady.told.progress
    has_stepped = progress.steps_seen > 0
    return -progress.moved_mono_s <= job.record.policy.silence_floor_s / 2 and (has_stepped or not steady.steps)


def _hear(loop: Loop, steady: Steady) -> _Heard:
    """Take in what nodes tell of themselves, and that their ranks went on or stand."""
    heard = _Heard([], [], [], [])
    now_s, wall_s = loop.clock(), loop.wall()
    registry, orders, note, sent_by = (
        loop.registry, loop.transitions.agent_orders, loop.node_clocks.note, loop.histories.sent_wall_s_by,
    )  # fmt: skip
    job, round_, told, stands = steady.job, steady.round, steady.told, steady.stands
    tells = told is not None or stands
    for place, sign in enumerate(steady.signs):
        node, agent_id, _seq, mono_s, sign_wall_s, _size = sign
        has_orders = orders and orders.get(node)
        view = None if has_orders else registry.awaits(sign, job, round_, tells=tells)
        if view is None:
            heard.refused.append(node)
            continue
        share = view.shares[job]
        is_known = share.is_plain and (share.is_placed or not steady.steps)  # nearly always
        if tells and not is_known and not _is_known(loop, node, share, steady):
            heard.refused.append(node)
            continue
        # A recorder may have been silent in so long a pause: what is known of its beats is looked at again.
        paused = stands and mono_s - view.sent_mono_s + steady.beat_ago_s > STALE_BEAT_S
        registry.go_on(view, sign, now_s, moves=told is not None or paused)
        note(node, sign_wall_s - wall_s, now_s)
        heard.places.append(place)
        heard.views.append(view)
        if tells:
            heard.sent_wall_s.append(sent_by(view.sender, agent_id, mono_s, wall_s))
            if told is not None:
                share.go_on(told, mono_s)
            else:
                share.stand(mono_s - steady.beat_ago_s)
    loop.heartbeats += len(heard.views)
    return heard


def _is_known(loop: Loop, node: str, share: Share, steady: Steady) -> bool:
    """Return whether nothing but that they went on, or stand, is to be known of a node's ranks."""
    if share.is_plain is None:
        share.is_plain = all(_is_plain(report) for report in share.ranks.values())
    if not share.is_plain or not steady.steps:
        return share.is_plain
    if share.is_placed is None:
        history = loop.histories.by_job.get(steady.job)
        known = history.knows if history is not None else None
        share.is_placed = known is not None and all(
            known(rank, node, report.mesh) for rank, report in share.ranks.items()
        )
    return share.is_placed


def _judge(loop: Loop, job: Job, steady: Steady, heard: _Heard) -> None:
    """Hand on what these nodes' ranks tell, as ``Loop`` does with each report."""
    told = steady.told
    assert told is not None
    progress = told.progress
    if job.state in (State.RESTARTING, State.CATCHING_UP):
        _look_at_pace(loop, job, heard.views, has_stepped=progress.steps_seen > 0)
    if progress.steps_seen and progress.step >= job.round.step:
        job.round.note_step(progress, loop.wall() + progress.moved_mono_s)
    if steady.steps:
        ranks, steps, counts = _only(heard.places, steady)
        loop.slowness.skewing.go_on(job.name, set(ranks.tolist()), told.collective)
        loop.histories.put_rows_by(job, steady.round, ranks, steps, np.repeat(heard.sent_wall_s, counts))


def _look_at_pace(loop: Loop, job: Job, views: Sequence[NodeView], *, has_stepped: bool) -> None:
    now_s = loop.clock()
    if not has_stepped:  # how many they are is all there is to know
        for view in views:
            job.round.paces[view.node] = round_progress.none_stepped(len(view.shares[job.name]))
        return
    for view in views:
        ranks = [view_rank(view, report, now_s) for report in view.shares[job.name].ranks.values()]
        starting.look_at_pace(job, view.node, ranks, loop.wall())


def _only(places: Sequence[int], steady: Steady) -> tuple[np.ndarray, list[Fields], np.ndarray]:
    """Return the ranks of some signs, their steps, and how many ranks each of the signs has."""
    counts = np.array([sign.size for sign in steady.signs])
    if len(places) == len(counts):
        return steady.ranks, list(steady.steps), counts
    taken = np.zeros(len(counts), bool)
    taken[list(places)] = True
    rows = np.repeat(taken, counts)
    return steady.ranks[rows], [one[rows] for one in steady.steps], counts[taken]


def _is_plain(report: RankReport) -> bool:
    """Return whether nothing about a rank asks for a look at it by itself."""
    process = report.process
    return (
        report.progress is not None
        and process.state not in ("T", *GONE)
        and not process.starved
        and report.error is None
        and not (report.last_words or report.rivals or report.findings)
        and report.sending < 0.0
        and report.tile_peer < 0
    )
