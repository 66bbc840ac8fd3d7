# SPDX-License-Identifier: Apache-2.0
"""Take in many heartbeats at once that tell nothing but that ranks went on, or stand still (``cluster.steady``).

Everything comes to be as it is after the same heartbeats one by one. What would need a look at a rank by itself is not
taken: those nodes are asked to speak for themselves.
"""

from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from megascale_ops.controller.cluster.columns import Flags, Numbers, Places
from megascale_ops.controller.cluster.node_view import Share
from megascale_ops.controller.cluster.steady import Fields, Ranks, Sign, Steady, Taken
from megascale_ops.controller.job import round_progress
from megascale_ops.controller.job.job import Job
from megascale_ops.controller.job.stood import Stood
from megascale_ops.controller.job.suspected import SUSPECTING
from megascale_ops.controller.job.transitions import again_in_s
from megascale_ops.controller.loop import Loop
from megascale_ops.controller.record.state_machine import ENDING, State
from megascale_ops.diagnosis.hangs.suspicion import STALE_BEAT_S
from megascale_ops.diagnosis.rank_view import GONE
from megascale_ops.diagnosis.stragglers.step_table import LARGE
from megascale_ops.schema.progress import MOST_WORK, Progress, RankReport

if TYPE_CHECKING:
    from megascale_ops.controller.job.round_progress import Pace

# In all others something is looked for in every report; while ranks are stopped only their last steps are.
_TAKEN_IN = (State.RUNNING, State.DEGRADED, State.CATCHING_UP, State.RESTARTING)


class _Heard(NamedTuple):
    """What became of some signs, by their numbers."""

    places: Places  # in the registry
    taken: Flags
    sent_wall_s: Numbers  # of those that were taken and tell of ranks


def take(loop: Loop, steady: Steady) -> Taken:
    """Take heartbeats in; those that are not taken must come as they are."""
    if steady.of_no_job:
        return Taken(_refused(steady, _hear(loop, steady)))
    job = loop.jobs.get(steady.job)
    if job is None or not _may_take(loop, job, steady):
        return Taken(list(steady.signs.nodes))
    heard = _hear(loop, steady)
    refused = _refused(steady, heard)
    if steady.stands and job.state in _TAKEN_IN:  # later only the judge of the whole round looks at them
        _look_at_standing(loop, job, steady, heard)
    if steady.stands or job.state in ENDING:
        return Taken(refused, again_in_s(job.state, loop.clock() - job.entered_s, len(loop.registry)))
    if steady.told is not None and heard.taken.any():
        _judge(loop, job, steady, heard)
    return Taken(refused)


def _refused(steady: Steady, heard: _Heard) -> list[str]:
    nodes = steady.signs.nodes
    return [nodes[number] for number in np.flatnonzero(~heard.taken).tolist()]


