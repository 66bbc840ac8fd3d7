# SPDX-License-Identifier: Apache-2.0
"""Death and loss: a runner reports failed ranks, or a node falls silent. Both end the round at once.

Dead ranks are reported by their runner, with exit statuses, when it asks for the next round. A node that is gone
reports nothing; it is noticed by the silence of both its agent and its runner.

Silence alone is no proof: a node may be cut off from the controller only, while its ranks go on training, and a restart
would cost all ranks what the network costs none. A collective ends for all or for none. So as long as all ranks that
are heard finish steps *and* collectives, the silent ones take part in them: that is warned of, and nothing is done.
When the others stand still too, patience counts from their last step. Ranks without collectives prove nothing.
"""

from collections.abc import Iterable, Sequence
from itertools import islice

import msgspec

from megascale_ops.controller.cluster.registry import Registry
from megascale_ops.controller.job import diagnose
from megascale_ops.controller.job.job import Job
from megascale_ops.controller.job.round import Exit, LifeSigns
from megascale_ops.controller.job.transitions import Transitions
from megascale_ops.controller.record.job_record import Member
from megascale_ops.controller.record.state_machine import ACTIVE, EventKind, State
from megascale_ops.controller.recovery import weighing
from megascale_ops.controller.recovery.weighing import LOST_NODE
from megascale_ops.diagnosis.hangs.lost_nodes import NodeSigns, Together, judge_nodes
from megascale_ops.schema.health import Verdict
from megascale_ops.schema.messages import RankExit

_replace = msgspec.structs.replace

# Each tick looks at a tenth of the nodes, so that 12,500 of them never hold a request up for more than a millisecond.
NODE_PARTS = 10
# 64 nodes that fell silent, of other jobs maybe: with more of them the members are looked at one by one.
_MOST_SILENT = 64
# 1 s for 100,000 ranks, all of which are compared: some 0.1 s. Every tick, a controller that was started again could do
# nothing else until all agents are back.
COMPARED_EACH_RANK_S = 1e-5


def _seen_ago_s(job: Job, now_s: float) -> float:
    """Return how long ago a runner saw the first rank fail, seconds: it reports only after stopping the others."""
    failed = [end.ended_s for end in job.round.exits.values() if end.exit.code != 0 and not end.exit.by_us]
    return max(0.0, now_s - min(failed, default=now_s))


def take_exits(job: Job, node: str, exits: tuple[RankExit, ...], mono_s: float, now_s: float) -> None:
    """Note how ranks ended, as their runner tells it; ``mono_s`` is its clock when it did, ``now_s`` ours."""
    for exit_ in exits:
        ago_s = max(0.0, mono_s - exit_.seen_mono_s) if mono_s else 0.0
        job.round.exits[exit_.rank] = Exit(node, exit_, now_s - ago_s)


def fail(transitions: Transitions, job: Job, node: str) -> None:
    """A runner reports that a rank of its own has failed: name the rank as far as is known, and stop all others."""
    if job.state not in ACTIVE:
        return
    now_s, wall_s = transitions.clock(), transitions.wall()
    verdict = diagnose.judge_unmet(job, wall_s) or diagnose.judge_exits(
        transitions.registry, job, now_s, wall_s, missing=()
    )
    watched = job.record.verdict if job.state is State.CONFIRMING else None
    seen_wall_s = wall_s - _seen_ago_s(job, now_s)
    if job.incident is None or job.state is not State.CONFIRMING:
        transitions.open_incident(job, watched or verdict, detected=seen_wall_s)
    elif seen_wall_s < job.incident.marks.detected:
        marks = _replace(job.incident.marks, detected=seen_wall_s)
        transitions.put_incident(job, _replace(job.incident, marks=marks))
    transitions.mark(job, "ordered")
    transitions.move(job, EventKind.RANK_FAILED, f"{node} reports: {verdict.reason}", verdict=watched)


def lose_nodes(transitions: Transitions, job: Job, verdict: Verdict) -> None:
    """Nodes of the round are gone: stop the others."""
    if job.state not in ACTIVE:
        return
    ranks = [
        rank
        for node in verdict.nodes
        if (share := transitions.registry.share(node, job.name, job.record.round)) is not None
        for rank in share.ranks
    ]
    verdict = _replace(verdict, culprits=tuple(sorted(ranks)), since_step=job.round.step)
    verdict = diagnose.quote_hardware(transitions.registry, job, verdict)
    transitions.open_incident(job, verdict, detected=transitions.wall())
    transitions.mark(job, "ordered")
    transitions.move(job, EventKind.NODE_LOST, verdict.reason, verdict=verdict)


