# SPDX-License-Identifier: Apache-2.0
"""Overlap kernels: how far each launch is, which rank waits for which, and which peer all the others wait for."""

from megascale_dashboards.asking import JOB, KERNELS, LINES, NODE, ROWS, Ask, worst_of
from megascale_dashboards.frame import INCIDENTS, RESTARTS, Page, Section, job_variable, label_variable, node_variable
from megascale_dashboards.maps import heat_card
from megascale_dashboards.panels import Card, bar_card, limits, line_card, stat_card
from megascale_dashboards.tables import table_card

HERE = f'{JOB}, {NODE}, kernel=~"$kernel"'
PROGRESS = f"megascale_tile_progress_ratio{{{HERE}}}"
WAITING = f"megascale_tile_waiting{{{HERE}}}"


def _verdict() -> tuple[Card, ...]:
    return (
        stat_card(
            "Furthest behind",
            "Tiles done in the newest launch, of the rank that is furthest behind. Looked at again and again it "
            "should differ; the same number below 1 for a minute is a hang inside the kernel.",
            (Ask(f"min({PROGRESS})"),),
            width=6,
            unit="percentunit",
            empty="no overlap kernel runs",
        ),
        stat_card(
            "Unchanged for a minute",
            "Ranks whose launch is not done and has not moved for a minute. Launches take milliseconds: anything but 0 "
            "is a hang. The table on the right says who is waited for.",
            (Ask(f"count(({PROGRESS} < 1) and (changes({PROGRESS}[1m]) == 0)) or vector(0)"),),
            width=6,
            unit="none",
            colours=limits((1, "red")),
        ),
        stat_card(
            "Thread blocks that wait",
            "Thread blocks that wait now for the two peers that their rank waits for most, over all ranks. Some always "
            "do; what counts is whether they wait for one and the same peer.",
            (Ask(f"sum({WAITING})"),),
            width=6,
            unit="none",
            empty="none",
        ),
        stat_card(
            "Waited for by most",
            "The peer that the most tiles wait for: its number in the kernel's own group, which is as a rule its "
            "tensor-parallel place on that node. In a hang this is the culprit, or the one before it: look what it "
            "waits for itself.",
            (Ask(f"topk(1, sum by (node, peer) ({WAITING}))", "peer {{peer}} on {{node}}"),),
            width=6,
            names=True,
            colours=limits((1, "yellow")),
            empty="nobody",
        ),
    )


def _waits() -> tuple[tuple[Card, ...], ...]:
    by_peer = f"sum by (node, peer) ({WAITING})"
    return (
        (
            table_card(
                "Who waits for whom",
                "Rank, kernel and the peer (its number in the kernel's group) whose tiles are missing. Follow the "
                "peers: a chain ends at the culprit, a ring is a deadlock. `megascale-ops why` follows it for you.",
                (Ask(f"topk(100, sum by (node, rank, kernel, peer) ({WAITING}))", "thread blocks"),),
                ("rank", "node", "kernel", "peer"),
                height=10,
                empty="nobody waits",
            ),
            bar_card(
                f"The {LINES} peers that are waited for most",
                "Thread blocks that wait, by the peer that owes them a tile.",
                (
                    Ask(
                        f"topk({LINES}, sum by (node, peer, kernel) ({WAITING}))",
                        "peer {{peer}} on {{node}} in {{kernel}}",
                    ),
                ),
                width=12,
                height=10,
                empty="nobody",
            ),
        ),
        (
            heat_card(
                f"Waits by peer x time, the {ROWS} most waited for",
                "One bright row: one rank (or its links) holds its whole group up in the kernel. All rows alike: tiles "
                "come as fast as the fabric brings them.",
                Ask(worst_of(by_peer), "{{node}} peer {{peer}}"),
                unit="none",
            ),
        ),
    )


def _progress() -> tuple[tuple[Card, ...], ...]:
    return (
        (
            line_card(
                "Tiles done, by kernel",
                "The newest launch of each kernel: the rank furthest behind, and the median.",
                (
                    Ask(f"min by (kernel) ({PROGRESS})", "{{kernel}} furthest behind"),
                    Ask(f"quantile by (kernel) (0.5, {PROGRESS})", "{{kernel}} median"),
                ),
                unit="percentunit",
                most=1.0,
            ),
            table_card(
                "Ranks furthest behind",
                "What they have done of the newest launch. Click at the rank for its history, at the node for its GPU.",
                (Ask(f"bottomk(20, min by (rank, node, kernel) ({PROGRESS}))", "done"),),
                ("rank", "node", "kernel"),
                units={"done": "percentunit"},
                empty="no overlap kernel runs",
                rising=True,
            ),
        ),
        (
            heat_card(
                f"Rank x time: tiles done of the {ROWS} furthest behind",
                "A row that stays dark is a rank whose kernel does not move.",
                Ask(
                    worst_of(f"min by (rank) ({PROGRESS})", least=True),
                    "{{rank}}",
                ),
                unit="percentunit",
                most=1.0,
            ),
        ),
    )


def page() -> Page:
    """Return the dashboard."""
    return Page(
        uid=KERNELS,
        title="MegaScale: Overlap kernels",
        text="Do the fused kernels move, and if not, whose tiles are missing?",
        sections=(
            Section("", (_verdict(),)),
            Section("Who waits for whom", _waits()),
            Section("How far they are", _progress()),
        ),
        variables=(
            job_variable(),
            node_variable(),
            label_variable("kernel", "Kernel", f"megascale_tile_progress_ratio{{{JOB}}}"),
        ),
        notes=(INCIDENTS, RESTARTS),
    )
