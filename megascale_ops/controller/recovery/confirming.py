# SPDX-License-Identifier: Apache-2.0
"""Suspicion first, then evidence, then judgement: what happens between a silence and a stop.

Evidence is gathered before patience is used up when others wait for the suspects in a collective. It sets
how long silence must last: a contradiction between ranks needs half of what a step may take, a rank that is seen to
work gets the patience of a declared phase, and one that is merely absent that of an absentee (``hangs``). Until then
the
incident is a warning: it names the ranks, the reason, and when the job will be restarted; the suspects are looked at
again, each time after a longer pause, and a rank that moves ends it all: nothing was stopped.

A pause that ended by itself teaches twice. The next is looked at early only when it is twice as long, so a script that
evaluates for 20 s without declaring it brings one harmless incident, not one every time. And a silence at the same
place of the script gets a multiple of it (``diagnosis.hangs.habits``).
"""

from collections.abc import Collection

import msgspec

from megascale_ops.controller.job import diagnose, incidents
from megascale_ops.controller.job.job import Job
from megascale_ops.controller.job.transitions import Transitions
from megascale_ops.controller.policy.actions import GO_ON, is_uncured, rule_for
from megascale_ops.controller.record.state_machine import EventKind
from megascale_ops.diagnosis.hangs import habits, standing
from megascale_ops.diagnosis.hangs.suspicion import Suspicion
from megascale_ops.schema.health import Verdict
from megascale_ops.schema.messages import EvidenceItem, Order
from megascale_ops.schema.wording import clock

_replace = msgspec.structs.replace

# 2 s before the second look, 4 before the third, 6 ...: what moves at all has moved then.
LOOK_AGAIN_S = 2.0
# 2 looks where the first was not answered: a rank that is named is asked once more what it does, before it is stopped.
LEAST_LOOKS = 2
# 0.16 ms for each rank: twice what a look at it costs the controller, whose time is for heartbeats and orders, too. Of
# 98,304 ranks 16 s lie between two looks at least.
LOOK_EACH_RANK_S = 16.0 / 98_304
# 5 looks within 20 s; a rank still in doubt then is a matter of patience.
MOST_LOOKS = 5
# 10 s after the fifth look, 20 after the sixth, ... 60: a rank that works for half an hour and hangs then is found
# within a minute, and a look costs each rank 0.1 s of CPU.
LOOK_ON_S, LOOK_ON_MOST_S = 10.0, 60.0
# 1,024 ranks: of fewer each look is at all; of more, a look at all takes the controller seconds.
LEAST_NARROW = 1_024
# 2 s: the moment of the restart is announced anew when it has moved by more; looks and heartbeats jitter by less.
RETELL_S = 2.0
# Twice the longest pause that was harmless.
HARMLESS_FACTOR = 2.0


def begin(transitions: Transitions, job: Job, suspicion: Suspicion) -> bool:
    """Open an incident and ask for evidence, if it is time; return whether it was."""
    early = not suspicion.lost
    # On its way back from an incident a job is given the time in which what looks stuck may come back by itself.
    is_back = job.incident is None or suspicion.age_s > job.record.policy.stuck_patience_s
    due = suspicion.held or suspicion.age_s > suspicion.name_s
    if early and not (is_back and due and suspicion.age_s > HARMLESS_FACTOR * job.harmless_s):
        return False
    verdict = suspicion.verdict
    transitions.open_incident(job, verdict, detected=job.record.since_wall_s, aside=early)
    event = EventKind.LOOK if early else EventKind.LOST
    _narrow(transitions, job, (), transitions.clock())
    # The job gets its verdict once it is acted upon; a rank that dies before is better evidence than silence.
    _look(transitions, job, event, verdict.reason, None if early else verdict)
    return True


def unanswered(transitions: Transitions, job: Job, now_s: float) -> list[Order] | None:
    """Return the orders for evidence whose time is over without an answer; None: the answers are still awaited."""
    suspected = job.suspects
    wanted = [job.orders[order_id] for order_id in sorted(suspected.evidence_wanted) if order_id in job.orders]
    deadline_s = max((order.deadline_s for order in wanted), default=0.0)
    if wanted and now_s - job.entered_s < deadline_s:
        return None
    if job.incident is not None and wanted:
        missing = [
            EvidenceItem(kind=order.kind.removeprefix("dump_"), ok=False, text=f"no answer from {order.node}")
            for order in wanted
        ]
        transitions.put_incident(job, incidents.add_evidence(job.incident, missing))
        transitions.withdraw(job, suspected.evidence_wanted)
        suspected.end_waiting(tuple(suspected.evidence_wanted))
    return wanted