def check_nodes(transitions: Transitions, job: Job, now_s: float, lag_s: float, part: int) -> None:
    """Look for nodes of which nothing is heard; each call looks at every tenth member, from ``part`` on."""
    registry = transitions.registry
    if job.state not in ACTIVE or _all_live(registry, job, now_s):
        return
    members = job.record.members[part::NODE_PARTS]
    _note_life(registry, job, all(_lives(registry, job, member, now_s) for member in members))
    looked_at = _signs(registry, job, members, now_s)
    # A runner that is gone with its ranks is a loss, too, though the agent beside it still reports.
    if not _silent(looked_at, job) and not any(one.ranks_gone and not one.polling for one in looked_at):
        if part == 0 and job.round.together is not None and not _silent(_all_signs(registry, job, now_s), job):
            job.round.together = None
        return
    if now_s - job.round.compared_s < job.record.world_size * COMPARED_EACH_RANK_S:
        return
    job.round.compared_s = now_s
    signs = _all_signs(registry, job, now_s)
    together = _look_at_others(registry, job, _silent(signs, job), now_s)
    verdict = _judge_lost(transitions, job, signs, now_s, lag_s)
    if verdict is None:
        return
    if together.seen_s and now_s - together.seen_s <= job.record.policy.node_lost_s + lag_s:
        _warn_of_silence(transitions, job, verdict, together)
    elif not weighing.leave_nodes(transitions, job, verdict):
        lose_nodes(transitions, job, verdict)


def _judge_lost(
    transitions: Transitions, job: Job, signs: Sequence[NodeSigns], now_s: float, lag_s: float
) -> Verdict | None:
    """Return which nodes have used up their patience; none has while the whole job is unheard, or just was."""
    record, wall_s = job.record, transitions.wall()
    verdict = judge_nodes(signs, record.policy, lag_s=lag_s, round_=record.round, wall_s=wall_s)
    unheard_s = _unheard_for_s(job, verdict, signs) if verdict is not None else None
    if verdict is not None and unheard_s is not None and unheard_s <= record.policy.join_timeout_s:
        _warn_of_nobody(transitions, job, verdict, now_s)
        return None
    if verdict is None or unheard_s is not None or job.round.unheard_s is None:
        return verdict
    transitions.unwarn(job, _key(job.nodes), "some of its nodes are heard again")
    excused = [_excuse(one, now_s - job.round.unheard_s) for one in signs]
    return judge_nodes(excused, record.policy, lag_s=lag_s, round_=record.round, wall_s=wall_s)


def _all_live(registry: Registry, job: Job, now_s: float) -> bool:
    """Return whether no member needs a check: all were seen alive, nothing has changed since, no node is silent."""
    seen = job.round.life_signs
    if seen.parts < NODE_PARTS or seen.changes != registry.changes or job.round.together is not None:
        return False
    silent = islice(registry.silent(now_s - job.record.policy.node_lost_s / 3), _MOST_SILENT)
    found = list(silent)
    return len(found) < _MOST_SILENT and not any(node in job.round.places for node in found)


def _lives(registry: Registry, job: Job, member: Member, now_s: float) -> bool:
    late_s = job.record.policy.node_lost_s / 3
    return registry.lives(member.node, job.name, job.record.round, now_s - late_s)


def _note_life(registry: Registry, job: Job, all_live: bool) -> None:
    """Note that another tenth of the members was looked at, and whether all of it plainly lived."""
    seen, changes = job.round.life_signs, registry.changes
    parts = seen.parts if seen.changes == changes else 0
    job.round.life_signs = LifeSigns(changes, min(parts + 1, NODE_PARTS) if all_live else 0)


def _warn_of_silence(transitions: Transitions, job: Job, verdict: Verdict, together: Together) -> None:
    """Warn that nodes are not heard and why nothing is done about it; the warning ends when they are heard."""
    key = _key(verdict.nodes)
    if key in job.round.warnings:
        return
    reason = (
        f"{verdict.reason}; but all {len(together.reached)} ranks elsewhere go on finishing steps and collectives, "
        "which they could not without it: only its way to the controller is cut, and training is left alone"
    )
    otherwise = "a step of the other ranks that does not end: then it would be counted as lost"
    transitions.warn(job, key, _replace(verdict, reason=reason, confidence=0.3, action="warn", otherwise=otherwise))


