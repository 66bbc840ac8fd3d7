# SPDX-License-Identifier: Apache-2.0
"""What can be seen of a job now: its ranks, its runners, what lives, what waits, and what the judges make of it.

Questions about a job, answered from the registry and from what its runners have reported; the caller passes the time.
Nothing here moves a job: ``recovery`` asks and then acts.
"""

from collections.abc import Sequence

import msgspec

from megascale_ops.controller.cluster.node_view import FRESH_HEARTBEATS
from megascale_ops.controller.cluster.registry import Registry
from megascale_ops.controller.job.job import Job
from megascale_ops.controller.job.round import Hold, SilenceCheck
from megascale_ops.controller.policy import ski_rental
from megascale_ops.diagnosis import hardware, watchdog
from megascale_ops.diagnosis.exits import first_cause
from megascale_ops.diagnosis.exits.classify import Ended
from megascale_ops.diagnosis.exits.last_errors import FAILED_AND_LIVES, GRACE_S, uncaught
from megascale_ops.diagnosis.hangs import habits, partition, standing
from megascale_ops.diagnosis.hangs import verdict as hangs_verdict
from megascale_ops.diagnosis.hangs.patience import raised
from megascale_ops.diagnosis.hangs.suspicion import Suspicion
from megascale_ops.diagnosis.hangs.verdict import UNHEARD_S
from megascale_ops.diagnosis.hardware import NodeHardware, RankPlace, quote
from megascale_ops.diagnosis.rank_view import RankView
from megascale_ops.schema.health import Verdict

# 10 s: agents send at least one heartbeat a second, and try again every two while the controller is away.
BLIND_S = 10.0
# 2.5 s, or two heartbeats and a half. When a runner's connection broke, its agent has sent one by then, or died too.
AGENT_OUTLIVES_S = 2.5
# 3 s: a runner sees the end of a rank within 20 ms and reports a failure at once; the rest is a loaded machine's. Of a
# rank whose script has failed that report will come; below a wrapped launcher only once the launcher has ended.
LEFT_S = 3.0
# A full judgement of 12,288 ranks takes some 20 ms: once a second for so many, ten times a second for few.
SCAN_EACH_RANK_S = 1.0 / 12_288
SCAN_S = 0.1
# A look at 12,500 nodes that have joined takes some 40 ms, on a busy machine 0.3 s: every 0.1 s, each join would look.
SCAN_EACH_NODE_S = 1.0 / 12_500
# 1,024 ranks: fewer are judged within some milliseconds, and what people read of them is as new as it can be.
LEAST_HELD = 1_024
# 16 culprits, or nodes: a verdict that names more is about none of their GPUs.
MOST_QUOTED_FOR = 16
# 64 nodes are looked at whenever one joins; thousands joining at once would cost their number squared.
SMALL = 64


def judge_silence(registry: Registry, job: Job, now_s: float, wall_s: float) -> Suspicion | None:
    """Return the job's suspicion, judged anew when the last judgement is old enough."""
    check = job.round.silence
    interval_s = max(SCAN_S, job.record.world_size * SCAN_EACH_RANK_S)
    is_due = now_s - check.at_s >= interval_s * 0.9
    if is_due and _stands(registry, job, check, now_s, wall_s, interval_s):
        check.stand(now_s)
    elif is_due or _has_news(job, check):
        job.round.silence = check = SilenceCheck(now_s)
        policy = raised(job.record.policy, restart_price_s(job, wall_s))
        check.suspicion = watchdog.judge(ranks(registry, job, now_s), policy, wall_s)
    if job.suspicion is not None and job.suspected is not None:
        job.suspected.age_s = job.suspicion.age_s
    return job.suspicion


def restart_price_s(job: Job, wall_s: float) -> float:
    """Return what a restart of a job that stands still would cost now, seconds.

    What its restarts have usually cost, or less: no more than the start and the steps since the newest checkpoint, or
    since the round began, would be made again. Right after a start, or a save, that is minutes, not the usual half of
    an hour.
    """
    record = job.record
    usual_s = ski_rental.usual_price_s(record.prices_s, record.policy)
    if not (record.prices_s and record.start_s > 0.0):
        return usual_s
    return min(usual_s, record.start_s + job.round.unsaved_s(wall_s))


