# SPDX-License-Identifier: Apache-2.0
"""Grades and totals: right is right, and every way of being wrong is said."""

import pytest

from megascale_ops.chaos.present import table, total_lines, trial_line
from megascale_ops.chaos.score import NEVER, Grade, Outcome, grade, spread, total

RIGHT = Outcome(
    "gil_held",
    named="gil_held",
    ranks=(1,),
    acted=True,
    recovered=True,
    detect_s=2.5,
    name_s=5.0,
    recover_s=10.0,
)
QUIET = Outcome("slow_step_once", ended=0)


def graded(outcome: Outcome, **changed: object) -> Grade:
    """Grade a changed outcome of a job of four in which rank 1 suffered."""
    from msgspec.structs import replace

    return grade(replace(outcome, **changed), 1, 4)


def test_right_class_right_rank_recovered_is_right() -> None:
    """Nothing is wrong."""
    assert graded(RIGHT).right


@pytest.mark.parametrize(
    ("changed", "sentence"),
    [
        ({"named": "silent"}, "silent was named"),
        ({"named": "", "ranks": ()}, "nothing was named"),
        ({"ranks": (0,)}, "ranks 0 were blamed"),
        ({"ranks": (0, 1)}, "ranks 0,1 were blamed"),
        ({"recovered": False}, "training never went on"),
        ({"further": ("killed",)}, "and then killed"),
        ({"name_s": 60.0}, "named only after 60.0 s"),
        ({"problem": "no disk"}, "not held: no disk"),
        ({"resumed_from_damaged": True}, "training went on from the damaged checkpoint"),
    ],
)
def test_every_way_of_being_wrong_is_said(changed: dict[str, object], sentence: str) -> None:
    """One change, one sentence."""
    assert graded(RIGHT, **changed).faults == (sentence,)


def test_nothing_is_right_where_nothing_may_happen() -> None:
    """A negative control is right when no rank was named and nothing was done."""
    assert graded(QUIET).right
    assert graded(QUIET, named="silent", ranks=(1,)).faults == ("silent was named",)
    assert graded(QUIET, acted=True).faults == ("ranks were started anew",)
    assert graded(QUIET, ended=1).faults == ("the job ended with status 1",)
    assert graded(QUIET, ended=None).faults == ("the job did not end",)


def test_who_starts_a_runner_again_expects_training_to_go_on() -> None:
    """The job is not restarted by a verdict, and still new ranks must come."""
    lost = Outcome("runner_killed", named="runner_lost", recovered=True, detect_s=9.0, name_s=9.0, recover_s=14.0)

    assert graded(lost).right
    assert graded(lost, recovered=False).faults == ("training never went on",)


def test_a_straggler_is_named_and_left_alone() -> None:
    """A restart for a slow rank is wrong."""
    slow = Outcome("compute_20", named="straggler", ranks=(1,), name_s=3.0)

    assert graded(slow).right
    assert graded(slow, acted=True).faults == ("ranks were started anew",)


def test_a_lost_node_is_blamed_by_its_name() -> None:
    """Its ranks need not be listed when the node is."""
    lost = Outcome("node_killed", named="node_lost", nodes=("second",), acted=True, recovered=True, name_s=16.0)

    assert graded(lost).right
    assert not graded(lost, nodes=("first",)).right


def test_totals_add_up() -> None:
    """Precision counts verdicts, recall counts faults, and what could not be held counts for neither."""
    grades = [
        graded(RIGHT),
        graded(RIGHT, named="silent", name_s=7.0),
        graded(RIGHT, named="", ranks=(), recovered=False, detect_s=NEVER, name_s=NEVER, recover_s=NEVER),
        graded(QUIET),
        graded(QUIET, named="silent", acted=True),
        graded(RIGHT, problem="no disk"),
    ]

    totals = total(grades)

    assert (totals.trials, totals.not_held, totals.right) == (6, 1, 2)
    assert totals.precision == pytest.approx(1 / 3)
    assert totals.recall == pytest.approx(1 / 3)
    assert (totals.quiet_actions, totals.quiet_names) == (1, 1)
    assert (totals.recovered, totals.to_recover) == (2, 3)
    assert totals.name_s == (5.0, 5.0)
    assert totals.recover_s == (10.0, 10.0)


def test_no_trials_have_no_shares() -> None:
    """Nothing is divided by nothing."""
    totals = total([])

    assert (totals.precision, totals.recall) == (NEVER, NEVER)
    assert total_lines(totals)[1] == "precision -, recall -"


def test_the_spread_leaves_out_what_never_came() -> None:
    """A median of what came; nothing when nothing came."""
    assert spread([3.0, NEVER, 1.0, 2.0]) == (2.0, 3.0)
    assert spread([NEVER]) == (NEVER, NEVER)


def test_a_line_says_expected_and_got() -> None:
    """What a person reads has both sides, and why they differ."""
    line = trial_line(graded(RIGHT, named="silent"))

    assert line.startswith("WRONG  gil_held: expected gil_held rank 1, restart; got silent rank 1 (detected 2.5 s")
    assert line.endswith(": silent was named")


def test_a_wrong_verdict_is_heard() -> None:
    """A rank named where none is to blame is shown with the verdict's own numbers; a right one needs none."""
    wrong = trial_line(graded(QUIET, named="straggler", ranks=(0,), reason="rank 0 works 60 ms where its equals 50"))
    right = trial_line(graded(RIGHT, reason="rank 1 holds the lock"))

    assert wrong.splitlines()[1:] == ["    it said: rank 0 works 60 ms where its equals 50"]
    assert len(right.splitlines()) == 1


def test_the_table_has_one_line_for_each_fault() -> None:
    """Trials of the same fault share a line, in the order of the matrix."""
    lines = table([graded(QUIET), graded(RIGHT), graded(RIGHT, named="silent")])

    assert [line.split()[0] for line in lines] == ["fault", "gil_held", "slow_step_once"]
    assert "1/2" in lines[1]
    assert "gil_held[1], silent[1]" in lines[1]
