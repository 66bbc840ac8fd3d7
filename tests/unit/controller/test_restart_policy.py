# SPDX-License-Identifier: Apache-2.0
"""Budgets for restarts, and the rule that tells a bug in the script from bad luck."""

from collections.abc import Sequence

import msgspec
import pytest

from megascale_ops.controller.policy.actions import failure_of, rule_for
from megascale_ops.controller.policy.answer import answer
from megascale_ops.controller.policy.decision import Decision, Failure, Question, Restart
from megascale_ops.diagnosis.exits.signature import signature
from megascale_ops.schema.fault_classes import FAULTS
from megascale_ops.schema.health import Finding, Verdict
from megascale_ops.schema.messages import RankExit
from megascale_ops.schema.policy import ACTION_WORDS, JobPolicy
from megascale_ops.schema.progress import RankError


def _exit_with(message: str, *, rank: int = 0, step: int = 7, where: str = "train.py:3 main") -> RankExit:
    error = RankError(type="ValueError", message=message, where=where, step=step)
    return RankExit(rank=rank, local_rank=0, pid=1, code=1, seen_mono_s=1.0, error=error)


def _judge(verdict: Verdict, policy: JobPolicy | None = None, **facts: object) -> Decision:
    history = facts.pop("history", ())
    assert isinstance(history, tuple)
    known: dict[str, object] = {"kind": "end", "wall_s": 10_000.0, "restarts": history, "restarts_in_all": len(history)}
    return answer(Question(verdict=verdict, policy=policy or JobPolicy(), **{**known, **facts}))  # type: ignore[arg-type]  # fields


KILLED = Verdict(fault="killed", reason="rank 1 was killed", confidence=0.9, culprits=(1,))


@pytest.mark.parametrize("fault", [*FAULTS, "of a newer version"])
def test_every_fault_has_an_action(fault: str) -> None:
    """No class of fault is forgotten, and one that only a newer version knows is restarted like an unknown one."""
    row = FAULTS.get(fault, FAULTS["unknown"])

    rule = rule_for(JobPolicy(), fault)

    assert rule == (row.action, row.why, False)


def test_a_first_kill_is_restarted() -> None:
    """Bad luck is tried again."""
    assert _judge(KILLED).action == "restart"


def test_the_same_exception_at_the_same_step_twice_is_a_bug() -> None:
    """Restarting would do it a third time: stop, and say so."""
    verdict = Verdict(fault="exception", reason="boom", confidence=0.9, culprits=(0,))
    failure = failure_of(verdict, (_exit_with("bad value 3 at 0x7f00"),))

    decision = _judge(verdict, failure=failure, failure_before=failure)

    assert decision.action == "stop"
    assert decision.fault == "script_bug"
    assert decision.reason == "the same exception at step 7 twice in a row is a bug in the script: boom"


def test_numbers_and_addresses_do_not_hide_a_bug() -> None:
    """Two exceptions that differ by an address or a number are the same."""
    one = signature(_exit_with("tensor 17 at 0x7f12ab is NaN (3.5e-3)"))
    two = signature(_exit_with("tensor 99 at 0x11 is NaN (8.25e+10)"))

    assert one == two


def test_another_step_or_place_is_another_failure() -> None:
    """The same text at another step or line is tried again."""
    verdict = Verdict(fault="exception", reason="boom", confidence=0.9, culprits=(0,))
    first = failure_of(verdict, (_exit_with("boom", step=7),))
    later = failure_of(verdict, (_exit_with("boom", step=8),))
    elsewhere = failure_of(verdict, (_exit_with("boom", where="other.py:1 f"),))

    assert _judge(verdict, failure=later, failure_before=first).action == "restart"
    assert _judge(verdict, failure=elsewhere, failure_before=first).action == "restart"


def _refused(words: str, **more: object) -> RankExit:
    facts: dict[str, object] = {"code": 2, "stderr_tail": f"usage: train.py [-h]\n{words}\n", **more}
    return RankExit(rank=0, local_rank=0, pid=1, seen_mono_s=1.0, **facts)  # type: ignore[arg-type]  # fields


REFUSED = Verdict(fault="exit_code", reason="exit code 2", confidence=0.95, culprits=(0, 1))


def test_a_script_that_refuses_its_options_twice_is_not_started_a_third_time() -> None:
    """Whatever rank came first, and whatever number its line has: the script would refuse them each time."""
    words = "train.py: error: unrecognized arguments: --stepz {}"
    first, second = (failure_of(REFUSED, (_refused(words.format(number)),)) for number in (4, 17))

    once = _judge(REFUSED, failure=first)
    twice = _judge(REFUSED, failure=second, failure_before=first, progressed=False)

    assert once.action == "restart"
    assert (twice.action, twice.fault) == ("stop", "script_bug")
    assert "the same exit code before the first step twice" in twice.reason
    assert "unrecognized arguments: --stepz N" in twice.reason


