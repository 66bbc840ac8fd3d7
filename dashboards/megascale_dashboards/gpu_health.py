# SPDX-License-Identifier: Apache-2.0
"""Node and GPU health: which node or GPU is sick, how one sees it, and which jobs run on it."""

from megascale_dashboards.asking import GPU_HEALTH, NODE, Ask
from megascale_dashboards.fabric import AGENTS
from megascale_dashboards.frame import Page, Section, job_variable, node_variable, xids
from megascale_dashboards.gpus import gpus
from megascale_dashboards.hosts import hosts
from megascale_dashboards.maps import matrix_card
from megascale_dashboards.panels import Card, limits, stat_card
from megascale_dashboards.tables import table_card

STATUS = f"megascale_health_check_status{{{NODE}}}"
INFO = f"megascale_gpu_info{{{NODE}}}"
ADVICE = f'megascale_gpu_recovery_action_info{{{NODE}, action!="none"}}'
WRONG_BITS = f'megascale_gpu_ecc_errors_total{{{NODE}, type="uncorrected"}}'
REMAPPED = f"megascale_gpu_remapped_rows_total{{{NODE}}}"
WORDS = ((0.0, "passes", "green"), (1.0, "warns", "yellow"), (2.0, "fails", "red"), (3.0, "no answer", "purple"))
XID = f"megascale_gpu_xid_events_total{{{NODE}}}"
KERNEL_LOG = f"megascale_kernel_log_events_total{{{NODE}}}"
# The switches' own errors, in the columns of the GPUs'.
SXID = f"max by (node, sxid, action) (megascale_nvswitch_sxid_events_total{{{NODE}}})"
SXIDS = (
    f'max by (node, gpu, xid, action) (label_replace(label_replace({SXID}, "xid", "SXid $1", "sxid", "(.*)"), '
    '"gpu", "NVSwitch", "", ""))'
)


def _verdict() -> tuple[Card, ...]:
    return (
        stat_card("GPUs", "GPUs that an agent sees on the nodes chosen.", (Ask(f"count({INFO})"),), unit="none"),
        stat_card(
            "Nodes that fail a check",
            "Of the nodes chosen. The matrix below says which check; a node that fails one should get no new job.",
            (Ask(f"count(max by (node) ({STATUS} == 2)) or vector(0)"),),
            unit="none",
            colours=limits((1, "red")),
        ),
        stat_card(
            "Checks without an answer",
            "A check that can't finish is a sign of its own: a hung driver hangs whoever asks it.",
            (Ask(f"count({STATUS} == 3) or vector(0)"),),
            unit="none",
            colours=limits((1, "purple")),
        ),
        stat_card(
            "GPUs that need something",
            "The driver's own advice: reset, reboot, drain. Follow it when the job is off the node.",
            (Ask(f"count({ADVICE}) or vector(0)"),),
            unit="none",
            colours=limits((1, "red")),
        ),
        stat_card(
            "Rows to be remapped",
            "GPUs with memory rows that wait for a reset to be remapped. Reset them when the job is over; a failed "
            "remapping means that the GPU has to be replaced.",
            (
                Ask(f"sum(megascale_gpu_row_remap_pending{{{NODE}}})", "wait"),
                Ask(f"sum(megascale_gpu_row_remap_failed{{{NODE}}})", "failed"),
            ),
            unit="none",
            colours=limits((1, "orange")),
            empty="no GPU",
        ),
        stat_card(
            "Remembered as bad",
            "GPUs here that were to blame before, by UUID. Each is in a table below with the reason.",
            (Ask(f"count(megascale_gpu_bad_info{{{NODE}}}) or vector(0)"),),
            unit="none",
            colours=limits((1, "orange")),
        ),
    )


def _matrix() -> tuple[Card, ...]:
    return (
        matrix_card(
            "Checks that did not pass, node x check",
            "Only checks that were not well at some time in the window, 60 at most. A node with several is broken; "
            "one check on many nodes is the check, or what they share.",
            Ask(
                "max by (node, check) (" + STATUS + ") and topk(60, max by (node, check) "
                f"(max_over_time({STATUS}[$__range] @ end())) > 0)",
                "{{node}}: {{check}}",
            ),
            words=WORDS,
            empty="all checks passed",
        ),
    )


