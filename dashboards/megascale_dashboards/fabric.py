# SPDX-License-Identifier: Apache-2.0
"""Fabric: ports, flaps, errors, congestion and throughput of InfiniBand or RoCE, and NVLink within the nodes."""

from megascale_dashboards.asking import FABRIC, LINES, LINKS_MISSING, NODE, Ask, per_second, worst_of
from megascale_dashboards.frame import INCIDENTS, RESTARTS, Page, Section, job_variable, node_variable
from megascale_dashboards.panels import Card, limits, line_card, stat_card
from megascale_dashboards.tables import table_card

PORT = ("node", "device", "port")
BY_PORT = ", ".join(PORT)
RATE = f"megascale_ib_rate_bytes_per_second{{{NODE}}}"
UP = f"megascale_ib_port_up{{{NODE}}}"
# Active ports that came up slower than most of their kind (link layer, board, bond): a management port at 200 Gb/s is
# sound beside eight at 400.
KIND = f"topk by ({BY_PORT}) (1, max by ({BY_PORT}, kind) (megascale_ib_port_info{{{NODE}}}))"
ACTIVE = f"((max by ({BY_PORT}) ({RATE}) and on ({BY_PORT}) ({UP} == 1)) * on ({BY_PORT}) group_left (kind) {KIND})"
SLOW = f"({ACTIVE} < on (kind) group_left () quantile by (kind) (0.5, {ACTIVE}))"
FLAPS = f"increase(megascale_ib_link_flaps_total{{{NODE}}}[$__range])"
ERRORS = f"increase(megascale_ib_errors_total{{{NODE}}}[$__range])"
AGENTS = "label_values(megascale_agent_last_heartbeat_timestamp_seconds, node)"


def _verdict() -> tuple[Card, ...]:
    return (
        stat_card(
            "Ports down",
            "Ports that exist and are not active. One down port of a rank's rail makes all collectives over that rail "
            "slow or dead: cordon the node, reseat or replace the cable.",
            (Ask(f"count({UP} == 0) or vector(0)"),),
            unit="none",
            colours=limits((1, "red")),
        ),
        stat_card(
            "Ports up",
            "Active ports of the nodes chosen. It should be ports per node times nodes.",
            (Ask(f"sum({UP})"),),
            unit="none",
            empty="no ports",
        ),
        stat_card(
            "Ports below the common rate",
            "Active ports that came up slower than most of their kind (link layer and board): a cable or transceiver "
            "that trained down. Every collective over it runs at its rate.",
            (Ask(f"count({SLOW}) or vector(0)"),),
            unit="none",
            colours=limits((1, "orange")),
        ),
        stat_card(
            "Flaps in the window",
            "Times that a link went down. A link that flaps once an hour costs a hang each time that it stays away for "
            "longer than NCCL retries.",
            (Ask(f"sum({FLAPS})"),),
            unit="none",
            decimals=0,
            colours=limits((0.5, "orange"), (3, "red")),
            empty="no ports",
        ),
        stat_card(
            "Errors in the window",
            "Symbol errors, bad packets, discards and the like, over all ports.",
            (Ask(f"sum({ERRORS})"),),
            unit="short",
            decimals=0,
            colours=limits((1, "yellow"), (1000, "orange")),
            empty="no ports",
        ),
        stat_card(
            "GPUs with NVLinks missing",
            "GPUs with fewer active links than any GPU of their model has here. Within the node all collectives "
            "run at the worst GPU's rate: see Node and GPU health.",
            (Ask(f"count({LINKS_MISSING}) or vector(0)"),),
            unit="none",
            colours=limits((1, "red")),
        ),
    )