def weigh(transitions: Transitions, job: Job, suspicion: Suspicion, now_s: float) -> Verdict | None:
    """Return the verdict when it is time to act upon it, at once if nothing is done; None: wait, or look again."""
    judged = diagnose.judge_hang(transitions.registry, job, suspicion, now_s, transitions.wall())
    verdict, incident, looks = judged.verdict, job.incident, job.suspects.looks_taken
    asks_again = judged.is_outrun or (judged.is_unseen and looks < LEAST_LOOKS)
    settled = is_left_running(job, verdict) or (suspicion.age_s >= judged.patience_s and not asks_again)
    if incident is not None:
        planned = "" if settled else _plan(transitions, job, verdict, suspicion.age_s, judged.patience_s)
        if settled or planned or _differs(incident.verdict, verdict):
            told = incident if not planned and not settled else _replace(incident, done=planned)
            transitions.put_incident(job, incidents.judge(told, verdict))
    if settled:
        return verdict
    extra = looks - MOST_LOOKS
    again_s = LOOK_AGAIN_S * looks
    if extra >= 0:
        again_s = min(LOOK_ON_MOST_S, LOOK_ON_S * 2.0 ** min(extra, 6))
    again_s = max(again_s, job.record.world_size * LOOK_EACH_RANK_S)
    looks_again = extra < 0 or judged.is_outrun or not judged.is_proven
    job.suspects.look_at_s = job.entered_s + again_s if looks_again else float("inf")
    if looks_again and now_s - job.entered_s >= again_s:
        _narrow(transitions, job, verdict.culprits, now_s)
        _look(transitions, job, EventKind.LOOK, f"look {looks + 1}: {verdict.reason}", job.record.verdict)
    return None


def _plan(transitions: Transitions, job: Job, verdict: Verdict, age_s: float, patience_s: float) -> str:
    """Return what is said of what is about to happen, "" where that was said before."""
    wall_s = transitions.wall() + patience_s - age_s
    if patience_s - age_s < RETELL_S or abs(wall_s - job.suspects.planned_wall_s) < RETELL_S:
        return ""
    job.suspects.planned_wall_s = wall_s
    rule = rule_for(job.record.policy, verdict.fault)
    only_told = rule.action in GO_ON or job.record.policy.dry_run
    only_told = only_told or (not rule.own and is_uncured(verdict, job.record.restarts))
    deed = "is told only" if only_told else "is acted upon"
    return f"nothing yet: it {deed} if it lasts until {clock(wall_s, None)} ({patience_s:.0f} s in all)"


def learn(job: Job) -> None:
    """The suspects moved by themselves: a pause as long as this one was harmless, and there a habit."""
    age_s = job.suspects.age_s
    if age_s <= 0:
        return
    job.harmless_s = max(job.harmless_s, age_s)
    verdict = job.incident.verdict if job.incident is not None else None
    if verdict is not None and verdict.place:
        job.change(habits=habits.learned(job.record.habits, verdict.place, age_s))


def _narrow(transitions: Transitions, job: Job, named: Collection[int], now_s: float) -> None:
    """Leave out of the next look who would show what was seen before (``standing``); of a small job none."""
    if job.record.world_size < LEAST_NARROW:
        return
    suspected, ranks = job.suspects, diagnose.ranks(transitions.registry, job, now_s)
    if not standing.is_whole(suspected.looks_taken, named):
        asked = standing.asked_again(ranks, suspected.looks, suspected.seen, named)
        suspected.asks = frozenset(view.node for view in ranks if view.report.rank in asked)
    # A node's ranks are looked at together.
    suspected.seen.update(
        (view.report.rank, view) for view in ranks if suspected.asks is None or view.node in suspected.asks
    )


def _look(transitions: Transitions, job: Job, event: EventKind, text: str, verdict: Verdict | None) -> None:
    transitions.move(job, event, text, verdict=verdict)
    job.suspects.begin_look(order.id for order in job.orders.values() if order.kind.startswith("dump_"))


def _differs(before: Verdict | None, now: Verdict) -> bool:
    """Return whether a verdict is to be published anew."""
    return before is None or _told(before) != _told(now)


def _told(verdict: Verdict) -> tuple[str, tuple[int, ...], str]:
    return verdict.fault, verdict.culprits, verdict.sure_of


def is_left_running(job: Job, verdict: Verdict) -> bool:
    """Return whether the suspects are slow, not hung, and the job's policy (by default) lets slow ranks run on."""
    return verdict.fault == "slow" and rule_for(job.record.policy, "slow").action in GO_ON


def harmless(verdict: Verdict | None, *, have_left: bool) -> str:
    """Return what is said of an incident in which nothing had to be done."""
    if have_left:
        return "its process ended by itself, without a failure, before anything was stopped"
    if verdict is not None and verdict.fault == "slow":
        return f"nothing was stopped: {verdict.reason}"
    return "it moved again before anything was stopped"
