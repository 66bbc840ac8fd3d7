# SPDX-License-Identifier: Apache-2.0
"""Go on paying, or buy? What to do about a fault that slows the job down and does not stop it.

How long a straggler will last is unknown. A restart costs a sum at once, going on costs a little with every step.
This is the ski rental problem: rent until the rents paid add up to the price, then buy; that never costs more than
twice what knowledge of the future would (Karlin et al., "Competitive snoopy caching", 1988). The rent is
``cost x step time``; the price is what a restart would cost now: what the last start took, and the work since the
newest checkpoint, which would be made again. It falls once a checkpoint is written, so that is when most are bought.
Where saves can't be seen it is what this job's restarts have cost. All measured, in seconds; before the first restart
the policy's assumption (``restart_price_s``) stands for what was measured, since a first start tells little of a later
one: work that is not saved comes on top of it, too.

Pure: a question with its time in, a value and a reason out.
"""

import statistics
from collections.abc import Sequence

import msgspec

from megascale_ops.controller.policy.actions import GO_ON, rule_for, spent_limit
from megascale_ops.controller.policy.decision import HOUR_S, Decision, Question, Tab, blamed_node
from megascale_ops.controller.policy.eviction import find_room
from megascale_ops.schema.events import Incident
from megascale_ops.schema.policy import JobPolicy
from megascale_ops.schema.wording import percent

# Causes that a fresh process is rid of; the node is to blame only when they come back on it within the hour.
OF_THE_PROCESS = frozenset({"gc", "host"})
# 20 restarts: enough for a median, and a job whose checkpoints grow is judged by the newer ones.
MOST_PRICES = 20
# 3 s: a warning is looked at each second; what was away for longer begins to hold anew.
BREAK_S = 3.0


def price_of(incident: Incident, step_s: float) -> float:
    """Return what the restart after an incident has cost, seconds; 0 when that can't be said.

    From the order to the first new step of every rank, and the steps that had to be made again.
    """
    marks = incident.marks
    if not marks.ordered or marks.stepped <= marks.ordered:
        return 0.0
    known = incident.step_before >= 0 and incident.step_after >= 0
    lost = max(0, incident.step_before - incident.step_after + 1) if known else 0
    return marks.stepped - marks.ordered + lost * step_s


def usual_price_s(prices_s: Sequence[float], policy: JobPolicy) -> float:
    """Return what a restart of a job costs by those it has had, or what is assumed before the first."""
    return statistics.median(prices_s) if prices_s else policy.restart_price_s


def price(question: Question) -> tuple[float, str]:
    """Return what a restart costs, seconds, and where the number comes from."""
    price_s = usual_price_s(question.prices_s, question.policy)
    is_seen = question.since_saved_s >= 0.0
    unsaved = f"{question.since_saved_s:.0f} s of work since the newest checkpoint"
    if question.prices_s and is_seen and question.start_s > 0.0:
        price_s = question.start_s + question.since_saved_s
        origin = f"a restart now costs {price_s:.1f} s ({question.start_s:.0f} s until ranks step again, and {unsaved})"
    elif is_seen and not question.prices_s:
        assumed_s, price_s = price_s, price_s + question.since_saved_s
        origin = f"a restart now costs {price_s:.1f} s ({assumed_s:g} s assumed, none was measured yet, and {unsaved})"
    elif question.prices_s:
        count = len(question.prices_s)
        measured = "the one restart so far" if count == 1 else f"the median of {count} restarts"
        origin = f"a restart costs {price_s:.1f} s ({measured})"
    else:
        origin = f"a restart is assumed to cost {price_s:g} s (none was measured yet)"
    acted = question.tab.acted if question.tab is not None else 0
    if acted:
        price_s *= 2.0 ** min(acted, 20)
        origin += f", and after {acted} in vain {price_s:.0f} s must be paid first"
    return price_s, origin


