# SPDX-License-Identifier: Apache-2.0
"""From what the collectors see to what is wrong: one sentence with its number for each.

A fault is reported as long as it lasts; an event (an Xid, a link that went down and came back) for ten
minutes, long enough for the verdict on what it broke, short enough to be forgotten by itself. Events of the kernel's
log are in ``kernel_findings.py``, findings of a collector of the table in its own file.

What is not worth a finding, and why: a power cap slows nearly every GPU at full load; temperatures lead to throttling,
which is reported; corrected errors of memory and of links are what the correction is for; a port that was never up is
an unused port.

Pure: observations and the time in, findings out.
"""

from collections.abc import Iterable, Mapping
from typing import NamedTuple

import msgspec

from megascale_agents.collectors.gpu_values import Gpu
from megascale_agents.collectors.infiniband import Port
from megascale_agents.hardware.checks import Status
from megascale_ops.schema.health import HardwareFinding

HELD_S = 600.0
# A tenth of the time between two looks with lowered clocks: less costs a step less than one percent.
THROTTLED_SHARE = 0.1
# A process that computed for less than a twentieth of the time takes less than that from another. One with a context
# alone (a rank that did not choose its GPU, a spare one) takes memory and no time.
SHARED_SHARE = 0.05
# sw_power_cap is how a GPU at full load runs; sync_boost follows another GPU.
THROTTLES = ("hw_thermal", "sw_thermal", "power_brake")
_MOST_NAMED = 4


_STATUS = {"note": Status.OK, "warn": Status.WARN, "fail": Status.FAIL}


class PortView(NamedTuple):
    """One port as it is, or as it was when it was last there, with its history."""

    port: Port
    was_up: bool
    is_gone: bool
    flaps: int  # within the time that findings are held
    best_bytes_s: float  # its highest rate within a day
    best_lanes: int


def worst(found: Iterable[HardwareFinding]) -> Status:
    """Return the status of a check with these findings."""
    return max((_STATUS[one.severity] for one in found), default=Status.OK)


def of_gpus(
    gpus: Iterable[Gpu], before: Mapping[int, Gpu], passed_s: float, most_links: Mapping[int, int]
) -> list[HardwareFinding]:
    """Return what is wrong with the GPUs.

    Args:
        gpus: As of this look.
        before: As of the look before, by index.
        passed_s: Time between the two.
        most_links: NVLinks that were ever up at once, by index.
    """
    found: list[HardwareFinding] = []
    for gpu in gpus:
        if gpu.lost:
            found.append(_gpu(gpu, "gpu_lost", f"does not answer any more: it is {gpu.lost}", "fail", is_bad=True))
            continue
        found += _of_memory(gpu, before.get(gpu.identity.ordinal))
        found += _of_links(gpu, most_links.get(gpu.identity.ordinal, 0))
        found += _of_clocks(gpu, before.get(gpu.identity.ordinal), passed_s)
        found += _of_sharing(gpu)
        if gpu.recovery not in ("", "none"):
            text = f"the driver advises: {gpu.recovery.replace('_', ' ')}"
            # Traffic between GPUs has to end, which the restart of their processes does: the GPU itself is well.
            is_bad = gpu.recovery != "drain_p2p"
            found.append(_gpu(gpu, f"recovery_{gpu.recovery}", text, "fail" if is_bad else "warn", is_bad=is_bad))
    return found


def _of_memory(gpu: Gpu, before: Gpu | None) -> list[HardwareFinding]:
    found = []
    if gpu.gauges.get("row_remap_failed"):
        text = "a row of its memory could not be replaced: it has no more to replace it with"
        found.append(_gpu(gpu, "row_remap_failed", text, "fail", is_bad=True))
    if gpu.gauges.get("row_remap_pending"):
        found.append(_gpu(gpu, "row_remap_pending", "a row of its memory waits to be replaced at the next reset"))
    wrong, was = gpu.ecc.get("uncorrected", 0.0), before.ecc.get("uncorrected", 0.0) if before is not None else 0.0
    if wrong:
        text = f"{wrong:.0f} errors of its memory could not be corrected since the driver was loaded"
        found.append(_gpu(gpu, "ecc_uncorrected", text, "fail" if wrong > was else "warn", is_bad=wrong > was))
    return found


def _of_links(gpu: Gpu, most: int) -> list[HardwareFinding]:
    active = int(gpu.gauges.get("nvlink_active_links", 0))
    if active >= most:
        return []
    return [_gpu(gpu, "nvlink_inactive", f"{active} of {most} NVLinks are up", "fail", is_bad=True)]