def _stands(registry: Registry, job: Job, check: SilenceCheck, now_s: float, wall_s: float, interval_s: float) -> bool:
    """Return whether another judgement would come to the same: only time has passed, and no deadline (``standing``).

    Before the suspects are looked at again it is made anew, so that what is said then has the ages of that moment.
    """
    hold, suspected = check.hold, job.suspected
    return (
        hold is not None
        and suspected is not None
        and not suspected.evidence_wanted
        and not _has_news(job, check)
        and now_s + interval_s <= suspected.look_at_s
        and _lasts(hold, job, now_s, wall_s)
        and hold.stirred == _stirred(registry, job, now_s)
    )


def _lasts(hold: Hold, job: Job, now_s: float, wall_s: float) -> bool:
    """Return whether no deadline has passed since, and what a judgement goes by is as it was."""
    record = job.record
    return (
        now_s < hold.until_s
        and hold.policy is record.policy
        and hold.price_s == restart_price_s(job, wall_s)
        and hold.habits is record.habits
    )


def _has_news(job: Job, check: SilenceCheck) -> bool:
    """Return whether evidence has come since a judgement that has stood for longer than until the next."""
    suspected = job.suspected
    if check.at_s <= check.judged_s:
        return False
    return suspected is None or suspected.judged is None or suspected.judged[0] is not check


def _stirred(registry: Registry, job: Job, now_s: float) -> int | None:
    return registry.stirred(job.name, job.record.round, job.nodes, now_s - UNHEARD_S)


def judge_hang(
    registry: Registry, job: Job, suspicion: Suspicion, now_s: float, wall_s: float
) -> hangs_verdict.Judgement:
    """Return what a suspicion is worth, judged anew when it or its evidence is new."""
    suspected = job.suspects
    if suspected.judged is not None and suspected.judged[0] is job.round.silence:
        return suspected.judged[1]
    price_s = restart_price_s(job, wall_s)
    policy = raised(job.record.policy, price_s)
    seen = ranks(registry, job, now_s)
    if any(one.name == FAILED_AND_LIVES for one in suspicion.verdict.evidence):
        # Its own error is more specific than a stack.
        known = hangs_verdict.Judgement(suspicion.verdict, suspicion.patience_s, is_proven=True)
    else:
        known = hangs_verdict.judge(suspicion, seen, suspected.looks, job.record.world_size, policy)
    broken = None if known.is_proven else _by_hardware(registry, job, known.verdict)
    if broken is not None:
        patience_s = min(known.patience_s, suspicion.base_s)
        known = known._replace(verdict=broken, patience_s=patience_s, is_proven=True)
    if not known.is_proven:
        earned_s = habits.granted_s(job.record.habits, known.verdict.place)
        known = known._replace(patience_s=max(known.patience_s, earned_s))
    check = job.round.silence
    before, check.hold = check.hold, None
    suspected.judged = (check, known)
    stirred = _stirred(registry, job, now_s) if job.record.world_size >= LEAST_HELD else None
    # Evidence has come, and since the ranks were judged nothing but time has passed: that judgement need not be made.
    stood = before is not None and before.stirred == stirred and _lasts(before, job, now_s, wall_s)
    is_new = check.at_s == now_s or stood
    if stirred is not None and is_new and not suspected.evidence_wanted:
        aged = suspicion._replace(age_s=suspicion.age_s + now_s - check.at_s)
        until_s = now_s + standing.holds_s(seen, aged, known, suspected.looks, policy)
        check.hold = Hold(until_s, stirred, job.record.policy, price_s, job.record.habits)
    return known


def _by_hardware(registry: Registry, job: Job, verdict: Verdict) -> Verdict | None:
    """Return the verdict on a silence with the GPU that failed as it began; None: none did, or none is known of."""
    sick = registry.sick & job.round.places.keys()
    if not sick or len(verdict.culprits) > MOST_QUOTED_FOR:
        return None
    seen = []
    for node in sorted(sick):
        share = registry.share(node, job.name, job.record.round)
        reports = share.ranks if share is not None else {}
        blamed = [rank for rank in reports if not verdict.culprits or rank in verdict.culprits]
        if blamed:
            places = tuple(RankPlace(rank, reports[rank].pid, reports[rank].gpu) for rank in blamed)
            seen.append(NodeHardware(node, registry.findings(node, job.name), places))
    return hardware.explained(verdict, seen)