def open_tab(known: Tab | None, wall_s: float) -> Tab:
    """Return the tab of a warning that holds: the old one, with its time begun anew after a break, or a new one.

    What was paid before a break still counts: rents add up, however often the skier goes home in between.
    """
    if known is None or wall_s - known.seen_wall_s > HOUR_S * 2.0 ** min(known.acted, 5):
        return Tab(since_wall_s=wall_s, seen_wall_s=wall_s)
    if wall_s - known.seen_wall_s > BREAK_S:
        return msgspec.structs.replace(known, since_wall_s=wall_s, seen_wall_s=wall_s, step=-1)
    return known


def pay(tab: Tab, *, cost: float, step: int, step_s: float, wall_s: float) -> Tab:
    """Add what the steps since the last look have cost: ``cost x step time`` each."""
    steps = step - tab.step if 0 <= tab.step < step else 0
    return msgspec.structs.replace(
        tab, paid_s=tab.paid_s + max(0.0, cost) * steps * step_s, step=step, seen_wall_s=wall_s
    )


def settle(tab: Tab, wall_s: float) -> Tab:
    """Return the accumulated cost after something was done: 0, and the next action is twice as dear."""
    return Tab(since_wall_s=wall_s, seen_wall_s=wall_s, acted=tab.acted + 1)


def weigh(question: Question) -> Decision:
    """Return whether a fault that only slows the job down is worth a restart by now."""
    fault = question.verdict.fault
    rule = rule_for(question.policy, fault)
    if rule.action in GO_ON:
        return Decision(rule.action, f"nothing is done: {rule.why}", fault, "table")
    early = _too_early(question)
    if early is not None:
        return early
    limit = spent_limit(question)
    if limit is not None:
        return Decision("warn", f"nothing is done: {limit.why}", fault, limit.rule)
    owed = rule.why
    if question.verdict.cost > 0:
        owed = f"{_paid(question)}, as much as a restart: {price(question)[1]}"
    return _act(question, rule.action, owed)


def _too_early(question: Question) -> Decision | None:
    """Return the decision to wait: it must hold for a while, and must have cost as much as a restart."""
    tab, verdict, hold_s = question.tab, question.verdict, question.policy.warning_hold_s
    held_s = max(0.0, question.wall_s - tab.since_wall_s) if tab is not None else 0.0
    if tab is None or held_s < hold_s:
        why = f"the warning has stood for {held_s:.0f} s without a break, and {hold_s:g} s are asked for"
        return Decision("warn", f"nothing is done yet: {why}", verdict.fault, "hold")
    price_s, origin = price(question)
    if verdict.cost > 0 and tab.paid_s < price_s:
        return Decision("warn", f"nothing is done yet: {_paid(question)}, and {origin}", verdict.fault, "paying")
    return None


def _act(question: Question, action: str, owed: str) -> Decision:
    """Return what to do now that it is worth it, or why it still can't be done."""
    verdict = question.verdict
    fault, node = verdict.fault, blamed_node(verdict)
    if action == "stop":
        return Decision("stop", owed, fault, "table")
    if action == "restart":
        return Decision("restart", owed, fault, "table")
    room = find_room(question)
    too_dear = room.by == "shrink" and question.share >= verdict.cost
    in_vain = question.tab.acted if question.tab is not None else 0
    if verdict.cause in OF_THE_PROCESS and (not in_vain or not room.by or too_dear):
        return Decision(
            "restart", f"{owed}; a fresh process may be rid of the cause ({verdict.cause})", fault, "process"
        )
    if too_dear:
        why = f"no spare waits, and without {node} {percent(question.share)} of all ranks would be missing"
        return Decision("warn", f"nothing is done: {owed}; {why}", fault, "too_dear")
    if not room.by:
        return Decision("warn", f"nothing is done: {owed}; {room.why}", fault, "no_room")
    return Decision("evict", f"{owed}; {room.why}", fault, room.by, nodes=(node,))


def _paid(question: Question) -> str:
    """Return what it costs and has cost, for people."""
    tab = question.tab
    return f"it costs {percent(question.verdict.cost)} of every step, {tab.paid_s if tab else 0.0:.1f} s so far"
