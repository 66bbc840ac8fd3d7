# SPDX-License-Identifier: Apache-2.0
"""Stragglers: which ranks hold the others up, since when, why, and what the slow ranks have in common."""

from megascale_dashboards.asking import (
    JOB,
    LINES,
    RANK_INFO,
    ROWS,
    STRAGGLERS,
    Ask,
    per_second,
    placed,
    quantiles,
    worst,
    worst_of,
)
from megascale_dashboards.frame import (
    INCIDENTS,
    RESTARTS,
    Page,
    Section,
    choice_variable,
    job_variable,
    label_variable,
    rank_variable,
)
from megascale_dashboards.maps import heat_card, timeline_card
from megascale_dashboards.panels import Card, bar_card, limits, line_card, stat_card
from megascale_dashboards.tables import table_card

LAG = f"megascale_rank_arrival_lag_seconds{{{JOB}}}"
# 0 before a rank's first step.
STEP = f"(megascale_rank_step_duration_seconds{{{JOB}}} > 0)"
WAIT = f"megascale_rank_comm_wait_ratio{{{JOB}}}"
SCORE = f"megascale_straggler_score_ratio{{{JOB}}}"
# Ranks of the stages, replicas and tensor-parallel places that were chosen.
CHOSEN = f'megascale_rank_info{{{JOB}, tp=~"$tp", pp=~"$pp", dp=~"$dp"}}'
LATE = f"max by (job, rank) ({LAG})"
HERE = f'{JOB}, rank=~"$rank"'
# At 0.1 an hour loses six minutes, about what a restart without the rank costs; 0.05 is half of it.
COST = limits((0.05, "yellow"), (0.1, "red"))


def _verdict() -> tuple[Card, ...]:
    return (
        stat_card(
            "What the worst one costs",
            "Share of every step that all ranks lose by waiting for the slowest. 0.1 on 1,024 GPUs are 102 GPUs idle. "
            "Yellow from 0.05, red from 0.1: an hour then loses six minutes, about what a restart without it costs.",
            (Ask(f"max({SCORE})"),),
            unit="percentunit",
            colours=COST,
            empty="nothing",
        ),
        bar_card(
            "Suspects by cause",
            "compute, gpu, throttled: the GPU (`megascale-ops profile` names the kernel). input: the data loader. "
            "host, gc: the CPU side. launch: the process gets to its kernels late. `megascale-ops skew` has the rest.",
            (Ask(f"sum by (cause) (megascale_straggler_suspects{{{JOB}}})", "{{cause}}"),),
            width=5,
            height=8,
        ),
        bar_card(
            "What each cause costs",
            "Share of every step, by the worst rank of each cause: ranks that are slow at once are waited for at once.",
            (Ask(f"max by (cause) ({SCORE})", "{{cause}}"),),
            width=4,
            height=8,
            unit="percentunit",
            colours=COST,
            empty="nothing",
        ),
        table_card(
            "Suspects",
            "The controller's list, the costliest first. Click at the rank to see it below, at the node for its "
            "hardware. Several ranks of one node: suspect the node; several of one pipeline stage: suspect the model.",
            (Ask(placed(f"sum by (job, rank, cause) ({SCORE})", "node", "local_rank", "tp", "pp", "dp"), "cost"),),
            ("rank", "node", "local_rank", "cause", "tp", "pp", "dp"),
            width=11,
            units={"cost": "percentunit"},
            colours=COST,
            empty="nobody",
        ),
    )


def _maps() -> tuple[tuple[Card, ...], ...]:
    hundreds = f'label_replace(label_replace({LATE}, "ranks", "0", "", ""), "ranks", "${{1}}00", "rank", "(.+)..")'
    fold = f"max by ($axis) ({LATE} * on (job, rank) group_left ($axis) {RANK_INFO})"
    return (
        (
            heat_card(
                f"Rank x time: the {ROWS} ranks that were latest",
                "How late each rank came to the collectives of its groups; TP, PP and DP above choose some. One bright "
                "row is a straggler; a bright column is something that hit all at once (a checkpoint, an evaluation, "
                "the fabric); a row that begins to glow at some moment: look what happened on that node then.",
                Ask(worst_of(f"{LATE} and on (job, rank) {CHOSEN}"), "{{rank}}"),
                height=12,
            ),
        ),
        (
            heat_card(
                "All ranks x time, a hundred ranks in a row",
                "The latest rank of each hundred; row 1200 are ranks 1200 to 1299. For the whole job at a glance: a "
                "bright band is a rack or a switch.",
                Ask(f"max by (ranks) ({hundreds})", "{{ranks}}"),
                width=12,
            ),
            heat_card(
                f"Folded along $axis: the {ROWS} latest",
                "The latest rank of each pipeline stage, replica, tensor-parallel place, expert group or node (choose "
                "above). One bright row names what the slow ranks have in common.",
                Ask(worst_of(fold), "{{$axis}}"),
                width=12,
            ),
        ),
        (
            timeline_card(
                "Suspects over time",
                "Who was a suspect when, and for what it cost. A band that comes and goes is a rank that is slow now "
                "and then: throttling, a neighbour on the node, garbage collection.",
                (Ask(worst(SCORE, 20), "rank {{rank}}: {{cause}}"),),
                unit="percentunit",
                colours=COST,
                empty="nobody was",
            ),
        ),
    )


