# SPDX-License-Identifier: Apache-2.0
"""Where what was restored is bad itself: one checkpoint back, once, then the end; and everything else as before."""

import msgspec
import pytest

from megascale_ops.controller.job.job import Job
from megascale_ops.controller.job.round import Round
from megascale_ops.controller.policy.actions import FIRST_STEPS, state_failure_of
from megascale_ops.controller.policy.answer import answer
from megascale_ops.controller.policy.decision import Decision, Failure, Question, Restart, StateFailure
from megascale_ops.controller.record.job_record import JobRecord, read_record
from megascale_ops.controller.recovery.restored import note_saved
from megascale_ops.schema.health import Verdict
from megascale_ops.schema.messages import RankExit
from megascale_ops.schema.policy import JobPolicy

NAN = "FloatingPointError: the loss is nan at train.py:9 main"
VERDICT = Verdict("exception", "rank 0: the loss is nan", 0.9, culprits=(0,))


def _asked(
    now: StateFailure | None, before: StateFailure | None, verdict: Verdict = VERDICT, **facts: object
) -> Decision:
    failures = {
        name: Failure(one.cause, one.at)
        for name, one in (("failure", now), ("failure_before", before))
        if one is not None and verdict.fault == "exception"
    }
    known: dict[str, object] = {"kind": "end", "wall_s": 10_000.0, "policy": JobPolicy(), **failures, **facts}
    return answer(Question(verdict=verdict, state_failure=now, state_failure_before=before, **known))  # type: ignore[arg-type]  # fields


@pytest.mark.parametrize(
    "first", [StateFailure(NAN, 121, -1), StateFailure(NAN, 121, 110), StateFailure(NAN, 121, 120)]
)
def test_the_same_failure_twice_after_one_checkpoint_goes_one_back(first: StateFailure) -> None:
    """Whether the first of them came in the round that saved it or after a restore; the second decides."""
    decision = _asked(StateFailure(NAN, 121, 120), first)

    assert (decision.action, decision.rule, decision.restore_before) == ("restart", "one_back", 120)
    assert "one checkpoint back, once" in decision.reason


def test_the_third_time_is_the_end() -> None:
    """One back, and the same again at the first steps: no 44 restarts from the same NaN."""
    decision = _asked(StateFailure(NAN, 114, 110), StateFailure(NAN, 121, 120), restore_before=120)

    assert (decision.action, decision.rule) == ("stop", "restored_bad")
    assert "4 steps after the restore of step 110" in decision.reason
    assert "a person's decision" in decision.reason


def test_a_script_that_restores_the_same_all_the_same_ends_too() -> None:
    """Its own checkpoints know nothing of the limit: the third failure from the same step is the last."""
    same = StateFailure(NAN, 121, 120)

    assert _asked(same, same, restore_before=120).rule == "restored_bad"


@pytest.mark.parametrize(
    ("now", "before"),
    [
        (StateFailure(NAN, 121 + FIRST_STEPS, 120), StateFailure(NAN, 131, 120)),
        (StateFailure(NAN, 121, 120), StateFailure(NAN, 300, 240)),
        (StateFailure(NAN, 121, 120), StateFailure("OSError: no space", 121, 120)),
        (StateFailure(NAN, 121, 120), None),
        (StateFailure(NAN, 5, -1), StateFailure(NAN, 5, -1)),
        (None, StateFailure(NAN, 121, 120)),
    ],
    ids=["late in the run", "before elsewhere", "another failure", "once", "nothing restored", "no failure of a state"],
)
def test_no_other_failure_goes_back(now: StateFailure | None, before: StateFailure | None) -> None:
    """A failure late in the run, one that came once, another one, or one without a restore: as it was without this."""
    decision = _asked(now, before)

    assert decision.rule not in ("one_back", "restored_bad")
    assert decision.restore_before == -1


def test_budgets_and_the_jobs_own_policy_hold() -> None:
    """A spent budget ends the job as ever; an action of the job's own that is no restart is respected."""
    same = StateFailure(NAN, 121, 120)
    history = tuple(Restart(9_990.0, "exception") for _ in range(25))

    assert _asked(same, same, restarts=history).action == "stop"
    assert _asked(same, same, policy=JobPolicy(actions={"exception": "stop"})).action == "stop"
    nan = Verdict("loss_nan", "the loss is not a number", 0.99, culprits=(0,), since_step=121)
    told = StateFailure("loss_nan", 121, 120)
    assert _asked(told, told, nan).rule not in ("one_back", "restored_bad")
    assert _asked(told, told, nan, policy=JobPolicy(actions={"loss_nan": "restart"})).rule == "one_back"


def test_what_ranks_tell_of_a_restore() -> None:
    """Where they stand less what they made since; kills say nothing of a state; a NaN counts from its first step."""
    ends = (
        RankExit(0, 0, 1, 1, 1.0, step=123, steps_seen=3, stderr_tail="loss is nan"),
        RankExit(1, 1, 2, -15, 1.0, by_us=True, step=122, steps_seen=2),
    )
    failed = state_failure_of(VERDICT, Failure(NAN, 123), ends)
    nan = state_failure_of(Verdict("loss_nan", "", 0.9, since_step=121), None, ends)
    ended = state_failure_of(Verdict("exit_code", "", 0.9, culprits=(0,)), None, ends)

    assert failed == StateFailure(NAN, 123, 120)
    assert nan == StateFailure("loss_nan", 121, 120)
    assert ended == StateFailure("exit code 1: loss is nan", 123, 120)
    assert state_failure_of(Verdict("killed", "", 0.9, culprits=(0,)), None, ends) is None
    assert state_failure_of(VERDICT, Failure(NAN, -1), (RankExit(0, 0, 1, 1, 1.0),)) is None


def test_the_limit_goes_when_a_newer_checkpoint_was_saved() -> None:
    """Not before the step was passed, not by a save before that, and it outlives the controller until then."""
    record = JobRecord("job", state="running", restore_before=120, state_failure=StateFailure(NAN, 121, 120))
    job = Job(read_record("job", msgspec.json.encode(record)), 0.0)
    job.round = Round(job.record)
    seen = []
    for step, wall_s, saved_wall_s in ((119, 10.0, 9.0), (121, 20.0, 19.0), (125, 21.0, 20.0), (130, 22.0, 21.5)):
        job.round.step = step
        note_saved(job, wall_s, saved_wall_s)
        seen.append(job.record.restore_before)

    assert seen == [120, 120, 120, -1]
