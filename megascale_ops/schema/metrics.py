# SPDX-License-Identifier: Apache-2.0
"""Every metric that a program of ours exposes, as one frozen table: name, kind, unit, help, labels.

Programs build their Prometheus families from this table and dashboards are checked against it, so a name is written
down once. The conventions are Prometheus' own: the prefix ``megascale_``, base units at the end of the name (seconds,
bytes, ratio), ``_total`` for counters, ``_info`` for facts that are labels, one meaning for one name.

No label grows with time (no step, pid or incident number): a series belongs to something that exists, and is removed
when that is gone. A node of 8 ranks has about 100 series, a job of 10,000 ranks 125,000: below the 200,000 that one
Prometheus server takes without notice.
"""

from enum import StrEnum

import msgspec


class Kind(StrEnum):
    """What Prometheus makes of a metric."""

    GAUGE = "gauge"
    COUNTER = "counter"
    HISTOGRAM = "histogram"
    INFO = "info"  # a gauge of constant value 1 whose labels are the information


class Metric(msgspec.Struct, frozen=True):
    """One metric as exposed; ``unit`` is empty where a count has none.

    ``component`` is who exposes it: agent, controller or runner; ``buckets`` are a histogram's upper bounds.
    """

    name: str
    component: str
    kind: Kind
    unit: str
    help: str
    labels: tuple[str, ...] = ()
    buckets: tuple[float, ...] = ()


_RANK = ("job", "node", "rank")
# 1 ms to 10 s in ten steps: a tick takes 1 ms when all is well and must stay below 100 ms; a journal write likewise.
_LATENCY_BUCKETS_S = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.5, 2.0, 10.0)

