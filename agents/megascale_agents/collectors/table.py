# SPDX-License-Identifier: Apache-2.0
"""The collectors that are asked for themselves alone: a file of this folder each (its form: ``collector.py``).

What other parts of the agent ask as well has a class in ``hardware`` (GPUs, adapters, the kernel's log), or is looked
at by the daemon itself (host, processes, sockets).
"""

from importlib import import_module
from typing import TYPE_CHECKING, cast

if TYPE_CHECKING:
    from megascale_agents.collectors.collector import Collector
    from megascale_ops.schema.metrics import Metric

COLLECTORS = (
    "pressure",
    "blocked",
    "disks",
)


def module_of(name: str) -> str:
    """Return the module of a collector."""
    return f"{__package__}.{name}"


def collector(name: str) -> "Collector":
    """Load one collector."""
    return cast("Collector", import_module(module_of(name)))


def declared() -> "tuple[Metric, ...]":
    """Return the metrics that collectors declare themselves."""
    return tuple(metric for name in COLLECTORS for metric in getattr(collector(name), "METRICS", ()))
