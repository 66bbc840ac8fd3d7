# SPDX-License-Identifier: Apache-2.0
"""What the kernel has logged since it started: Xids, machine checks, memory errors, kills, links and disks that failed.

Lines are read by the agent's own reader and judged by its own table (``megascale_agents/collectors``): what an agent
calls a fault is one here. What is older than a day is told and held against no node: it has run since.
"""

import os
import time
from collections.abc import Iterable
from typing import NamedTuple

from megascale_agents.collectors import kernel_log
from megascale_agents.collectors.kernel_events import KernelEvent, LineReader
from megascale_agents.hardware.kernel_findings import Happened, of_kernel_log, place_of

from megascale_ops.diagnostics.check import Check, Reading, Task, UnmeasuredError
from megascale_ops.diagnostics.report import CheckFinding, Fact, Figure
from megascale_ops.schema.wording import duration

CHECK = Check("kernel_log", "the kernel's log", quick_s=5.0, full_s=10.0, severity="warn")

_PATH = "/dev/kmsg"
_DAY_S = 86_400.0
_RECORD_BYTES = 8192
# 65,536 records: the largest ring buffer that distributions set (16 MiB) has fewer.
_MOST_RECORDS = 65_536
_MOST_EVENTS = 200
_SEVERITIES = {"fail": "bad", "warn": "warn"}


class Told(NamedTuple):
    """One kind of event: the agent's sentence about it."""

    name: str
    text: str
    severity: str
    times: int
    age_s: float


def measure(task: Task) -> Reading:
    """Read the whole log.

    Raises:
        UnmeasuredError: it may not be read.
    """
    del task
    events = LineReader().read(kernel_log.parse(_read(_PATH)))
    told = told_of(events, time.monotonic())
    figures = [
        Figure(name, one.name, value)
        for one in told
        for name, value in (("event_age", one.age_s), ("event_count", one.times))
    ]
    facts = [
        Fact(name, one.name, value)
        for one in told
        for name, value in (("event", one.text), ("event_severity", one.severity))
    ]
    return Reading(tuple(figures), (*facts, Fact("kernel", "node", os.uname().release, peers="kernel")))


def _read(path: str) -> bytes:
    try:
        handle = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    except OSError as error:
        remedy = "sysctl kernel.dmesg_restrict=0, or CAP_SYSLOG"
        raise UnmeasuredError(f"the kernel's log can't be read ({path}: {error.strerror}): {remedy}") from error
    parts = []
    try:
        for _ in range(_MOST_RECORDS):
            try:
                part = os.read(handle, _RECORD_BYTES)
            except BrokenPipeError:  # overwritten meanwhile; the next one is there
                continue
            except BlockingIOError:
                break
            if not part:
                break
            parts.append(part)
    finally:
        os.close(handle)
    return b"".join(parts)


def told_of(events: Iterable[KernelEvent], now_mono_s: float) -> list[Told]:
    """Return what the agent's table says of these events, one for each kind and device, the newest first."""
    by_place: dict[tuple[str, str, int, int, str], list[KernelEvent]] = {}
    for event in events:
        if event.ends:
            for place in [one for one in by_place if (one[0], one[1]) == (event.ends, event.device)]:
                del by_place[place]
        else:
            by_place.setdefault(place_of(event), []).append(event)
    found = []
    for group in by_place.values():
        age_s = max(0.0, now_mono_s - group[-1].mono_s)
        happened = Happened(group[-1], group[0].mono_s, group[-1].mono_s, len(group))
        found += [
            Told(_named(one.name, group[-1]), one.text, one.severity, len(group), age_s)
            for one in of_kernel_log([happened], lambda _pci: None, group[-1].mono_s)
        ]
    return sorted(found, key=lambda one: one.age_s)[:_MOST_EVENTS]


def _named(name: str, event: KernelEvent) -> str:
    """Return a name that no other event of the log has."""
    return " ".join(filter(None, (name, event.pci, str(event.pid) if event.pid else "")))


def judge(reading: Reading) -> list[CheckFinding]:
    """Hold failures of the last day against the node."""
    severities, texts, ages = reading.texts("event_severity"), reading.texts("event"), reading.values("event_age")
    found = []
    for name, severity in severities.items():
        ours = _SEVERITIES.get(severity)
        if ours is None:
            continue
        text = f"{texts[name]}, {duration(ages[name])} ago"
        if ages[name] > _DAY_S:
            found.append(CheckFinding("note", name, text))
        else:
            following = "dmesg -T has the lines around it; the runbook of its class says what to do"
            found.append(CheckFinding("bad" if ours == "bad" else "warn", name, text, following))
    return found
