# SPDX-License-Identifier: Apache-2.0
"""Toolkit self-check: are the watchers well, do they miss anything, and what do they cost?"""

from megascale_dashboards.asking import JOB, LINES, NODE, SELF, Ask, bucket_quantile, per_second, worst_of
from megascale_dashboards.fabric import AGENTS
from megascale_dashboards.frame import Page, Section, job_variable, node_variable
from megascale_dashboards.panels import Card, limits, line_card, stat_card
from megascale_dashboards.tables import table_card

TICK = "megascale_controller_tick_seconds_bucket"
JOURNAL = "megascale_controller_journal_write_seconds_bucket"
# A build_info shows which process a page is of; both programs carry the standard process metrics.
AGENT = 'megascale_build_info{component="agent"}'
CPU = "rate(process_cpu_seconds_total[$__rate_interval])"
HEARD_S = "time() - megascale_agent_heard_timestamp_seconds"
SENT_S = f"time() - (megascale_agent_last_heartbeat_timestamp_seconds{{{NODE}}} > 0)"


def _verdict() -> tuple[Card, ...]:
    return (
        stat_card(
            "Agents heard",
            "Nodes whose agent the controller has heard in the last minute. It should be the number of nodes.",
            (Ask(f"count({HEARD_S} < 60) or vector(0)"),),
            unit="none",
            colours=limits((1, "green"), base="red"),
        ),
        stat_card(
            "Longest not heard",
            "Heartbeats come once a second. Yellow from 10 s, red from 30 s: is the node down, or its agent, or the "
            "way between? `megascale-ops status` and the node's own /healthz tell.",
            (Ask(f"max({HEARD_S})"),),
            unit="s",
            colours=limits((10, "yellow"), (30, "red")),
            empty="none known",
        ),
        stat_card(
            "Controller late by",
            "How late its last look at all jobs began. Above 1 s verdicts come late: is its machine overloaded?",
            (Ask("max(megascale_controller_lag_seconds)"),),
            unit="s",
            colours=limits((0.2, "yellow"), (1, "red")),
            empty="no controller",
        ),
        stat_card(
            "Journal",
            "Batches of events that wait because the journal can't be written, and events that were lost for it. "
            "Training goes on; a controller that is killed now forgets them. Is its disk full?",
            (
                Ask("max(megascale_controller_journal_waiting)", "waiting"),
                Ask("max(megascale_controller_journal_lost_events_total)", "lost"),
            ),
            unit="none",
            colours=limits((1, "red")),
            empty="no controller",
        ),
        stat_card(
            "Series of the controller",
            "What its last scrape held. 12,288 ranks make about 28,000; all of a job should stay below 200,000.",
            (Ask("max(megascale_controller_series)"),),
            unit="short",
            colours=limits((150_000, "yellow"), (200_000, "red")),
            empty="no controller",
        ),
        stat_card(
            "Clocks apart by",
            "The node whose wall clock is furthest from the controller's. Verdicts do not depend on it; traces and "
            "logs are hard to read from 0.5 s on. Is time synchronisation running there?",
            (Ask("max(abs(megascale_node_clock_offset_seconds))"),),
            unit="s",
            colours=limits((0.5, "yellow"), (5, "red")),
            empty="not known",
        ),
    )


def _pace() -> tuple[Card, ...]:
    return (
        line_card(
            "Time to judge all jobs",
            "Must stay below 0.1 s, or the next look is late.",
            (Ask(bucket_quantile(0.5, TICK), "median"), Ask(bucket_quantile(0.99, TICK), "99 %")),
            width=8,
            unit="s",
            colours=limits((0.1, "red")),
        ),
        line_card(
            "Time to write the journal",
            "Every move is written before its orders leave: a slow disk makes recovery slow.",
            (Ask(bucket_quantile(0.5, JOURNAL), "median"), Ask(bucket_quantile(0.99, JOURNAL), "99 %")),
            width=8,
            unit="s",
            colours=limits((0.5, "red")),
        ),
        line_card(
            "Heartbeats",
            "Per second: one from each node. Refused ones are malformed, too large, of another version, late or "
            "without the right token.",
            (
                Ask(f"sum({per_second('megascale_controller_heartbeats_total')})", "taken"),
                Ask(
                    f"sum by (reason) ({per_second('megascale_controller_heartbeats_rejected_total')})",
                    "refused: {{reason}}",
                ),
            ),
            width=8,
        ),
    )