CLASSES = [name for name, row in FAULTS.items() if row.script_bug_after == 3]
MACHINES = ("segfault", "aborted", "cuda_error")


def _verdict(fault: str, *evidence: Finding) -> Verdict:
    reason = f"rank 0 on a: {fault} of 17 bytes"
    return Verdict(fault=fault, reason=reason, confidence=0.95, culprits=(0,), since_step=40, evidence=evidence)


def _rounds(
    fault: str, ends: Sequence[RankExit], *evidence: Finding, policy: JobPolicy | None = None, progressed: int = 1
) -> list[Decision]:
    """Judge rounds that end one after the other; the first ``progressed`` of them led on."""
    verdict, before, found = _verdict(fault, *evidence), None, []
    for at, exit_ in enumerate(ends):
        step = msgspec.structs.replace(verdict, since_step=exit_.step)
        failure = failure_of(step, (exit_,))
        found.append(_judge(step, policy, failure=failure, failure_before=before, progressed=at < progressed))
        before = failure.after(before) if failure is not None else None
    return found


def _ends(*steps: int, words: str = "no data left at {}", seen: int = 20) -> list[RankExit]:
    return [_refused(words.format(at), code=7, step=step, steps_seen=seen) for at, step in enumerate(steps)]


@pytest.mark.parametrize("fault", CLASSES)
def test_the_same_end_at_the_same_step_three_times_is_no_chance(fault: str) -> None:
    """A status, a full memory or disk, a wrong collective: once and twice it is tried again, the third time not."""
    decisions = _rounds(fault, _ends(40, 40, 40))

    last = decisions[-1]
    assert [one.action for one in decisions] == ["restart", "restart", "stop"]
    assert (last.fault, last.rule) == ("script_bug" if fault == "exit_code" else fault, "script_bug")
    assert last.reason.startswith(
        f"{fault} at step 40 with the same words 3 times in a row: a restart does not mend it"
    )
    assert last.reason.endswith(f"rank 0 on a: {fault} of 17 bytes")


@pytest.mark.parametrize("fault", [name for name, row in FAULTS.items() if not row.script_bug_after])
def test_what_machines_networks_and_people_do_is_never_the_scripts(fault: str) -> None:
    """The negative control: kills, lost nodes, cut networks and hangs may befall the same step again and again."""
    assert "script_bug" not in {one.rule for one in _rounds(fault, _ends(40, 40, 40, 40))}


@pytest.mark.parametrize(
    ("ends", "progressed"),
    [
        (_ends(40, 41, 40), 1),  # never at the same step twice
        (_ends(40, 40, 41), 1),
        ([*_ends(40, 40), *_ends(40, words="the file server does not answer")], 1),
        (_ends(40, 40, 40), 3),  # each round led on: steps count from each start anew, and what it made was saved
    ],
    ids=["other step", "other step last", "other words", "led on"],
)
@pytest.mark.parametrize("fault", [name for name in CLASSES if FAULTS[name].hang.value == "no"])
def test_what_is_not_the_same_is_chance(fault: str, ends: list[RankExit], progressed: int) -> None:
    """The negative control: other words, another step, or steps that none had made before."""
    assert {one.action for one in _rounds(fault, ends, progressed=progressed)} == {"restart"}


@pytest.mark.parametrize("fault", MACHINES)
def test_a_signal_or_a_gpu_may_be_a_bad_machines(fault: str) -> None:
    """The negative control: it falls over its first step each time, or its GPU tells of errors (memory is none)."""
    bad = Finding("xid_79", "GPU 0 has fallen off the bus (Xid 79)", "hardware", 0)
    taken = Finding("oom_kill", "the kernel has killed rank 0 for memory", "hardware", 0)

    assert {one.action for one in _rounds(fault, _ends(40, 40, 40, 40, seen=0))} == {"restart"}
    assert {one.action for one in _rounds(fault, _ends(40, 40, 40, 40), bad)} == {"restart"}
    assert _rounds(fault, _ends(40, 40, 40), taken)[-1].rule == "script_bug"


def test_a_job_may_go_on_over_the_same_failure() -> None:
    """With --policy script_bug=restart it is tried again until other limits end it."""
    policy = JobPolicy(actions={"script_bug": "restart"})

    assert {one.action for one in _rounds("out_of_memory", _ends(40, 40, 40, 40), policy=policy)} == {"restart"}


def test_failures_are_counted_in_a_row() -> None:
    """Another one in between begins the count anew; what was counted does not depend on the count."""
    one, other = Failure("exit code 7: a", 40), Failure("exit code 7: b", 40)

    again = one.after(one.after(None))

    assert (again.times, one.after(again).times, other.after(again).times) == (2, 3, 1)
    assert one.after(other.after(again)).times == 1