def _spread() -> tuple[tuple[Card, ...], ...]:
    return (
        (
            line_card(
                "Time of a step, over all ranks",
                "Ranks' own median step. Synchronous ranks all take as long as the slowest, so the lines lie on each "
                "other; where they part, ranks do not wait for each other.",
                quantiles(STEP),
                unit="s",
            ),
            line_card(
                "Share of a step spent waiting, over all ranks",
                "Victims wait, the culprit does not: the lower the smallest line against the median, the more one rank "
                "holds all others up.",
                (Ask(f"min({WAIT})", "smallest"), *quantiles(WAIT)),
                unit="percentunit",
                most=1.0,
            ),
        ),
        (
            line_card(
                "Lateness, over all ranks",
                "How much later than the first of its group a rank comes to its collectives. A low median with a high "
                "largest is one straggler; all lines high means that everybody's steps vary.",
                quantiles(LATE),
                unit="s",
            ),
            table_card(
                "Who waits least",
                "Ranks with the least waiting: when all others wait, these are the ones waited for. Works without any "
                "judgement of the controller.",
                (Ask(placed(f"bottomk(15, max by (job, rank) ({WAIT}))", "node", "local_rank", "pp", "dp"), "waits"),),
                ("rank", "node", "local_rank", "pp", "dp"),
                units={"waits": "percentunit"},
                rising=True,
            ),
        ),
    )


def _gpu() -> tuple[Card, ...]:
    found = f"megascale_step_gpu_seconds{{{JOB}}}"
    return (
        line_card(
            "GPU time of a step by part",
            "What the GPUs themselves need, without waiting for the host: median of the nodes, and the slowest node. "
            "A part where the two lie apart is slow on one node's GPUs; `megascale-ops profile` names the kernel.",
            (
                Ask(f"quantile by (part) (0.5, {found})", "{{part}} median"),
                Ask(f"max by (part) ({found})", "{{part}} slowest node"),
            ),
            unit="s",
        ),
        table_card(
            "Nodes whose GPUs are slowest",
            "GPU time of the newest step, all parts together, against the median node. Click at a node for its clocks "
            "and temperatures.",
            (
                Ask(
                    f"topk(15, sum by (node) ({found})) / on () group_left () quantile(0.5, sum by (node) ({found}))",
                    "of the median",
                ),
            ),
            ("node",),
            units={"of the median": "percentunit"},
            colours=limits((1.05, "yellow"), (1.1, "red")),
            empty="no GPU timers",
        ),
    )


def _one() -> tuple[tuple[Card, ...], ...]:
    def lines(metric: str) -> str:
        return worst_of(metric, LINES)

    return (
        (
            line_card(
                "Lateness",
                f"At most {LINES} of the ranks that match the pattern above, beside the median of all.",
                (
                    Ask(lines(f"max by (rank) (megascale_rank_arrival_lag_seconds{{{HERE}}})"), "rank {{rank}}"),
                    Ask(f"quantile(0.5, {LATE})", "median of all"),
                ),
                width=8,
                unit="s",
            ),
            line_card(
                "CPU time per second",
                "Cores that the rank's process uses, in jobs of up to 4,096 ranks. Far above its neighbours: it "
                "computes on the CPU; near 0 while others work: it waits for something outside.",
                (
                    Ask(
                        lines(f"sum by (rank) ({per_second(f'megascale_rank_cpu_seconds_total{{{HERE}}}')})"),
                        "rank {{rank}}",
                    ),
                ),
                width=8,
                unit="none",
            ),
            line_card(
                "Memory of the process",
                "A line that only rises ends in an OOM kill. In jobs of up to 4,096 ranks.",
                (Ask(lines(f"max by (rank) (megascale_rank_resident_bytes{{{HERE}}})"), "rank {{rank}}"),),
                width=8,
                unit="bytes",
            ),
        ),
        (
            timeline_card(
                "Phase",
                "What the rank was doing when. A phase that is longer than the others' is where its time goes.",
                (Ask(worst(f"megascale_rank_phase_info{{{HERE}}}", 20), "rank {{rank}}: {{phase}}"),),
            ),
        ),
    )


def page() -> Page:
    """Return the dashboard."""
    return Page(
        uid=STRAGGLERS,
        title="MegaScale: Stragglers",
        text="Which rank holds the others up, since when, why, and what do the slow ones have in common?",
        sections=(
            Section("", (_verdict_line(),)),
            Section("Rank x time", _maps()),
            Section("All ranks", (*_spread(), _gpu())),
            Section("Ranks that match $rank", _one()),
        ),
        variables=(
            job_variable(),
            *(label_variable(axis, axis.upper(), f"megascale_rank_info{{{JOB}}}") for axis in ("tp", "pp", "dp")),
            choice_variable("axis", "Fold along", ("node", "pp", "dp", "tp", "ep")),
            rank_variable(),
        ),
        notes=(INCIDENTS, RESTARTS),
    )


def _verdict_line() -> tuple[Card, ...]:
    """All of the first line are as high as its table."""
    return tuple(card._replace(height=8) for card in _verdict())
