# SPDX-License-Identifier: Apache-2.0
"""Who is silent, since when, and is it their fault?

A collective ends for everybody or for nobody, so one rank that stops makes all of them silent. Whoever *waits* in a
collective is a victim; the culprit is the one the others wait for. Patience is learned from the run: a multiple of the
p99 step, with a floor; long before steps flow, and long again when somebody does something that is known to take long.

First suspect, then lost, when all patience is used up. Where others wait in a collective, half of what a step may
take makes a suspect, also one that is busy: evidence is gathered early, and ``hangs`` says what it is worth. How long
the others have waited counts, not how long the absent one was quiet: it may have worked, as all of them did. A stopped
process (state T) needs no patience, only a short grace for debuggers; two processes that say they are one rank need
none at all. Silence is measured in the agent's clock as of its last heartbeat: a slow controller accuses nobody.

Pure: told the ages, answers with a suspicion that carries its numbers, or None.
"""

from collections.abc import Sequence
from typing import NamedTuple

from megascale_ops.controller.registry import RankView
from megascale_ops.schema.folding import named, ranges
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


# A rank that says so may be stopped on purpose: `with recorder.phase("debug")` around a breakpoint.
DEBUG_PHASES = ("debug", "debugger")


class Suspicion(NamedTuple):
    """Somebody stands still. ``lost``: patience is used up.

    ``base_s`` is what a step of these ranks may take; ``patience_s`` is that, or more for who seems to work.
    ``held`` says that others wait for the suspects inside a collective, so that it pays to gather evidence early.
    ``excused`` says that somebody has declared a long phase: then only ranks that contradict each other are acted upon
    before that phase has used up its time.
    """

    lost: bool
    verdict: Verdict
    age_s: float = 0.0
    patience_s: float = 0.0
    base_s: float = 0.0
    held: bool = False
    excused: bool = False


def patience_s(report: RankReport, policy: JobPolicy) -> float:
    """Return how long this rank may show no progress, by what it has shown of itself."""
    progress = report.progress
    if progress is None or progress.steps_seen < LEARNED_STEPS:
        return policy.startup_patience_s
    p99_s = progress.step_p99_s
    typical_s = min(p99_s, OUTLIER * progress.step_p50_s) if progress.step_p50_s > 0 else p99_s
    # 2 x p99: what happened once in a hundred steps may happen again.
    return max(policy.silence_floor_s, policy.silence_factor * typical_s, 2.0 * p99_s)


def busy_patience_s(base_s: float, policy: JobPolicy) -> float:
    """Return how long a rank that seems to work may take, given what a step may take."""
    return max(policy.busy_factor * base_s, policy.busy_floor_s)


def is_waiting(report: RankReport) -> bool:
    """Say whether the rank waits inside a collective."""
    position = report.collective
    return position is not None and position.enqueued > position.completed


def is_leaving(rank: RankView) -> bool:
    """Say whether the rank's script has ended; its process may still be there."""
    progress = rank.report.progress
    return progress is not None and progress.state == "exited"


def is_debugged(rank: RankView, policy: JobPolicy) -> bool:
    """Say whether somebody has declared that this rank is held by a debugger, so that it may be stopped."""
    progress = rank.report.progress
    return progress is not None and progress.phase in DEBUG_PHASES and rank.phase_s <= policy.phase_patience_s


def looks_odd(rank: RankView, policy: JobPolicy) -> bool:
    """Say whether a rank is worth a full judgement: cheap, asked at every heartbeat, never wrong the other way."""
    if rank.report.process.state == "T" or rank.report.rivals:
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
    return (
        _judge_doubles(ranks, wall_s) or _judge_frozen(ranks, policy, wall_s) or _judge_silence(ranks, policy, wall_s)
    )


