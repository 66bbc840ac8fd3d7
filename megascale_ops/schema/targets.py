# SPDX-License-Identifier: Apache-2.0
"""What Prometheus shall scrape, in the form that its file and HTTP discovery read.

The labels of a target become labels of all its series, so they are few and never change while the target lives: the
node. What changes (the jobs that run there) is a label that begins with ``__meta_``: it can be used to choose targets,
and is not kept.

https://prometheus.io/docs/prometheus/latest/http_sd/
"""

import msgspec

COMPONENT = "__meta_megascale_component"  # agent, controller
JOBS = "__meta_megascale_jobs"  # ",gpt,other,": a comma around each, as Prometheus' own lists have it


class TargetGroup(msgspec.Struct, frozen=True):
    """Targets ("HOST:PORT") that share their labels."""

    targets: tuple[str, ...]
    labels: dict[str, str] = {}
