# SPDX-License-Identifier: Apache-2.0
"""A page of metrics, read as Prometheus' own client library reads it."""

from prometheus_client.openmetrics.parser import text_string_to_metric_families as open_metrics_families
from prometheus_client.parser import text_string_to_metric_families
from prometheus_client.samples import Sample

from megascale_ops.schema.metrics import METRICS

# The Accept header of Prometheus 3, shortened: OpenMetrics first, the older format if need be.
OPEN_METRICS = "application/openmetrics-text;version=1.0.0;q=0.6,text/plain;version=0.0.4;q=0.3,*/*;q=0.2"


def samples(page: bytes) -> list[Sample]:
    """Return all samples of a page in the text format: name, labels, value."""
    return [sample for family in text_string_to_metric_families(page.decode()) for sample in family.samples]


def open_samples(page: bytes) -> list[Sample]:
    """Return all samples of a page in OpenMetrics, which its parser holds against the specification."""
    return [sample for family in open_metrics_families(page.decode()) for sample in family.samples]


def values(sample: Sample) -> tuple[str, ...]:
    """Return the values of a sample's labels in the table's order, a bucket's bound last."""
    stem = sample.name.removesuffix("_bucket").removesuffix("_sum").removesuffix("_count")
    metric = METRICS.get(sample.name) or METRICS.get(stem)
    order = (*metric.labels, "le") if metric is not None else tuple(sample.labels)
    assert sample.labels.keys() <= set(order), sample
    return tuple(sample.labels[name] for name in order if name in sample.labels)
