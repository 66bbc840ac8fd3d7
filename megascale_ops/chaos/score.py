# SPDX-License-Identifier: Apache-2.0
"""Compare what was made of each fault with the truth, and add it up. Pure: outcomes in, grades and totals out."""

from collections.abc import Iterable, Sequence
from statistics import median

import msgspec

from megascale_ops.chaos.faults import BY_NAME, Fault

NEVER = -1.0


class Outcome(msgspec.Struct, frozen=True):
    """What happened in one trial. Seconds count from the fault; -1: it never came.

    ``named`` and ``ranks`` are the verdict that was given, ``further`` the classes of verdicts beyond the first.
    ``acted`` says that ranks were started anew. ``problem`` is set when the trial itself could not be held.
    """

    fault: str
    launcher: str = "ours"
    problem: str = ""
    named: str = ""
    ranks: tuple[int, ...] = ()
    nodes: tuple[str, ...] = ()
    further: tuple[str, ...] = ()
    acted: bool = False
    recovered: bool = False
    ended: int | None = None  # exit code of a job that ended by itself
    resumed_from_damaged: bool = False
    detect_s: float = NEVER
    name_s: float = NEVER
    recover_s: float = NEVER
    reason: str = ""  # the verdict's own sentence


class Grade(msgspec.Struct, frozen=True):
    """Whether one outcome is right; ``faults`` lists what is not."""

    outcome: Outcome
    expected: str
    class_right: bool
    ranks_right: bool
    faults: tuple[str, ...] = ()

    @property
    def right(self) -> bool:
        """Whether nothing is wrong."""
        return not self.faults


class Totals(msgspec.Struct, frozen=True):
    """The whole matrix in numbers; shares are in 0..1, -1 where nothing was there to share."""

    trials: int
    not_held: int
    right: int
    precision: float  # of all verdicts given, those of the right class and ranks
    recall: float  # of all faults that have a class, those given the right class and ranks
    quiet_actions: int  # restarts where nothing may happen
    quiet_names: int  # verdicts where nothing may happen
    recovered: int
    to_recover: int
    detect_s: tuple[float, float] = (NEVER, NEVER)  # median, worst
    name_s: tuple[float, float] = (NEVER, NEVER)
    recover_s: tuple[float, float] = (NEVER, NEVER)


def expectation(fault: Fault, rank: int, world: int) -> str:
    """Return what is right for a row, in a few words."""
    if fault.quiet:
        return "nothing"
    culprits = fault.culprits(rank, world)
    who = "" if culprits is None else " rank " + ",".join(map(str, culprits))
    if fault.who == "node":
        who = " second node"
    return "/".join(fault.classes) + who + (", restart" if fault.acted else ", no restart")


def grade(outcome: Outcome, rank: int, world: int) -> Grade:
    """Return whether one outcome is right, with what is wrong."""
    fault = BY_NAME[outcome.fault]
    wrong = [] if not outcome.problem else [f"not held: {outcome.problem}"]
    if fault.quiet:
        class_right = ranks_right = not outcome.named
        if outcome.named:
            wrong.append(f"{outcome.named} was named")
        if outcome.acted:
            wrong.append("ranks were started anew")
        if outcome.ended is None:
            wrong.append("the job did not end")
        elif outcome.ended:
            wrong.append(f"the job ended with status {outcome.ended}")
    else:
        class_right = outcome.named in fault.classes
        ranks_right = _ranks_right(fault, outcome, rank, world)
        wrong += [] if class_right else [f"{outcome.named or 'nothing'} was named"]
        wrong += [] if ranks_right or not outcome.named else [f"ranks {_listed(outcome.ranks)} were blamed"]
        if outcome.further:
            wrong.append("and then " + ", ".join(outcome.further))
        wrong += _deeds(fault, outcome)
    if outcome.resumed_from_damaged:
        wrong.append("training went on from the damaged checkpoint")
    expected = expectation(fault, rank, world)
    return Grade(outcome, expected, class_right, ranks_right, tuple(wrong))


def _ranks_right(fault: Fault, outcome: Outcome, rank: int, world: int) -> bool:
    culprits = fault.culprits(rank, world)
    if fault.who == "node" and outcome.nodes:
        return outcome.nodes == ("second",)
    return culprits is None or outcome.ranks == culprits


def _deeds(fault: Fault, outcome: Outcome) -> list[str]:
    """Return what was done wrongly."""
    wrong = []
    if (fault.acted or fault.goes_on) and not outcome.recovered:
        wrong.append("training never went on")
    if not fault.acted and outcome.acted:
        wrong.append("ranks were started anew")
    if outcome.named and outcome.name_s > fault.name_s:
        wrong.append(f"named only after {outcome.name_s:.1f} s")
    return wrong


def total(grades: Sequence[Grade]) -> Totals:
    """Add up; trials that could not be held count for nothing else."""
    held = [each for each in grades if not each.outcome.problem]
    with_class = [each for each in held if not BY_NAME[each.outcome.fault].quiet]
    quiet = [each for each in held if BY_NAME[each.outcome.fault].quiet]
    hits = [each for each in with_class if each.class_right and each.ranks_right]
    verdicts = sum(bool(each.outcome.named) + len(each.outcome.further) for each in held)
    to_recover = [each for each in held if (row := BY_NAME[each.outcome.fault]).acted or row.goes_on]
    return Totals(
        trials=len(grades),
        not_held=len(grades) - len(held),
        right=sum(each.right for each in held),
        precision=len(hits) / verdicts if verdicts else NEVER,
        recall=len(hits) / len(with_class) if with_class else NEVER,
        quiet_actions=sum(each.outcome.acted for each in quiet),
        quiet_names=sum(bool(each.outcome.named) for each in quiet),
        recovered=sum(each.outcome.recovered for each in to_recover),
        to_recover=len(to_recover),
        detect_s=spread(each.outcome.detect_s for each in with_class),
        name_s=spread(each.outcome.name_s for each in hits),
        recover_s=spread(each.outcome.recover_s for each in to_recover),
    )


def spread(seconds: Iterable[float]) -> tuple[float, float]:
    """Return the median and the worst of what came at all."""
    came = [each for each in seconds if each >= 0.0]
    return (median(came), max(came)) if came else (NEVER, NEVER)


def _listed(ranks: tuple[int, ...]) -> str:
    return ",".join(map(str, ranks)) or "(none)"
