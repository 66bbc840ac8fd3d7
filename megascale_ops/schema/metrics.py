# SPDX-License-Identifier: Apache-2.0
"""Every metric that a program of ours exposes, as one frozen table: name, kind, unit, help, labels.

Programs build their Prometheus families from this table and dashboards are checked against it, so a name is written
down once. The conventions are Prometheus' own: the prefix ``megascale_``, base units at the end of the name (seconds,
bytes, ratio), ``_total`` for counters, ``_info`` for facts that are labels, one meaning for one name.

No label grows with time (no step, pid or incident number): a series belongs to something that exists, and is removed
when that is gone. The budget of a job of 12,288 ranks is 200,000 series (``tests/processes/test_prometheus.py`` counts
them in a real Prometheus): two a rank and two a node at the controller, five a rank and some seventy a node at the
agents, those of the NCCL profiler, the GPUs' timers and overlapped kernels among them. What belongs to nodes (hardware,
host, the agent itself) is there without any job and scraped apart: at most 500 a node of 8 GPUs.
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

    ``component`` is the program that exposes it: agent, controller, runner or every one of them; ``buckets`` are a
    histogram's upper bounds.
    """

    name: str
    component: str
    kind: Kind
    unit: str
    help: str
    labels: tuple[str, ...] = ()
    buckets: tuple[float, ...] = ()


# Jobs of more ranks have fewer series of each: no CPU time and memory of single ranks, five classes of collectives, of
# an overlapped kernel the node's rank that is furthest behind. In smaller ones all stays far below the budget.
MOST_DETAILED = 4_096
# The component of what every program exposes.
EVERY = "every"
_RANK = ("job", "node", "rank")
_GPU = ("node", "gpu")
_PORT = ("node", "device", "port")
# 1 ms to 10 s in ten steps: a tick takes 1 ms when all is well and must stay below 100 ms; a journal write likewise.
_LATENCY_BUCKETS_S = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.5, 2.0, 10.0)
# Decades: each bound costs a series for each operation, size and node. What is slow today shows in the bandwidth.
_COLLECTIVE_BUCKETS_S = (0.0003, 0.003, 0.03, 0.3, 3.0)
# 50 ms to two minutes; most jobs make steps of 1 to 30 s.
_STEP_BUCKETS_S = (0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 20.0, 40.0, 120.0)

