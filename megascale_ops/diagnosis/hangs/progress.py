# SPDX-License-Identifier: Apache-2.0
"""Which ranks show no progress, and is it their fault?

A collective completes on all ranks or on none, so one rank that stops makes all of them silent. A rank that *waits* in
a collective is a victim; the culprit is the one the others wait for. How long the others have waited counts, not how
long
the absent one was quiet: it may have worked, as all of them did. A rank that does what is known to take long excuses
all that wait for it.

Named early, acted upon late: from ``name_s`` on a silence is worth a warning with evidence. It contradicts nothing, so
it is not stopped before ``absent_patience_s``. The exception is a rank that has ended while the others wait for it.

Pure: ages in, a suspicion that carries its numbers, or None, out.
"""

from collections.abc import Sequence
from typing import NamedTuple

from megascale_ops.diagnosis.hangs.patience import (
    BUSY,
    CONTRADICTED,
    STARTUP_LOOK_S,
    busy_patience_s,
    has_learned,
    is_leaving,
    is_waiting,
    left_by_itself,
    patience_s,
)
from megascale_ops.diagnosis.hangs.suspicion import (
    Suspicion,
    nodes_of,
    numbers_of,
    rank_findings,
    step_of,
    waiting_finding,
    who,
)
from megascale_ops.diagnosis.rank_view import RankView
from megascale_ops.schema.health import Verdict
from megascale_ops.schema.policy import JobPolicy
from megascale_ops.schema.wording import PLACE

# Phases that every step has; any other name was declared by the script and may take long.
STEP_PHASES = frozenset({"startup", "data", "forward", "backward", "optimizer", "other"})


class _Silence(NamedTuple):
    """The ranks that stand still, and by which measure."""

    culprits: list[RankView]
    fault: str
    why: str
    name_s: float  # how long before it is named
    age_s: float
    confidence: float
    base_s: float = 0.0  # what a step may take
    held: bool = False  # others wait for them in a collective
    is_proven: bool = False  # waiting mends nothing


def judge_silence(ranks: Sequence[RankView], policy: JobPolicy, wall_s: float) -> Suspicion | None:
    """Return a suspicion of the ranks that show no progress although they should, or None."""
    if any(rank.gone and not left_by_itself(rank) for rank in ranks):
        return None  # a death: its runner reports it with the exit status, which is better evidence than silence
    there = [rank for rank in ranks if not rank.gone and rank.report.progress is not None]
    live = [rank for rank in there if not is_leaving(rank)]
    if not live:
        return _judge_leaving(there, policy, wall_s)
    excused = _excused(live, policy)
    # A rank that saves and waits in a collective waits for peers; where all wait, there may be no rank left to come.
    if excused and not all(is_waiting(rank.report) for rank in live):
        return None
    granted = [patience_s(rank.report, policy) for rank in live]
    silent = [rank for rank, each_s in zip(live, granted, strict=True) if rank.silent_s > each_s / 2]
    if not silent:
        return _judge_start(ranks, live, policy, wall_s)
    base_s = max(each_s for rank, each_s in zip(live, granted, strict=True) if rank.silent_s > each_s / 2)
    is_said = any(not has_learned(rank.report) for rank in silent)
    found = _name_culprits(ranks, live, silent, base_s, policy)
    if found is None or found.age_s <= (found.base_s if found.held else found.name_s) / 2:
        # Some have reached half of what a start may take, others not yet: they stand as they did the moment before.
        return _judge_start(ranks, live, policy, wall_s) if is_said else None
    seen = _suspect(found, live, policy, wall_s, absent_s=_absent_s(silent, policy), excused=excused)
    return seen._replace(is_said=is_said)


def _absent_s(silent: Sequence[RankView], policy: JobPolicy) -> float:
    """Return what the silent are granted for being absent; a start and a declared phase have patience of their own."""
    if any(not has_learned(rank.report) for rank in silent):
        return 0.0
    overstayed = any(rank.report.progress and rank.report.progress.phase not in STEP_PHASES for rank in silent)
    return min(policy.absent_patience_s, policy.phase_patience_s) if overstayed else policy.absent_patience_s


def _suspect(
    found: _Silence,
    live: Sequence[RankView],
    policy: JobPolicy,
    wall_s: float,
    *,
    absent_s: float,
    excused: bool = False,
) -> Suspicion:
    """Return a suspicion with the patience that it deserves."""
    patience = found.name_s if found.is_proven else max(found.name_s, absent_s)
    if excused:
        patience = max(patience, policy.phase_patience_s)
    return Suspicion(
        lost=found.age_s > patience,
        verdict=_verdict(found, live, wall_s, patience),
        age_s=found.age_s,
        patience_s=patience,
        base_s=found.base_s or found.name_s,
        held=found.held,
        excused=excused,
        name_s=found.name_s,
        is_proven=found.is_proven,
        absent_s=absent_s,
    )