def ranks(registry: Registry, job: Job, now_s: float) -> list[RankView]:
    """Return all ranks of the round that agents have reported."""
    found = list(registry.ranks(job.name, job.record.round, job.nodes, now_s))
    if any(rank.gone for rank in found):
        return [_with_leave(job, rank, now_s) if rank.gone else rank for rank in found]
    return found


def _with_leave(job: Job, rank: RankView, now_s: float) -> RankView:
    """Decide whether a rank that is gone has just left: its runner would have reported a failure."""
    number = rank.report.rank
    since_s = job.round.gone.setdefault(number, now_s)
    runner = job.runners.get(rank.node)
    told = number in job.round.exits or runner is None or runner.broken or not runner.is_alive(now_s)
    if told:
        return rank
    if now_s - since_s < (LEFT_S if uncaught(rank) is None else GRACE_S):
        job.round.silence.odd = True  # looked at again when it counts, not with the next heartbeat
        return rank
    return rank._replace(left=True)


def judge_unmet(job: Job, wall_s: float) -> Verdict | None:
    """Return the verdict on nodes that could not reach each other, so that no round began; None without any."""
    first = next(iter(job.nodes), "")
    return partition.unmet(job.round.unmet, first, round_=job.record.round, wall_s=wall_s)


def judge_exits(registry: Registry, job: Job, now_s: float, wall_s: float, missing: Sequence[str]) -> Verdict:
    """Return the verdict on how the round ended, by exits and reports; ``missing`` are nodes without a report."""
    ended = [Ended(one.node, one.exit, max(0.0, now_s - one.ended_s)) for one in job.round.exits.values()]
    reports = {rank.report.rank: rank.report for rank in ranks(registry, job, now_s)}
    hosts = {
        node: view.host
        for node in job.nodes
        if (view := registry.node(node, job.name)) is not None and view.host is not None
    }
    verdict = first_cause.judge_exits(
        ended,
        world_size=job.record.world_size,
        missing=missing,
        reports=reports,
        hosts=hosts,
        round_=job.record.round,
        wall_s=wall_s,
    )
    return quote_hardware(registry, job, partition.lasts(verdict, job.record.ended_verdict, job.round.reached_step))


def quote_hardware(registry: Registry, job: Job, verdict: Verdict, *, until_wall_s: float | None = None) -> Verdict:
    """Return a verdict with the hardware findings of its nodes.

    ``until_wall_s``: the verdict was acted upon already; what began until then is added as evidence.
    """
    wanted = set(verdict.culprits[:MOST_QUOTED_FOR])
    seen = []
    for node in sorted(registry.sick & job.round.places.keys()):
        share = registry.share(node, job.name, job.record.round)
        reports = share.ranks if share is not None else {}
        ranks = tuple(RankPlace(rank, reports[rank].pid, reports[rank].gpu) for rank in wanted & reports.keys())
        if ranks or node in verdict.nodes[:MOST_QUOTED_FOR]:
            findings = registry.findings(node, job.name)
            if until_wall_s is not None:
                findings = tuple(one for one in findings if one.since_wall_s <= until_wall_s)
            seen.append(NodeHardware(node, findings, ranks))
    return quote(verdict, seen, late=until_wall_s is not None)


def load_of(registry: Registry, node: str) -> str:
    """Return how loaded a node's host is, in words; "" where that is not known."""
    view = registry.node(node)
    host = view.host if view is not None else None
    return f"{node} has a load of {host.load_1m:.1f} on {host.cores} cores" if host is not None and host.cores else ""


def unit(registry: Registry, job: Job) -> str:
    """Return the unit that a job's hours are told in: "GPU" where each rank is known to have one, else "rank"."""
    for node in job.nodes:
        share = registry.share(node, job.name, job.record.round)
        if share is not None and share.ranks:
            return "GPU" if all(report.gpu for report in share.ranks.values()) else "rank"
    return "rank"