def _of_clocks(gpu: Gpu, before: Gpu | None, passed_s: float) -> list[HardwareFinding]:
    found = []
    for reason in THROTTLES:
        since_s = gpu.throttled_s.get(reason, 0.0) - (before.throttled_s.get(reason, 0.0) if before else 0.0)
        share = since_s / passed_s if before is not None and passed_s > 0 else 0.0
        if share >= THROTTLED_SHARE:
            clock = gpu.gauges.get("sm_clock_hertz", 0.0) / 1e6
            hot = gpu.gauges.get("temperature_celsius", 0.0)
            why = reason.replace("_", " ")
            text = f"its clocks were lowered for {min(1.0, share):.0%} of the time ({why})"
            found.append(_gpu(gpu, f"throttled_{reason}", f"{text}, now {clock:.0f} MHz at {hot:.0f} C"))
    return found


def _of_sharing(gpu: Gpu) -> list[HardwareFinding]:
    at_work = sorted((-share, pid) for pid, share in gpu.shares.items() if share >= SHARED_SHARE)
    if len(at_work) < 2:
        return []
    named = [f"{pid} ({-share:.0%} of the time)" for share, pid in at_work]
    more = f" and {len(named) - _MOST_NAMED} more" if len(named) > _MOST_NAMED else ""
    text = (
        f"{len(at_work)} processes compute on it, which costs each of them time: {', '.join(named[:_MOST_NAMED])}{more}"
    )
    return [msgspec.structs.replace(_gpu(gpu, "gpu_shared", text), pids=tuple(pid for _, pid in at_work)[:16])]


def of_fabric(views: Iterable[PortView]) -> list[HardwareFinding]:
    """Return what is wrong with the ports."""
    found = []
    for view in views:
        port = view.port
        at, name = f"{port.device}_{port.port}", f"{port.device} port {port.port}"
        told = _absent(view, name)
        for kind, text, severity in [told] if told else _present(view, name):
            found.append(HardwareFinding(f"{kind}_{at}", text, "fabric", severity))
    return found


def _absent(view: PortView, name: str) -> tuple[str, str, str] | None:
    """Return kind, sentence and severity of a port that carries nothing and did before."""
    port = view.port
    if view.is_gone:
        # A virtual function is lent to a container and leaves this namespace; a physical one has fallen off the bus.
        severity = "note" if port.is_virtual else "fail" if view.was_up else "warn"
        return "port_gone", f"{name} is not there any more, and was {port.state or 'there'} before", severity
    if port.is_up or not view.was_up:
        return None
    if port.is_up is None:
        return "port_unknown", f"{name} does not tell its state any more", "warn"
    physical = f" ({port.physical})" if port.physical else ""
    # A virtual function's link follows the container or machine that has it; failures are reported on the physical one.
    severity = "note" if port.is_virtual else "fail"
    return "port_down", f"{name} is {port.state or 'not active'}{physical} and was active before", severity


def _present(view: PortView, name: str) -> Iterable[tuple[str, str, str]]:
    """Yield what is wrong with a port that is up, or was never seen up."""
    port = view.port
    if view.flaps:
        yield "link_flaps", f"the link of {name} went down {view.flaps} times in the last ten minutes", "warn"
    if port.is_up and port.rate_bytes_s is not None:
        now = _rate(port.rate_bytes_s, port.lanes)
        if port.rate_bytes_s < view.best_bytes_s:
            was = _rate(view.best_bytes_s, view.best_lanes)
            yield "port_slow", f"{name} runs at {now}, it was {was} before", "warn"
        # A link of InfiniBand is made of four lanes, or of two; RoCE at 25 and 50 Gb/s has one by design.
        elif port.lanes == 1 and port.kind.startswith("InfiniBand"):
            yield "port_slow", f"{name} runs on one lane of four: {now}", "warn"
    if port.full:
        full = ", ".join(f"{file.rpartition('/')[2]} ({count})" for file, count in port.full.items())
        text = f"counters of {name} have reached their largest value and count no more until they are reset: {full}"
        yield "counters_full", text, "note"


def _rate(bytes_s: float, lanes: int) -> str:
    return f"{bytes_s * 8 / 1e9:g} Gb/s" + (f" ({lanes}X)" if lanes else "")


def of_silence(check: str, hung_s: float, error: str = "") -> HardwareFinding:
    """Return the finding that a check does not answer or fails, which is worth knowing by itself."""
    said = f"has not answered for {hung_s:.0f} s" if hung_s else f"failed: {error[:120]}"
    return HardwareFinding(f"no_answer_{check}", f"the check {check} {said}", check)


def _gpu(gpu: Gpu, name: str, text: str, severity: str = "warn", *, is_bad: bool = False) -> HardwareFinding:
    identity = gpu.identity
    return HardwareFinding(name, f"GPU {identity.ordinal}: {text}", "gpu", severity, identity.uuid, is_bad=is_bad)
