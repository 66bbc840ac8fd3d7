# SPDX-License-Identifier: Apache-2.0
"""Collectives: how long they take, how much they move, how well the fabric is used, and which node falls behind."""

from megascale_dashboards.asking import COLLECTIVES, JOB, LINES, NODE, Ask, bucket_quantile, per_second, quantiles
from megascale_dashboards.frame import (
    INCIDENTS,
    RESTARTS,
    Page,
    Section,
    job_variable,
    label_variable,
    node_variable,
)
from megascale_dashboards.maps import heat_card
from megascale_dashboards.panels import Card, limits, line_card, stat_card
from megascale_dashboards.tables import table_card

HERE = f'{JOB}, {NODE}, op=~"$op"'
BUCKETS = f"megascale_collective_duration_seconds_bucket{{{HERE}}}"
SUM = f"megascale_collective_duration_seconds_sum{{{HERE}}}"
COUNT = f"megascale_collective_duration_seconds_count{{{HERE}}}"
MOVED = f"megascale_collective_bytes_total{{{HERE}}}"
BANDWIDTH = f"megascale_collective_bus_bandwidth_bytes_per_second{{{HERE}}}"
MIDDLE = f"quantile by (op, size_class) (0.5, {BANDWIDTH})"
WAIT = f"megascale_rank_comm_wait_ratio{{{JOB}}}"


def _verdict() -> tuple[Card, ...]:
    return (
        stat_card(
            "Matched",
            "Share of collectives of which every member's call was seen. Below 0.9 lateness is a guess: records are "
            "being dropped, see Toolkit self-check.",
            (Ask(f"megascale_collective_matched_ratio{{{JOB}}}"),),
            width=6,
            unit="percentunit",
            colours=limits((0.9, "yellow"), (0.99, "green"), base="red"),
            empty="not fed",
        ),
        stat_card(
            "Collectives per second",
            "Over all ranks of the nodes chosen.",
            (Ask(f"sum({per_second(COUNT)})"),),
            width=6,
            empty="none seen",
        ),
        stat_card(
            "Bytes per second",
            "What ranks hand to collectives, over all nodes chosen.",
            (Ask(f"sum({per_second(MOVED)})"),),
            width=6,
            unit="Bps",
            empty="none seen",
        ),
        stat_card(
            "Slowest node against the median",
            "Bus bandwidth of the worst node and size, as a share of what the others reach with the same. Below 0.8: "
            "see the table, then Fabric for that node.",
            (Ask(f"min({BANDWIDTH} / on (op, size_class) group_left () {MIDDLE})"),),
            width=6,
            unit="percentunit",
            colours=limits((0.8, "yellow"), (0.9, "green"), base="red"),
            empty="not measured",
        ),
    )


def _durations() -> tuple[Card, ...]:
    return (
        line_card(
            "Duration by operation",
            "From a rank's arrival to the end, waiting included: so the 99 % line of a job with a straggler is "
            "high everywhere but on the straggler.",
            (
                Ask(bucket_quantile(0.5, BUCKETS, "op"), "{{op}} median"),
                Ask(bucket_quantile(0.99, BUCKETS, "op"), "{{op}} 99 %"),
            ),
            unit="s",
        ),
        line_card(
            "Duration by size",
            "Small ones are latency, large ones bandwidth: when only the small ones suffer, suspect hosts and "
            "launches; when the large ones do, suspect links.",
            (
                Ask(bucket_quantile(0.5, BUCKETS, "size_class"), "{{size_class}} median"),
                Ask(bucket_quantile(0.99, BUCKETS, "size_class"), "{{size_class}} 99 %"),
            ),
            unit="s",
        ),
    )


def _spread() -> tuple[Card, ...]:
    return (
        heat_card(
            "How durations are spread",
            "Collectives by duration. Two bands are two kinds of collectives, or healthy and hindered ones.",
            Ask(f"sum by (le) (increase({BUCKETS}[$__rate_interval]))", "{{le}}"),
            width=12,
            height=9,
            buckets=True,
        ),
        line_card(
            "Time in collectives, by operation",
            "Seconds that one rank spends in each second, waiting and moving together; the next one says which.",
            (
                Ask(
                    f"sum by (op) ({per_second(SUM)}) / scalar(count(megascale_rank_info{{{JOB}, {NODE}}}))",
                    "{{op}}",
                ),
            ),
            height=9,
            unit="percentunit",
            stacked=True,
        ),
    )