def _nodes() -> tuple[Card, ...]:
    return (
        table_card(
            "Nodes not heard for longest",
            "The 15 longest. One: its agent or node. Many at once: the network, or the controller.",
            (Ask(f"topk(15, max by (node) ({HEARD_S}))", "not heard for"),),
            ("node",),
            width=8,
            units={"not heard for": "s"},
            colours=limits((10, "yellow"), (30, "red")),
        ),
        table_card(
            "Clocks furthest apart",
            "Node's wall clock minus the controller's.",
            (
                Ask(
                    "megascale_node_clock_offset_seconds and topk(15, abs(megascale_node_clock_offset_seconds))",
                    "offset",
                ),
            ),
            ("node",),
            width=8,
            units={"offset": "s"},
        ),
        table_card(
            "Versions",
            "Neighbours one version apart understand each other; more than two versions at a time are a rollout "
            "that was left half done.",
            (Ask("count by (component, version) (megascale_build_info)", "programs"),),
            ("component", "version"),
            width=8,
        ),
    )


def _own_faults() -> tuple[Card, ...]:
    """Faults of the watchers themselves, contained: they cost a job its judge for a while, never its training."""
    return (
        stat_card(
            "Jobs unjudged now",
            "After a fault of the controller's own in judging a job, that job goes unjudged for 5 s to 5 minutes; the "
            "others do not. Its /healthz names the job and the fault.",
            (Ask("max(megascale_controller_unjudged_jobs)"),),
            width=8,
            height=8,
            unit="none",
            colours=limits((1, "red")),
            empty="no controller",
        ),
        line_card(
            "Faults of the controller's own",
            "In each quarter of an hour. Each is a bug that was contained: the log has it, beginning with `a fault of "
            "ours while`.",
            (Ask("sum by (instance) (increase(megascale_controller_own_faults_total[15m]))", "{{instance}}"),),
            width=8,
            colours=limits((1, "red")),
        ),
        line_card(
            f"Values of black boxes that were mended, the {LINES} worst nodes",
            "In each quarter of an hour: what can't be was brought into range before it was sent. A script writes over "
            "its own black box, or memory is bad.",
            (Ask(worst_of(f"increase(megascale_agent_values_mended_total{{{NODE}}}[15m])", LINES), "{{node}}"),),
            width=8,
        ),
    )


def _leaders() -> tuple[Card, ...]:
    """Several controllers on one database: one leads, and its number grows with each change."""
    epoch = "megascale_controller_epoch"
    return (
        table_card(
            "Controllers",
            "One leads, the others wait for its end. *led as* is the newest leader's number as this controller knows "
            "it, 0 where there is only one without PostgreSQL; two that differ for long do not share a database. "
            "Nobody leads: no dead rank is restarted; `GET /leader` of each says why.",
            (
                Ask("max by (instance) (megascale_controller_leader)", "leads"),
                Ask(f"max by (instance) ({epoch})", "led as"),
                Ask("max by (instance) (megascale_controller_journal_failing)", "journal fails"),
            ),
            ("instance",),
            width=8,
        ),
        line_card(
            "Leaders at a time",
            "1 is right. 0 for longer than ten seconds: no controller is there, or the leader can't be sure that it "
            "still leads. 2 for one scrape: it changed between two pages.",
            (Ask("sum(megascale_controller_leader) or vector(0)", "leaders"),),
            width=8,
        ),
        line_card(
            "Number of the leader",
            "Each change makes it one higher: somebody was stopped, killed, paused or cut off from the database, and "
            "a restart of a single controller on PostgreSQL counts as well. Many in an hour: is the database slow?",
            (Ask(f"max({epoch})", "number"), Ask(f"max(changes({epoch}[1h]))", "changes in the last hour")),
            width=8,
        ),
    )


