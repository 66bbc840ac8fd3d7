# SPDX-License-Identifier: Apache-2.0
"""A page of metrics, read as Prometheus' own client library reads it."""

from prometheus_client.parser import text_string_to_metric_families
from prometheus_client.samples import Sample


def samples(page: bytes) -> list[Sample]:
    """Return all samples of a page: name, labels, value."""
    return [sample for family in text_string_to_metric_families(page.decode()) for sample in family.samples]
