# SPDX-License-Identifier: Apache-2.0
"""Prometheus' text format, written from the table of metrics: fast where there is one series for each of 12,288 ranks.

A page is built anew for each scrape, so a series is gone as soon as it is not added. Names, help, kind and labels
come from ``schema.metrics``; a name that is not there, or labels that do not fit, are a bug and raise.

https://prometheus.io/docs/instrumenting/exposition_formats/
"""

import math
from bisect import bisect_left
from collections.abc import Iterable, Sequence

from megascale_ops.schema.metrics import METRICS, Kind, Metric

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"
_ESCAPES = str.maketrans({"\\": r"\\", '"': r"\"", "\n": r"\n"})
_HELP_ESCAPES = str.maketrans({"\\": r"\\", "\n": r"\n"})


class Distribution:
    """Counts of measured values, by upper bounds; the last is of all above. Owned by its writer."""

    __slots__ = ("bounds", "counts", "total")

    def __init__(self, bounds: Sequence[float], counts: Sequence[int] = (), total: float = 0.0) -> None:
        self.bounds = tuple(bounds)
        self.counts = list(counts) or [0] * (len(self.bounds) + 1)
        self.total = total

    def copy(self) -> "Distribution":
        """Return what was counted until now, not to change any more."""
        return Distribution(self.bounds, self.counts, self.total)

    def observe(self, value: float) -> None:
        """Count one value."""
        self.counts[bisect_left(self.bounds, value)] += 1
        self.total += value


class Page:
    """The answer to one scrape, family by family."""

    def __init__(self) -> None:
        self.series = 0
        self._parts: list[str] = []
        self._named: set[str] = set()

    def add(self, name: str, samples: Iterable[tuple[tuple[str, ...], float]]) -> None:
        """Add a family with its samples: the labels' values, in the table's order, and the value. None: no family."""
        self.add_family(METRICS[name], samples)

    def add_family(self, metric: Metric, samples: Iterable[tuple[tuple[str, ...], float]]) -> None:
        """Add a family that need not stand in the table: a collector may declare what no other program knows."""
        lines = []
        for labels, value in samples:
            lines.append(f"{metric.name}{labelled(metric.labels, labels)} {number(value)}")
        self._put(metric, lines, len(lines))

    def one(self, name: str, value: float) -> None:
        """Add a metric without labels."""
        self.add(name, [((), value)])

    def foreign(self, name: str, kind: Kind, text: str, value: float) -> None:
        """Add a metric whose name is not ours: one series, without labels."""
        self._put(Metric(name, "", kind, "", text), [f"{name} {number(value)}"], 1)

    def by_rank(self, name: str, columns: Iterable[tuple[str, Sequence[float], str]]) -> None:
        """Add one series for each rank of each job; ranks whose value is negative or no number have none.

        Args:
            name: of a metric with the labels job, rank and perhaps one more.
            columns: job, values by rank, and the value of the label that comes after rank ("" where there is none).
        """
        metric = METRICS[name]
        assert metric.labels[:2] == ("job", "rank"), name
        lines: list[str] = []
        for job, values, more in columns:
            head = f'{name}{{job="{job.translate(_ESCAPES)}",rank="'
            tail = f'",{metric.labels[2]}="{more.translate(_ESCAPES)}"}} ' if metric.labels[2:] else '"} '
            # Six digits: a rank's lag to the microsecond, up to a second.
            lines += [f"{head}{rank}{tail}{value:.6g}" for rank, value in enumerate(values) if 0.0 <= value < math.inf]
        self._put(metric, lines, len(lines))

    def distributions(self, name: str, found: Iterable[tuple[tuple[str, ...], Distribution]]) -> None:
        """Add a histogram for each set of labels."""
        metric = METRICS[name]
        lines = []
        series = 0
        for labels, one in found:
            below = 0
            for bound, count in zip((*one.bounds, math.inf), one.counts, strict=True):
                below += count
                bucket = labelled((*metric.labels, "le"), (*labels, number(bound)))
                lines.append(f"{name}_bucket{bucket} {below}")
            own = labelled(metric.labels, labels)
            lines += [f"{name}_sum{own} {number(one.total)}", f"{name}_count{own} {below}"]
            series += len(one.counts) + 2
        self._put(metric, lines, series)

    def _put(self, metric: Metric, lines: Sequence[str], series: int) -> None:
        assert metric.name not in self._named, f"{metric.name} is added twice"
        if not lines:
            return
        self._named.add(metric.name)
        self.series += series
        kind = Kind.GAUGE if metric.kind is Kind.INFO else metric.kind
        self._parts.append(f"# HELP {metric.name} {metric.help.translate(_HELP_ESCAPES)}")
        self._parts.append(f"# TYPE {metric.name} {kind}")
        self._parts.extend(lines)

    def text(self) -> bytes:
        """Return the page."""
        return ("\n".join(self._parts) + "\n").encode()


def labelled(names: Sequence[str], values: Sequence[str]) -> str:
    """Return labels as they stand behind a name: ``{job="gpt",rank="3"}``, "" for none."""
    assert len(names) == len(values), (names, values)
    if not names:
        return ""
    pairs = zip(names, values, strict=True)
    return "{" + ",".join(f'{name}="{value.translate(_ESCAPES)}"' for name, value in pairs) + "}"


def number(value: float) -> str:
    """Return a value as Prometheus writes it."""
    if math.isfinite(value):
        return repr(float(value))
    return "NaN" if math.isnan(value) else "+Inf" if value > 0 else "-Inf"