def _judge_doubles(ranks: Sequence[RankView], wall_s: float) -> Suspicion | None:
    """Two living processes that say they are one rank need no patience: both write the same checkpoints."""
    doubled = [rank for rank in ranks if rank.report.rivals and not rank.gone]
    if not doubled:
        return None
    findings = [
        _finding("claimed_twice", f"rank {rank.report.rank} is claimed by {_claims(rank)}", "black box", rank, 2, "")
        for rank in doubled[:16]
    ]
    verdict = Verdict(
        fault="duplicate_rank",
        reason=f"{_who(doubled)} is claimed by {_claims(doubled[0])} at the same time",
        confidence=0.95,
        culprits=_numbers(doubled),
        nodes=_nodes(doubled),
        since_wall_s=wall_s,
        since_step=_step(doubled),
        round=doubled[0].report.round,
        evidence=tuple(findings),
        otherwise="nothing, had one of the processes ended",
    )
    return Suspicion(lost=True, verdict=verdict)


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
    grace_s = policy.frozen_grace_s
    return Suspicion(age_s > grace_s, verdict, age_s=age_s, patience_s=grace_s, base_s=grace_s)


class _Silence(NamedTuple):
    """Who stands still and by which measure."""

    culprits: list[RankView]
    fault: str
    why: str
    patience_s: float
    age_s: float
    confidence: float
    base_s: float = 0.0  # what a step may take
    held: bool = False  # others wait for them in a collective


def _judge_silence(ranks: Sequence[RankView], policy: JobPolicy, wall_s: float) -> Suspicion | None:
    if any(rank.gone and not _left_by_itself(rank) for rank in ranks):
        return None  # a death: its runner reports it with the exit status, which says more than silence
    there = [rank for rank in ranks if not rank.gone and rank.report.progress is not None]
    live = [rank for rank in there if not is_leaving(rank)]
    if not live:
        return _judge_leaving(there, policy, wall_s)
    excused = _excused(live, policy)
    # Who saves and waits in a collective waits for the others, and where all wait there may be nobody left to come.
    if excused and not all(is_waiting(rank.report) for rank in live):
        return None
    granted = [patience_s(rank.report, policy) for rank in live]
    silent = [rank for rank, each_s in zip(live, granted, strict=True) if rank.silent_s > each_s / 2]
    if not silent:
        return None
    base_s = max(each_s for rank, each_s in zip(live, granted, strict=True) if rank.silent_s > each_s / 2)
    found = _name_culprits(ranks, live, silent, base_s, policy)
    if found is None or found.age_s <= (found.base_s if found.held else found.patience_s) / 2:
        return None
    if excused:
        found = found._replace(patience_s=max(found.patience_s, policy.phase_patience_s))
    return Suspicion(
        lost=found.age_s > found.patience_s,
        verdict=_verdict(found, live, wall_s),
        age_s=found.age_s,
        patience_s=found.patience_s,
        base_s=found.base_s or found.patience_s,
        held=found.held,
        excused=excused,
    )


def _judge_leaving(leaving: Sequence[RankView], policy: JobPolicy, wall_s: float) -> Suspicion | None:
    """Judge ranks whose scripts have all ended: Python tidies up for seconds on a busy machine, and may hang there."""
    if not leaving:
        return None
    base_s = max(patience_s(rank.report, policy) for rank in leaving)
    patience = busy_patience_s(base_s, policy)
    age_s = min(rank.silent_s for rank in leaving)
    if age_s <= patience / 2:
        return None
    found = _Silence(list(leaving), "silent", "after its script had ended: it does not leave", patience, age_s, 0.6)
    return Suspicion(age_s > patience, _verdict(found, leaving, wall_s), age_s, patience, base_s)


def _excused(live: Sequence[RankView], policy: JobPolicy) -> bool:
    """Say whether some rank does what is known to take long (a declared phase): all the others wait for it then."""
    for rank in live:
        progress = rank.report.progress
        if progress and progress.phase not in STEP_PHASES and rank.phase_s <= policy.phase_patience_s:
            return True
    return False