def test_other_last_words_are_another_failure() -> None:
    """A port that was taken, then a file that is missing: neither has come twice."""
    first = failure_of(REFUSED, (_refused("address already in use"),))
    second = failure_of(REFUSED, (_refused("no such file: vocab.json"),))

    assert _judge(REFUSED, failure=second, failure_before=first, progressed=False).action == "restart"


def test_hours_without_a_step_that_is_seen_are_no_failed_start() -> None:
    """A script without visible steps may fail on the same server twice, a day apart."""
    same = failure_of(REFUSED, (_refused("the file server does not answer"),))

    assert _judge(REFUSED, failure=same, failure_before=same, progressed=True).action == "restart"


def test_a_syntax_error_is_one_failure_by_whatever_rank_it_was_told() -> None:
    """A script that Python can't read has no black box: its traceback is in its stderr."""
    tail = "  File \"/job/train.py\", line 3\n    foo(\n       ^\nSyntaxError: '(' was never closed\n"
    one = Verdict(fault="exception", reason="boom", confidence=0.95, culprits=(0,))
    everywhere = Verdict(fault="exception_everywhere", reason="boom", confidence=0.95, culprits=(0, 1))
    dead = RankExit(rank=0, local_rank=0, pid=1, code=1, seen_mono_s=1.0, stderr_tail=tail)

    first, second = failure_of(one, (dead,)), failure_of(everywhere, (dead,))

    assert first is not None
    assert _judge(everywhere, failure=second, failure_before=first, progressed=False).fault == "script_bug"


def test_a_kill_is_never_called_a_bug() -> None:
    """Who kills a rank from outside has reasons of his own."""
    assert failure_of(KILLED, (_exit_with("boom", rank=1),)) is None


def test_the_budget_in_all() -> None:
    """--max-restarts counts every restart there was."""
    history = (Restart(0.0, "killed"), Restart(1.0, "segfault"))

    spent = _judge(KILLED, JobPolicy(max_restarts=2), history=history)
    left = _judge(KILLED, JobPolicy(max_restarts=3), history=history)

    assert spent.action == "stop"
    assert "budget of 2 restarts" in spent.reason
    assert left.action == "restart"


def test_the_budget_per_hour_forgets() -> None:
    """Restarts older than an hour cost nothing."""
    policy = JobPolicy(restarts_per_hour=2, restarts_per_cause_per_hour=2)
    recent = (Restart(9_000.0, "segfault"), Restart(9_900.0, "frozen"))
    old = (Restart(6_000.0, "segfault"), Restart(9_900.0, "frozen"))

    assert _judge(KILLED, policy, history=recent).action == "stop"
    assert _judge(KILLED, policy, history=old).action == "restart"


def test_the_budget_per_cause() -> None:
    """One cause may not eat what the whole job has."""
    policy = JobPolicy(restarts_per_cause_per_hour=1)
    history = (Restart(9_000.0, "killed"),)

    same = _judge(KILLED, policy, history=history)
    other = _judge(Verdict(fault="frozen", reason="", confidence=1.0), policy, history=history)

    assert same.action == "stop"
    assert "because of killed" in same.reason
    assert other.action == "restart"


def test_a_changed_set_of_nodes_costs_nothing() -> None:
    """Taking in a node more is no failure."""
    decision = _judge(Verdict(fault="membership", reason="", confidence=1.0), JobPolicy(max_restarts=0))

    assert decision.action == "restart"
    assert not decision.counted


def test_before_the_first_step_counts_too() -> None:
    """A script that cannot even start is not started for ever."""
    failure = Failure("ImportError: x at a.py:1", -1)
    verdict = Verdict(fault="exception", reason="", confidence=0.9)

    decision = _judge(verdict, failure=failure, failure_before=failure, progressed=False)

    assert "before the first step" in decision.reason


def test_every_action_of_the_table_is_a_word() -> None:
    """The table has only actions that can be taken."""
    assert {row.action for row in FAULTS.values()} <= set(ACTION_WORDS)


@pytest.mark.parametrize("fault", sorted(FAULTS))
@pytest.mark.parametrize("action", sorted(ACTION_WORDS))
def test_a_job_may_say_otherwise(fault: str, action: str) -> None:
    """A job's own action stands above the table, for every class, and says whose it is."""
    rule = rule_for(JobPolicy(actions={fault: action}), fault)

    assert (rule.action, rule.own) == (action, True)
    assert fault in rule.why


def test_a_word_that_is_no_action_changes_nothing() -> None:
    """A policy from elsewhere with an unknown word falls back to the table instead of failing in the middle of it."""
    assert rule_for(JobPolicy(actions={"killed": "explode"}), "killed").action == "restart"


