# SPDX-License-Identifier: Apache-2.0
"""Who is silent, since when, and is it their fault?

A collective ends for everybody or for nobody, so one rank that stops makes all of them silent. Whoever *waits* in a
collective is a victim; the culprit is the one the others wait for. Patience is learned from the run: a multiple of the
p99 step, with a floor; long before steps flow, and long again when somebody does something that is known to take long.

First suspect (half the patience), then lost. A stopped process (state T) needs no patience, only a short grace for
debuggers. Silence is measured in the agent's clock as of its last heartbeat: a slow controller accuses nobody.

Pure: told the ages, answers with a suspicion that carries its numbers, or None.
"""

from collections.abc import Sequence
from typing import NamedTuple

from megascale_ops.controller.registry import RankView
from megascale_ops.schema.health import Finding, Verdict
from megascale_ops.schema.messages import JobPolicy
from megascale_ops.schema.progress import RankReport

# Phases that every step has; any other name was declared by the script and may take long.
STEP_PHASES = frozenset({"startup", "data", "forward", "backward", "optimizer", "other"})
# 5: fewer steps say nothing of the slow ones, and the first are slowed by caches and compilers.
LEARNED_STEPS = 5
# 0.2 of a core: a waiting rank uses 0.00 to 0.02, a computing one nearly 1.
BUSY = 0.2
# 10 x p50: a single slow step (the first, a checkpoint) may not set the patience for the next thousand.
OUTLIER = 10.0
# 2 s: the recorder beats ten times a second; twenty missed beats while the process lives mean that the GIL is held.
STALE_BEAT_S = 2.0


class Suspicion(NamedTuple):
    """Somebody stands still. ``lost``: patience is used up; otherwise half of it is."""

    lost: bool
    verdict: Verdict


def patience_s(report: RankReport, policy: JobPolicy) -> float:
    """Return how long this rank may show no progress, by what it has shown of itself."""
    progress = report.progress
    if progress is None or progress.steps_seen < LEARNED_STEPS:
        return policy.startup_patience_s
    p99_s = progress.step_p99_s
    typical_s = min(p99_s, OUTLIER * progress.step_p50_s) if progress.step_p50_s > 0 else p99_s
    # 2 x p99: what happened once in a hundred steps may happen again.
    return max(policy.silence_floor_s, policy.silence_factor * typical_s, 2.0 * p99_s)


def is_waiting(report: RankReport) -> bool:
    """Say whether the rank waits inside a collective."""
    position = report.collective
    return position is not None and position.enqueued > position.completed


def looks_odd(rank: RankView, policy: JobPolicy) -> bool:
    """Say whether a rank is worth a full judgement: cheap, asked at every heartbeat, never wrong the other way."""
    if rank.report.process.state == "T":
        return True
    # Below half the floor nobody is suspected, whatever the rank has learned.
    return rank.silent_s > policy.silence_floor_s / 2 and rank.silent_s > patience_s(rank.report, policy) / 2


def judge(ranks: Sequence[RankView], policy: JobPolicy, wall_s: float) -> Suspicion | None:
    """Return who stands still, or None.

    Args:
        ranks: all ranks of the round that have been reported.
        policy: how patient to be.
        wall_s: the time now, for the verdict's ``since_wall_s``.
    """
    return _judge_frozen(ranks, policy, wall_s) or _judge_silence(ranks, policy, wall_s)