def _waits() -> tuple[Card, ...]:
    return (
        line_card(
            "Waiting for peers",
            "Share of a step that ranks wait in collectives for others, over all ranks: what is left is moving "
            "data. A high median with a low smallest is a straggler, not a slow fabric.",
            (
                Ask(f"min({WAIT})", "smallest"),
                Ask(f"quantile(0.5, {WAIT})", "median"),
                Ask(f"max({WAIT})", "largest"),
            ),
            unit="percentunit",
            most=1.0,
        ),
        line_card(
            "Skew of arrival",
            "How much later than the first of its group ranks come to collectives. High with a slow fabric's pattern "
            "above: it is not the fabric, it is who comes late (Stragglers).",
            quantiles(f"max by (job, rank) (megascale_rank_arrival_lag_seconds{{{JOB}}})"),
            unit="s",
        ),
    )


def _split() -> tuple[Card, ...]:
    in_all = f"sum({per_second(SUM)}) / scalar(count(megascale_rank_info{{{JOB}, {NODE}}}))"
    return (
        line_card(
            "Waiting and moving",
            "Time in collectives, split: waiting for peers as ranks' steps have it, the rest moves data. Waiting that "
            "grows is who comes late (Stragglers); moving that grows is the fabric. Sums of streams that overlap may "
            "exceed 1.",
            (
                Ask(f"avg({WAIT})", "waiting"),
                Ask(f"clamp_min({in_all} - scalar(avg({WAIT})), 0)", "moving"),
            ),
            width=24,
            unit="percentunit",
            stacked=True,
        ),
    )


def _time() -> tuple[tuple[Card, ...], ...]:
    return (_durations(), _spread(), _waits(), _split())


def _reached() -> tuple[tuple[Card, ...], ...]:
    return (
        (
            line_card(
                "Bus bandwidth, median of nodes",
                "NCCL's convention, so it can be held against the hardware's rate whatever the number of ranks. Large "
                "ones should stay within a tenth of what they reached in the first hour.",
                (Ask(MIDDLE, "{{op}} {{size_class}}"),),
                unit="Bps",
            ),
            line_card(
                "Bytes by operation",
                "What is handed to collectives. It changes with the model's code, not with the fabric's health.",
                (Ask(f"sum by (op) ({per_second(MOVED)})", "{{op}}"),),
                unit="Bps",
                stacked=True,
            ),
        ),
        (
            line_card(
                "Bus bandwidth against its best",
                "Share of the most that each operation and size reached in the window, median of nodes. Below 0.8 for "
                "long with the same ranks: something in the fabric has changed. `CommBandwidthDegraded` watches it "
                "against the six hours before.",
                (
                    Ask(
                        f"({MIDDLE}) / on (op, size_class) max_over_time(({MIDDLE})[$__range:] @ end())",
                        "{{op}} {{size_class}}",
                    ),
                ),
                width=24,
                unit="percentunit",
                most=1.0,
            ),
        ),
    )


def _behind() -> tuple[Card, ...]:
    return (
        table_card(
            "Nodes that fall behind",
            "Bus bandwidth against the median of all nodes for the same operation and size. One node below 0.8: "
            "its links or its NIC (Fabric). All ranks of one switch: the switch.",
            (
                Ask(
                    f"bottomk(15, max by (node, op, size_class) ({BANDWIDTH}) "
                    f"/ on (op, size_class) group_left () {MIDDLE})",
                    "of the median",
                ),
            ),
            ("node", "op", "size_class"),
            units={"of the median": "percentunit"},
            colours=limits((0.8, "yellow"), (0.9, "green"), base="red"),
            rising=True,
        ),
        line_card(
            f"The {LINES} slowest nodes by size",
            "Whether a node was always slow or became so.",
            (
                Ask(
                    f"{BANDWIDTH} and bottomk({LINES}, min_over_time({BANDWIDTH}[$__range] @ end()))",
                    "{{node}} {{op}} {{size_class}}",
                ),
            ),
            unit="Bps",
        ),
    )


def _bandwidth() -> tuple[tuple[Card, ...], ...]:
    return (*_reached(), _behind())


def page() -> Page:
    """Return the dashboard."""
    return Page(
        uid=COLLECTIVES,
        title="MegaScale: Collectives",
        text="Is communication slow, and is it the fabric, one node, or somebody who comes late?",
        sections=(
            Section("", (_verdict(),)),
            Section("Time", _time()),
            Section("Bandwidth", _bandwidth()),
        ),
        variables=(
            job_variable(),
            node_variable(),
            label_variable("op", "Operation", f"megascale_collective_bytes_total{{{JOB}}}"),
        ),
        notes=(INCIDENTS, RESTARTS),
    )
