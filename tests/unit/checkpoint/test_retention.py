# SPDX-License-Identifier: Apache-2.0
"""Which checkpoints stay, by the rule of their owner, and the reason of each."""

import random

import pytest

from megascale_ops.checkpoint.retention import MARK_LASTS_S, Decision, Rule, Standing, decide, still_reads
from megascale_ops.errors import UsageError


def standing(*steps: int, damaged: tuple[int, ...] = (), read: tuple[int, ...] = ()) -> list[Standing]:
    """Checkpoints of these steps."""
    return [Standing(step, f"/c/{step}", None, step in damaged, ("job a",) * (step in read)) for step in steps]


def kept(decisions: list[Decision]) -> list[int]:
    """The steps that stay, newest first."""
    return [one.step for one in decisions if one.stays]


def test_the_newest_stay_and_damaged_ones_do_not_count() -> None:
    """``keep`` whole ones stay whatever is damaged; later steps of another attempt are left alone."""
    there = standing(10, 20, 30, 40, 99, damaged=(30,))

    assert kept(decide(there, Rule(keep=4), newest_step=40)) == [99, 40, 30, 20, 10]
    assert kept(decide(there, Rule(keep=2), newest_step=40)) == [99, 40, 30, 20]
    assert kept(decide(there, Rule(keep=1), newest_step=40)) == [99, 40]
    assert kept(decide(there, Rule(keep=1))) == [99]


def test_each_that_stays_has_its_reasons() -> None:
    """A person who looks for space is told what holds it."""
    there = [*standing(900, 1000, 1100, 1900, 2050, read=(900,)), Standing(1950, "/c/1950", 0.25)]

    told = {one.step: one.reasons for one in decide(there, Rule(keep=1, keep_every=1000, keep_best=1))}

    assert told == {
        2050: ("the newest", "the first from step 2000 on"),
        1950: ("the best: 0.25",),
        1900: (),
        1100: (),
        1000: ("the first from step 1000 on",),
        900: ("read by job a",),
    }


def test_a_script_that_saves_by_the_clock_keeps_its_long_history() -> None:
    """No step is a multiple; the first behind each multiple stays, and goes on to stay as later ones come."""
    rule, there, stayed = Rule(keep=2, keep_every=1000), [], set()
    for step in range(137, 6000, 137):
        there = [*there, *standing(step)]
        decisions = decide(there, rule, newest_step=step)
        there = [one for one in there if one.step in kept(decisions)]
        stayed = {one.step for one in there}

    assert sorted(stayed) == [1096, 2055, 3014, 4110, 5069, 5754, 5891]


@pytest.mark.parametrize(("higher", "best"), [(False, [5, 20, 30]), (True, [10, 20, 30])])
def test_the_best_stay_by_their_metric(higher: bool, best: list[int]) -> None:
    """Lower is better unless it is said; one without a metric is never among them; of equal ones the newer stays."""
    there = [Standing(5, "5", 0.1), Standing(10, "10", 0.9), Standing(20, "20", 0.5), Standing(30, "30")]
    there.append(Standing(7, "7", 0.5))

    assert sorted(kept(decide(there, Rule(keep=1, keep_best=2, higher_is_better=higher)))) == best


def test_whatever_the_rule_the_newest_whole_one_stays_and_nothing_read_goes() -> None:
    """Drawn folders and rules: the newest whole ones, all that are read, and no more than has a reason."""
    dice = random.Random(7)  # noqa: S311  not a secret
    for _ in range(500):
        steps = dice.sample(range(1, 400), dice.randint(0, 12))
        damaged = tuple(step for step in steps if dice.random() < 0.3)
        read = tuple(step for step in steps if dice.random() < 0.1)
        rule = Rule(dice.randint(1, 4), dice.choice([0, 50]), dice.choice([0, 2]))

        stays = set(kept(decide(standing(*steps, damaged=damaged, read=read), rule)))

        whole = sorted(set(steps) - set(damaged), reverse=True)
        assert stays >= set(whole[: rule.keep]) | set(read)
        if len(whole) <= rule.keep - 1:
            assert stays == set(steps)
        elif not rule.keep_every:
            assert stays - set(read) - set(damaged) == set(whole[: rule.keep]) - set(read)


@pytest.mark.parametrize(
    ("rule", "sentence"),
    [
        (Rule(keep=0), "keep is 0; at least one checkpoint must be kept"),
        (Rule(keep_every=-1), "keep_every is -1; 0 keeps none for that reason"),
        (Rule(keep_best=-2), "keep_best is -2; 0 keeps none for that reason"),
    ],
)
def test_a_rule_of_nonsense_is_refused(rule: Rule, sentence: str) -> None:
    """One sentence, with the number."""
    with pytest.raises(UsageError, match=f"^{sentence}$"):
        rule.checked()


@pytest.mark.parametrize(
    ("life", "age_s", "reads"),
    [
        ("alive", 1e6, True),  # stopped by a debugger, perhaps for a day
        ("dead", 0.0, False),
        ("dying", 0.0, False),
        ("unknown", MARK_LASTS_S - 1.0, True),
        ("unknown", MARK_LASTS_S + 1.0, False),
        ("unknown", -300.0, True),  # another machine's clock is ahead
    ],
)
def test_a_mark_ends_with_its_reader_or_by_its_age(life: str, age_s: float, reads: bool) -> None:
    """The kernel's word counts where it has one."""
    assert still_reads(life, age_s) is reads
