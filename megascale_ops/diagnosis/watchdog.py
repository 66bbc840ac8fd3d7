# SPDX-License-Identifier: Apache-2.0
"""Which ranks are silent, frozen or there twice?

First suspect, then lost, when all patience is used up. Where others wait in a collective, half of what a step may
take makes a suspect, also one that is busy: evidence is gathered early, and ``hangs`` weighs it. A stopped
process (state T) needs no patience, only a short grace for debuggers; two processes that claim to be one rank need
none at all; a rank that has failed and does not end is named by its error (``last_errors``); all others are judged by
``progress``. Silence is measured in the agent's clock as of its last heartbeat: a slow controller accuses no rank.

Pure: ages in, a suspicion that carries its numbers, or None, out.
"""

from collections.abc import Sequence

from megascale_ops.diagnosis.exits.last_errors import fatal, judge_failed
from megascale_ops.diagnosis.hangs.patience import STARTUP_LOOK_S, has_learned, is_waiting, patience_s
from megascale_ops.diagnosis.hangs.progress import judge_silence
from megascale_ops.diagnosis.hangs.suspicion import (
    Suspicion,
    nodes_of,
    numbers_of,
    rank_finding,
    step_of,
    waiting_finding,
    who,
)
from megascale_ops.diagnosis.rank_view import GONE, RankView
from megascale_ops.schema.health import Finding, Verdict
from megascale_ops.schema.policy import JobPolicy
from megascale_ops.schema.progress import RankReport

# A rank in such a phase may be stopped on purpose: `with recorder.phase("debug")` around a breakpoint.
DEBUG_PHASES = ("debug", "debugger")
# For how long a process has been stopped or gone counts from the first judgement that saw it.
ODD_STATES = frozenset({"T", *GONE})


def judge(ranks: Sequence[RankView], policy: JobPolicy, wall_s: float) -> Suspicion | None:
    """Return a suspicion of the ranks that stand still, or None.

    Args:
        ranks: all ranks of the round that have been reported.
        policy: how patient to be.
        wall_s: the time now, for the verdict's ``since_wall_s``.
    """
    return (
        _judge_doubles(ranks, wall_s)
        or _judge_frozen(ranks, policy, wall_s)
        or judge_failed(ranks, wall_s)
        or judge_silence(ranks, policy, wall_s)
    )


def _judge_doubles(ranks: Sequence[RankView], wall_s: float) -> Suspicion | None:
    """Suspect two living processes that claim to be one rank, at once: both write the same checkpoints."""
    doubled = [rank for rank in ranks if rank.report.rivals and not rank.gone]
    if not doubled:
        return None
    findings = [
        rank_finding(
            "claimed_twice", f"rank {rank.report.rank} is claimed by {_claims(rank)}", "black box", rank, 2, ""
        )
        for rank in doubled[:16]
    ]
    verdict = Verdict(
        fault="duplicate_rank",
        reason=f"{who(doubled)} is claimed by {_claims(doubled[0])} at the same time",
        confidence=0.95,
        culprits=numbers_of(doubled),
        nodes=nodes_of(doubled),
        since_wall_s=wall_s,
        since_step=step_of(doubled),
        round=doubled[0].report.round,
        evidence=tuple(findings),
        otherwise="nothing, had one of the processes ended",
    )
    return Suspicion(lost=True, verdict=verdict, is_proven=True)


def _claims(rank: RankView) -> str:
    return f"processes {', '.join(map(str, sorted((rank.report.pid, *rank.report.rivals))))}"


def _judge_frozen(ranks: Sequence[RankView], policy: JobPolicy, wall_s: float) -> Suspicion | None:
    stopped = [rank for rank in ranks if rank.report.process.state == "T" and not is_debugged(rank, policy)]
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
        findings.append(waiting_finding(others))
    verdict = Verdict(
        fault="frozen",
        reason=f"{who(stopped)} is stopped (state T) for {age_s:.1f} s; {policy.frozen_grace_s:g} s are granted",
        confidence=0.99,
        culprits=numbers_of(stopped),
        nodes=nodes_of(stopped),
        since_wall_s=wall_s - age_s,
        since_step=step_of(stopped),
        round=stopped[0].report.round,
        evidence=tuple(findings),
        otherwise=f"nothing, had it been continued (SIGCONT) within {policy.frozen_grace_s:g} s",
    )
    grace_s = policy.frozen_grace_s
    return Suspicion(
        age_s > grace_s, verdict, age_s=age_s, patience_s=grace_s, base_s=grace_s, name_s=grace_s, is_proven=True
    )


def is_debugged(rank: RankView, policy: JobPolicy) -> bool:
    """Return whether this rank has declared a debugger's phase, so that it may be stopped."""
    progress = rank.report.progress
    return progress is not None and progress.phase in DEBUG_PHASES and rank.phase_s <= policy.phase_patience_s


def looks_odd(rank: RankView, policy: JobPolicy) -> bool:
    """Return whether a rank is worth a full judgement: cheap, asked at every heartbeat, never wrong the other way."""
    if rank.report.process.state in ODD_STATES or rank.report.rivals:
        return True
    if rank.report.error is not None and fatal(rank) is not None:
        return True
    # Below half the floor no rank is suspected, whatever it has learned.
    return rank.silent_s > policy.silence_floor_s / 2 and rank.silent_s > odd_after_s(rank.report, policy)


def odd_after_s(report: RankReport, policy: JobPolicy) -> float:
    """Return after how long a silence a rank looks odd of which nothing else does."""
    least_s = patience_s(report, policy) / 2
    if not has_learned(report) and is_waiting(report):
        least_s = min(least_s, STARTUP_LOOK_S / 2)
    return max(policy.silence_floor_s / 2, least_s)
