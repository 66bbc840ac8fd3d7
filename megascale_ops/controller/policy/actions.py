# SPDX-License-Identifier: Apache-2.0
"""What to do about what was judged: by the table of classes, and by the limits that a table can't know.

A restart costs little, restarting for ever costs everything: so there is a budget in all, one per hour, and one per
cause per hour (one flaky node may not eat what the whole job has). The same exception at the same step twice in a
row is no accident: the script would do it a third time. Nor is a status, a full memory or disk, or a wrong collective
that comes a third time. And restarts that lead to no new step lead nowhere.

``decide`` is asked when a round has ended, and when a hang is about to be stopped. What only slows a job down is
weighed elsewhere (``ski_rental``), under the same limits.

Pure: a question with its time in, an action and a sentence out.
"""

from collections import Counter
from collections.abc import Sequence
from typing import NamedTuple

from megascale_ops.controller.policy import outage
from megascale_ops.controller.policy.decision import (
    HOUR_S,
    Decision,
    Failure,
    Question,
    Restart,
    StateFailure,
    blamed_node,
)
from megascale_ops.controller.policy.eviction import find_room, repeated, still_cut
from megascale_ops.controller.policy.services import is_of_a_service, says_so
from megascale_ops.diagnosis.exits.last_traceback import before_it, with_error
from megascale_ops.diagnosis.exits.signature import signature, signature_of_exit, without_numbers
from megascale_ops.diagnosis.hardware import SOURCE as HARDWARE
from megascale_ops.schema.fault_classes import Blames, Hang, class_of
from megascale_ops.schema.health import Verdict
from megascale_ops.schema.messages import RankExit
from megascale_ops.schema.policy import ACTION_WORDS, JobPolicy
from megascale_ops.schema.wording import PLACE

GO_ON = ("ignore", "warn")

# 10 steps: what is wrong with a state shows in the first forward or optimizer steps; later it is the data or the run.
FIRST_STEPS = 10
# Four faults of four machines count as one restart that mended nothing: 20 in a row are the guard's five.
UNLUCKY_FOR_ONE = 4
_IN_SCRIPT = ("exception", "exception_everywhere")
# The script's own doing as well as a bad machine's.
_MAYBE_MACHINES = ("segfault", "aborted", "cuda_error")
_MEMORY_TAKEN = "oom_kill"  # a finding of the host, and no fault of it
# An exit status before the first step: a script refuses its options or its environment, and says so in its last line.
_REFUSALS = 2


class Rule(NamedTuple):
    """A class's action, the reason, and whether it comes from this job's own policy."""

    action: str
    why: str
    own: bool


def rule_for(policy: JobPolicy, fault: str) -> Rule:
    """Return the rule for a class: the job's own policy's, else the table's."""
    own = policy.actions.get(fault, "")
    if own not in ACTION_WORDS:
        row = class_of(fault)
        return Rule(row.action, row.why, own=False)
    return Rule(own, f"this job's policy says {own} for {fault}", own=True)


def failure_of(verdict: Verdict, exits: tuple[RankExit, ...]) -> Failure | None:
    """Return what the script fell over, or None where chance, the machine or another process may be behind it.

    What is compared leaves numbers and ranks out. A signal or a CUDA error may be a bad machine's, which shows in the
    first thing that is tried: it counts after steps of the round's own only, and beside no finding of hardware.
    """
    row = class_of(verdict.fault)
    if not row.script_bug_after or (row.name in _MAYBE_MACHINES and _has_bad_hardware(verdict)):
        return None
    if row.hang is Hang.PROVEN:
        return Failure(f"{row.name}: {without_numbers(verdict.reason)}", verdict.since_step)
    blamed = frozenset(verdict.culprits)  # all of 100,000 where each has lost its loss
    for exit_ in map(with_error, (one for one in exits if one.rank in blamed)):
        if row.name in _IN_SCRIPT and exit_.error is None:
            continue
        if row.name in _MAYBE_MACHINES and not exit_.steps_seen:
            return None
        if exit_.error is not None:
            away = is_of_a_service(exit_.error, before_it(exit_.stderr_tail))
            step = exit_.error.step if exit_.error.step >= 0 else exit_.step
            return Failure(signature(exit_), step, of_service=away)
        said = signature_of_exit(exit_)
        return Failure(said, exit_.step, of_service=row.name == "exit_code" and says_so(said))
    return None


def _has_bad_hardware(verdict: Verdict) -> bool:
    return any(one.source == HARDWARE and one.name != _MEMORY_TAKEN for one in verdict.evidence)


def silent_place(verdict: Verdict) -> str:
    """Return the place of a silence that a restart may or may not cure; "" for what is sure to be a fault."""
    return verdict.place if class_of(verdict.fault).hang is Hang.UNPROVEN and verdict.sure_of == PLACE else ""


def is_uncured(verdict: Verdict, restarts: Sequence[Restart]) -> bool:
    """Return whether a restart was ordered before for a silence at the same place."""
    place = silent_place(verdict)
    return bool(place) and any(one.place == place for one in restarts)