def _judge_frozen(ranks: Sequence[RankView], policy: JobPolicy, wall_s: float) -> Suspicion | None:
    stopped = [rank for rank in ranks if rank.report.process.state == "T"]
    if not stopped:
        return None
    # The agent reports a resumed process at once, so up to one heartbeat (1.2 s) of no news is still "stopped".
    ages = [rank.stopped_s + min(rank.heard_age_s, 1.2) for rank in stopped]
    age_s = max(ages)
    findings = [
        Finding(
            name="process_stopped",
            text=f"process {rank.report.pid} of rank {rank.report.rank} is in state T for {age:.1f} s",
            source="process",
            rank=rank.report.rank,
            node=rank.node,
            value=age,
            unit="s",
        )
        for rank, age in zip(stopped, ages, strict=True)
    ]
    others = [rank for rank in ranks if is_waiting(rank.report) and rank.report.process.state != "T"]
    if others:
        findings.append(_waiting_finding(others))
    verdict = Verdict(
        fault="frozen",
        reason=f"{_who(stopped)} is stopped (state T) for {age_s:.1f} s; {policy.frozen_grace_s:g} s are granted",
        confidence=0.99,
        culprits=_numbers(stopped),
        nodes=_nodes(stopped),
        since_wall_s=wall_s - age_s,
        since_step=_step(stopped),
        round=stopped[0].report.round,
        evidence=tuple(findings),
        otherwise=f"nothing, had it been continued (SIGCONT) within {policy.frozen_grace_s:g} s",
    )
    return Suspicion(lost=age_s > policy.frozen_grace_s, verdict=verdict)


class _Silence(NamedTuple):
    """Who stands still and by which measure."""

    culprits: list[RankView]
    fault: str
    why: str
    patience_s: float
    age_s: float
    confidence: float


def _judge_silence(ranks: Sequence[RankView], policy: JobPolicy, wall_s: float) -> Suspicion | None:
    if any(rank.gone and not _left_by_itself(rank.report) for rank in ranks):
        return None  # a death: its runner reports it with the exit status, which says more than silence
    live = [rank for rank in ranks if not rank.gone and rank.report.progress is not None]
    if not live or _excused(live, policy):
        return None
    silent = [rank for rank in live if rank.silent_s > patience_s(rank.report, policy) / 2]
    if not silent:
        return None
    found = _name_culprits(ranks, live, silent, policy)
    if found is None or found.age_s <= found.patience_s / 2:
        return None
    return Suspicion(lost=found.age_s > found.patience_s, verdict=_verdict(found, live, wall_s))


def _excused(live: Sequence[RankView], policy: JobPolicy) -> bool:
    """Say whether some rank does what is known to take long (a declared phase): all the others wait for it then."""
    for rank in live:
        progress = rank.report.progress
        if progress and progress.phase not in STEP_PHASES and rank.phase_s <= policy.phase_patience_s:
            return True
    return False


def _name_culprits(
    ranks: Sequence[RankView], live: Sequence[RankView], silent: Sequence[RankView], policy: JobPolicy
) -> _Silence | None:
    """Decide whom the others wait for, and how long that is all right."""
    base_s = max(patience_s(rank.report, policy) for rank in silent)
    waiting = [rank for rank in live if is_waiting(rank.report)]
    absent = [rank for rank in live if not is_waiting(rank.report)]
    left = [rank for rank in ranks if rank.gone and _left_by_itself(rank.report)]
    silent_ranks = {rank.report.rank for rank in silent}
    if any(rank.report.rank not in silent_ranks for rank in (absent if waiting else live)):
        return None  # the one the others wait for moves: slow perhaps, but not silent
    if left:
        return _after_some_left(left, silent, waiting, base_s, policy)
    if not waiting:
        return _nobody_waits(live, silent, base_s, policy)
    if absent:
        if any(rank.report.process.cpu_busy > BUSY for rank in absent):
            base_s = max(policy.busy_factor * base_s, policy.busy_floor_s)
        age_s = min(rank.silent_s for rank in absent)
        few = len(absent) * 2 <= len(live)
        why = f"while {len(waiting)} of {len(live)} ranks wait for it in a collective"
        return _Silence(absent, "silent", why, base_s, age_s, 0.9 if few else 0.6)
    return _everybody_waits(waiting, base_s)


def _after_some_left(
    left: list[RankView],
    silent: Sequence[RankView],
    waiting: Sequence[RankView],
    base_s: float,
    policy: JobPolicy,
) -> _Silence:
    """Judge a job of which some ranks have ended by themselves, without an error."""
    if not waiting:
        age_s = min(rank.silent_s for rank in silent)
        return _Silence(list(silent), "silent", "while the others have ended", policy.phase_patience_s, age_s, 0.5)
    age_s = min(rank.silent_s for rank in waiting)
    return _Silence(left, "exited_early", "ended while the others wait for it", base_s, age_s, 0.9)