def _reached() -> tuple[Card, ...]:
    """Whether agents reach the controller that leads, or a standby instead of it."""
    unheard = "megascale_controller_unheard_seconds and on (instance) megascale_controller_leader == 1"
    return (
        line_card(
            "The leader has answered no agent for",
            "Of several controllers the one that leads; agents speak each second. From 20 s on it gives way, if more "
            "than half of the nodes ask a standby. Long without a job: no agent speaks. Long with one: what cuts it "
            "off? `GET /leader` of each, and the network between them and the nodes.",
            (Ask(f"max by (instance) ({unheard})", "{{instance}}"),),
            width=8,
            unit="s",
            colours=limits((20, "yellow"), (60, "red")),
        ),
        line_card(
            "Nodes that ask a standby",
            "0 is right. Their agents do not reach the leader, and what they tell is not judged. A few for seconds: "
            "the leader has just changed. Behind a proxy that asks `GET /leader` no standby is asked.",
            (Ask("max by (instance) (megascale_controller_refused_nodes)", "{{instance}}"),),
            width=8,
            colours=limits((1, "red")),
        ),
        line_card(
            "Leaders that gave way",
            "In each hour: it was reached by no agent, and a standby was. Each is a network that was cut; "
            "`leader_gave_way` in a job's events says why. After six in an hour no leader gives way any more.",
            (Ask("sum by (instance) (increase(megascale_controller_gave_way_total[1h]))", "{{instance}}"),),
            width=8,
            colours=limits((1, "red")),
        ),
    )


def _controller() -> tuple[tuple[Card, ...], ...]:
    return (_pace(), _leaders(), _reached(), _own_faults(), _nodes())


def _heartbeats() -> tuple[Card, ...]:
    def rate(metric: str, by: str) -> str:
        return f"sum by ({by}) ({per_second(f'{metric}{{{NODE}}}')})"

    return (
        line_card(
            "Heartbeats of agents",
            "Per second. failed: the controller is not reached or refuses; spooled: kept for later.",
            (
                Ask(f"sum({per_second(f'megascale_agent_heartbeats_sent_total{{{NODE}}}')})", "taken"),
                Ask(f"sum({per_second(f'megascale_agent_heartbeats_failed_total{{{NODE}}}')})", "failed"),
                Ask(f"sum({per_second(f'megascale_agent_heartbeats_spooled_total{{{NODE}}}')})", "spooled"),
            ),
            width=8,
        ),
        line_card(
            "Since the last heartbeat that was taken",
            f"As agents see it, the {LINES} longest.",
            (Ask(worst_of(f"max by (node) ({SENT_S})", LINES), "{{node}}"),),
            width=8,
            unit="s",
            colours=limits((30, "red")),
        ),
        line_card(
            "Time of a look at all ranks",
            "Of one node's agent, ten times a second: the slowest node and the mean.",
            (
                Ask(
                    f"max({rate('megascale_agent_scan_seconds_total', 'node')} "
                    f"/ {rate('megascale_agent_scans_total', 'node')})",
                    "slowest node",
                ),
                Ask(
                    f"avg({rate('megascale_agent_scan_seconds_total', 'node')} "
                    f"/ {rate('megascale_agent_scans_total', 'node')})",
                    "mean",
                ),
            ),
            width=8,
            unit="s",
        ),
    )


def _costs() -> tuple[Card, ...]:
    def rate(metric: str, by: str) -> str:
        return f"sum by ({by}) ({per_second(f'{metric}{{{NODE}}}')})"

    return (
        line_card(
            "CPU of agents",
            f"Cores. One agent may use 0.01 of a core with all collectors; the {LINES} that use most.",
            (Ask(worst_of(f"{CPU} and on (instance) {AGENT}", LINES), "{{instance}}"),),
            width=8,
            unit="percentunit",
            colours=limits((0.01, "orange")),
        ),
        line_card(
            "Memory of agents",
            f"60 MB is what one may use; the {LINES} largest.",
            (Ask(worst_of(f"process_resident_memory_bytes and on (instance) {AGENT}", LINES), "{{instance}}"),),
            width=8,
            unit="bytes",
            colours=limits((60e6, "orange")),
        ),
        line_card(
            "What agents could not see",
            "Per second: looks of a collector that failed, black boxes that could not be read, bytes of logs "
            "passed over, checks that did not finish. Whatever is not 0 is a blind spot: the agent's log says why.",
            (
                Ask(rate("megascale_agent_collector_errors_total", "collector"), "collector {{collector}}"),
                Ask(f"sum({per_second(f'megascale_agent_box_read_errors_total{{{NODE}}}')})", "black boxes"),
                Ask(f"sum({per_second(f'megascale_agent_log_skipped_bytes_total{{{NODE}}}')})", "log bytes"),
                Ask(rate("megascale_health_check_timeouts_total", "check"), "check {{check}} timed out"),
            ),
            width=8,
        ),
    )


