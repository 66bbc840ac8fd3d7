# SPDX-License-Identifier: Apache-2.0
"""From events of the kernel's log to findings: one sentence for each, for ten minutes.

What is over (a file server that answers again) stays as a note: it explains what stood still meanwhile.

A finding is named after the kind of line, with the device behind it (``nic_link_down_0000:5c:00.0``), or ``xid_79``; an
Xid whose line asks for less than its number may has that in its name (``xid_149_none``). A GPU is remembered as bad
only for an Xid, and only where the catalogue or the line itself asks for its repair.

Pure: events and the time in, findings out.
"""

from collections.abc import Callable, Iterable
from typing import NamedTuple

from megascale_agents.collectors.gpu_values import Identity
from megascale_agents.collectors.kernel_events import KernelEvent
from megascale_agents.collectors.nvlink_xids import BY_LINE
from megascale_agents.collectors.xid_table import BAD_ACTIONS, meaning_of
from megascale_agents.hardware.findings import HELD_S
from megascale_ops.schema.health import HardwareFinding

# 100 characters of a device's name leave room for the kind in a word of 128.
_MOST_DEVICE = 100
_RANKED = {"note": 0, "warn": 1, "fail": 2}


class Happened(NamedTuple):
    """One kind of kernel event, and how often it was logged; times on the wall clock."""

    event: KernelEvent
    first_wall_s: float
    last_wall_s: float
    times: int
    over_wall_s: float = 0.0  # when its end was logged, 0 before


class _Told(NamedTuple):
    name: str
    text: str
    severity: str
    gpu: str = ""
    is_bad: bool = False


def place_of(event: KernelEvent) -> tuple[str, str, int, int, str]:
    """Return what is counted as the same thing happening again."""
    of_process = event.pid if event.kind not in ("xid", "sxid") else 0
    return event.kind, event.pci or event.device, event.number, of_process, event.action


def rank_of(event: KernelEvent) -> int:
    """Return how severe an event is, as a number to compare."""
    return _RANKED[event.severity if event.kind not in ("xid", "sxid") else _severity_of(event)]


def weight_of(happened: Happened) -> tuple[int, float]:
    """Return what goes first where there is no more room: the least severe, of these the oldest."""
    return rank_of(happened.event), happened.last_wall_s


def of_kernel_log(
    happened: Iterable[Happened], gpu_at: Callable[[str], Identity | None], now_wall_s: float
) -> list[HardwareFinding]:
    """Return findings on the kernel's recent events; ``gpu_at`` finds the GPU of a PCI address."""
    found = []
    for one in happened:
        if now_wall_s - one.last_wall_s > HELD_S:
            continue
        told = _told(one.event, gpu_at)
        times = f", {one.times} times" if one.times > 1 else ""
        over = f"; over after {max(0.0, one.over_wall_s - one.first_wall_s):.0f} s" if one.over_wall_s else ""
        found.append(
            HardwareFinding(
                name=told.name,
                text=f"{told.text}{times}{over}",
                check="kernel_log",
                severity="note" if one.over_wall_s else told.severity,
                gpu=told.gpu,
                since_wall_s=round(one.first_wall_s, 3),
                last_wall_s=round(one.last_wall_s, 3),
                count=one.times,
                is_bad=told.is_bad,
                pids=(one.event.pid,) if one.event.pid else (),
            )
        )
    return found


def _told(event: KernelEvent, gpu_at: Callable[[str], Identity | None]) -> _Told:
    gpu = gpu_at(event.pci) if event.pci else None
    uuid = gpu.uuid if gpu is not None else ""
    if event.kind == "xid":
        which = f"GPU {gpu.ordinal}" if gpu is not None else f"the GPU at {event.pci}"
        return _of_xid(event, which, uuid)
    if event.kind == "sxid":
        said = f" ({event.text[:120]})" if event.text else ""
        text = f"NVSwitch {event.pci}: SXid {event.number}{said}"
        return _Told(f"sxid_{event.number}", text, _severity_of(event))
    if gpu is not None:
        return _Told(event.kind, f"GPU {gpu.ordinal}: {event.text}", event.severity, uuid)
    device = event.device.replace(" ", "_")[:_MOST_DEVICE]
    return _Told(f"{event.kind}_{device}" if device else event.kind, event.text, event.severity)


def _of_xid(event: KernelEvent, which: str, uuid: str) -> _Told:
    row = meaning_of(event.number)
    by_line = event.number in BY_LINE and event.action != row.action
    is_bad = action_of(event) in BAD_ACTIONS
    if by_line and event.action:
        text = f"{which}: Xid {event.number}, {event.text[:200] or row.name}"
    else:
        text = f"{which}: Xid {event.number}, {row.name}{f' ({event.text[:120]})' if event.text else ''}"
    lesser = f"_{event.action}" if by_line and event.action and not is_bad else ""
    return _Told(f"xid_{event.number}{lesser}", text, _severity_of(event), uuid, is_bad)


def _severity_of(event: KernelEvent) -> str:
    """Return how bad an Xid or SXid is: by what it asks for, and never much for what a script does."""
    if event.kind == "sxid":
        return "fail" if sxid_action(event) == "reset_gpu" else "note"
    row, action = meaning_of(event.number), action_of(event)
    if action in BAD_ACTIONS:
        return "fail"
    if action == "none":
        return event.severity if event.number in BY_LINE and event.action else "note"
    return "note" if row.group == "application" else "warn"


def action_of(event: KernelEvent) -> str:
    """Return what an Xid asks for: by its line where that has it, else by its number."""
    return event.action or meaning_of(event.number).action


def sxid_action(event: KernelEvent) -> str:
    """Return what an SXid asks for: its line has "fatal" or "non-fatal", and no table is better."""
    return "none" if "non-fatal" in event.text.lower() else "reset_gpu" if "fatal" in event.text.lower() else "none"