def _everybody_waits(waiting: Sequence[RankView], base_s: float) -> _Silence:
    """Blame those that are furthest behind; when nobody is, say that the evidence names nobody."""
    last = min(rank.report.collective.enqueued for rank in waiting if rank.report.collective)
    behind = [rank for rank in waiting if rank.report.collective and rank.report.collective.enqueued == last]
    age_s = min(rank.silent_s for rank in waiting)
    if len(behind) == len(waiting):
        why = f"all {len(waiting)} ranks wait in the same collective: a network or a library is as likely as a rank"
        return _Silence(behind, "silent", why, base_s, age_s, 0.3)
    why = f"it is at collective {last}, the others are further: it may wait for what never comes"
    return _Silence(behind, "silent", why, base_s, age_s, 0.7)


def _nobody_waits(live: Sequence[RankView], silent: Sequence[RankView], base_s: float, policy: JobPolicy) -> _Silence:
    """Judge a job in which no collective says who waits for whom.

    Where collectives are seen (or there is one rank only) and nobody waits in one, nobody is held up either: a slow
    save or a slow disk looks the same, so they get the patience of busy ranks.
    """
    seen = len(live) == 1 or any(rank.report.collective is not None for rank in live)
    if seen or any(rank.report.process.cpu_busy > BUSY for rank in live):
        base_s = max(policy.busy_factor * base_s, policy.busy_floor_s)
    age_s = min(rank.silent_s for rank in silent)
    confidence = 0.3 if len(silent) == len(live) and len(live) > 1 else 0.7
    return _Silence(list(silent), "silent", "and nobody is seen waiting in a collective", base_s, age_s, confidence)


def _verdict(found: _Silence, live: Sequence[RankView], wall_s: float) -> Verdict:
    culprits = found.culprits
    findings = [finding for rank in culprits[:16] for finding in _rank_findings(rank)]
    waiting = [rank for rank in live if is_waiting(rank.report) and rank not in culprits]
    if waiting:
        findings.append(_waiting_finding(waiting))
    verb = "shows no progress for" if found.fault == "silent" else "is gone, the others have waited for"
    return Verdict(
        fault=found.fault,
        reason=f"{_who(culprits)} {verb} {found.age_s:.1f} s, {found.why}; patience is {found.patience_s:.1f} s",
        confidence=found.confidence,
        culprits=_numbers(culprits),
        nodes=_nodes(culprits),
        since_wall_s=wall_s - found.age_s,
        since_step=_step(culprits),
        round=culprits[0].report.round,
        evidence=tuple(findings),
        otherwise=f"nothing, had it moved within {found.patience_s:.1f} s; a declared phase (recorder.phase) buys more",
    )


def _rank_findings(rank: RankView) -> list[Finding]:
    report, progress = rank.report, rank.report.progress
    findings = []
    if progress is not None:
        text = (
            f"rank {report.rank} last moved {rank.silent_s:.1f} s ago, after step {progress.step}, in phase "
            f"{progress.phase}; its p99 step takes {progress.step_p99_s:.3f} s"
        )
        findings.append(_finding("last_moved", text, "black box", rank, rank.silent_s, "s"))
        # Both ages are taken in the sender's clock: silent_s reaches from moved_mono_s to its last heartbeat.
        stale_s = rank.silent_s + progress.moved_mono_s - progress.beat_mono_s
        if progress.beat_mono_s and stale_s > STALE_BEAT_S:
            text = f"the recorder's own thread in rank {report.rank} is silent for {stale_s:.1f} s: the GIL is held"
            findings.append(_finding("gil_held", text, "black box", rank, stale_s, "s"))
    if report.collective is not None:
        text = (
            f"rank {report.rank} has enqueued {report.collective.enqueued} collectives and completed "
            f"{report.collective.completed} ({report.collective.name or 'no name'})"
        )
        findings.append(_finding("collective", text, "black box", rank, report.collective.enqueued, ""))
    state = report.process.state or "gone"
    text = f"process {report.pid} of rank {report.rank} is in state {state}, uses {report.process.cpu_busy:.2f} cores"
    findings.append(_finding("process", text, "process", rank, report.process.cpu_busy, "cores"))
    return findings