# One metric, one row: unfolded by the formatter this table would be 300 lines.
# fmt: off
_ROWS = (
    # Every program.
    ("megascale_build_info", EVERY, Kind.INFO, "", "Version of this program.", ("version", "component")),
    # The agent: its ranks. At most ten gauges for each rank, see the module's text.
    ("megascale_rank_info", "agent", Kind.INFO, "", "Which process a rank is and where it stands in the mesh.",
     ("job", "node", "rank", "local_rank", "tp", "pp", "dp", "ep", "gpu_uuid")),
    ("megascale_rank_round", "agent", Kind.GAUGE, "",
     "Round (incarnation of the job) that the node's ranks belong to.", ("job", "node")),
    ("megascale_rank_step", "agent", Kind.GAUGE, "", "Last finished training step; -1 before the first.", _RANK),
    ("megascale_rank_step_duration_seconds", "agent", Kind.GAUGE, "seconds",
     "Median wall time of the recent steps.", _RANK),
    ("megascale_step_gpu_seconds", "agent", Kind.GAUGE, "seconds",
     "GPU time of the newest step's data, forward, backward, optimizer, checkpoint: median of the node's ranks.",
     ("job", "node", "part")),
    # The agent: checkpoints that its ranks save with us; of a node's ranks the one with the most.
    ("megascale_checkpoint_stall_seconds", "agent", Kind.GAUGE, "seconds",
     "How long the training stood still for its newest save.", ("job", "node")),
    ("megascale_checkpoint_write_seconds", "agent", Kind.GAUGE, "seconds",
     "How long the newest sealed save was written beside the training; 0: it was not saved in the background.",
     ("job", "node")),
    ("megascale_checkpoint_saves_in_flight", "agent", Kind.GAUGE, "",
     "Saves that are still written in the background: 0 or 1.", ("job", "node")),
    ("megascale_checkpoint_failed_saves_total", "agent", Kind.COUNTER, "",
     "Saves that failed, of the present processes.", ("job", "node")),
    ("megascale_checkpoint_sealed_timestamp_seconds", "agent", Kind.GAUGE, "seconds",
     "Wall clock when the newest checkpoint was sealed; no series before the first.", ("job", "node")),
    # The same of restores; of the present processes.
    ("megascale_checkpoint_restores_total", "agent", Kind.COUNTER, "",
     "Restores, by where the checkpoint was read: node, buddy (the copy of what a node had lost), shared, store.",
     ("job", "node", "tier")),
    ("megascale_checkpoint_restore_seconds", "agent", Kind.GAUGE, "seconds",
     "How long the newest restore took, the search for it included.", ("job", "node")),
    ("megascale_checkpoint_restore_read_bytes", "agent", Kind.GAUGE, "bytes",
     "What the node's ranks read from storage for it; what they were sent by others is not in it.", ("job", "node")),
    ("megascale_checkpoint_passed_over_total", "agent", Kind.COUNTER, "",
     "Checkpoints that restores found damaged and passed over for an older one.", ("job", "node")),
    ("megascale_checkpoint_failed_restores_total", "agent", Kind.COUNTER, "",
     "Restores that found checkpoints and could load none.", ("job", "node")),
    ("megascale_rank_phase_info", "agent", Kind.INFO, "", "Phase the rank is in.", (*_RANK, "phase")),
    ("megascale_rank_silent_seconds", "agent", Kind.GAUGE, "seconds",
     "Time since the rank last finished a step, changed phase or entered a collective.", _RANK),
    ("megascale_rank_cpu_seconds_total", "agent", Kind.COUNTER, "seconds",
     "CPU time of the rank's process; of jobs of up to 4,096 ranks.", _RANK),
    ("megascale_rank_resident_bytes", "agent", Kind.GAUGE, "bytes",
     "Resident memory of the rank's process; of jobs of up to 4,096 ranks.", _RANK),
    ("megascale_rank_process_info", "agent", Kind.INFO, "",
     "State of the rank's process, where it is odd: blocked, stopped, traced, gone, other.", (*_RANK, "state")),
    # The agent: its host.
    # The NCCL profiler plugin in this node's ranks, where NCCL has loaded it.
    ("megascale_nccl_profiler_overhead_ratio", "agent", Kind.GAUGE, "ratio",
     "Share of the wall time that the plugin's calls took when last measured, in the rank where it was most.",
     ("job", "node")),
    ("megascale_plugin_overhead_seconds_total", "agent", Kind.COUNTER, "seconds",
     "Time that the plugin's calls took in all ranks of the node; one call in sixteen is measured.", ("job", "node")),
    ("megascale_profiler_event_mask", "agent", Kind.GAUGE, "",
     "Kinds of events that NCCL is asked for now, as NCCL's bits; of ranks that differ the fewest.", ("job", "node")),
    ("megascale_nccl_profiler_budget_ratio", "agent", Kind.GAUGE, "ratio", "Share that they may take.",
     ("job", "node")),
    ("megascale_nccl_profiler_records_total", "agent", Kind.COUNTER, "",
     "Collectives, sends and receives that the plugin has written down.", ("job", "node")),
    ("megascale_records_dropped_total", "agent", Kind.COUNTER, "",
     "What the plugin left out or lost: late, busy, no_box, no_context, chain; for its budget unsampled, untimed.",
     ("job", "node", "reason")),
    # Finished collectives of this node's ranks: nine series for each operation and class of size, eight at most.
    ("megascale_collective_duration_seconds", "agent", Kind.HISTOGRAM, "seconds",
     "Time in collectives, waiting for late ranks included. Size: le64k, le1m, le16m, le256m, more.",
     ("job", "node", "op", "size_class"), _COLLECTIVE_BUCKETS_S),
    ("megascale_collective_bytes_total", "agent", Kind.COUNTER, "bytes",
     "Size of the finished collectives, as nccl-tests count it (of an all-gather: what a rank has in the end).",
     ("job", "node", "op")),
    ("megascale_collective_bus_bandwidth_bytes_per_second", "agent", Kind.GAUGE, "bytes_per_second",
     "Bus bandwidth as nccl-tests define it, median of the newest 63; only of groups whose size is known.",
     ("job", "node", "op", "size_class")),
    # Overlapped kernels, only of ranks that keep a progress board.
    ("megascale_tile_progress_ratio", "agent", Kind.GAUGE, "ratio",
     "Share of the tiles that is done in the newest launch; of more than 4,096 ranks the node's furthest behind.",
     (*_RANK, "kernel")),
    ("megascale_tile_waiting", "agent", Kind.GAUGE, "",
     "CTAs of the newest launch that wait for a peer, of the two most waited for; by its number in the kernel's group.",
     (*_RANK, "kernel", "peer")),
    ("megascale_host_cpu_busy_ratio", "agent", Kind.GAUGE, "ratio", "Share of all cores that is busy.", ("node",)),
    ("megascale_host_load_1m", "agent", Kind.GAUGE, "", "Load average over one minute.", ("node",)),
    ("megascale_host_memory_used_ratio", "agent", Kind.GAUGE, "ratio", "Share of memory in use.", ("node",)),
    ("megascale_host_memory_available_bytes", "agent", Kind.GAUGE, "bytes", "Memory that can be had.", ("node",)),
    ("megascale_host_swap_used_ratio", "agent", Kind.GAUGE, "ratio", "Share of swap space in use.", ("node",)),
    ("megascale_host_shm_free_bytes", "agent", Kind.GAUGE, "bytes", "Free space where the black boxes are.", ("node",)),
    ("megascale_host_disk_free_bytes", "agent", Kind.GAUGE, "bytes", "Free space of the run folder's disk.", ("node",)),
    # The agent: its GPUs, by NVML; values that a GPU lacks have no series. About 33 series for each GPU.
    ("megascale_gpu_info", "agent", Kind.INFO, "", "Which GPU it is; gpu is its index on the node.",
     (*_GPU, "uuid", "model", "driver", "vbios")),
    ("megascale_gpu_temperature_celsius", "agent", Kind.GAUGE, "celsius", "Temperature of the chip.", _GPU),
    ("megascale_gpu_memory_temperature_celsius", "agent", Kind.GAUGE, "celsius", "Temperature of the memory.", _GPU),
    ("megascale_gpu_power_watts", "agent", Kind.GAUGE, "watts", "Power that the GPU draws.", _GPU),
    ("megascale_gpu_energy_joules_total", "agent", Kind.COUNTER, "joules", "Energy since the driver was loaded.", _GPU),
    ("megascale_gpu_sm_clock_hertz", "agent", Kind.GAUGE, "hertz", "Clock of the multiprocessors.", _GPU),
    ("megascale_gpu_memory_clock_hertz", "agent", Kind.GAUGE, "hertz", "Clock of the memory.", _GPU),
    ("megascale_gpu_memory_used_bytes", "agent", Kind.GAUGE, "bytes", "Memory in use.", _GPU),
    ("megascale_gpu_memory_size_bytes", "agent", Kind.GAUGE, "bytes", "Memory of the GPU.", _GPU),
    ("megascale_gpu_busy_ratio", "agent", Kind.GAUGE, "ratio",
     "Share of time in which any kernel ran; 1 also while a rank waits for others inside NCCL.", _GPU),
    ("megascale_gpu_sm_active_ratio", "agent", Kind.GAUGE, "ratio",
     "Share of multiprocessors that were busy (GPM, Hopper and newer).", _GPU),
    ("megascale_gpu_tensor_active_ratio", "agent", Kind.GAUGE, "ratio",
     "Share of time in which tensor cores computed (GPM).", _GPU),
    ("megascale_gpu_memory_active_ratio", "agent", Kind.GAUGE, "ratio",
     "Share of the memory's bandwidth that was used (GPM).", _GPU),
    ("megascale_gpu_throttle_seconds_total", "agent", Kind.COUNTER, "seconds",
     "Time with lowered clocks: sw_power_cap (usual at full load), hw_thermal, sw_thermal, power_brake, sync_boost.",
     (*_GPU, "reason")),
    ("megascale_gpu_ecc_errors_total", "agent", Kind.COUNTER, "",
     "Wrong bits in memory since the driver was loaded: corrected, uncorrected.", (*_GPU, "type")),
    ("megascale_gpu_remapped_rows_total", "agent", Kind.COUNTER, "",
     "Rows of memory that were replaced, ever: corrected, uncorrected (what made it necessary).", (*_GPU, "type")),
    ("megascale_gpu_row_remap_pending", "agent", Kind.GAUGE, "", "1: a row is replaced at the next reset.", _GPU),
    ("megascale_gpu_row_remap_failed", "agent", Kind.GAUGE, "", "1: no row is left to replace another.", _GPU),
    ("megascale_gpu_nvlink_active_links", "agent", Kind.GAUGE, "", "NVLinks that are up.", _GPU),
    ("megascale_gpu_nvlink_errors_total", "agent", Kind.COUNTER, "",
     "NVLink errors of all links: crc_flit, crc_data, replay, recovery.", (*_GPU, "kind")),
    ("megascale_gpu_nvlink_bytes_total", "agent", Kind.COUNTER, "bytes",
     "Data over all NVLinks: transmitted, received.", (*_GPU, "direction")),
    ("megascale_gpu_pcie_replays_total", "agent", Kind.COUNTER, "", "Packets that PCIe had to send again.", _GPU),
    ("megascale_gpu_xid_events_total", "agent", Kind.COUNTER, "",
     "Xids since the agent began, by the kernel's log or else by NVML; gpu is the PCI address where no index is known.",
     (*_GPU, "xid", "action")),
    ("megascale_gpu_xid_age_seconds", "agent", Kind.GAUGE, "seconds",
     "Time since the newest of these Xids; what an alert asks, since a lost scrape is no news to it.",
     (*_GPU, "xid", "action")),
    ("megascale_nvswitch_sxid_events_total", "agent", Kind.COUNTER, "",
     "NVSwitch's SXids in the kernel's log since the agent began, by what the line says of them.",
     ("node", "sxid", "action")),
    ("megascale_kernel_log_events_total", "agent", Kind.COUNTER, "",
     "What else the kernel's log told of since the agent began: segfault, hung_task, nic_unhealthy, io_error, ...",
     ("node", "kind", "severity")),
    ("megascale_nvswitch_sxid_age_seconds", "agent", Kind.GAUGE, "seconds", "Time since the newest of these SXids.",
     ("node", "sxid", "action")),
    ("megascale_gpu_recovery_action_info", "agent", Kind.INFO, "",
     "What the driver advises: none, reset, reboot, drain_p2p, drain_reset, ...", (*_GPU, "action")),
    # The agent: its adapters.
    ("megascale_ib_port_up", "agent", Kind.GAUGE, "", "1: the port's state is active; 0 also when it is gone.", _PORT),
    ("megascale_ib_port_info", "agent", Kind.INFO, "",
     "A port, and the kind that it can be compared within: link layer and board.", (*_PORT, "kind")),
    ("megascale_ib_counters_full", "agent", Kind.GAUGE, "",
     "Counters of the port that have reached their largest value; no series when none has.", _PORT),
    ("megascale_ib_counters_refused", "agent", Kind.GAUGE, "",
     "Files of the port that its driver refuses to tell; no series when it refuses none.", _PORT),
    ("megascale_ib_rate_bytes_per_second", "agent", Kind.GAUGE, "bytes_per_second", "Rate of the port's link.", _PORT),
    ("megascale_ib_link_flaps_total", "agent", Kind.COUNTER, "", "How often the port's link went down.", _PORT),
    ("megascale_ib_errors_total", "agent", Kind.COUNTER, "",
     "Errors: symbol, recovery, receive, remote_physical, transmit_discard, local_integrity, buffer_overrun, checksum.",
     (*_PORT, "kind")),
    ("megascale_ib_received_bytes_total", "agent", Kind.COUNTER, "bytes", "Data that the port received.", _PORT),
    ("megascale_ib_transmitted_bytes_total", "agent", Kind.COUNTER, "bytes", "Data that the port sent.", _PORT),
    ("megascale_ib_congestion_total", "agent", Kind.COUNTER, "",
     "Congestion, loss and their repair: cnp_sent, ecn_marked, out_of_sequence, ack_timeout, discarded, no_buffer, ...",
     (*_PORT, "kind")),
    # The agent: what makes its host wait.
    ("megascale_host_memory_pressure_ratio", "agent", Kind.GAUGE, "ratio",
     "Share of the last 10 s in which a process waited for memory (PSI).", ("node",)),
    ("megascale_host_io_pressure_ratio", "agent", Kind.GAUGE, "ratio",
     "Share of the last 10 s in which a process waited for storage (PSI).", ("node",)),
    ("megascale_host_cpu_pressure_ratio", "agent", Kind.GAUGE, "ratio",
     "Share of the last 10 s in which a process waited for a processor (PSI).", ("node",)),
    ("megascale_host_oom_kills_total", "agent", Kind.COUNTER, "",
     "Processes that the kernel killed for memory since it was booted.", ("node",)),
    ("megascale_host_blocked_processes", "agent", Kind.GAUGE, "",
     "Processes in state D (they wait in the kernel for a device or a file system).", ("node",)),
    ("megascale_host_disk_free_ratio", "agent", Kind.GAUGE, "ratio",
     "Share of the bytes that is free: run (the run folder), root, shm.", ("node", "mount_kind")),
    ("megascale_host_inodes_free_ratio", "agent", Kind.GAUGE, "ratio",
     "Share of the inodes that is free: run, root, shm.", ("node", "mount_kind")),
    # The agent: its checks (gpu, fabric, kernel_log, and its table of collectors), where there is something to check.
    ("megascale_health_check_status", "agent", Kind.GAUGE, "",
     "0: ok, 1: warn, 2: fail, 3: unknown, for it does not answer or can't be asked.", ("node", "check")),
    ("megascale_health_check_duration_seconds", "agent", Kind.GAUGE, "seconds",
     "How long the check's last look took.", ("node", "check")),
    ("megascale_health_check_timeouts_total", "agent", Kind.COUNTER, "",
     "Looks of the check that did not end in time.", ("node", "check")),
    # The agent: itself.
    ("megascale_agent_heartbeats_sent_total", "agent", Kind.COUNTER, "", "Heartbeats the controller took.", ("node",)),
    ("megascale_agent_heartbeats_failed_total", "agent", Kind.COUNTER, "",
     "Heartbeats that could not be delivered or were refused.", ("node",)),
    ("megascale_agent_heartbeats_spooled_total", "agent", Kind.COUNTER, "",
     "Heartbeats kept back while the controller was away.", ("node",)),
    ("megascale_agent_last_heartbeat_timestamp_seconds", "agent", Kind.GAUGE, "seconds",
     "Wall clock of the last heartbeat that the controller took; 0 before the first.", ("node",)),
    ("megascale_agent_values_mended_total", "agent", Kind.COUNTER, "",
     "Values that can't be (a black box that was written over) and were brought into range before they were sent.",
     ("node",)),
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
    ("megascale_job_ranks", "controller", Kind.GAUGE, "", "Ranks by judgement: ok, slow, suspect, lost.",
     ("job", "judged")),
    ("megascale_job_world_size", "controller", Kind.GAUGE, "", "Ranks of the job's round.", ("job",)),
    ("megascale_job_step", "controller", Kind.GAUGE, "", "Last step that every rank has finished.", ("job",)),
    ("megascale_job_last_step_timestamp_seconds", "controller", Kind.GAUGE, "seconds",
     "Wall clock of the last step that any rank finished in this round; no series before the first.", ("job",)),
    ("megascale_job_step_seconds", "controller", Kind.GAUGE, "seconds", "Median wall time of a step.", ("job",)),
    ("megascale_job_useful_ratio", "controller", Kind.GAUGE, "ratio",
     "Share of wall time spent in steps that were not lost later, as far as step numbers tell.", ("job",)),
    ("megascale_restarts_total", "controller", Kind.COUNTER, "", "Restarts, by the fault's class.",
     ("job", "reason")),
    ("megascale_incidents_total", "controller", Kind.COUNTER, "",
     "Incidents, by the fault's class and by what became of them: recovered, ended (the job), harmless, warned.",
     ("job", "verdict", "class")),
    ("megascale_incident_open", "controller", Kind.GAUGE, "",
     "Incidents and warnings that hold now, by the fault's class.",
     ("job", "verdict")),
    ("megascale_incident_seconds_total", "controller", Kind.COUNTER, "seconds",
     "What incidents that are over have cost: detect, diagnose, check, idle, restart, reload, recompute.",
     ("job", "stage")),
    ("megascale_hang_suspected", "controller", Kind.GAUGE, "",
     "1 from the suspicion of a hang until training goes on, by its class; none: 0.", ("job", "verdict")),
    ("megascale_stuck_seconds", "controller", Kind.GAUGE, "seconds",
     "Time since any rank of the job moved (step, phase, collective); 0 while none is expected to.", ("job",)),
    ("megascale_straggler_suspects", "controller", Kind.GAUGE, "", "Slow ranks, by cause.", ("job", "cause")),
    ("megascale_straggler_score_ratio", "controller", Kind.GAUGE, "ratio",
     "Share of every step that the job loses by a slow rank; at most the 20 worst.", ("job", "rank", "cause")),
    ("megascale_suspect_confidence_ratio", "controller", Kind.GAUGE, "ratio",
     "How sure it is of each rank that is named now and where it is, by the fault's class; at most the 20 surest.",
     ("job", "rank", "verdict")),
    ("megascale_collective_matched_ratio", "controller", Kind.GAUGE, "ratio",
     "Share of the told collectives that all of their ranks told.", ("job",)),
    ("megascale_step_duration_seconds", "controller", Kind.HISTOGRAM, "seconds",
     "Wall time of the job's steps, of each the slowest rank's.", ("job",), _STEP_BUCKETS_S),
    # Where the job's time goes: the ledger, as of the last finished step while the job trains.
    ("megascale_job_wall_seconds", "controller", Kind.GAUGE, "seconds", "Wall time since the job began.", ("job",)),
    ("megascale_wall_seconds", "controller", Kind.GAUGE, "seconds",
     "The same by what it went into; a class may shrink when it is known better.", ("job", "class")),
    ("megascale_goodput_ratio", "controller", Kind.GAUGE, "ratio",
     "Share of wall time that was training: of the job, of its last hour, now (the last 5 minutes).",
     ("job", "window")),
    ("megascale_effective_training_time_ratio", "controller", Kind.GAUGE, "ratio",
     "Share of wall time in steps that count, slowed down or not: of the job, of its last hour, now (5 minutes).",
     ("job", "window")),
    ("megascale_checkpoint_last_success_timestamp_seconds", "controller", Kind.GAUGE, "seconds",
     "Wall clock of the last finished step with a checkpoint in it; no series before the first.", ("job",)),
    # The controller: ranks, two series for each. What an agent can measure by itself, the agent exports.
    ("megascale_rank_arrival_lag_seconds", "controller", Kind.GAUGE, "seconds",
     "How much later than the first of its group a rank typically comes to a collective; group: all kinds together.",
     ("job", "rank", "group")),
    ("megascale_rank_comm_wait_ratio", "controller", Kind.GAUGE, "ratio",
     "Share of its recent steps that a rank waited in collectives.", ("job", "rank")),
    # The controller: nodes.
    ("megascale_agent_heard_timestamp_seconds", "controller", Kind.GAUGE, "seconds",
     "Wall clock when the node's agent was last heard.", ("node",)),
    ("megascale_node_clock_offset_seconds", "controller", Kind.GAUGE, "seconds",
     "Node's wall clock ahead of the controller's, less what a heartbeat takes at its fastest of the last minute.",
     ("node",)),
    # The controller: the newest self-check of each node that had one since it began.
    ("megascale_node_check_timestamp_seconds", "controller", Kind.GAUGE, "seconds",
     "Wall clock when the node's newest self-check was asked for.", ("node",)),
    ("megascale_node_check_status", "controller", Kind.GAUGE, "",
     "What it found: 0 nothing, 1 a warning, 2 something bad, 3 nothing could be measured.", ("node",)),
    ("megascale_node_check_worst_info", "controller", Kind.INFO, "",
     "Its worst finding: of which check, and of which part of the node; no series where nothing is wrong.",
     ("node", "check", "of")),
    ("megascale_node_check_median", "controller", Kind.GAUGE, "",
     "Its figures, the median over equal parts of the node, in base units (bytes, operations a second, seconds).",
     ("node", "figure")),
    # The controller: what it keeps of GPUs.
    ("megascale_gpu_bad_info", "controller", Kind.INFO, "",
     "A GPU that failed and of which nobody has said since that it was mended.", ("node", "uuid", "reason")),
    ("megascale_node_life_info", "controller", Kind.INFO, "",
     "A node that is not simply healthy as a machine, and where it stands.", ("node", "state")),
    ("megascale_node_engine_info", "controller", Kind.INFO, "",
     "A node that we have drained in Slurm or Kubernetes, or could not (state), and where it stands here (life).",
     ("node", "state", "life")),
    ("megascale_nodes_spared", "controller", Kind.GAUGE, "",
     "Nodes that would be out, had the day's limit not been reached: a person decides."),
    # The controller: itself.
    ("megascale_controller_heartbeats_total", "controller", Kind.COUNTER, "", "Heartbeats taken."),
    ("megascale_controller_heartbeats_rejected_total", "controller", Kind.COUNTER, "",
     "Heartbeats refused: malformed, oversized, version, unauthorised, stale.", ("reason",)),
    ("megascale_controller_nodes", "controller", Kind.GAUGE, "", "Nodes whose agent is heard."),
    ("megascale_controller_tick_seconds", "controller", Kind.HISTOGRAM, "seconds",
     "Time to judge every job once.", (), _LATENCY_BUCKETS_S),
    ("megascale_controller_lag_seconds", "controller", Kind.GAUGE, "seconds", "How late the last tick began."),
    ("megascale_controller_own_faults_total", "controller", Kind.COUNTER, "",
     "Faults of ours in judging a job; that job then goes unjudged for 5 s to 5 min, the others as ever."),
    ("megascale_controller_leader", "controller", Kind.GAUGE, "",
     "1 of the controller that leads, 0 of a standby and of one that can't tell whether it still leads."),
    ("megascale_controller_epoch", "controller", Kind.GAUGE, "",
     "Number of the newest leader; 0 where the journal is no PostgreSQL."),
    ("megascale_controller_unheard_seconds", "controller", Kind.GAUGE, "seconds",
     "Of several controllers the leader: for how long it has answered no agent and no runner."),
    ("megascale_controller_refused_nodes", "controller", Kind.GAUGE, "",
     "Of several controllers a standby: nodes whose agents ask it, and do not reach the leader."),
    ("megascale_controller_gave_way_total", "controller", Kind.COUNTER, "",
     "How often this controller gave the lead to a standby that agents reached instead of it."),
    ("megascale_controller_unjudged_jobs", "controller", Kind.GAUGE, "", "Jobs that go unjudged after such a fault."),
    ("megascale_controller_journal_write_seconds", "controller", Kind.HISTOGRAM, "seconds",
     "Time from handing an event to the journal to its commit.", (), _LATENCY_BUCKETS_S),
    ("megascale_controller_journal_errors_total", "controller", Kind.COUNTER, "", "Journal writes that failed."),
    ("megascale_controller_journal_waiting", "controller", Kind.GAUGE, "",
     "Batches kept in memory because the journal can't be written."),
    ("megascale_controller_journal_failing", "controller", Kind.GAUGE, "", "1 while the journal can't be written."),
    ("megascale_controller_journal_damaged", "controller", Kind.GAUGE, "",
     "1 when the journal was found damaged at the start, and a part of it is lost."),
    ("megascale_controller_journal_lost_events_total", "controller", Kind.COUNTER, "",
     "Events that were lost because the journal could not be written for too long."),
    ("megascale_controller_moves_total", "controller", Kind.COUNTER, "", "Moves in the recovery table.",
     ("event", "state")),
    ("megascale_controller_otlp_records_total", "controller", Kind.COUNTER, "",
     "Spans and logs for OpenTelemetry, by what became of them: sent, failed, left_out.", ("outcome",)),
    ("megascale_controller_notifications_sent_total", "controller", Kind.COUNTER, "",
     "Notifications that a target took, by kind of target; of kinds that are configured.", ("kind",)),
    ("megascale_controller_notifications_failed_total", "controller", Kind.COUNTER, "",
     "Notifications that did not go after all attempts.", ("kind",)),
    ("megascale_controller_notifications_left_out_total", "controller", Kind.COUNTER, "",
     "Notifications left out because a target's hour or its queue was full.", ("kind",)),
    ("megascale_controller_series", "controller", Kind.GAUGE, "", "Series in this answer of the controller."),
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
    return tuple(metric for metric in METRICS.values() if metric.component in (component, EVERY))