# One metric, one row: unfolded by the formatter this table would be 300 lines.
# fmt: off
_ROWS = (
    # Every program.
    ("megascale_build_info", "agent", Kind.INFO, "", "Version of this program.", ("version", "component")),
    # The agent: its ranks. At most ten gauges for each rank, see the module's text.
    ("megascale_rank_info", "agent", Kind.INFO, "", "Which process a rank is and where it stands in the mesh.",
     ("job", "node", "rank", "local_rank", "tp", "pp", "dp", "ep")),
    ("megascale_rank_round", "agent", Kind.GAUGE, "", "Round (incarnation of the job) the rank belongs to.", _RANK),
    ("megascale_rank_step", "agent", Kind.GAUGE, "", "Last finished training step; -1 before the first.", _RANK),
    ("megascale_rank_step_seconds", "agent", Kind.GAUGE, "seconds", "Median wall time of the recent steps.", _RANK),
    ("megascale_rank_phase_info", "agent", Kind.INFO, "", "Phase the rank is in.", (*_RANK, "phase")),
    ("megascale_rank_silent_seconds", "agent", Kind.GAUGE, "seconds",
     "Time since the rank last finished a step, changed phase or entered a collective.", _RANK),
    ("megascale_rank_cpu_seconds_total", "agent", Kind.COUNTER, "seconds", "CPU time of the rank's process.", _RANK),
    ("megascale_rank_resident_bytes", "agent", Kind.GAUGE, "bytes", "Resident memory of the rank's process.", _RANK),
    ("megascale_rank_process_info", "agent", Kind.INFO, "",
     "State of the rank's process: running, sleeping, blocked, stopped, traced, gone, other.", (*_RANK, "state")),
    # The agent: its host.
    ("megascale_host_cpu_busy_ratio", "agent", Kind.GAUGE, "ratio", "Share of all cores that is busy.", ("node",)),
    ("megascale_host_load_1m", "agent", Kind.GAUGE, "", "Load average over one minute.", ("node",)),
    ("megascale_host_memory_used_ratio", "agent", Kind.GAUGE, "ratio", "Share of memory in use.", ("node",)),
    ("megascale_host_memory_available_bytes", "agent", Kind.GAUGE, "bytes", "Memory that can be had.", ("node",)),
    ("megascale_host_swap_used_ratio", "agent", Kind.GAUGE, "ratio", "Share of swap space in use.", ("node",)),
    ("megascale_host_shm_free_bytes", "agent", Kind.GAUGE, "bytes", "Free space where the black boxes are.", ("node",)),
    ("megascale_host_disk_free_bytes", "agent", Kind.GAUGE, "bytes", "Free space of the run folder's disk.", ("node",)),
    # The agent: itself.
    ("megascale_agent_heartbeats_sent_total", "agent", Kind.COUNTER, "", "Heartbeats the controller took.", ("node",)),
    ("megascale_agent_heartbeats_failed_total", "agent", Kind.COUNTER, "",
     "Heartbeats that could not be delivered or were refused.", ("node",)),
    ("megascale_agent_heartbeats_spooled_total", "agent", Kind.COUNTER, "",
     "Heartbeats kept back while the controller was away.", ("node",)),
    ("megascale_agent_last_heartbeat_timestamp_seconds", "agent", Kind.GAUGE, "seconds",
     "Wall clock of the last heartbeat that the controller took; 0 before the first.", ("node",)),
    ("megascale_agent_box_read_errors_total", "agent", Kind.COUNTER, "",
     "Black boxes that could not be read (not ours, too short, other version).", ("node",)),
    ("megascale_agent_log_matches_total", "agent", Kind.COUNTER, "",
     "Lines of stderr that matched a known pattern.", ("node", "pattern")),
    ("megascale_agent_log_skipped_bytes_total", "agent", Kind.COUNTER, "bytes",
     "Bytes of stderr passed over because they came faster than they are read.", ("node",)),
    ("megascale_agent_collector_errors_total", "agent", Kind.COUNTER, "",
     "Looks of a collector that failed; the other collectors went on.", ("node", "collector")),
    ("megascale_agent_orders_total", "agent", Kind.COUNTER, "",
     "Orders of the controller, by what became of them: obeyed, failed, refused.", ("node", "kind", "outcome")),
    ("megascale_agent_scan_seconds_total", "agent", Kind.COUNTER, "seconds", "Time spent looking at ranks.", ("node",)),
    ("megascale_agent_scans_total", "agent", Kind.COUNTER, "", "Looks at all ranks of the node.", ("node",)),
    # The controller: jobs.
    ("megascale_jobs", "controller", Kind.GAUGE, "", "Jobs in each state of recovery.", ("state",)),
    ("megascale_job_round", "controller", Kind.GAUGE, "", "Current round of the job.", ("job",)),
    ("megascale_job_state_info", "controller", Kind.INFO, "", "State of recovery the job is in.", ("job", "state")),
    ("megascale_job_ranks", "controller", Kind.GAUGE, "", "Ranks by judgement: ok, suspect, lost.", ("job", "judged")),
    ("megascale_job_step", "controller", Kind.GAUGE, "", "Last step that every rank has finished.", ("job",)),
    ("megascale_job_step_seconds", "controller", Kind.GAUGE, "seconds", "Median wall time of a step.", ("job",)),
    ("megascale_job_useful_ratio", "controller", Kind.GAUGE, "ratio",
     "Share of wall time spent in steps that were not lost later.", ("job",)),
    ("megascale_job_restarts_total", "controller", Kind.COUNTER, "", "Restarts, by the fault's class.",
     ("job", "cause")),
    ("megascale_job_incidents_total", "controller", Kind.COUNTER, "", "Incidents, by the fault's class.",
     ("job", "fault")),
    # The controller: itself.
    ("megascale_controller_heartbeats_total", "controller", Kind.COUNTER, "", "Heartbeats taken."),
    ("megascale_controller_heartbeats_rejected_total", "controller", Kind.COUNTER, "",
     "Heartbeats refused: malformed, oversized, version, unauthorised, stale.", ("reason",)),
    ("megascale_controller_nodes", "controller", Kind.GAUGE, "", "Nodes whose agent is heard."),
    ("megascale_controller_tick_seconds", "controller", Kind.HISTOGRAM, "seconds",
     "Time to judge every job once.", (), _LATENCY_BUCKETS_S),
    ("megascale_controller_lag_seconds", "controller", Kind.GAUGE, "seconds", "How late the last tick began."),
    ("megascale_controller_journal_write_seconds", "controller", Kind.HISTOGRAM, "seconds",
     "Time from handing an event to the journal to its commit.", (), _LATENCY_BUCKETS_S),
    ("megascale_controller_journal_errors_total", "controller", Kind.COUNTER, "", "Journal writes that failed."),
    ("megascale_controller_journal_waiting", "controller", Kind.GAUGE, "",
     "Events kept in memory because the journal can't be written."),
    # The runner.
    ("megascale_runner_round", "runner", Kind.GAUGE, "", "Round the runner is in.", ("job", "node")),
    ("megascale_runner_ranks", "runner", Kind.GAUGE, "", "Living processes the runner started.", ("job", "node")),
    ("megascale_runner_rank_exits_total", "runner", Kind.COUNTER, "", "Ended ranks, by how they ended.",
     ("job", "node", "how")),
)
# fmt: on

METRICS: dict[str, Metric] = {row[0]: Metric(*row) for row in _ROWS}


def metrics_of(component: str) -> tuple[Metric, ...]:
    """Return the metrics that ``component`` (agent, controller, runner) exposes, in the table's order."""
    return tuple(metric for metric in METRICS.values() if metric.component == component)
