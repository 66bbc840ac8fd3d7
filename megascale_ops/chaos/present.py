# SPDX-License-Identifier: Apache-2.0
"""What people read of trials: one line for each, a table for each fault, and the totals."""

from collections.abc import Iterable, Sequence

from megascale_ops.chaos.faults import BY_NAME, MATRIX, Fault
from megascale_ops.chaos.score import Grade, Totals, spread


def fault_lines(rows: Iterable[Fault], rank: int, world: int) -> list[str]:
    """Return one line for each row of the matrix: name, truth, what is done."""
    from megascale_ops.chaos.score import expectation

    listed = [(row.name, row.kind, expectation(row, rank, world), row.text) for row in rows]
    widths = [max(len(row[column]) for row in listed) for column in range(3)]
    return [
        "  ".join([*(cell.ljust(width) for cell, width in zip(row, widths, strict=False)), row[3]]) for row in listed
    ]


def trial_line(grade: Grade) -> str:
    """Return one trial in one line, and what the verdict itself said in a second one where it was wrong."""
    outcome = grade.outcome
    if outcome.problem:
        return f"NOT HELD  {outcome.fault}: {outcome.problem}"
    got = outcome.named or "nothing"
    if outcome.named:
        got += " rank " + (",".join(map(str, outcome.ranks)) or "none")
    times = ", ".join(
        f"{word} {seconds:.1f} s"
        for word, seconds in (
            ("detected", outcome.detect_s),
            ("named", outcome.name_s),
            ("recovered", outcome.recover_s),
        )
        if seconds >= 0
    )
    line = f"{'right' if grade.right else 'WRONG'}  {outcome.fault}: expected {grade.expected}; got {got}"
    line += f" ({times})" if times else ""
    line += f": {'; '.join(grade.faults)}" if grade.faults else ""
    return line + (f"\n    it said: {outcome.reason}" if grade.faults and outcome.reason else "")


def table(grades: Sequence[Grade]) -> list[str]:
    """Return a line for each fault: how many trials were right, what was named, the times' medians."""
    lines = [f"{'fault':<22}{'kind':<12}{'right':>7}{'detect s':>10}{'name s':>9}{'recover s':>11}  named"]
    order = {row.name: number for number, row in enumerate(MATRIX)}
    names = sorted({each.outcome.fault for each in grades}, key=order.__getitem__)
    for name in names:
        own = [each for each in grades if each.outcome.fault == name]
        outcomes = [each.outcome for each in own if not each.outcome.problem]
        seconds = (
            spread(each.detect_s for each in outcomes)[0],
            spread(each.name_s for each in outcomes)[0],
            spread(each.recover_s for each in outcomes)[0],
        )
        detect, named, recover = ("-" if value < 0 else f"{value:.1f}" for value in seconds)
        count = f"{sum(each.right for each in own)}/{len(outcomes)}" if outcomes else "not held"
        words = sorted({_words(each) for each in own})
        lines.append(
            f"{name:<22}{BY_NAME[name].kind:<12}{count:>7}{detect:>10}{named:>9}{recover:>11}  {', '.join(words)}"
        )
    return lines


def _words(grade: Grade) -> str:
    outcome = grade.outcome
    if outcome.problem:
        return outcome.problem
    return f"{outcome.named}[{','.join(map(str, outcome.ranks))}]" if outcome.named else "nothing"


def total_lines(totals: Totals) -> list[str]:
    """Return the totals in sentences."""
    held = totals.trials - totals.not_held
    return [
        f"{totals.right} of {held} trials right" + (f", {totals.not_held} not held" if totals.not_held else ""),
        f"precision {_share(totals.precision)}, recall {_share(totals.recall)}",
        f"where nothing may happen: {totals.quiet_actions} restarts, {totals.quiet_names} verdicts",
        f"recovered {totals.recovered} of {totals.to_recover}",
        "time to detect, to name (where right), to recover: "
        + "; ".join(_spread(pair) for pair in (totals.detect_s, totals.name_s, totals.recover_s)),
    ]


def _share(value: float) -> str:
    return "-" if value < 0 else f"{100 * value:.1f} %"


def _spread(pair: tuple[float, float]) -> str:
    return "-" if pair[0] < 0 else f"median {pair[0]:.1f} s, worst {pair[1]:.1f} s"