def _bad() -> tuple[Card, ...]:
    return (
        table_card(
            "Ports that are down or slow",
            "Rate 0 stands for a port that is down.",
            (
                Ask(
                    f"bottomk(100, max by ({BY_PORT}) ({UP} == 0) or max by ({BY_PORT}) ({SLOW}))",
                    "rate",
                ),
            ),
            PORT,
            width=8,
            units={"rate": "Bps"},
            empty="none",
            rising=True,
        ),
        table_card(
            "Most flaps in the window",
            "A cable or transceiver that is on its way out; cumulative down time says more than one flap.",
            (Ask(f"topk(20, sum by ({BY_PORT}) ({FLAPS}) > 0)", "flaps"),),
            PORT,
            width=8,
            colours=limits((3, "red")),
            empty="none",
        ),
        table_card(
            "Most errors in the window",
            "By kind. Symbol errors that grow are the cable; discards on sending are congestion or a dead peer.",
            (Ask(f"topk(20, sum by ({BY_PORT}, kind) ({ERRORS}) > 0)", "errors"),),
            (*PORT, "kind"),
            width=8,
            empty="none",
        ),
    )


def _use() -> tuple[Card, ...]:
    def used(direction: str) -> str:
        sent = per_second(f"megascale_ib_{direction}_bytes_total{{{NODE}}}")
        return f"{sent} / on ({BY_PORT}) {RATE}"

    def spread(direction: str) -> tuple[Ask, ...]:
        return (
            Ask(f"quantile(0.5, {used(direction)})", f"{direction}: median port"),
            Ask(f"max({used(direction)})", f"{direction}: busiest port"),
            Ask(f"min({used(direction)})", f"{direction}: idlest port"),
        )

    return (
        line_card(
            "Use of the ports",
            "Share of each port's rate. Rails of one job should lie together: one port far below its like is the "
            "slow one, or its rank is the straggler.",
            (*spread("received"), *spread("transmitted")),
            unit="percentunit",
            most=1.0,
        ),
        line_card(
            "Bytes per second, all ports",
            "What the nodes chosen move in all. It falls to nothing while the job is stuck.",
            (
                Ask(f"sum({per_second(f'megascale_ib_received_bytes_total{{{NODE}}}')})", "received"),
                Ask(f"sum({per_second(f'megascale_ib_transmitted_bytes_total{{{NODE}}}')})", "transmitted"),
            ),
            unit="Bps",
        ),
    )


def _congestion() -> tuple[Card, ...]:
    return (
        line_card(
            "Congestion by kind",
            "Packets per second. cnp_sent and ecn_marked: this side sees a full switch; cnp_handled: this side was "
            "told to slow down; out_of_sequence, ack_timeout, adaptive_retransmit: packets were lost. Lost packets "
            "with few marks are a bad link, many marks are too much traffic at one place.",
            (Ask(f"sum by (kind) ({per_second(f'megascale_ib_congestion_total{{{NODE}}}')})", "{{kind}}"),),
        ),
        line_card(
            f"The {LINES} ports with most congestion",
            "All of one rack: its uplink. One alone: what its ranks do differs.",
            (
                Ask(
                    worst_of(f"sum by ({BY_PORT}) ({per_second(f'megascale_ib_congestion_total{{{NODE}}}')})", LINES),
                    "{{node}} {{device}}/{{port}}",
                ),
            ),
        ),
    )


def _errors() -> tuple[Card, ...]:
    return (
        line_card(
            "Errors by kind",
            "Per second, over all ports.",
            (Ask(f"sum by (kind) ({per_second(f'megascale_ib_errors_total{{{NODE}}}')})", "{{kind}}"),),
        ),
        line_card(
            f"NVLink errors, the {LINES} worst GPUs",
            "Per second. crc and replay errors are repeated by the link and cost time; recovery means it was "
            "trained again. Growing: drain the node.",
            (
                Ask(
                    worst_of(
                        f"sum by (node, gpu, kind) ({per_second(f'megascale_gpu_nvlink_errors_total{{{NODE}}}')})",
                        LINES,
                    ),
                    "{{node}} GPU {{gpu}} {{kind}}",
                ),
            ),
        ),
    )


def _traffic() -> tuple[tuple[Card, ...], ...]:
    return (_use(), _congestion(), _errors())


def page() -> Page:
    """Return the dashboard."""
    return Page(
        uid=FABRIC,
        title="MegaScale: Fabric",
        text="Is a link, a port or a switch slow, flapping or full?",
        sections=(
            Section("", (_verdict(),)),
            Section("Ports to look at", (_bad(),)),
            Section("Traffic", _traffic()),
        ),
        variables=(job_variable(), node_variable(AGENTS)),
        notes=(INCIDENTS, RESTARTS),
    )