def _not_cured(question: Question) -> str:
    """Return the sentence for a silence at the place of one that a restart was ordered for before, or ""."""
    if not is_uncured(question.verdict, question.restarts):
        return ""
    place = question.verdict.place
    ago_s = question.wall_s - max(one.wall_s for one in question.restarts if one.place == place)
    return (
        f"a restart {ago_s:.0f} s ago did not cure the same silence at the same place ({place}) and is not repeated: "
        f"if the script is meant to take so long there, declare it (recorder.phase); if it hangs, end it by hand"
    )


# What ends a round and is no failure of anything: no budget is spent by it.
_NO_FAILURE = {
    "membership": "the set of nodes changed",
    "engine_eviction": "the others go on without the node, or with what its engine puts in its place",
}


def decide(question: Question) -> Decision:
    """Return what follows when a round has ended, or when a hang could be stopped."""
    settled = _of_restored(question) or _without_limits(question)
    if settled is not None:
        return settled
    fault = question.verdict.fault
    limit = spent_limit(question)
    if limit is not None:
        return Decision("stop", limit.why, fault, limit.rule)
    if (awaited := _of_outage(question)) is not None:
        return awaited
    action, why, own = rule_for(question.policy, fault)
    lasting = still_cut(question)
    if lasting.node and not own:
        return _evict_or_restart(question, lasting.why, lasting.node)
    why_machine = repeated(question)
    if action == "evict" or (why_machine and not own):
        return _evict_or_restart(question, why_machine or why)
    return Decision("restart", why, fault, "table")


def _without_limits(question: Question) -> Decision | None:
    """Return the decision where no budget matters: a changed set of nodes, a bug, and what the table forbids."""
    policy, fault, failure = question.policy, question.verdict.fault, question.failure
    action, why, own = rule_for(policy, fault)
    if fault in _NO_FAILURE and (question.kind == "end" or not own):
        return Decision("restart", _NO_FAILURE[fault], fault, fault, counted=False)
    if question.kind == "hang" and action not in GO_ON and not own and (why_not := _not_cured(question)):
        return Decision("warn", why_not, fault, "not_cured")
    if failure is not None and _is_bug(question) and rule_for(policy, "script_bug").action == "stop":
        named = "script_bug" if fault in (*_IN_SCRIPT, "exit_code") else fault  # memory and disks keep their own name
        return Decision("stop", _why_bug(question, failure), named, "script_bug")
    if action in GO_ON and question.kind == "hang":
        return Decision(action, why, fault, "table")
    if action in GO_ON and own:
        return Decision("stop", f"{why}, but the round has ended, and without a restart so has the job", fault, "table")
    return Decision("stop", why, fault, "table") if action == "stop" else None


def _of_outage(question: Question) -> Decision | None:
    """Return what follows where a service was away; None where none was, or the policy has other words for it."""
    rule = rule_for(question.policy, outage.FAULT)
    if not outage.is_outage(question) or rule.action not in ("restart", "stop"):
        return None
    return outage.wait(question) if rule.action == "restart" else Decision("stop", rule.why, outage.FAULT, "table")


def _is_bug(question: Question) -> bool:
    """Return whether the script has failed in the same way as often as its class takes for no chance.

    Before the first step that counts only where nothing was got done: of a script whose steps are not seen, hours of
    work may lie between two failures with the same words. So it does for all that says less than an exception.
    """
    failure, fault = question.failure, question.verdict.fault
    if failure is None or _of_outage(question) is not None:
        return False
    is_refusal = fault == "exit_code" and failure.step < 0
    most = _REFUSALS if is_refusal else class_of(fault).script_bug_after
    if failure.after(question.failure_before).times < most:
        return False
    return not question.progressed or (fault in _IN_SCRIPT and failure.step >= 0)


def _why_bug(question: Question, failure: Failure) -> str:
    """Return the sentence about a failure that comes again and again; it ends with what was said of it this time."""
    fault = question.verdict.fault
    where = "before the first step" if failure.step < 0 else f"at step {failure.step}"
    if fault == "exit_code" and failure.step < 0:
        return f"the same exit code {where} twice in a row is a bug in the script: {failure.signature}"
    # As it was this time: what they have in common leaves out numbers, which a person needs.
    said = question.verdict.reason
    if fault in _IN_SCRIPT:
        return f"the same exception {where} twice in a row is a bug in the script: {said}"
    times = failure.after(question.failure_before).times
    return (
        f"{fault} {where} with the same words {times} times in a row: a restart does not mend it, so none is tried "
        f"any more (--policy script_bug=restart goes on all the same): {said}"
    )


def _evict_or_restart(question: Question, why: str, node: str = "") -> Decision:
    """Return an eviction when the node can be spared; a node that can't be is restarted rather than nothing."""
    node, fault = node or blamed_node(question.verdict), question.verdict.fault
    room = find_room(question, node)
    if room.by:
        return Decision("evict", f"{why}; {room.why}", fault, room.by, nodes=(node,))
    return Decision("restart", f"{why}; nobody is evicted: {room.why}", fault, "no_room")