def _unheard_for_s(job: Job, verdict: Verdict, signs: Sequence[NodeSigns]) -> float | None:
    """Return for how long the whole job is unheard; None where a node of it is heard."""
    if len(verdict.nodes) < len(job.record.members) or any(node not in job.round.places for node in job.waiting):
        return None
    newest_s = min(min(one.agent_age_s, one.runner_age_s) for one in signs)
    # An agent that reports dead ranks is connected.
    return newest_s if newest_s > job.record.policy.node_lost_s else None


def _warn_of_nobody(transitions: Transitions, job: Job, verdict: Verdict, now_s: float) -> None:
    """Warn that the whole job is unheard, which is waited for: no node is there to be ordered.

    More likely than the death of all nodes at once is a cut between them and the controller. The first node that is
    heard ends it; the others then get their patience anew. ``join_timeout_s``, the longest that a round is waited
    for, is also the longest that a job may be unheard.
    """
    key = _key(job.nodes)
    job.round.unheard_s = now_s
    if key in job.round.warnings:
        return
    reason = (
        f"{verdict.reason}; nobody of this job is heard: all its nodes are gone, or this controller is cut off "
        "from them; nothing can be ordered, and training is left alone"
    )
    longest_s = job.record.policy.join_timeout_s
    otherwise = f"one sign of life; after {longest_s:.0f} s without any the job is counted as lost"
    told = _replace(verdict, reason=reason, confidence=0.5, action="warn", otherwise=otherwise)
    transitions.warn(job, key, told)


def _look_at_others(registry: Registry, job: Job, silent: tuple[str, ...], now_s: float) -> Together:
    """Note whether all ranks elsewhere have finished a step and a collective since the last look."""
    record, before = job.record, job.round.together
    reached = registry.reached(job.name, record.round, [node for node in job.nodes if node not in silent])
    if before is None:
        job.round.together = Together(silent, reached, 0.0)
    elif before.silent != silent:
        # Nodes that fell silent just now reported until then: the result for the others still holds.
        job.round.together = Together(silent, reached, before.seen_s)
    elif (
        reached
        and reached.keys() == before.reached.keys()
        and all(
            one.step > before.reached[rank].step and one.completed > before.reached[rank].completed
            for rank, one in reached.items()
        )
    ):
        job.round.together = Together(silent, reached, now_s)
    assert job.round.together is not None
    return job.round.together


def _silent(signs: Sequence[NodeSigns], job: Job) -> tuple[str, ...]:
    """Return the nodes that have missed heartbeats and polls for a third of the patience."""
    late_s = job.record.policy.node_lost_s / 3
    return tuple(one.node for one in signs if min(one.agent_age_s, one.runner_age_s) > late_s)


def _all_signs(registry: Registry, job: Job, now_s: float) -> list[NodeSigns]:
    return _signs(registry, job, job.record.members, now_s)


def _signs(registry: Registry, job: Job, members: Sequence[Member], now_s: float) -> list[NodeSigns]:
    """Return what is known of those nodes that do not plainly live."""
    record = job.record
    late_s = record.policy.node_lost_s / 3
    lives, name, round_, since_s = registry.lives, job.name, record.round, now_s - late_s
    signs = []
    for member in members:
        node = member.node
        if lives(node, name, round_, since_s):
            continue  # nearly always, so this comes first and costs little
        view = registry.node(node, name)
        agent_age_s = now_s - view.heard_s if view is not None else float("inf")
        gone = not diagnose.has_live_rank(registry, job, node)
        runner = job.runners.get(node)
        if runner is None or node in job.round.left or node in job.waiting:
            continue
        polling = runner.open_requests > 0
        if polling and now_s - runner.seen_s > late_s:
            runner.nudge()
        # A node that was cut off comes back agent first: its runner has the same patience from then on.
        runner_s = max(runner.seen_s, view.back_s if view is not None else 0.0)
        signs.append(NodeSigns(node, agent_age_s, now_s - runner_s, gone, polling))
    return signs


def _key(nodes: Iterable[str]) -> str:
    """Return the name of the warning that these nodes are not heard; it ends by itself once all of them are."""
    return LOST_NODE + ",".join(nodes)


def _excuse(signs: NodeSigns, since_s: float) -> NodeSigns:
    """Forget the silence before ``since_s`` ago, when no node of the job was heard: that was no fault of this node."""
    age_s = min(signs.agent_age_s, signs.runner_age_s)
    return signs._replace(excused_s=max(0.0, age_s - since_s))
