# SPDX-License-Identifier: Apache-2.0
"""Take in many heartbeats at once that tell nothing but that ranks went on, or stand still (``cluster.steady``).

Everything comes to be as it is after the same heartbeats one by one. What would need a look at a rank by itself is not
taken: those nodes are asked to speak for themselves.
"""

from collections.abc import Sequence

import numpy as np

from megascale_ops.controller.cluster.registry import NodeView, Share, view_rank
from megascale_ops.controller.cluster.steady import Fields, Sign, Steady, Taken
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
_TAKEN_IN = (State.RUNNING, State.DEGRADED, State.CATCHING_UP)

_Heard = tuple[int, Sign, NodeView]  # the first: which of the signs it is


def take(loop: Loop, steady: Steady) -> Taken:
    """Take heartbeats in; those that are not taken must come as they are."""
    job = loop.jobs.get(steady.job)
    if job is None or not _may_take(loop, job, steady):
        return Taken([sign.node for sign in steady.signs])
    refused, heard = _hear(loop, steady)
    if steady.stands:
        _note_standing(loop, steady, heard)
        return Taken(refused, again_in_s(job.state, loop.clock() - job.entered_s, len(loop.registry)))
    if steady.told is not None and heard:
        _judge(loop, job, steady, heard)
    return Taken(refused)


def _note_standing(loop: Loop, steady: Steady, heard: Sequence[_Heard]) -> None:
    wall_s = loop.wall()
    for _place, sign, view in heard:
        view.shares[steady.job].stand(sign.mono_s - steady.beat_ago_s)
        loop.histories.sent_wall_s_by(view.sender, sign.agent_id, sign.mono_s, wall_s)


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
    return -progress.moved_mono_s <= job.record.policy.silence_floor_s / 2 and bool(progress.steps_seen)


def _hear(loop: Loop, steady: Steady) -> tuple[list[str], list[_Heard]]:
    """Take in what nodes tell of themselves; return those that are refused, and the others."""
    refused: list[str] = []
    heard: list[_Heard] = []
    now_s, wall_s = loop.clock(), loop.wall()
    registry, orders, note = loop.registry, loop.transitions.agent_orders, loop.node_clocks.note
    job, round_, stands, moves = steady.job, steady.round, steady.stands, steady.told is not None
    tells = moves or stands
    for place, sign in enumerate(steady.signs):
        has_orders = orders and orders.get(sign.node)
        view = None if has_orders else registry.awaits(sign, job, round_, tells=tells)
        if view is None or (tells and not _is_known(loop, view, steady)):
            refused.append(sign.node)
            continue
        # A recorder may have been silent in so long a pause: what is known of its beats is looked at again.
        paused = stands and sign.mono_s - view.sent_mono_s + steady.beat_ago_s > STALE_BEAT_S
        registry.go_on(view, sign, now_s, moves=moves or paused)
        note(sign.node, sign.wall_s - wall_s, now_s)
        heard.append((place, sign, view))
    loop.heartbeats += len(heard)
    return refused, heard


def _is_known(loop: Loop, view: NodeView, steady: Steady) -> bool:
    """Return whether nothing but that they went on, or stand, is to be known of a node's ranks."""
    share = view.shares[steady.job]
    if share.is_plain and share.is_placed:  # nearly always
        return True
    if share.is_plain is None:
        share.is_plain = all(_is_plain(report) for report in share.ranks.values())
    if not share.is_plain or steady.stands:
        return share.is_plain
    if share.is_placed is None:
        history = loop.histories.by_job.get(steady.job)
        known = history.knows if history is not None else None
        share.is_placed = known is not None and all(
            known(rank, view.node, report.mesh) for rank, report in share.ranks.items()
        )
    return share.is_placed


def _judge(loop: Loop, job: Job, steady: Steady, heard: Sequence[_Heard]) -> None:
    """Hand on what these nodes' ranks tell, as ``Loop`` does with each report."""
    told = steady.told
    assert told is not None
    sent_wall_s, shares = [], []
    now_s, wall_s, sent_by = loop.clock(), loop.wall(), loop.histories.sent_wall_s_by
    for _place, sign, view in heard:
        share = view.shares[steady.job]
        share.go_on(told, sign.mono_s)
        shares.append((view, share))
        sent_wall_s.append(sent_by(view.sender, sign.agent_id, sign.mono_s, wall_s))
    if job.state is State.CATCHING_UP:
        _look_at_pace(loop, job, shares, now_s)
    if told.progress.step >= job.round.step:
        job.round.note_step(told.progress, wall_s + told.progress.moved_mono_s)
    ranks, steps = _only([place for place, _sign, _view in heard], steady)
    loop.slowness.skewing.go_on(job.name, set(ranks.tolist()), told.collective)
    if steps:
        counts = [sign.size for _place, sign, _view in heard]
        loop.histories.put_rows_by(job, steady.round, ranks, steps, np.repeat(sent_wall_s, counts))


def _look_at_pace(loop: Loop, job: Job, shares: Sequence[tuple[NodeView, Share]], now_s: float) -> None:
    for view, share in shares:
        ranks = [view_rank(view, report, now_s) for report in share.ranks.values()]
        starting.look_at_pace(job, view.node, ranks, loop.wall())


def _only(places: Sequence[int], steady: Steady) -> tuple[np.ndarray, list[Fields]]:
    """Return the ranks of some signs, and their steps."""
    if len(places) == len(steady.signs):
        return steady.ranks, list(steady.steps)
    counts = np.array([sign.size for sign in steady.signs])
    taken = np.zeros(len(counts), bool)
    taken[list(places)] = True
    rows = np.repeat(taken, counts)
    return steady.ranks[rows], [one[rows] for one in steady.steps]


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
