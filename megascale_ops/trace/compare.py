# SPDX-License-Identifier: Apache-2.0
"""Two runs side by side: how fast, how much of the time was training, what went wrong.

The figures are those of the report (``report_facts.reckon``): nothing is counted a second time here. Pure.
"""

from collections import Counter
from collections.abc import Callable, Iterator
from typing import NamedTuple

from megascale_ops.ledger import EFFECTIVE, US
from megascale_ops.schema.events import Incident
from megascale_ops.schema.folding import named
from megascale_ops.schema.wording import duration
from megascale_ops.trace.report_facts import Report


class Figure(NamedTuple):
    """One figure of two runs; a value is None where it is not known. ``change`` is of the second against the first."""

    name: str
    values: tuple[float | None, float | None]
    shown: tuple[str, str]
    change: str = ""


class Side(NamedTuple):
    """What is told of one run."""

    report: Report
    label: str


def figures(one: Side, other: Side) -> list[Figure]:
    """Return what two runs are compared by, in the order in which a person asks."""
    return [
        _figure("ranks", one, other, lambda report: float(len(report.places)) or None, "{:.0f}".format),
        _figure("furthest step", one, other, _reached, "{:,.0f}".format),
        _figure("wall time", one, other, lambda report: report.ledger.wall_us / US, duration, relative=True),
        _figure("typical step", one, other, lambda report: report.step_s or None, duration, relative=True),
        _figure("longest step", one, other, _longest, duration, relative=True),
        _figure("training (goodput)", one, other, _training, _percent),
        _figure("effective training time", one, other, _effective, _percent),
        _figure("incidents", one, other, lambda report: float(len(report.gathered.told)), "{:.0f}".format),
        _figure("stops", one, other, _stops, "{:.0f}".format),
    ]


def verdicts(report: Report) -> list[tuple[str, int]]:
    """Return what a run's verdicts said and how often, the most frequent first: class, and whom it named."""
    counted = Counter(_verdict(told.incident) for told in report.gathered.told)
    return sorted(counted.items(), key=lambda pair: (-pair[1], pair[0]))


def losses(one: Report, other: Report) -> Iterator[tuple[str, float, float]]:
    """Yield the rows of the ledger that cost either of two runs something, in seconds."""
    for row, us in one.ledger.rows.items():
        if row != "train" and (us or other.ledger.rows[row]):
            yield row, us / US, other.ledger.rows[row] / US


def _figure(
    name: str,
    one: Side,
    other: Side,
    read: Callable[[Report], float | None],
    show: Callable[[float], str],
    *,
    relative: bool = False,
) -> Figure:
    values = read(one.report), read(other.report)
    shown = tuple("not known" if value is None else show(value) for value in values)
    first, second = values
    change = ""
    if first is not None and second is not None:
        if relative and first > 0:
            change = f"{(second - first) / first:+.1%}"
        elif show is _percent:
            change = f"{(second - first) * 100:+.1f} points"
        elif second != first:
            change = f"{second - first:+,.0f}"
    return Figure(name, values, (shown[0], shown[1]), change)


def _percent(share: float) -> str:
    return f"{share * 100:.1f} %"


def _reached(report: Report) -> float | None:
    reached = max(report.times.reached, default=-1) if report.times is not None else -1
    return float(reached) if reached >= 0 else None


def _longest(report: Report) -> float | None:
    import numpy as np

    if report.times is None or not np.isfinite(report.times.longest).any():
        return None
    return float(np.nanmax(report.times.longest))


def _training(report: Report) -> float | None:
    return report.ledger.share("train") if report.ledger.rows["train"] else None


def _effective(report: Report) -> float | None:
    return report.ledger.share(*EFFECTIVE) if report.ledger.rows["train"] else None


def _stops(report: Report) -> float:
    return float(sum(1 for told in report.gathered.told if told.incident.marks.stopped or told.incident.marks.ordered))


def _verdict(incident: Incident) -> str:
    verdict = incident.verdict
    if verdict is None:
        return "not judged"
    return f"{verdict.fault} ({named(verdict.culprits)})" if verdict.culprits else verdict.fault