def state_failure_of(verdict: Verdict, failure: Failure | None, exits: tuple[RankExit, ...]) -> StateFailure | None:
    """Return the failure as one that a bad state may explain; None where it has nothing to do with one.

    A rank tells which step it has restored by where it stands less the steps that it has made since. A kill or a lost
    node is the same whatever was restored.
    """
    ends = [one for one in exits if one.step >= 0]
    if not ends:
        return None
    at = max(one.step for one in ends)
    if failure is not None and failure.of_service:
        return None
    cause = failure.signature if failure is not None and verdict.fault in _IN_SCRIPT else ""
    if verdict.fault == "loss_nan":
        cause, at = "loss_nan", max(0, verdict.since_step)
    elif verdict.fault == "exit_code":
        blamed = frozenset(verdict.culprits)
        cause = next((signature_of_exit(with_error(one)) for one in ends if one.rank in blamed), "")
    return StateFailure(cause, at, min(one.step - one.steps_seen for one in ends)) if cause else None


def _of_restored(question: Question) -> Decision | None:
    """Return what follows where what was restored is bad itself: one checkpoint back, once, and then the end.

    The same failure twice at the first steps after the same checkpoint is no accident, and a third restart from there
    would fail again: a peer's job was restarted 44 times from the same NaN. The first of the two may have come in the
    round that saved it.
    """
    now, before, fault = question.state_failure, question.state_failure_before, question.verdict.fault
    if question.kind != "end" or rule_for(question.policy, fault).action not in ("restart", "evict"):
        return None
    if now is None or before is None or now.cause != before.cause or now.restored < 0:
        return None
    steps = now.at - now.restored
    if steps > FIRST_STEPS:
        return None
    if question.restore_before >= 0:
        reason = (
            f"the same failure {steps} steps after the restore of step {now.restored}, which is one checkpoint before "
            f"the one that it came from: going back further is a person's decision ({question.verdict.reason})"
        )
        return Decision("stop", reason, fault, "restored_bad")
    if not 0 <= before.at - now.restored <= FIRST_STEPS or spent_limit(question) is not None:
        return None
    reason = (
        f"the same failure twice within {FIRST_STEPS} steps of step {now.restored}, which was restored: what was saved "
        "there may be bad itself, so one checkpoint back, once"
    )
    return Decision("restart", reason, fault, "one_back", restore_before=now.restored)


class Limit(NamedTuple):
    """A limit that is reached."""

    rule: str  # budget, no_progress
    why: str


def spent_limit(question: Question) -> Limit | None:
    """Return the first limit that forbids one more restart, or None."""
    spent = _spent_budget(question)
    if spent:
        return Limit("budget", spent)
    fruitless = _fruitless(question)
    return Limit("no_progress", fruitless) if fruitless else None


def _spent_budget(question: Question) -> str:
    """Return the sentence for the first budget that is used up, or ""."""
    policy = question.policy
    cause = outage.FAULT if outage.is_outage(question) else question.verdict.fault
    if 0 <= policy.max_restarts <= question.restarts_in_all:
        return f"the budget of {policy.max_restarts} restarts is used up (--max-restarts)"
    recent = [restart for restart in question.restarts if question.wall_s - restart.wall_s < HOUR_S]
    count = len(recent) + sum(question.older.values())
    if count >= policy.restarts_per_hour:
        return f"{count} restarts in the last hour use up the budget of {policy.restarts_per_hour} an hour"
    same = sum(restart.cause == cause for restart in recent)
    same += sum(times for name, times in question.older.items() if name.partition("@")[0] == cause)
    if same >= policy.restarts_per_cause_per_hour and not outage.is_going_on(question):
        return (
            f"{same} restarts because of {cause} in the last hour use up the budget of "
            f"{policy.restarts_per_cause_per_hour} an hour for one cause"
        )
    return ""


def _fruitless(question: Question) -> str:
    """Return the sentence for restarts that led to no new step, or "".

    Faults of machines that have nothing to do with each other, each of another one, are bad luck and count a quarter.
    Among 100,000 GPUs five of them between two checkpoints are no rarity, and a sixth restart is as good as the first.
    """
    if question.progressed or not question.restarts or outage.is_outage(question):
        return ""
    chain = [(question.verdict.fault, blamed_node(question.verdict))]
    # Each restart records whether the round before it had come further; the oldest is about a round without a restart.
    for restart in reversed(question.restarts[1:]):
        if restart.progressed:
            break
        if restart.cause != outage.FAULT:
            chain.append((restart.cause, restart.node))
    of_node = Counter(node for _, node in chain)
    unlucky = sum(_may_be_machines(cause) and bool(node) and of_node[node] == 1 for cause, node in chain)
    if len(chain) - unlucky + unlucky // UNLUCKY_FOR_ONE < question.policy.fruitless_restarts:
        return ""
    if question.counts_anew:
        return f"{len(chain)} restarts in a row led no further than the rounds before, so another would not either"
    return f"{len(chain)} restarts in a row led to no step that had not been made before, so another would not either"


def _may_be_machines(cause: str) -> bool:
    row = class_of(cause)
    return row.is_machines or row.checks_gpu or row.blames is Blames.NODE