def _errors() -> tuple[Card, ...]:
    return (
        table_card(
            "Xids by what to do",
            "NVIDIA's error numbers since the agent began, with the action of NVIDIA's catalogue. Application "
            "errors (13, 31, 43, 45, 109, copy engines) are the script's, not the GPU's.",
            (Ask(f"topk(100, max by (node, gpu, xid, action) ({XID}) or {SXIDS})", "times"),),
            ("node", "gpu", "xid", "action"),
            width=8,
            empty="none",
        ),
        table_card(
            "Advice of the driver",
            "What the driver wants done with a GPU.",
            (Ask(f"topk(100, max by (node, gpu, action) ({ADVICE}))"),),
            ("node", "gpu", "action"),
            width=8,
            empty="nothing",
        ),
        table_card(
            "Remembered, and why",
            "GPUs that failed before, by UUID. `megascale-ops bad-hardware forget` forgets one that was mended.",
            (Ask(f"topk(100, max by (node, uuid, reason) (megascale_gpu_bad_info{{{NODE}}}))"),),
            ("node", "uuid", "reason"),
            width=8,
            empty="none",
        ),
    )


def _memory() -> tuple[Card, ...]:
    return (
        table_card(
            "Uncorrected memory errors and remapped rows",
            "Any uncorrected error killed what ran. Several remapped rows on one GPU: have it replaced.",
            (
                Ask(f"topk(100, sum by (node, gpu) ({WRONG_BITS}) > 0)", "uncorrected"),
                Ask(f"topk(100, sum by (node, gpu) ({REMAPPED}) > 0)", "remapped rows"),
            ),
            ("node", "gpu"),
            colours=limits((1, "orange"), (5, "red")),
            empty="none",
        ),
        table_card(
            "Versions in use",
            "More than one driver or VBIOS among like GPUs is an accident of maintenance, and a cause of "
            "stragglers that no counter shows.",
            (Ask(f"count by (model, driver, vbios) ({INFO})", "GPUs"),),
            ("model", "driver", "vbios"),
            empty="no GPU",
        ),
    )


def _kernels() -> tuple[Card, ...]:
    return (
        table_card(
            "What else the kernels' logs told",
            "Since the agent began, by kind of line: PCIe, machine checks, adapters, disks, file servers, processes. A "
            "failure is something that is lost; a note was mended by itself, or was a program's own.",
            (Ask(f"topk(100, sum by (node, kind, severity) ({KERNEL_LOG}))", "times"),),
            ("node", "kind", "severity"),
            width=24,
            empty="nothing",
        ),
    )


def _self_checks() -> tuple[Card, ...]:
    when = f"max by (node) (megascale_node_check_timestamp_seconds{{{NODE}}})"
    return (
        table_card(
            "The last self-check of each node",
            "`megascale-ops diagnose` with --node asks for one; a verdict that calls a GPU slow does by itself. 0: "
            "nothing was found, 1: a warning, 2: something bad, 3: nothing could be measured.",
            (
                Ask(f"topk(100, max by (node) (megascale_node_check_status{{{NODE}}}))", "found"),
                Ask(f"topk(100, time() - {when})", "ago"),
            ),
            ("node",),
            width=8,
            units={"ago": "s"},
            empty="none was made",
        ),
        table_card(
            "What they found worst",
            "The check, and the part of the node. The page of a job there has the sentence with its numbers.",
            (Ask(f"topk(100, max by (node, check, of) (megascale_node_check_worst_info{{{NODE}}}))"),),
            ("node", "check", "of"),
            width=8,
            empty="nothing",
        ),
        table_card(
            "What they measured",
            "Medians over equal parts of a node, in base units: bytes and operations a second, seconds.",
            (Ask(f"topk(100, max by (node, figure) (megascale_node_check_median{{{NODE}}}))", "median"),),
            ("node", "figure"),
            width=8,
            empty="nothing",
        ),
    )


def _checks() -> tuple[tuple[Card, ...], ...]:
    return (_matrix(), _self_checks(), _errors(), _kernels(), _memory())


def page() -> Page:
    """Return the dashboard."""
    return Page(
        uid=GPU_HEALTH,
        title="MegaScale: Node and GPU health",
        text="Which node or GPU is sick, how is it seen, and who runs on it?",
        sections=(
            Section("", (_verdict(),)),
            Section("What is not well", _checks()),
            Section("GPUs", gpus()),
            Section("Hosts", hosts()),
        ),
        variables=(job_variable(), node_variable(AGENTS)),
        notes=(xids(NODE),),
    )
