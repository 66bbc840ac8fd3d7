# SPDX-License-Identifier: Apache-2.0
"""For how long does a judgement of a wait stand, and of which ranks a look, while nothing happens but time passes?

A rank that is merely absent is waited for nine minutes, and all that while thousands of ranks tell that they are where
they were. What the watchdog and the questions about a hang rest on changes in two ways. A heartbeat or evidence
tells something new (``has_changed``); or an age passes a threshold: of patience, of a declared phase, of a rank's own
silence. ``holds_s`` knows the next of these. Until then another judgement would only have other ages in its
sentences.

Ages are those of the last heartbeats, and grow with each: after some seconds they are at most as many seconds older,
and what the last heartbeat was old, and what the next ones are faster on their way.

A look stands in the same way. It costs each rank a tenth of a second and the controller a judgement of what is said; a
rank that was seen to wait in a collective, and of which every heartbeat since tells the same, is where it was.
``asked_again`` knows the others: who is named, who does not wait, who gave no answer, whose data did not leave it,
whose kernels wait for tiles, whose calls went on between two looks, and of whom a heartbeat has told anything new.

Pure: reports, evidence and ages in, yes or no, seconds, or ranks out.
"""

from collections.abc import Collection, Mapping, Sequence

from megascale_ops.diagnosis.hangs.evidence import NOTHING, Look
from megascale_ops.diagnosis.hangs.patience import (
    BUSY,
    LEAST_WANDERED,
    STARTUP_LOOK_S,
    WANDER_S,
    has_learned,
    is_leaving,
    patience_s,
)
from megascale_ops.diagnosis.hangs.progress import STEP_PHASES
from megascale_ops.diagnosis.hangs.suspicion import STALE_BEAT_S, Suspicion
from megascale_ops.diagnosis.hangs.verdict import UNHEARD_S, Judgement
from megascale_ops.diagnosis.hangs.wait_graph import stand_of
from megascale_ops.diagnosis.rank_view import GONE, RankView
from megascale_ops.schema.messages import JobReport
from megascale_ops.schema.policy import JobPolicy
from megascale_ops.schema.progress import Progress, RankReport

# States in which a process is judged by its state; the others come and go while it waits.
_TELLING = frozenset({"T", "D", *GONE})
# 1 s: as much faster may a heartbeat be on its way than the one before.
LATE_S = 1.0
# 15 s: so old may the ages be in what people read of a wait. Of 100,000 ranks a judgement takes 3 s of a core: a
# minute.
MOST_HELD_S = 15.0
HELD_EACH_RANK_S = 60.0 / 100_000
# 2 looks at all ranks: the second tells whether stacks, calls and tiles have stayed as they were.
WHOLE_LOOKS = 2
# 8: each eighth look is at all ranks again. What no heartbeat tells (a GPU that works off its queue) is seen then.
WHOLE_EVERY = 8


def is_as_before(
    round_: int, known: Mapping[int, RankReport], report: JobReport, sent_mono_s: float, *, full: bool
) -> bool:
    """Return whether a node's report of a job tells nothing that a judgement of a wait rests on but time passing.

    Args:
        round_: of which round it reported before.
        known: and what it reported, by rank.
        report: what is told now.
        sent_mono_s: when it was sent, by its node's clock.
        full: who is not in it is not there any more.
    """
    if round_ != report.round or (full and len(known) != len(report.ranks)):
        return False
    return all(
        (before := known.get(rank.rank)) is not None and not has_changed(before, rank, sent_mono_s)
        for rank in report.ranks
        if rank.round == round_
    )


def has_changed(before: RankReport, now: RankReport, sent_mono_s: float) -> bool:
    """Return whether a rank's report tells more than that time passes.

    What no judgement of a wait rests on may differ: memory, CPU seconds, how much of a core it uses beyond what is
    busy, and when its recorder's thread beat last, as long as it does.

    Args:
        before: its report before.
        now: its newest.
        sent_mono_s: when that was sent, by its node's clock.
    """
    if _has_progressed(before.progress, now.progress, sent_mono_s):
        return True
    was, is_now = before.process, now.process
    if was.state != is_now.state and not _TELLING.isdisjoint((was.state, is_now.state)):
        return True
    return (
        (was.cpu_busy > BUSY) != (is_now.cpu_busy > BUSY)
        or was.stopped_since_mono_s != is_now.stopped_since_mono_s
        or before.collective != now.collective
        or before.error != now.error
        or before.pid != now.pid
        or before.rivals != now.rivals
        or before.tile_peer != now.tile_peer
        or before.world_size != now.world_size
    )


def _has_progressed(before: Progress | None, now: Progress | None, sent_mono_s: float) -> bool:
    if before is None or now is None:
        return before is not now
    return (
        before.moved_mono_s != now.moved_mono_s
        or before.phase_since_mono_s != now.phase_since_mono_s
        or before.wandered_mono_s != now.wandered_mono_s
        or before.wandered != now.wandered
        or before.step != now.step
        or before.steps_seen != now.steps_seen
        or before.phase != now.phase
        or before.state != now.state
        or before.step_p50_s != now.step_p50_s
        or before.step_p99_s != now.step_p99_s
        # A recorder that was silent beats again: the interpreter's lock is free.
        or (before.beat_mono_s != now.beat_mono_s and sent_mono_s - before.beat_mono_s > STALE_BEAT_S)
    )


