# SPDX-License-Identifier: Apache-2.0
"""What slows a job down is paid for until that has cost as much as a restart, and only then acted upon."""

import pytest

from megascale_ops.controller.job.round import Saves
from megascale_ops.controller.policy.answer import answer
from megascale_ops.controller.policy.decision import Decision, Eviction, Question, Restart, Tab
from megascale_ops.controller.policy.ski_rental import open_tab, pay, price_of, settle
from megascale_ops.schema.events import Incident, Marks
from megascale_ops.schema.health import Verdict
from megascale_ops.schema.policy import JobPolicy

NOW_S = 50_000.0


def _ask(paid_s: float = 1_000.0, *, cost: float = 0.2, cause: str = "compute", **facts: object) -> Decision:
    fault = str(facts.pop("fault", "straggler"))
    verdict = Verdict(fault, "", 0.9, culprits=(2,), nodes=("b",), cause=cause, cost=cost)
    tab = Tab(since_wall_s=NOW_S - 1_000.0, seen_wall_s=NOW_S, paid_s=paid_s)
    known: dict[str, object] = {
        "kind": "warning",
        "wall_s": NOW_S,
        "verdict": verdict,
        "policy": JobPolicy(),
        "members": 8,
        "min_nodes": 8,
        "share": 0.125,
        "spares": 1,
        "tab": tab,
    }
    return answer(Question(**{**known, **facts}))  # type: ignore[arg-type]  # fields


def test_what_has_cost_less_than_a_restart_is_borne() -> None:
    """Up to the price nothing is done, and the sentence has both sums; one second later the node goes."""
    before, after = _ask(59.0), _ask(60.0)

    assert (before.acts, before.rule) == (False, "paying")
    assert "20.0 % of every step, 59.0 s so far" in before.reason
    assert "assumed to cost 60 s (none was measured yet)" in before.reason
    assert (after.action, after.nodes) == ("evict", ("b",))


def test_the_price_is_the_median_of_what_restarts_have_cost() -> None:
    """Measured prices replace the assumed one; one that took long for a reason of its own does not count."""
    prices_s = (4.0, 5.0, 300.0)

    assert not _ask(4.9, prices_s=prices_s).acts
    assert _ask(5.1, prices_s=prices_s).acts
    assert "costs 5.0 s (the median of 3 restarts)" in _ask(4.9, prices_s=prices_s).reason


def test_what_was_not_saved_is_part_of_the_price_and_a_checkpoint_lowers_it() -> None:
    """Work that would be made again counts; where saves can't be seen, what restarts have cost counts instead."""
    known = {"prices_s": (30.0,), "start_s": 100.0}

    unsaved = _ask(400.0, since_saved_s=301.0, **known)
    saved = _ask(400.0, since_saved_s=0.0, **known)

    assert (unsaved.acts, unsaved.rule) == (False, "paying")
    assert "a restart now costs 401.0 s (100 s until ranks step again, and 301 s of work since" in unsaved.reason
    assert saved.acts
    assert not _ask(99.0, since_saved_s=0.0, **known).acts
    assert _ask(31.0, since_saved_s=-1.0, **known).acts
    assert _ask(31.0, since_saved_s=5.0, prices_s=(30.0,), start_s=0.0).acts


def test_what_was_not_saved_counts_before_the_first_restart_too() -> None:
    """The policy's assumption tells what a start takes, and not what would be made again: that is known, and added."""
    unsaved, saved, unseen = (_ask(400.0, since_saved_s=known_s) for known_s in (1_500.0, 0.0, -1.0))

    assert (unsaved.acts, unsaved.rule) == (False, "paying")
    assert "a restart now costs 1560.0 s (60 s assumed, none was measured yet, and 1500 s of work" in unsaved.reason
    assert saved.acts
    assert unseen.acts
    assert not _ask(59.0, since_saved_s=0.0).acts
    assert _ask(1_561.0, since_saved_s=1_500.0).acts