def _name_culprits(
    ranks: Sequence[RankView],
    live: Sequence[RankView],
    silent: Sequence[RankView],
    base_s: float,
    policy: JobPolicy,
) -> _Silence | None:
    """Decide whom the others wait for, and how long that is all right."""
    waiting = [rank for rank in live if is_waiting(rank.report)]
    absent = [rank for rank in live if not is_waiting(rank.report)]
    left = [rank for rank in ranks if (rank.gone or is_leaving(rank)) and _left_by_itself(rank)]
    if waiting and absent:
        silent_ranks = {rank.report.rank for rank in silent}
        moves = any(rank.report.rank not in silent_ranks for rank in absent)
    else:
        moves = not waiting and len(silent) < len(live)
    if moves:
        return None  # the one the others wait for moves: slow perhaps, but not silent
    if left:
        return _after_some_left(left, silent, waiting, base_s, policy)
    if not waiting:
        return _nobody_waits(live, silent, base_s, policy)
    if absent:
        busy = any(rank.report.process.cpu_busy > BUSY for rank in absent)
        # All may have worked for a minute (a compilation, an evaluation): the first to end waits from then on only.
        held_s = max(rank.silent_s for rank in waiting)
        age_s = min(held_s, *(rank.silent_s for rank in absent))
        few = len(absent) * 2 <= len(live)
        why = f"while {len(waiting)} of {len(live)} ranks wait for it in a collective"
        patience = busy_patience_s(base_s, policy) if busy else base_s
        return _Silence(absent, "silent", why, patience, age_s, 0.9 if few else 0.6, base_s, held=True)
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
        return _Silence(behind, "silent", why, base_s, age_s, 0.3, base_s, held=True)
    why = f"it is at collective {last}, the others are further: it may wait for what never comes"
    return _Silence(behind, "silent", why, base_s, age_s, 0.7, base_s, held=True)


def _nobody_waits(live: Sequence[RankView], silent: Sequence[RankView], base_s: float, policy: JobPolicy) -> _Silence:
    """Judge a job in which no collective says who waits for whom.

    Where collectives are seen (or there is one rank only) and nobody waits in one, nobody is held up either: a slow
    save or a slow disk looks the same, so they get the patience of busy ranks.
    """
    positions = [rank.report.collective for rank in live]
    seen = len(live) == 1 or any(position is not None and position.enqueued >= 0 for position in positions)
    patience = base_s
    if seen or any(rank.report.process.cpu_busy > BUSY for rank in live):
        patience = busy_patience_s(base_s, policy)
    age_s = min(rank.silent_s for rank in silent)
    confidence = 0.3 if len(silent) == len(live) and len(live) > 1 else 0.7
    return _Silence(
        list(silent), "silent", "and nobody is seen waiting in a collective", patience, age_s, confidence, base_s
    )


def _verdict(found: _Silence, live: Sequence[RankView], wall_s: float) -> Verdict:
    culprits = found.culprits
    findings = [finding for rank in culprits[:16] for finding in _rank_findings(rank)]
    blamed = {rank.report.rank for rank in culprits}
    waiting = [rank for rank in live if is_waiting(rank.report) and rank.report.rank not in blamed]
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
        text=f"{len(waiting)} ranks wait in a collective{inside}: {ranges(_numbers(waiting))}",
        source="black box",
        value=float(len(waiting)),
        unit="ranks",
    )


def _left_by_itself(rank: RankView) -> bool:
    """Say whether a rank has ended without an error; ``os._exit(0)`` leaves no word of it in the black box."""
    progress, error = rank.report.progress, rank.report.error
    return error is None and (rank.left or (progress is not None and progress.state == "exited"))


def _numbers(ranks: Sequence[RankView]) -> tuple[int, ...]:
    return tuple(sorted(rank.report.rank for rank in ranks))


def _nodes(ranks: Sequence[RankView]) -> tuple[str, ...]:
    return tuple(sorted({rank.node for rank in ranks}))


def _step(ranks: Sequence[RankView]) -> int:
    return min((rank.report.progress.step for rank in ranks if rank.report.progress is not None), default=-1)


def _who(ranks: Sequence[RankView]) -> str:
    if len(ranks) == 1:
        return f"rank {ranks[0].report.rank} on {ranks[0].node}"
    return f"each of the {named(_numbers(ranks))} on {_list(_nodes(ranks))}"


def _list(items: Sequence[int | str]) -> str:
    shown = ", ".join(str(item) for item in items[:8])
    return shown if len(items) <= 8 else f"{shown} and {len(items) - 8} more"