def _judge_start(
    ranks: Sequence[RankView], live: Sequence[RankView], policy: JobPolicy, wall_s: float
) -> Suspicion | None:
    """Look early at ranks that wait in collectives before steps flow: their calls may contradict each other.

    Only a contradiction is acted upon sooner than ``startup_patience_s``: what else takes long at the start (data that
    one rank prepares, a compilation) takes as long as it likes.
    """
    waiting = [rank for rank in live if is_waiting(rank.report)]
    if not waiting or min(rank.silent_s for rank in live) <= STARTUP_LOOK_S / 2:
        return None
    found = _name_culprits(ranks, live, list(live), STARTUP_LOOK_S, policy)
    if found is None or found.age_s <= STARTUP_LOOK_S / 2:
        return None
    seen = _suspect(found, live, policy, wall_s, absent_s=0.0)
    if found.is_proven:
        return seen
    patience = max(seen.patience_s, *(patience_s(rank.report, policy) for rank in live))
    return seen._replace(
        lost=seen.age_s > patience,
        verdict=_verdict(found, live, wall_s, patience),
        patience_s=patience,
        name_s=patience,
        is_start=True,
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
    why = "after its script had ended: it does not leave"
    found = _Silence(list(leaving), "silent", why, patience, age_s, 0.6, base_s)
    return _suspect(found, leaving, policy, wall_s, absent_s=policy.absent_patience_s)


def _excused(live: Sequence[RankView], policy: JobPolicy) -> bool:
    """Return whether some rank does what is known to take long (a declared phase): all the others wait for it then."""
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
    """Decide which ranks the others wait for, and how long that is all right."""
    waiting = [rank for rank in live if is_waiting(rank.report)]
    absent = [rank for rank in live if not is_waiting(rank.report)]
    left = [rank for rank in ranks if (rank.gone or is_leaving(rank)) and left_by_itself(rank)]
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
    # Since the last of them moved, too: what the others had waited for before (a network was cut) is no fault of it.
    told = [rank for rank in left if rank.report.progress is not None]
    age_s = min(rank.silent_s for rank in (*waiting, *told))
    # Over NCCL no connection breaks, so that nothing but this shows it.
    patience = CONTRADICTED * base_s
    why = "ended while the others wait for it"
    return _Silence(left, "exited_early", why, patience, age_s, 0.9, is_proven=True)


def _everybody_waits(waiting: Sequence[RankView], base_s: float) -> _Silence:
    """Blame those that are furthest behind in their own group; without such ranks, name none."""
    groups: dict[str, list[tuple[int, RankView]]] = {}
    for rank in waiting:
        if rank.report.collective is not None:
            groups.setdefault(rank.report.collective.name, []).append((rank.report.collective.enqueued, rank))
    last = {name: min(number for number, _ in inside) for name, inside in groups.items()}
    apart = [name for name, inside in groups.items() if any(number > last[name] for number, _ in inside)]
    age_s = min(rank.silent_s for rank in waiting)
    if not apart:
        where = "the same collective" if len(groups) == 1 else f"collectives of {len(groups)} groups"
        why = f"all {len(waiting)} ranks wait in {where}: a network or a library is as likely as a rank"
        return _Silence(list(waiting), "silent", why, base_s, age_s, 0.3, base_s, held=True)
    behind = [rank for name in apart for number, rank in groups[name] if number == last[name]]
    behind = [rank for rank in behind if rank.report.tile_peer < 0] or behind  # the others are held up themselves
    where = f"{last[apart[0]]} of {apart[0]}" if apart[0] else f"{last[apart[0]]}"
    why = f"it is at collective {where}, the others are further: it may wait for what never comes"
    return _Silence(behind, "silent", why, base_s, age_s, 0.7, base_s, held=True)


def _nobody_waits(live: Sequence[RankView], silent: Sequence[RankView], base_s: float, policy: JobPolicy) -> _Silence:
    """Judge a job in which no collective shows which rank waits for which.

    Where collectives are seen (or there is one rank only) and no rank waits in one, none is held up either: a slow
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


def _verdict(found: _Silence, live: Sequence[RankView], wall_s: float, patience: float) -> Verdict:
    culprits = found.culprits
    findings = [finding for rank in culprits[:16] for finding in rank_findings(rank)]
    blamed = {rank.report.rank for rank in culprits}
    waiting = [rank for rank in live if is_waiting(rank.report) and rank.report.rank not in blamed]
    if waiting:
        findings.append(waiting_finding(waiting))
    verb = "shows no progress for" if found.fault == "silent" else "is gone, the others have waited for"
    return Verdict(
        fault=found.fault,
        reason=f"{who(culprits)} {verb} {found.age_s:.1f} s, {found.why}; patience is {patience:.1f} s",
        confidence=found.confidence,
        culprits=numbers_of(culprits),
        nodes=nodes_of(culprits),
        since_wall_s=wall_s - found.age_s,
        since_step=step_of(culprits),
        round=culprits[0].report.round,
        evidence=tuple(findings),
        otherwise=f"nothing, had it moved within {patience:.1f} s; a declared phase (recorder.phase) buys more",
        sure_of="" if found.is_proven else PLACE,
    )