def test_a_checkpoint_counts_once_it_had_time_to_be_written() -> None:
    """Ranks go on meanwhile, and a restart would begin at the one before: it lowers the price a minute later."""
    none = Saves()
    assert none.with_newest(0.0) == none

    first = none.with_newest(1_000.0)
    assert [first.held_wall_s(now_s) for now_s in (1_059.0, 1_060.0)] == [0.0, 1_000.0]
    second = first.with_newest(2_000.0).with_newest(2_000.0)  # the same is told again
    assert [second.held_wall_s(now_s) for now_s in (2_059.0, 2_060.0)] == [1_000.0, 2_000.0]
    third = second.with_newest(2_005.0)  # who begins the next one has written the one before
    assert third.held_wall_s(2_006.0) == 2_000.0
    assert third.shifted(-500.0).held_wall_s(1_506.0) == 1_500.0
    assert none.shifted(-500.0) == none


def test_nobody_pays_more_than_twice_what_hindsight_would() -> None:
    """The promise of ski rental, for a straggler of any length: at most twice the better of enduring it and acting."""
    price_s = 30.0
    for lasts in range(10, 2_000, 37):
        tab, spent_s, step_s, cost = Tab(0.0, 0.0, step=0), 0.0, 1.0, 0.1
        for step in range(1, lasts + 1):
            tab = pay(tab, cost=cost, step=step, step_s=step_s, wall_s=float(step))
            spent_s = tab.paid_s
            policy = JobPolicy(warning_hold_s=0.0)
            if _ask(tab.paid_s, cost=cost, prices_s=(price_s,), policy=policy).acts:
                spent_s += price_s
                break

        best_s = min(lasts * cost * step_s, price_s)
        assert spent_s <= 2.0 * best_s + cost * step_s


def test_a_warning_must_hold() -> None:
    """However dear, what began a moment ago may be over in the next."""
    tab = Tab(since_wall_s=NOW_S - 29.0, seen_wall_s=NOW_S, paid_s=1_000.0)

    decision = _ask(tab=tab)

    assert (decision.acts, decision.rule) == (False, "hold")
    assert "29 s without a break, and 30 s are asked for" in decision.reason


def test_a_break_begins_the_time_anew_and_keeps_the_bill() -> None:
    """A warning that comes and goes must hold again each time, but what it has cost is not forgotten for an hour."""
    tab = pay(open_tab(None, 100.0), cost=0.5, step=10, step_s=1.0, wall_s=100.0)
    tab = pay(open_tab(tab, 101.0), cost=0.5, step=20, step_s=1.0, wall_s=101.0)

    soon, later, forgotten = open_tab(tab, 102.0), open_tab(tab, 300.0), open_tab(tab, 5_000.0)

    assert (soon.since_wall_s, soon.paid_s) == (100.0, 5.0)
    assert (later.since_wall_s, later.paid_s, later.step) == (300.0, 5.0, -1)
    assert forgotten.paid_s == 0.0


def test_steps_are_paid_for_once() -> None:
    """No new step costs nothing; a round that begins below the last step paid for is not billed for old ones."""
    tab = Tab(0.0, 0.0, step=100)

    same = pay(tab, cost=0.5, step=100, step_s=2.0, wall_s=1.0)
    back = pay(same, cost=0.5, step=40, step_s=2.0, wall_s=2.0)
    on = pay(back, cost=0.5, step=43, step_s=2.0, wall_s=3.0)

    assert (same.paid_s, back.paid_s, on.paid_s) == (0.0, 0.0, 3.0)


def test_the_second_time_is_twice_as_dear() -> None:
    """What came back after it was acted upon must cost twice as much before it is acted upon again."""
    settled = settle(Tab(0.0, 0.0, paid_s=70.0), NOW_S - 1_000.0)

    assert (settled.paid_s, settled.acted) == (0.0, 1)
    tab = Tab(NOW_S - 1_000.0, NOW_S, paid_s=119.0, acted=1)
    assert not _ask(tab=tab).acts
    assert _ask(tab=Tab(NOW_S - 1_000.0, NOW_S, paid_s=121.0, acted=1)).acts


@pytest.mark.parametrize("cause", ["gc", "host"])
def test_a_cause_of_the_process_needs_no_eviction(cause: str) -> None:
    """A fresh process on the same node may be rid of it."""
    decision = _ask(cause=cause)

    assert (decision.action, decision.nodes) == ("restart", ())
    assert cause in decision.reason