def place(registry: Registry, job: Job, verdict: Verdict) -> tuple[Verdict, float]:
    """Return a verdict with its culprits' nodes, and the typical step of the first of them; 0 when not known."""
    nodes: list[str] = []
    step_s = 0.0
    places = {rank: place for place, rank in enumerate(verdict.culprits)}
    for node in job.nodes if places else ():
        share = registry.share(node, job.name, job.record.round)
        here = share.named(places) if share is not None else []
        if share is None or not here:
            continue
        nodes.append(node)
        for rank in here if not step_s else ():
            progress = share.ranks[rank].progress
            step_s = step_s or (progress.step_p50_s if progress is not None else 0.0)
    return (verdict if verdict.nodes else msgspec.structs.replace(verdict, nodes=tuple(nodes))), step_s


def not_stopped(registry: Registry, job: Job, now_s: float) -> list[str]:
    """Return the nodes of the round that live and have not said that their ranks stopped."""
    return [
        node
        for node in job.nodes
        if node not in job.waiting and node not in job.round.left and is_alive(registry, job, node, now_s)
    ]


def is_alive(registry: Registry, job: Job, node: str, now_s: float) -> bool:
    """Return whether a node shows signs of life: its runner's requests, or its agent speaking of ranks."""
    runner = job.runners.get(node)
    if runner is not None and runner.is_alive(now_s):
        return True
    if not registry.agent_is_fresh(job.name, node, now_s):
        return False
    view = registry.node(node, job.name)
    outlives_s = max(AGENT_OUTLIVES_S, view.every_s * FRESH_HEARTBEATS if view is not None else 0.0)
    if (
        runner is not None
        and runner.broken
        and now_s - runner.seen_s > outlives_s
        and (view is None or view.heard_s <= runner.seen_s)
    ):
        return False  # both fell silent in the same moment: the node did
    return has_live_rank(registry, job, node)


def has_live_rank(registry: Registry, job: Job, node: str) -> bool:
    """Return whether the node's agent has reported a living rank of the round."""
    share = registry.share(node, job.name, job.record.round)
    return share is not None and share.lives


def joined(job: Job, now_s: float) -> dict[str, float]:
    """Return nodes whose runner waits for a round and is there, with the time it joined."""
    found = {}
    for node, waiting in job.waiting.items():
        runner = job.runners.get(node)
        if runner is not None and runner.runner_id == waiting.join.runner_id and runner.is_alive(now_s):
            found[node] = waiting.since_s
    return found


def is_blind(registry: Registry, job: Job, now_s: float) -> bool:
    """Return whether this controller is too young to have heard of all nodes: no news is not a sign of life."""
    if now_s - job.entered_s >= BLIND_S:
        return False
    seen = registry.shares_seen
    if seen is not None and seen == job.round.all_heard:
        return False
    if all(registry.share(member.node, job.name, job.record.round) is not None for member in job.record.members):
        job.round.all_heard = seen
        return False
    job.round.silence = SilenceCheck()  # a judgement without reports is void when they come
    return True


def has_moved(registry: Registry, job: Job, now_s: float) -> bool:
    """Return whether the end of a suspicion is the ranks' doing, not that of a controller whose clocks began anew.

    Nor is it theirs where a process is gone and its runner has not reported how it ended: that report decides.
    """
    awaited = any(
        rank.gone and not rank.left and rank.report.rank not in job.round.exits for rank in ranks(registry, job, now_s)
    )
    return not awaited and registry.has_moved(job.name, job.record.round, job.nodes)


def have_left(registry: Registry, job: Job, verdict: Verdict | None, now_s: float) -> bool:
    """Return whether all ranks that a verdict names have ended without a failure."""
    named = frozenset(verdict.culprits if verdict is not None else ())
    left = {rank.report.rank for rank in ranks(registry, job, now_s) if rank.left}
    return bool(named) and named <= left


def may_scan_nodes(job: Job, now_s: float) -> bool:
    """Return whether to look at all nodes now: of few always, of many when all are in or some time has passed."""
    if len(job.waiting) <= SMALL or len(job.waiting) >= job.record.max_nodes:
        return True
    if now_s - job.round.scanned_s < max(SCAN_S, len(job.waiting) * SCAN_EACH_NODE_S) * 0.9:
        return False
    job.round.scanned_s = now_s
    return True


def gpu_of(registry: Registry, job: Job, node: str, rank: int) -> str:
    """Return the UUID of a rank's GPU in the newest round, "" where no agent has told it."""
    share = registry.share(node, job.name, job.record.round)
    report = share.ranks.get(rank) if share is not None else None
    return report.gpu if report is not None else ""
