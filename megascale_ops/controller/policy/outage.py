# SPDX-License-Identifier: Apache-2.0
"""A service that the script needs and that does not answer: its return is waited for, ever longer, up to a limit.

Neither is it a bug of the script, though it fails at the same step with the same words each time, nor does a restart
mend it. So the restarts of one outage count against no guard for restarts that mend nothing; each waits as long as the
outage has lasted so far, 10 s at least and 5 min at most; and after ``service_patience_s`` the job ends, and says why.

Pure: a question in, a decision out.
"""

from megascale_ops.controller.policy.decision import Decision, Question
from megascale_ops.schema.fault_classes import class_of
from megascale_ops.schema.wording import duration

FAULT = "service_down"
# 10 s: a server that is restarted, a name server that fails over. 5 min: twelve tries an hour are no load for a server.
_LEAST_S, _MOST_S = 10.0, 300.0
# 10 min: clients try by themselves for minutes, which are no work of a script whose steps can't be seen.
_TRIES_S = 600.0


def is_outage(question: Question) -> bool:
    """Return whether a service that is away has ended the round."""
    return question.failure is not None and question.failure.of_service


def begun_wall_s(question: Question) -> float:
    """Return since when the service is away; now, if the round before was not ended by it."""
    last = question.restarts[-1] if question.restarts else None
    if last is None or last.cause != FAULT:
        return question.wall_s
    lived_s = question.wall_s - last.wall_s - last.waited_s
    step = question.failure.step if question.failure is not None else -1
    if question.progressed and (step >= 0 or lived_s > _TRIES_S):
        return question.wall_s
    return last.outage_wall_s or last.wall_s


def is_going_on(question: Question) -> bool:
    """Return whether the outage is one that a restart has been waited for already."""
    return is_outage(question) and begun_wall_s(question) < question.wall_s


def wait(question: Question) -> Decision:
    """Return the next try and when it is due, or the end."""
    began_s, patience_s = begun_wall_s(question), question.policy.service_patience_s
    lasted_s = question.wall_s - began_s
    if lasted_s >= patience_s:
        reason = (
            f"a service that the script needs has not answered for {duration(lasted_s)}, which is as long as one is "
            f"waited for (--policy service_patience_s={patience_s:g})"
        )
        return Decision("stop", reason, FAULT, "service_patience")
    pause_s = min(max(lasted_s, _LEAST_S), _MOST_S, patience_s - lasted_s)
    reason = f"{class_of(FAULT).why}; the next try is in {pause_s:.0f} s"
    return Decision("restart", reason, FAULT, "outage", wait_s=pause_s, outage_wall_s=began_s)