def _may_take(loop: Loop, job: Job, steady: Steady) -> bool:
    is_ending = job.state in ENDING
    is_calm = (
        job.record.world_size >= LARGE
        and job.record.round == steady.round
        and (is_ending or job.state in _TAKEN_IN or (steady.stands and job.state in SUSPECTING))
        and not (is_ending and steady.steps)
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
    registry, signs = loop.registry, steady.signs
    places = registry.places(signs.nodes)
    held = [node for node, orders in loop.transitions.agent_orders.items() if orders]
    taken = registry.awaits_all(steady, places, held)
    sent_wall_s = np.zeros(len(places))
    which = np.flatnonzero(taken)
    if len(which):
        now_s, wall_s = loop.clock(), loop.wall()
        registry.go_on_all(steady, places, which, now_s)
        nodes = signs.nodes if len(which) == len(places) else [signs.nodes[number] for number in which.tolist()]
        loop.node_clocks.note_all(nodes, signs.wall_s[which] - wall_s, now_s)
        if steady.tells:
            senders = [view.sender for view in registry.views(places[which])]
            sent_wall_s[which] = loop.histories.senders.sent_wall_s_all(
                senders, signs.agent_ids[which], signs.mono_s[which], wall_s
            )
    for number in np.flatnonzero(~taken).tolist():
        sent_s = _hear_alone(loop, steady, signs.at(number))
        if sent_s is not None:
            taken[number], sent_wall_s[number] = True, sent_s
    loop.heartbeats += int(taken.sum())
    return _Heard(places, taken, sent_wall_s)


def _hear_alone(loop: Loop, steady: Steady, sign: Sign) -> float | None:
    """Do so with one node that was not heard so before; return when it was sent, by our wall clock; None: refused."""
    now_s, wall_s, registry = loop.clock(), loop.wall(), loop.registry
    node, agent_id, _seq, mono_s, sign_wall_s, _size = sign
    told, stands = steady.told, steady.stands
    has_orders = loop.transitions.agent_orders.get(node)
    view = None if has_orders else registry.awaits(sign, steady.job, steady.round, tells=steady.tells)
    if view is None:
        return None
    if steady.of_no_job:
        registry.go_on(view, sign, now_s, moves=False)
        loop.node_clocks.note(node, sign_wall_s - wall_s, now_s)
        registry.lend(view, steady.job, steady.round)
        return wall_s
    share = view.shares[steady.job]
    is_known = share.is_plain and (share.is_placed or not steady.steps)
    if steady.tells and not is_known and not _is_known(loop, node, share, steady):
        return None
    # A recorder may have been silent in so long a pause: what is known of its beats is looked at again.
    paused = stands and mono_s - view.sent_mono_s + steady.beat_ago_s > STALE_BEAT_S
    registry.go_on(view, sign, now_s, moves=told is not None or paused)
    loop.node_clocks.note(node, sign_wall_s - wall_s, now_s)
    if told is not None:
        share.go_on(told, mono_s)
    elif stands:
        share.stand(mono_s - steady.beat_ago_s)
    if share.is_plain:
        registry.lend(view, steady.job, steady.round)
    return loop.histories.senders.sent_wall_s(view.sender, agent_id, mono_s, wall_s) if steady.tells else wall_s


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


def _look_at_standing(loop: Loop, job: Job, steady: Steady, heard: _Heard) -> None:
    """Do what ``Loop.look_at_ranks`` does at each heartbeat of nodes that stand, once for all that tell nothing new."""
    registry, now_s = loop.registry, loop.clock()
    stood = job.round.stood
    if stood is None or stood.policy is not job.record.policy:
        stood = job.round.stood = Stood(job.record.policy)
    which = np.flatnonzero(heard.taken)
    places, sent_mono_s = heard.places[which], steady.signs.mono_s[which]
    stirred = registry.stirred_at(places)
    is_known = stood.knows(places, stirred)
    for view, number in zip(registry.views(places[~is_known]), stirred[~is_known].tolist(), strict=True):
        share = view.shares[job.name]
        loop.look_at_ranks(job, share, view, now_s)
        stood.note(view.place, number, share.ranks.values(), view.floor_mono_s)
    places, sent_mono_s = places[is_known], sent_mono_s[is_known]
    for view in registry.views(places[stood.may_look_odd(places, sent_mono_s)]):
        if job.round.silence.odd:
            break  # one is enough
        loop.look_at_ranks(job, view.shares[job.name], view, now_s)
    is_furthest, moved_mono_s = stood.last_moved(places, job.round.step)
    if is_furthest.any():
        moved_s = np.maximum(0.0, sent_mono_s - moved_mono_s)[is_furthest].min()
        job.round.note_moved(loop.wall() - float(moved_s))
    if job.state not in (State.RESTARTING, State.CATCHING_UP):
        return
    silent_s = registry.silent_for_s(places, moved_mono_s)
    for view, standing_s in zip(registry.views(places), silent_s.tolist(), strict=True):
        share, progress = view.shares[job.name], stood.progress(view.place)
        if progress is None:
            loop.look_at_ranks(job, share, view, now_s)
        else:
            job.round.paces[view.node] = _pace(job, loop.wall(), len(share), progress, standing_s)


def _judge(loop: Loop, job: Job, steady: Steady, heard: _Heard) -> None:
    """Hand on what these nodes' ranks tell, as ``Loop`` does with each report."""
    told = steady.told
    assert told is not None
    progress = told.progress
    if job.state in (State.RESTARTING, State.CATCHING_UP):
        _look_at_pace(loop, job, steady, heard)
    if progress.steps_seen and progress.step >= job.round.step:
        job.round.note_step(progress, loop.wall() + progress.moved_mono_s)
    if steady.steps:
        ranks, steps, sent_wall_s = _only(steady, heard)
        loop.slowness.skewing.go_on(job.name, set(ranks.tolist()), told.collective)
        loop.histories.put_rows_by(job, steady.round, ranks, steps, sent_wall_s)


def _look_at_pace(loop: Loop, job: Job, steady: Steady, heard: _Heard) -> None:
    """Note how far these nodes are, all of whose ranks tell the same."""
    assert steady.told is not None
    progress, signs = steady.told.progress, steady.signs
    which = np.flatnonzero(heard.taken)
    moved_mono_s = signs.mono_s[which] + progress.moved_mono_s
    silent_s = loop.registry.silent_for_s(heard.places[which], moved_mono_s).tolist()
    wall_s = loop.wall()
    known: dict[tuple[int, float], Pace] = {}
    for number, ranks, standing_s in zip(which.tolist(), signs.size[which].tolist(), silent_s, strict=True):
        pace = known.get((ranks, standing_s))
        if pace is None:
            pace = known[ranks, standing_s] = _pace(job, wall_s, ranks, progress, standing_s)
        job.round.paces[signs.nodes[number]] = pace


def _pace(job: Job, wall_s: float, ranks: int, progress: Progress, silent_s: float) -> "Pace":
    """Return how far a node is whose ranks are equally far, the last of which moved so long ago."""
    if not progress.steps_seen:  # how many they are is all there is to know
        return round_progress.none_stepped(ranks)
    return round_progress.alike(ranks, progress, silent_s, job.record.best_step, wall_s)


def _only(steady: Steady, heard: _Heard) -> tuple[Ranks, list[Fields], Numbers]:
    """Return the ranks of the signs that were taken, their steps, and when each was told, by our wall clock."""
    sizes = steady.signs.size
    sent_wall_s = np.repeat(heard.sent_wall_s, sizes)
    if heard.taken.all():
        return steady.ranks, list(steady.steps), sent_wall_s
    rows = np.repeat(heard.taken, sizes)
    return steady.ranks[rows], [one[rows] for one in steady.steps], sent_wall_s[rows]


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
