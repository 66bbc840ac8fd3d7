# SPDX-License-Identifier: Apache-2.0
"""May the job start again? Budgets, and the rule that tells a bug in the script from bad luck.

A restart costs little, restarting for ever costs everything: so there is a budget in all, one per hour, and one per
cause per hour (one flaky node may not eat what the whole job has). And the same exception at the same step twice in a
row is no accident: the script would do it a third time, so the job stops and says so.

Pure: told the time, answers with an action and a sentence.
"""

import re

import msgspec

from megascale_ops.schema.health import Verdict
from megascale_ops.schema.messages import JobPolicy, RankExit

HOUR_S = 3600.0

# What to do about each class, before budgets. All that can be transient is tried again; the budgets end what is not.
ACTIONS: dict[str, tuple[str, str]] = {
    "exception": ("restart", "an exception may be transient; the same one at the same step again is a bug"),
    "exception_everywhere": ("restart", "all ranks fell over the same thing once; once more and it is a bug"),
    "killed": ("restart", "whoever killed the rank may not do it again"),
    "segfault": ("restart", "memory faults are often the machine's"),
    "aborted": ("restart", "an abort is often the machine's or a library's"),
    "out_of_memory": ("restart", "memory may have been taken by somebody else"),
    "disk_full": ("restart", "the newest checkpoint that verifies is still there; space may be freed"),
    "cuda_error": ("restart", "a fresh process gets a fresh CUDA context"),
    "nccl_error": ("restart", "fresh processes get fresh communicators"),
    "exit_code": ("restart", "the script may have given up on something transient"),
    "exited_early": ("restart", "the others cannot go on without the rank"),
    "frozen": ("restart", "the process does not run and holds all others up"),
    "silent": ("restart", "the rank does not move and holds all others up"),
    "node_lost": ("restart", "the others can go on, with a replacement or without"),
    "membership": ("restart", "a changed set of nodes needs a new round"),
    "script_bug": ("stop", "it would happen again"),
    "unknown": ("restart", "nothing speaks against trying once more"),
}

_ADDRESS = re.compile(r"0x[0-9a-fA-F]+")
_NUMBER = re.compile(r"\d+(?:\.\d+)?(?:[eE][-+]?\d+)?")
_IN_SCRIPT = ("exception", "exception_everywhere")


class Restart(msgspec.Struct, frozen=True):
    """One restart of the past, for the budgets."""

    wall_s: float
    cause: str


class Failure(msgspec.Struct, frozen=True):
    """What the script fell over: equal for two incidents means the same exception at the same step."""

    signature: str
    step: int


class Decision(msgspec.Struct, frozen=True):
    """What to do now, and the sentence that says why. ``fault`` may sharpen the verdict's class."""

    action: str  # restart, stop
    reason: str
    fault: str
    counted: bool = True  # uses up a budget


def signature(exit_: RankExit) -> str:
    """Return the exception as it would read on any rank in any run: numbers and addresses are taken out."""
    if exit_.error is None:
        return ""
    text = _NUMBER.sub("N", _ADDRESS.sub("0xN", exit_.error.message))
    return f"{exit_.error.type}: {text} at {exit_.error.where}"


def failure_of(verdict: Verdict, exits: tuple[RankExit, ...]) -> Failure | None:
    """Return what the script fell over, or None when the verdict blames no exception."""
    if verdict.fault not in _IN_SCRIPT:
        return None
    for exit_ in exits:
        if exit_.rank in verdict.culprits and exit_.error is not None:
            step = exit_.error.step if exit_.error.step >= 0 else exit_.step
            return Failure(signature(exit_), step)
    return None


def decide(
    policy: JobPolicy,
    verdict: Verdict,
    *,
    history: tuple[Restart, ...],
    failure: Failure | None,
    failure_before: Failure | None,
    wall_s: float,
) -> Decision:
    """Return whether the job may start again after ``verdict``.

    Args:
        policy: the job's budgets.
        verdict: what ended the round.
        history: the job's restarts so far, all of them.
        failure: what the script fell over this time, if it did.
        failure_before: the same for the incident before this one.
        wall_s: the time now.
    """
    if verdict.fault == "membership":
        return Decision("restart", "the set of nodes changed", verdict.fault, counted=False)
    if failure is not None and failure == failure_before:
        where = "before the first step" if failure.step < 0 else f"at step {failure.step}"
        reason = (
            f"the same exception {where} twice in a row is a bug in the script, so it is not started again: "
            f"{failure.signature}"
        )
        return Decision("stop", reason, "script_bug")
    spent = _spent_budget(policy, verdict.fault, history, wall_s)
    if spent:
        return Decision("stop", spent, verdict.fault)
    action, why = ACTIONS.get(verdict.fault, ACTIONS["unknown"])
    return Decision(action, why, verdict.fault)


def _spent_budget(policy: JobPolicy, cause: str, history: tuple[Restart, ...], wall_s: float) -> str:
    """Return the sentence for the first budget that is used up, or ""."""
    if 0 <= policy.max_restarts <= len(history):
        return f"the budget of {policy.max_restarts} restarts is used up (--max-restarts)"
    recent = [restart for restart in history if wall_s - restart.wall_s < HOUR_S]
    if len(recent) >= policy.restarts_per_hour:
        return f"{len(recent)} restarts in the last hour use up the budget of {policy.restarts_per_hour} an hour"
    same = [restart for restart in recent if restart.cause == cause]
    if len(same) >= policy.restarts_per_cause_per_hour:
        return (
            f"{len(same)} restarts because of {cause} in the last hour use up the budget of "
            f"{policy.restarts_per_cause_per_hour} an hour for one cause"
        )
    return ""