def _checks() -> tuple[Card, ...]:
    def rate(metric: str, by: str) -> str:
        return f"sum by ({by}) ({per_second(f'{metric}{{{NODE}}}')})"

    return (
        line_card(
            "Time that checks take",
            f"The {LINES} slowest now, on any node. One that nears its deadline will turn into no answer.",
            (Ask(worst_of(f"megascale_health_check_duration_seconds{{{NODE}}}", LINES), "{{node}}: {{check}}"),),
            unit="s",
        ),
        line_card(
            "Orders by what became of them",
            "Per second. failed or refused orders are why a recovery does not go on: see the agent's log.",
            (Ask(rate("megascale_agent_orders_total", "kind, outcome"), "{{kind}}: {{outcome}}"),),
        ),
    )


def _agents() -> tuple[tuple[Card, ...], ...]:
    return (_heartbeats(), _costs(), _checks())


def _profiler_costs() -> tuple[Card, ...]:
    here = f"{JOB}, {NODE}"
    ranks = f"scalar(count(megascale_rank_info{{{here}}}))"
    return (
        line_card(
            "Time that the NCCL profiler takes, by rank",
            "Seconds of CPU in each second, mean of all ranks; the share above is of the rank where it is most. The "
            "two far apart: one rank calls far more collectives than the others.",
            (Ask(f"sum({per_second(f'megascale_plugin_overhead_seconds_total{{{here}}}')}) / {ranks}", "mean"),),
            unit="percentunit",
        ),
        line_card(
            "Kinds of events that the NCCL profiler asks for",
            "NCCL's bits: 2 collectives, 4 sends and receives, 64 what the GPU's own times come from. It changes only "
            "with `MEGASCALE_PROFILER_MASK=adapt`; ranks that differ have another NCCL or a second plugin. That most "
            "collectives go without 64 where there are too many is not shown here but as `untimed` below.",
            (
                Ask(f"min(megascale_profiler_event_mask{{{here}}})", "fewest"),
                Ask(f"max(megascale_profiler_event_mask{{{here}}})", "most"),
            ),
            unit="none",
        ),
    )


def _profiler() -> tuple[Card, ...]:
    here = f"{JOB}, {NODE}"
    return (
        line_card(
            "What the NCCL profiler costs",
            "Share of the wall time in the rank where it is most, against what it may take. Above the budget it leaves "
            "records out.",
            (
                Ask(f"max(megascale_nccl_profiler_overhead_ratio{{{here}}})", "costs"),
                Ask(f"min(megascale_nccl_profiler_budget_ratio{{{here}}})", "may cost"),
            ),
            width=8,
            unit="percentunit",
        ),
        line_card(
            "Records of the NCCL profiler",
            "Collectives, sends and receives written down per second.",
            (Ask(f"sum({per_second(f'megascale_nccl_profiler_records_total{{{here}}}')})", "written"),),
            width=8,
        ),
        line_card(
            "What the NCCL profiler lost",
            "Per second, by reason. unsampled (no record) and untimed (a record without GPU times) are meant: the "
            "budget; late and busy mean that lateness of ranks is judged on fewer records.",
            (
                Ask(
                    f"sum by (reason) ({per_second(f'megascale_records_dropped_total{{{here}}}')})",
                    "{{reason}}",
                ),
            ),
            width=8,
        ),
    )


def page() -> Page:
    """Return the dashboard."""
    return Page(
        uid=SELF,
        title="MegaScale: Toolkit self-check",
        text="Are the watchers well, do they miss anything, and what do they cost?",
        sections=(
            Section("", (_verdict(),)),
            Section("Controller", _controller()),
            Section("Agents", _agents()),
            Section("NCCL profiler", (_profiler(), _profiler_costs())),
        ),
        variables=(job_variable(), node_variable(AGENTS)),
    )
