# SPDX-License-Identifier: Apache-2.0
"""The node's hardware as samples for a scrape: name, labels' values in the table's order, value.

What a GPU, an adapter or a kernel does not report has no series; a lost GPU keeps only its ``_info``. Of a check that
does not answer nothing is shown: an unconfirmed number looks like a healthy one.
"""

from collections.abc import Collection, Iterator

from megascale_agents.collectors.collector import Sample
from megascale_agents.collectors.gpu_values import Gpu
from megascale_agents.hardware.checks import Status
from megascale_agents.hardware.findings import PortView
from megascale_agents.hardware.hardware import Hardware


def samples_of(hardware: Hardware, node: str) -> Iterator[Sample]:
    """Yield everything that is known of a node's hardware."""
    checks = list(hardware.checks())
    known = {check.name for check in checks if check.status is not Status.UNKNOWN}
    for gpu in hardware.gpu.gpus:
        yield from _of_gpu(gpu if "gpu" in known else Gpu(gpu.identity), node)
    for view in hardware.fabric.views if "fabric" in known else ():
        yield from _of_port(view, node, hardware.fabric.refused.get((view.port.device, view.port.port), 0))
    yield from _of_kernel(hardware, node)
    yield from _of_collectors(hardware, node, known)
    for check in checks:
        at = (node, check.name)
        yield "megascale_health_check_status", at, float(check.status)
        yield "megascale_health_check_duration_seconds", at, check.took_s
        yield "megascale_health_check_timeouts_total", at, float(check.timeouts)


def _of_gpu(gpu: Gpu, node: str) -> Iterator[Sample]:
    identity = gpu.identity
    at = (node, str(identity.ordinal))
    yield "megascale_gpu_info", (*at, identity.uuid, identity.model, identity.driver, identity.vbios), 1.0
    for name, value in gpu.gauges.items():
        yield f"megascale_gpu_{name}", at, value
    if gpu.energy_j is not None:
        yield "megascale_gpu_energy_joules_total", at, gpu.energy_j
    if gpu.pcie_replays is not None:
        yield "megascale_gpu_pcie_replays_total", at, gpu.pcie_replays
    if gpu.recovery:
        yield "megascale_gpu_recovery_action_info", (*at, gpu.recovery), 1.0
    for name, counters in (
        ("throttle_seconds", gpu.throttled_s),
        ("ecc_errors", gpu.ecc),
        ("remapped_rows", gpu.remapped),
        ("nvlink_errors", gpu.nvlink_errors),
        ("nvlink_bytes", gpu.nvlink_bytes),
    ):
        for kind, value in counters.items():
            yield f"megascale_gpu_{name}_total", (*at, kind), value


def _of_port(view: PortView, node: str, refused: int) -> Iterator[Sample]:
    port = view.port
    at = (node, port.device, port.port)
    if view.is_gone:
        if view.was_up and not port.is_virtual:
            yield "megascale_ib_port_up", at, 0.0
        return
    yield "megascale_ib_port_info", (*at, port.kind), 1.0
    for name, value in (
        ("port_up", port.is_up),
        ("rate_bytes_per_second", port.rate_bytes_s),
        ("link_flaps_total", port.downed),
        ("received_bytes_total", port.received_bytes),
        ("transmitted_bytes_total", port.transmitted_bytes),
        ("counters_full", len(port.full) or None),
        ("counters_refused", refused or None),
    ):
        if value is not None:
            yield f"megascale_ib_{name}", at, float(value)
    for kind, count in port.errors.items():
        yield "megascale_ib_errors_total", (*at, kind), float(count)
    for kind, count in port.congestion.items():
        yield "megascale_ib_congestion_total", (*at, kind), float(count)


def _of_kernel(hardware: Hardware, node: str) -> Iterator[Sample]:
    kernel, now_s = hardware.kernel, hardware.clock()
    for (gpu, xid, action), count in kernel.xids.items():
        yield "megascale_gpu_xid_events_total", (node, gpu, str(xid), action), float(count)
        age_s = now_s - kernel.newest_s[gpu, xid, action]
        yield "megascale_gpu_xid_age_seconds", (node, gpu, str(xid), action), max(0.0, age_s)
    for (sxid, action), count in kernel.sxids.items():
        yield "megascale_nvswitch_sxid_events_total", (node, str(sxid), action), float(count)
        age_s = now_s - kernel.newest_s[sxid, action]
        yield "megascale_nvswitch_sxid_age_seconds", (node, str(sxid), action), max(0.0, age_s)
    for (kind, severity), count in hardware.kernel.others.items():
        yield "megascale_kernel_log_events_total", (node, kind, severity), float(count)


def _of_collectors(hardware: Hardware, node: str, known: Collection[str]) -> Iterator[Sample]:
    for watch in hardware.collectors:
        if watch.name in known:
            yield from ((name, (node, *labels), value) for name, labels, value in watch.samples)