@pytest.mark.parametrize("cause", ["gc", "host"])
def test_a_cause_of_the_process_that_comes_back_on_the_node_is_the_nodes(cause: str) -> None:
    """A fresh process was not rid of it: whatever starves it of CPU stays there when it is started again."""
    again = Tab(NOW_S - 1_000.0, NOW_S, paid_s=121.0, acted=1)

    decision = _ask(cause=cause, tab=again)
    nobody_to_spare = _ask(cause=cause, tab=again, spares=0)
    too_dear = _ask(cause=cause, tab=again, spares=0, min_nodes=4, cost=0.05)

    assert (decision.action, decision.nodes, decision.rule) == ("evict", ("b",), "spare")
    assert [(one.action, one.rule) for one in (nobody_to_spare, too_dear)] == [("restart", "process")] * 2


def test_an_elastic_job_shrinks_only_when_that_is_cheaper() -> None:
    """Without a spare, an eighth of the ranks is given up for a straggler of 20 %, and not for one of 5 %."""
    dear = _ask(cost=0.2, spares=0, min_nodes=4)
    cheap = _ask(cost=0.05, spares=0, min_nodes=4)

    assert (dear.action, dear.rule) == ("evict", "shrink")
    assert (cheap.acts, cheap.rule) == (False, "too_dear")
    assert "12.5 % of all ranks would be missing" in cheap.reason


@pytest.mark.parametrize(
    ("facts", "why"),
    [
        ({"spares": 0}, "no spare waits"),
        ({"spares": 0, "members": 1, "min_nodes": 1}, "b is the only node"),
        ({"policy": JobPolicy(actions={"straggler": "warn"})}, "this job's policy says warn for straggler"),
        ({"policy": JobPolicy(actions={"straggler": "ignore"})}, "this job's policy says ignore for straggler"),
        ({"policy": JobPolicy(max_restarts=0)}, "budget of 0 restarts"),
        (
            {"restarts": tuple(Restart(NOW_S - i, "straggler") for i in range(10))},
            "10 restarts because of straggler in the last hour",
        ),
        (
            {"evictions": tuple(Eviction("x", NOW_S - 60.0, NOW_S) for _ in range(2))},
            "2 evictions in the last hour",
        ),
        ({"fault": "loss_nan"}, "researcher's decision"),
    ],
    ids=["no spare", "alone", "warn", "ignore", "restarts", "per cause", "evictions", "loss"],
)
def test_where_nothing_is_done_the_reason_says_why(facts: dict[str, object], why: str) -> None:
    """A limit ends no job that still makes steps: it goes on as it is, and one sentence says why."""
    decision = _ask(**facts)  # type: ignore[arg-type]  # fields

    assert not decision.acts
    assert decision.action in {"warn", "ignore"}
    assert decision.reason.startswith("nothing is done")
    assert why in decision.reason


def test_a_dry_run_says_what_it_would_have_done() -> None:
    """The node would have gone; it stays."""
    decision = _ask(policy=JobPolicy(dry_run=True))

    assert (decision.action, decision.dry_run, decision.acts) == ("evict", True, False)


def test_a_warning_without_a_cost_is_acted_upon_once_it_has_held() -> None:
    """A job that wants a restart for a loss that is not a number gets it, though that costs no time."""
    policy = JobPolicy(actions={"loss_nan": "restart"})

    assert _ask(0.0, cost=0.0, cause="", fault="loss_nan", policy=policy).action == "restart"


def test_the_price_of_a_restart() -> None:
    """From the order to the first new step of all ranks, and the steps that were made twice."""
    incident = Incident(
        id="j-1", job="j", round=1, marks=Marks(ordered=10.0, stepped=14.0), step_before=59, step_after=50
    )

    assert price_of(incident, 0.5) == pytest.approx(4.0 + 10 * 0.5)
    assert price_of(Incident(id="j-1", job="j", round=1, marks=Marks(ordered=10.0)), 0.5) == 0.0
