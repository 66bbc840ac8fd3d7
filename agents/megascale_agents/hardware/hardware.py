# SPDX-License-Identifier: Apache-2.0
"""This node's GPUs, adapters, kernel log and host: looked at, judged, kept for heartbeats and scrapes.

What may hang is asked in threads (``checks.py``), what is asked stands in ``watches.py``, what it means in
``findings.py``. A check that has no answer is a finding itself: a driver that hangs is the first sign of a GPU that is
about to be lost.
"""

import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import msgspec

from megascale_agents.collectors.collector import Place
from megascale_agents.collectors.kernel_log import KernelLog
from megascale_agents.collectors.table import COLLECTORS
from megascale_agents.config import AgentConfig
from megascale_agents.hardware import findings
from megascale_agents.hardware.checks import Check, Status
from megascale_agents.hardware.fabric_watch import PortWatch
from megascale_agents.hardware.kernel_log_watch import KernelWatch
from megascale_agents.hardware.watches import CollectorWatch, GpuWatch, Watch
from megascale_agents.ownership.rights import Owner
from megascale_ops.schema.health import HardwareFinding
from megascale_ops.schema.messages import MOST_FINDINGS

_ORDER = {"fail": 0, "warn": 1, "note": 2}


class CheckState(NamedTuple):
    """One check as a scrape shows it."""

    name: str
    status: Status
    took_s: float
    timeouts: int


class Hardware:
    """All checks of one node. Owned by the daemon; ``look`` never waits.

    Args:
        config: Where /sys, /proc and the kernel's log are.
        node: This node's name.
        failed: Called with the name of a check that raised, and the error.
        clock: Monotonic clock.
        wall: Wall clock.
    """

    def __init__(
        self,
        config: AgentConfig,
        node: str,
        failed: Callable[[str, Exception], None],
        *,
        clock: Callable[[], float] = time.monotonic,
        wall: Callable[[], float] = time.time,
    ) -> None:
        self.findings: tuple[HardwareFinding, ...] = ()
        self.gpu = GpuWatch(clock)
        self.fabric = PortWatch(config.sys_root, config.fabric_exclude)
        self.place = Place(config.proc_root, config.sys_root, config.box_root)
        self.collectors = tuple(CollectorWatch(name, lambda: self.place) for name in COLLECTORS)
        # An agent that ends with its run keeps no state: no later run would continue from it.
        memory = "" if config.exit_with_parent else f"{config.box_root}/.kernel-log-{node}.json"
        source = KernelLog(config.kernel_log, memory, _boot_id(config.proc_root)) if config.kernel_log else None
        self.kernel = KernelWatch(source, self.gpu.at, wall, config.proc_root)
        self.clock = clock
        self._failed = failed
        self._wall = wall
        self._found: dict[str, list[HardwareFinding]] = {}  # by check
        self._since: dict[tuple[str, str], float] = {}  # by name and GPU
        watches: tuple[Watch, ...] = (self.gpu, self.fabric, *self.collectors)
        self._checks: list[tuple[Watch, Check[Any]]] = [
            (watch, Check(watch.name, watch.read, watch.pace, clock=clock)) for watch in watches
        ]

    def poll_checks(self, now_s: float) -> str:
        """Look at what is due; return what is new and a failure, "" when nothing is."""
        news = {}
        if (found := self.kernel.poll_log(now_s)) is not None:
            news[self.kernel.name] = found
        for watch, check in self._checks:
            if now_s < check.rests_until_s:
                continue
            found = self._poll(watch, check, now_s)
            if found is not None and found != self._found.get(watch.name):
                news[watch.name] = found
        if (found := self.kernel.hear(self.gpu.take_xids(), now_s)) is not None:
            news[self.kernel.name] = found
        if not news:
            return ""
        before = {(one.name, one.gpu): one.count for one in self.findings}
        self._found |= news
        self.findings = self._put_together()
        return next(
            (
                one.text
                for one in self.findings
                if one.severity == "fail" and before.get((one.name, one.gpu), 0) < one.count
            ),
            "",
        )

    def _poll(self, watch: Watch, check: Check[Any], now_s: float) -> list[HardwareFinding] | None:
        """Return what is wrong by a check's newest answer, or by its silence; None when there is nothing new."""
        answer = check.poll(now_s)
        if answer is not None:
            try:
                return watch.ingest_reading(answer, now_s)
            except Exception as senseless:  # noqa: BLE001  a failing collector must not stop the others; logged below
                check.refuse(senseless)
        if check.hung_since_s is not None:
            return [findings.of_silence(watch.name, check.pace.deadline_s)]
        error = check.take_error()
        if error is not None:
            self._failed(watch.name, error)
            return [findings.of_silence(watch.name, 0.0, str(error) or type(error).__name__)]
        return None

    def _put_together(self) -> tuple[HardwareFinding, ...]:
        """Return all findings, the worst first, each with the time since when it holds."""
        everything = [one for found in self._found.values() for one in found]
        wall_s = round(self._wall(), 3)
        self._since = {
            key: self._since.get(key) or one.since_wall_s or wall_s
            for one in everything
            for key in [(one.name, one.gpu)]
        }
        dated = [
            msgspec.structs.replace(one, since_wall_s=one.since_wall_s or self._since[one.name, one.gpu])
            for one in everything
        ]
        return tuple(sorted(dated, key=lambda one: (_ORDER[one.severity], one.name, one.gpu))[:MOST_FINDINGS])

    def look_at_job(self, run_dir: str, owner: Owner) -> None:
        """Set the job that runs here: its run folder is read as its owner; "" for none."""
        self.place = self.place._replace(run_dir=run_dir, owner=owner)

    def uuids(self) -> tuple[str, ...]:
        """Return the UUIDs of this node's GPUs, those that are lost included."""
        return tuple(gpu.identity.uuid for gpu in self.gpu.gpus if gpu.identity.uuid)

    def serials(self) -> tuple[str, ...]:
        """Return the serial numbers of these, in the same order; "" where one is not known."""
        return tuple(gpu.identity.serial for gpu in self.gpu.gpus if gpu.identity.uuid)

    def checks(self) -> Iterator[CheckState]:
        """Yield the checks that have something to look at."""
        for watch, check in self._checks:
            if check.is_known:
                unknown = check.hung_since_s is not None or check.is_failing
                status = Status.UNKNOWN if unknown else findings.worst(self._found.get(watch.name, []))
                yield CheckState(watch.name, status, check.took_s, check.timeouts)
        if self.kernel.is_read:
            status = self.kernel.status(self._found.get(self.kernel.name, []))
            yield CheckState(self.kernel.name, status, self.kernel.took_s, 0)

    def close(self) -> None:
        """Ask nothing any more."""
        for _, check in self._checks:
            check.close()
        self.kernel.close()


def _boot_id(proc_root: str) -> str:
    try:
        return Path(proc_root, "sys/kernel/random/boot_id").read_text(encoding="ascii").strip()
    except OSError:
        return ""
