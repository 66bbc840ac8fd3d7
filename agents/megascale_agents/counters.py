# SPDX-License-Identifier: Apache-2.0
"""What the agent counts about itself, as plain numbers; ``metrics.py`` shows them to Prometheus.

Counting must not need the Prometheus client: an agent without ``/metrics`` never loads it.
"""

from collections import defaultdict


class Tally:
    """Counters and gauges by name and labels; every name stands in the table of metrics."""

    def __init__(self, node: str) -> None:
        self._node = node
        self._values: defaultdict[str, dict[tuple[str, ...], float]] = defaultdict(dict)

    def add(self, name: str, *labels: str, by: float = 1.0) -> None:
        """Count; ``labels`` are the values of the metric's labels after ``node``, in the table's order."""
        values, key = self._values[name], (self._node, *labels)
        values[key] = values.get(key, 0.0) + by

    def set(self, name: str, value: float) -> None:
        """Remember a value of this node."""
        self._values[name][self._node,] = value

    def values(self, name: str) -> dict[tuple[str, ...], float]:
        """Return all values of a metric by their labels' values.

        A counter of the node that has not counted yet is 0, not absent: rate() needs a first value.
        """
        from megascale_ops.schema.metrics import METRICS, Kind  # 20 ms that a start need not wait for

        found = dict(self._values.get(name, {}))
        metric = METRICS.get(name)
        if not found and metric is not None and metric.labels == ("node",) and metric.kind is Kind.COUNTER:
            found[self._node,] = 0.0
        return found
