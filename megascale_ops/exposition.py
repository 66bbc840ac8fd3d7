# SPDX-License-Identifier: Apache-2.0
"""A page of metrics: families by our one table, written by prometheus-client in the format that the scraper accepts.

A page is built anew for each scrape, so a series is gone as soon as it is not added. Names, help, kind, unit and
labels come from ``schema.metrics``; a name that is not there, or labels that do not fit, are a bug and raise. A page
is a custom collector of the library, and is gathered without it: what changes under a loop's hands is read there, and a
thread then writes it, which takes 7 us a series, 10 in OpenMetrics. No start of ours waits for the library's import.

https://prometheus.github.io/client_python/collector/custom/
https://prometheus.io/docs/specs/om/open_metrics_spec/
"""

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial
from typing import TYPE_CHECKING, NamedTuple

from megascale_ops.distribution import Distribution
from megascale_ops.schema.metrics import METRICS, Kind, Metric

if TYPE_CHECKING:
    from prometheus_client.metrics_core import Metric as Family

# Values of the labels, in the table's order, and the value.
Sample = tuple[tuple[str, ...], float]


class Encoded(NamedTuple):
    """An answer to a scrape."""

    body: bytes
    content_type: str


class Page:
    """The families of one scrape; a collector as prometheus-client knows it.

    Args:
        counted_by: metric that tells how many series the page has, its own included, and comes last; "" for none.
    """

    def __init__(self, counted_by: str = "") -> None:
        self._counted_by = counted_by
        self._families: dict[str, Callable[[], Family]] = {}

    def add(self, name: str, samples: Iterable[Sample]) -> None:
        """Add a family of the table with its samples. None: no family."""
        self.add_family(METRICS[name], samples)

    def add_family(self, metric: Metric, samples: Iterable[Sample]) -> None:
        """Add a family that need not stand in the table: a collector may declare what no other program knows."""
        self._put(metric, partial(_of_samples, metric, list(samples)))

    def by_rank(self, name: str, columns: Iterable[tuple[str, Sequence[float], str]]) -> None:
        """Add one series for each rank of each job; ranks whose value is negative or no number have none.

        Args:
            name: of a metric with the labels job, rank and perhaps one more.
            columns: job, values by rank, and the value of the label that comes after rank ("" where there is none).
        """
        metric = METRICS[name]
        assert metric.labels[:2] == ("job", "rank"), name
        self._put(metric, partial(_of_ranks, metric, list(columns)))

    def distributions(self, name: str, found: Iterable[tuple[tuple[str, ...], Distribution]]) -> None:
        """Add a histogram for each set of labels."""
        self._put(METRICS[name], partial(_of_distributions, METRICS[name], list(found)))

    def _put(self, metric: Metric, family: "Callable[[], Family]") -> None:
        assert metric.name not in self._families, f"{metric.name} is added twice"
        self._families[metric.name] = family

    def collect(self) -> "Iterator[Family]":
        """Yield every family that has a series, as the library's encoders ask for them; one at a time is in memory."""
        series = 0
        for build in self._families.values():
            family = build()
            if family.samples:
                series += len(family.samples)
                yield family
        if self._counted_by:
            yield _of_samples(METRICS[self._counted_by], [((), series + 1.0)])


def encoded(page: Page, accept: str = "") -> Encoded:
    """Write a page, in OpenMetrics for who accepts that and in Prometheus' text format for all others.

    Args:
        page: what was gathered.
        accept: the request's header of this name.
    """
    from prometheus_client.exposition import choose_encoder

    try:
        write, content_type = choose_encoder(accept if accept.isascii() else "")
    except TypeError:  # version=x: the library compares it with numbers
        write, content_type = choose_encoder("")
    return Encoded(write(page), content_type)


def _of_samples(metric: Metric, samples: Iterable[Sample]) -> "Family":
    from prometheus_client.metrics_core import CounterMetricFamily, GaugeMetricFamily

    # An info metric is a gauge whose name ends in _info: the library's own class would add it twice.
    build = CounterMetricFamily if metric.kind is Kind.COUNTER else GaugeMetricFamily
    family = build(metric.name, metric.help, labels=metric.labels, unit=metric.unit)
    assert family.name == metric.name.removesuffix("_total"), f"{metric.name} does not end in its unit, {metric.unit}"
    for labels, value in samples:
        assert len(labels) == len(metric.labels), (metric.name, labels)
        family.add_metric(labels, value)
    return family


def _of_ranks(metric: Metric, columns: Iterable[tuple[str, Sequence[float], str]]) -> "Family":
    # Six digits: a rank's lag to the microsecond, up to a second.
    return _of_samples(
        metric,
        (
            ((job, str(rank), more) if metric.labels[2:] else (job, str(rank)), float(f"{value:.6g}"))
            for job, values, more in columns
            for rank, value in enumerate(values)
            if 0.0 <= value < math.inf
        ),
    )


def _of_distributions(metric: Metric, found: Iterable[tuple[tuple[str, ...], Distribution]]) -> "Family":
    from prometheus_client.metrics_core import HistogramMetricFamily

    family = HistogramMetricFamily(metric.name, metric.help, labels=metric.labels, unit=metric.unit)
    for labels, one in found:
        assert len(labels) == len(metric.labels), (metric.name, labels)
        buckets = [("+Inf" if bound == math.inf else repr(float(bound)), below) for bound, below in one.below()]
        family.add_metric(labels, buckets, one.total)
    return family
