# SPDX-License-Identifier: Apache-2.0
"""The lower part of Node and GPU health: pressure, disks and blocked processes of the hosts, and their jobs."""

from megascale_dashboards.asking import LINES, NODE, Ask, worst_of
from megascale_dashboards.panels import Card, limits, line_card
from megascale_dashboards.tables import table_card


def _pressure() -> tuple[Card, ...]:
    def worst_nodes(metric: str) -> Ask:
        found = f"{metric}{{{NODE}}}"
        return Ask(f"{found} and topk({LINES}, max_over_time({found}[$__range] @ end()))", "{{node}}")

    return (
        line_card(
            f"CPU pressure, the {LINES} worst nodes",
            "Share of the time that something runnable waits for a core. Above 0.2 the ranks' own Python is slowed "
            "down: too many data-loader workers, or a stranger on the node.",
            (worst_nodes("megascale_host_cpu_pressure_ratio"),),
            width=8,
            unit="percentunit",
            colours=limits((0.2, "orange")),
        ),
        line_card(
            f"Memory pressure, the {LINES} worst nodes",
            "Share of the time that something waits for memory. Anything lasting ends in an OOM kill.",
            (worst_nodes("megascale_host_memory_pressure_ratio"),),
            width=8,
            unit="percentunit",
            colours=limits((0.1, "orange")),
        ),
        line_card(
            f"I/O pressure, the {LINES} worst nodes",
            "Share of the time that something waits for a disk or a file system. High while the data loader is "
            "slow: the storage.",
            (worst_nodes("megascale_host_io_pressure_ratio"),),
            width=8,
            unit="percentunit",
            colours=limits((0.3, "orange")),
        ),
    )


def _full() -> tuple[Card, ...]:
    free = f"min by (node, mount_kind) (megascale_host_disk_free_ratio{{{NODE}}})"
    return (
        table_card(
            "Disks nearly full",
            "The 15 fullest: share that is free, of bytes and of inodes. Below 0.05: the next checkpoint may fail.",
            (
                Ask(f"bottomk(15, {free})", "bytes free"),
                Ask(
                    f"min by (node, mount_kind) (megascale_host_inodes_free_ratio{{{NODE}}}) "
                    f"and on (node, mount_kind) bottomk(15, {free})",
                    "inodes free",
                ),
            ),
            ("node", "mount_kind"),
            width=8,
            units={"bytes free": "percentunit", "inodes free": "percentunit"},
            colours=limits((0.05, "orange"), (0.1, "green"), base="red"),
            rising=True,
        ),
        line_card(
            "OOM kills and blocked processes",
            "Kills in the last minutes, and processes that wait in the kernel where no signal reaches them: dead "
            "storage or a hung driver.",
            (
                Ask(f"sum(increase(megascale_host_oom_kills_total{{{NODE}}}[$__rate_interval]))", "OOM kills"),
                Ask(worst_of(f"megascale_host_blocked_processes{{{NODE}}} > 0", LINES), "blocked on {{node}}"),
            ),
            width=8,
            unit="none",
        ),
        table_card(
            "Who runs here",
            "Ranks on the nodes chosen (the first 200), with their GPU. Click at a rank for its history.",
            (Ask(f"topk(200, max by (rank, node, job, local_rank, gpu_uuid) (megascale_rank_info{{{NODE}}}))"),),
            ("rank", "node", "job", "local_rank", "gpu_uuid"),
            width=8,
            empty="no rank",
        ),
    )


def hosts() -> tuple[tuple[Card, ...], ...]:
    """Return the lines of panels."""
    return (_pressure(), _full())
