# SPDX-License-Identifier: Apache-2.0
"""Pieces of PromQL that several dashboards ask with, and the names that hold them together.

A job of 12,288 ranks has 12,288 series of every per-rank metric. So whatever has the label ``rank`` is asked for
through ``worst`` (the few that stood out in the window), a quantile, or folded along the mesh; never as it is.
"""

from typing import NamedTuple

# Stable: alerts, runbooks and bookmarks point to them.
ON_CALL = "megascale-oncall"
STRAGGLERS = "megascale-stragglers"
COLLECTIVES = "megascale-collectives"
KERNELS = "megascale-kernels"
GPU_HEALTH = "megascale-gpu-health"
FABRIC = "megascale-fabric"
GOODPUT = "megascale-goodput"
SELF = "megascale-self"

JOB = 'job="$job"'
NODE = 'node=~"$node"'
# 40 rows are as many as can be distinguished in a heat map of 600 pixels.
ROWS = 40
# 10 lines are as many as can be distinguished in one picture.
LINES = 10

# One row for each rank: while a rank moves to another node, both nodes may export it for one scrape.
RANK_INFO = f"topk by (job, rank) (1, megascale_rank_info{{{JOB}}})"


# Active NVLinks with the GPU's model: 12 and 18 stand side by side in a cluster of several, and neither lacks any.
LINKS = (
    f"(max by (node, gpu) (megascale_gpu_nvlink_active_links{{{NODE}}}) * on (node, gpu) group_left (model) "
    f"topk by (node, gpu) (1, max by (node, gpu, model) (megascale_gpu_info{{{NODE}}})))"
)
LINKS_MISSING = f"{LINKS} < on (model) group_left () max by (model) {LINKS}"


class Ask(NamedTuple):
    """One query of a panel. ``name`` is the legend, or the value's column in a table ("" leaves that column out)."""

    expr: str
    name: str = ""


def placed(expr: str, *labels: str) -> str:
    """Return ``expr``, which has ``job`` and ``rank``, with more labels of where the rank stands."""
    return f"({expr}) * on (job, rank) group_left ({', '.join(labels)}) {RANK_INFO}"


def worst(metric: str, count: int = ROWS, *, over: str = "max_over_time") -> str:
    """Return the series of ``metric`` (name and braces) that stood out most in the whole window, for all of it.

    Without the ``@ end()`` the choice would be made anew at each point of the picture, and lines would come and go.
    """
    return f"{metric} and topk({count}, {over}({metric}[$__range] @ end()))"


def worst_of(expr: str, count: int = ROWS, *, least: bool = False) -> str:
    """Return the same for an expression; the window is looked at through a subquery. ``least``: the smallest ones."""
    choose, over = ("bottomk", "min_over_time") if least else ("topk", "max_over_time")
    return f"({expr}) and {choose}({count}, {over}(({expr})[$__range:] @ end()))"


def quantiles(metric: str, by: str = "") -> tuple[Ask, ...]:
    """Return four lines that show how the many are spread: median, 90 %, 99 % and the largest."""
    named = f" by ({by})" if by else ""
    legend = f"{{{{{by}}}}} " if by else ""
    return (
        Ask(f"quantile{named} (0.5, {metric})", f"{legend}median"),
        Ask(f"quantile{named} (0.9, {metric})", f"{legend}90 %"),
        Ask(f"quantile{named} (0.99, {metric})", f"{legend}99 %"),
        Ask(f"max{named} ({metric})", f"{legend}largest"),
    )


def per_second(counter: str) -> str:
    """Return how fast a counter (name and braces) grows."""
    return f"rate({counter}[$__rate_interval])"


def bucket_quantile(share: float, histogram: str, by: str = "") -> str:
    """Return a quantile of a histogram (name of its buckets and braces), for each value of the labels ``by``."""
    labels = f"le, {by}" if by else "le"
    return f"histogram_quantile({share}, sum by ({labels}) ({per_second(histogram)}))"