def _finding(name: str, text: str, source: str, rank: RankView, value: float, unit: str) -> Finding:
    return Finding(
        name=name, text=text, source=source, rank=rank.report.rank, node=rank.node, value=float(value), unit=unit
    )


def _waiting_finding(waiting: Sequence[RankView]) -> Finding:
    names = sorted({rank.report.collective.name for rank in waiting if rank.report.collective} - {""})
    inside = f" ({', '.join(names[:3])})" if names else ""
    return Finding(
        name="others_wait",
        text=f"{len(waiting)} ranks wait in a collective{inside}: {_list(_numbers(waiting))}",
        source="black box",
        value=float(len(waiting)),
        unit="ranks",
    )


def _left_by_itself(report: RankReport) -> bool:
    return report.progress is not None and report.progress.state == "exited" and report.error is None


def _numbers(ranks: Sequence[RankView]) -> tuple[int, ...]:
    return tuple(sorted(rank.report.rank for rank in ranks))


def _nodes(ranks: Sequence[RankView]) -> tuple[str, ...]:
    return tuple(sorted({rank.node for rank in ranks}))


def _step(ranks: Sequence[RankView]) -> int:
    return min((rank.report.progress.step for rank in ranks if rank.report.progress is not None), default=-1)


def _who(ranks: Sequence[RankView]) -> str:
    if len(ranks) == 1:
        return f"rank {ranks[0].report.rank} on {ranks[0].node}"
    return f"each of the ranks {_list(_numbers(ranks))} on {_list(_nodes(ranks))}"


def _list(items: Sequence[int | str]) -> str:
    shown = ", ".join(str(item) for item in items[:8])
    return shown if len(items) <= 8 else f"{shown} and {len(items) - 8} more"


class NodeSigns(NamedTuple):
    """When a node was last heard, as ages in seconds; infinite where it never was."""

    node: str
    agent_age_s: float
    runner_age_s: float
    ranks_gone: bool  # its agent says that every rank's process is gone
    polling: bool  # the runner's request is open


def judge_nodes(
    nodes: Sequence[NodeSigns], policy: JobPolicy, *, lag_s: float, round_: int, wall_s: float
) -> Verdict | None:
    """Return which nodes are lost: neither agent nor runner answers, or the runner is gone and its ranks with it.

    ``lag_s`` is how late the controller itself was of late; it is added to every patience.
    """
    patience = policy.node_lost_s + lag_s
    lost = []
    for signs in nodes:
        agent_silent = signs.agent_age_s > patience
        runner_silent = signs.runner_age_s > patience
        if runner_silent and (agent_silent or (signs.ranks_gone and not signs.polling)):
            lost.append(signs)
    if not lost:
        return None
    since_s = min(min(signs.agent_age_s, signs.runner_age_s) for signs in lost)
    names = tuple(signs.node for signs in lost)
    only_runner = all(signs.agent_age_s <= patience for signs in lost)
    what = "the runner is gone and its ranks with it" if only_runner else "neither agent nor runner answers"
    findings = tuple(_sign_finding(signs) for signs in lost[:16])
    return Verdict(
        fault="node_lost",
        reason=f"{_list(names)}: {what} for {since_s:.1f} s; patience is {patience:.1f} s",
        confidence=0.9,
        nodes=names,
        since_wall_s=wall_s - since_s,
        round=round_,
        evidence=findings,
        otherwise=f"nothing, had one heartbeat or one request of the runner come within {patience:.1f} s",
    )


def _sign_finding(signs: NodeSigns) -> Finding:
    def ago(age_s: float) -> str:
        return "never" if age_s == float("inf") else f"{age_s:.1f} s ago"

    text = (
        f"{signs.node}: last heartbeat {ago(signs.agent_age_s)}, last request of its runner {ago(signs.runner_age_s)}"
    )
    return Finding(
        name="node_silent", text=text, source="heartbeat", node=signs.node, value=min(signs.runner_age_s, 1e9), unit="s"
    )