@pytest.mark.parametrize("action", ["ignore", "warn"])
def test_a_hang_may_be_left_alone_but_not_a_death(action: str) -> None:
    """To ignore a hang leaves it; to ignore a death ends the job, since the dead rank can't go on, and says so."""
    policy = JobPolicy(actions={"frozen": action, "killed": action})
    frozen = Verdict(fault="frozen", reason="", confidence=1.0)

    hang = _judge(frozen, policy, kind="hang")
    death = _judge(KILLED, policy)

    assert (hang.action, hang.acts) == (action, False)
    assert death.action == "stop"
    assert "the round has ended" in death.reason


def test_a_slow_rank_is_not_stopped() -> None:
    """Slow is not stuck: the table only warns of it."""
    assert not _judge(Verdict(fault="slow", reason="", confidence=0.9), kind="hang").acts


def test_stop_stops() -> None:
    """A class that a job stops for is not restarted even with all budgets left."""
    assert _judge(KILLED, JobPolicy(actions={"killed": "stop"})).action == "stop"


def test_a_dry_run_decides_the_same_and_does_nothing() -> None:
    """The answer of a dry run differs in nothing but that it is only said."""
    done, said = _judge(KILLED), _judge(KILLED, JobPolicy(dry_run=True))

    assert (done.dry_run, said.dry_run) == (False, True)
    assert (done.action, done.reason) == (said.action, said.reason)
    assert done.acts
    assert not said.acts


def _fruitless(count: int) -> tuple[Restart, ...]:
    """Return restarts of which each but the first ended a round without a new step."""
    return tuple(Restart(9_000.0 + i, f"cause {i}", progressed=i == 0) for i in range(count))


def test_restarts_that_lead_nowhere_end() -> None:
    """Five restarts in a row without one new step: the sixth is not tried, whatever the causes were."""
    fifth = _judge(KILLED, history=_fruitless(4), progressed=False)
    sixth = _judge(KILLED, history=_fruitless(5), progressed=False)

    assert fifth.action == "restart"
    assert (sixth.action, sixth.rule) == ("stop", "no_progress")
    assert "5 restarts in a row" in sixth.reason


def _of_machines(nodes: list[str], cause: str = "cuda_error") -> tuple[Restart, ...]:
    """Return restarts for a fault of each of these machines, of which each but the first ended a fruitless round."""
    return tuple(Restart(1_000.0 + i, cause, node, progressed=i == 0) for i, node in enumerate(nodes))


def _broken(node: str, fault: str = "cuda_error") -> Verdict:
    return Verdict(fault=fault, reason="rank 1: CUDA error", confidence=0.9, culprits=(1,), nodes=(node,))


def test_machines_that_fail_one_after_the_other_are_bad_luck() -> None:
    """Of 100,000 GPUs one fails in less time than lies between two checkpoints: a job may not end for that."""
    nodes = [f"node-{i}" for i in range(20)]

    assert _judge(_broken("node-99"), history=_of_machines(nodes[:12]), progressed=False).action == "restart"
    assert _judge(_broken("node-99"), history=_of_machines(nodes[:19]), progressed=False).action == "restart"
    last = _judge(_broken("node-99"), history=_of_machines(nodes), progressed=False)
    assert (last.action, last.rule) == ("stop", "no_progress")  # even luck is not as bad as that
    assert "20 restarts in a row" in last.reason


@pytest.mark.parametrize(
    "history",
    [
        _of_machines(["node-1"] * 6),  # the same one again and again
        _of_machines([""] * 6),  # no machine alone
        _of_machines([f"node-{i}" for i in range(6)], "nccl_error"),  # what no machine is likely to have done
        _of_machines([f"node-{i}" for i in range(6)], "exception"),
    ],
)
def test_what_is_no_bad_luck_of_machines_ends_as_before(history: tuple[Restart, ...]) -> None:
    """Five restarts without a new step that one thing may be behind."""
    decision = _judge(KILLED, history=history, progressed=False)

    assert (decision.action, decision.rule) == ("stop", "no_progress")


def test_one_new_step_begins_the_count_anew() -> None:
    """A job that makes progress between faults may go on as long as the budgets last."""
    now = _judge(KILLED, history=_fruitless(8), progressed=True)
    between = (
        *_fruitless(4),
        Restart(9_500.0, "killed", progressed=True),
        Restart(9_600.0, "killed", progressed=False),
    )

    assert now.action == "restart"
    assert _judge(KILLED, history=between, progressed=False).action == "restart"


def test_a_job_may_refuse_newcomers() -> None:
    """A job that says so takes no node in while it runs; once its round has ended it goes on all the same."""
    verdict = Verdict(fault="membership", reason="", confidence=1.0)
    policy = JobPolicy(actions={"membership": "ignore"})

    assert _judge(verdict, kind="hang").acts
    assert not _judge(verdict, policy, kind="hang").acts
    assert _judge(verdict, policy, kind="end").action == "restart"