def holds_s(
    ranks: Sequence[RankView], suspicion: Suspicion, judged: Judgement, looks: Mapping[int, Look], policy: JobPolicy
) -> float:
    """Return for how long time alone changes nothing about a judgement; 0: it may at once.

    At most ``MOST_HELD_S``, of more than 25,000 ranks ``HELD_EACH_RANK_S`` for each.

    Args:
        ranks: all ranks of the round that have been reported, as they were judged.
        suspicion: what the watchdog made of them.
        judged: what that was worth with the evidence.
        looks: the evidence.
        policy: how patient to be, as they were judged by.
    """
    age_s = suspicion.age_s
    if judged.is_outrun or age_s >= judged.patience_s or _may_lose_lock(ranks, suspicion, judged, looks):
        return 0.0
    ends = (judged.patience_s, suspicion.patience_s, suspicion.name_s, suspicion.base_s)
    most_s = max(MOST_HELD_S, HELD_EACH_RANK_S * len(ranks))
    left_s = min([most_s + UNHEARD_S + LATE_S, *(end_s - age_s for end_s in ends if end_s >= age_s)])
    heard_age_s = 0.0
    for rank in ranks:
        report = rank.report
        if report.error is not None or report.rivals or report.process.state in ("T", *GONE) or is_leaving(rank):
            return 0.0  # those have deadlines of their own, of seconds
        heard_age_s = max(heard_age_s, rank.heard_age_s)
        left_s = min(left_s, _left_s(rank, policy))
    if heard_age_s >= UNHEARD_S:
        return 0.0
    return min(most_s, max(0.0, left_s - heard_age_s - LATE_S))


def _left_s(rank: RankView, policy: JobPolicy) -> float:
    """Return how long it takes a rank at least until an age of its own passes a threshold."""
    progress, silent_s = rank.report.progress, rank.silent_s
    if progress is None:
        return float("inf")
    ends = [patience_s(rank.report, policy) / 2]
    if not has_learned(rank.report):
        ends.append(STARTUP_LOOK_S / 2)
    left_s = min((end_s - silent_s for end_s in ends if end_s >= silent_s), default=float("inf"))
    if progress.phase not in STEP_PHASES and rank.phase_s <= policy.phase_patience_s:
        left_s = min(left_s, policy.phase_patience_s - rank.phase_s)
    if progress.wandered >= LEAST_WANDERED:
        quiet_s = silent_s + progress.moved_mono_s - progress.wandered_mono_s
        most_s = max(WANDER_S, (progress.wandered_mono_s - progress.moved_mono_s) / 2)
        if quiet_s <= most_s:
            left_s = min(left_s, most_s - quiet_s)
    return left_s


def _may_lose_lock(
    ranks: Sequence[RankView], suspicion: Suspicion, judged: Judgement, looks: Mapping[int, Look]
) -> bool:
    """Return whether a rank to blame, of which no stack is known, may be found to hold the interpreter's lock soon.

    That is told by its recorder's beats alone, which may end with any heartbeat.
    """
    unseen = {
        rank for rank in (*judged.verdict.culprits, *suspicion.verdict.culprits) if not looks.get(rank, NOTHING).seen
    }
    return any(rank.report.rank in unseen and _beats(rank) for rank in ranks) if unseen else False


def _beats(rank: RankView) -> bool:
    progress = rank.report.progress
    if progress is None or not progress.beat_mono_s:
        return False
    return rank.silent_s + progress.moved_mono_s - progress.beat_mono_s <= STALE_BEAT_S


def is_whole(looks_taken: int, named: Collection[int]) -> bool:
    """Return whether the next look is at all ranks: one of the first, each eighth, and any while no rank is named."""
    return looks_taken < WHOLE_LOOKS or looks_taken % WHOLE_EVERY == 0 or not named


def asked_again(
    ranks: Sequence[RankView], looks: Mapping[int, Look], known: Mapping[int, RankView], named: Collection[int]
) -> set[int]:
    """Return the ranks of which another look may show something else.

    Args:
        ranks: all ranks of the round that have been reported.
        looks: the evidence on each rank; those that are missing gave none.
        known: each rank as its heartbeats described it when it was looked at last.
        named: the ranks that are blamed.
    """
    blamed = frozenset(named)
    return {
        view.report.rank
        for view in ranks
        if view.report.rank in blamed
        or _is_open(looks.get(view.report.rank, NOTHING))
        or _is_new(known.get(view.report.rank), view)
        or not stand_of(view, looks).waits
    }


def _is_open(look: Look) -> bool:
    """Return whether a look was not answered, or shows what another look decides."""
    return (
        look is NOTHING
        or "no_answer" in look.marks
        or bool(look.stuck or look.tiles)
        or look.went_on
        or look.tiles_went_on
    )


def _is_new(before: RankView | None, now: RankView) -> bool:
    """Return whether heartbeats have told something new since a rank was looked at."""
    if before is None or before.report is now.report:
        return before is None
    progress = before.report.progress
    # A recorder that was silent then, and beats now, tells that; one that has beaten all the time tells nothing.
    told_mono_s = progress.moved_mono_s + before.silent_s if progress is not None else 0.0
    return has_changed(before.report, now.report, told_mono_s)
