# SPDX-License-Identifier: Apache-2.0
"""Events of the kernel's log: counted for scrapes, and kept for ten minutes as findings.

The log never blocks, so it is read with every look and an Xid is reported within 0.1 s, mostly before the process that
met it has died of it. A log that was never readable (an agent without the permission, a container) is none of ours,
which is logged once. One that ceases to be readable is an unknown check. Both are tried again each minute.
"""

import logging
import re
import time
from collections import Counter
from collections.abc import Callable, Sequence
from typing import TypeVar

from megascale_agents.collectors.gpu_values import Identity
from megascale_agents.collectors.kernel_events import KernelEvent
from megascale_agents.collectors.kernel_log import KernelLog
from megascale_agents.collectors.short_files import beginning
from megascale_agents.collectors.xid_table import meaning_of
from megascale_agents.hardware import findings, kernel_findings
from megascale_agents.hardware.checks import Status
from megascale_agents.hardware.findings import HELD_S
from megascale_agents.hardware.kernel_findings import Happened
from megascale_ops.schema.health import HardwareFinding

log = logging.getLogger(__name__)
Key = TypeVar("Key")

_AGAIN_S = 60.0
# Different numbers on different GPUs; a node with more is broken in any case.
_MOST_KINDS = 256
# 4 KiB: a status file has some 1,500 bytes, and the field is in its first 100.
_STATUS_BYTES = 4096
_TGID = re.compile(rb"^Tgid:\s*(\d{1,10})$", re.MULTILINE)
# What is kept ends by time alone: looked at every 5 s.
_FADE_S = 5.0


class KernelWatch:
    """Follows the log of one kernel.

    Args:
        source: The log; None where it is not to be read.
        gpu_at: Knows the GPU at a PCI address.
        wall: Wall clock.
        proc_root: Where a thread's process is looked up.
    """

    name = "kernel_log"

    def __init__(
        self,
        source: KernelLog | None,
        gpu_at: Callable[[str], Identity | None],
        wall: Callable[[], float],
        proc_root: str = "/proc",
    ) -> None:
        self.xids: Counter[tuple[str, int, str]] = Counter()  # by GPU (its index, else its address), number, action
        self.sxids: Counter[tuple[int, str]] = Counter()
        self.others: Counter[tuple[str, str]] = Counter()  # by kind of line and severity
        self.newest_s: dict[tuple[str, int, str] | tuple[int, str], float] = {}  # of each of those, monotonic
        self.error = ""  # why it can't be read
        self.took_s = 0.0
        self._source = source
        self._was_read = False
        self._gpu_at = gpu_at
        self._wall = wall
        self._proc_root = proc_root
        self._happened: dict[tuple[str, str, int, int, str], Happened] = {}
        self._due_s = 0.0
        self._fade_s = 0.0

    @property
    def is_read(self) -> bool:
        """Whether there is a log to follow."""
        return self._was_read

    def poll_log(self, now_s: float) -> list[HardwareFinding] | None:
        """Read what is new; return what is wrong now, None when that is as before."""
        if self._source is None or now_s < self._due_s:
            return self._fade(now_s)
        began_s = time.perf_counter()
        try:
            events = self._source.poll_log()
        except OSError as error:
            self._source.close()
            self._due_s = now_s + _AGAIN_S
            if self.error:
                return None
            self.error = str(error)
            level = logging.WARNING if self._was_read else logging.INFO
            log.log(level, "the kernel's log can't be read (%s): Xids are not seen; tried again each minute", error)
            return self._tell(now_s) if self._was_read else None
        self._was_read = True
        self.took_s = time.perf_counter() - began_s
        came_back, self.error = bool(self.error), ""
        for event in events:
            self._count(event, now_s)
        return self._tell(now_s) if events or came_back else self._fade(now_s)

    def hear(self, events: Sequence[KernelEvent], now_s: float) -> list[HardwareFinding] | None:
        """Take another source's record of the same events, where the log itself is not read; returns as ``look``."""
        if not events or (self._was_read and not self.error):
            return None
        for event in events:
            self._count(event, now_s)
        return self._tell(now_s)

    def _fade(self, now_s: float) -> list[HardwareFinding] | None:
        """Let what is old go, now and then."""
        return self._tell(now_s) if self._happened and now_s >= self._fade_s else None

    def _tell(self, now_s: float) -> list[HardwareFinding]:
        """Return what is wrong now."""
        self._fade_s = now_s + _FADE_S
        wall_s = self._wall()
        self._happened = {key: one for key, one in self._happened.items() if wall_s - one.last_wall_s <= HELD_S}
        silent = [findings.of_silence(self.name, 0.0, self.error)] if self._was_read and self.error else []
        return silent + kernel_findings.of_kernel_log(self._happened.values(), self._gpu_at, wall_s)

    def status(self, found: list[HardwareFinding]) -> Status:
        """Return the check's status."""
        if self.error:
            return Status.UNKNOWN
        return findings.worst(found)

    def close(self) -> None:
        """Let go of the log."""
        if self._source is not None:
            self._source.close()

    def _count(self, event: KernelEvent, now_s: float) -> None:
        if event.kind == "xid":
            gpu = self._gpu_at(event.pci)
            which = str(gpu.ordinal) if gpu is not None else event.pci
            action = kernel_findings.action_of(event)
            key = (which, event.number, action)
            if _add(self.xids, key):
                self.newest_s[key] = max(event.mono_s, self.newest_s.get(key, event.mono_s))
            log.warning("Xid %d of GPU %s: %s (%s)", event.number, which, meaning_of(event.number).name, action)
        elif event.kind == "sxid":
            number = (event.number, kernel_findings.sxid_action(event))
            if _add(self.sxids, number):
                self.newest_s[number] = max(event.mono_s, self.newest_s.get(number, event.mono_s))
        else:
            _add(self.others, (event.kind, event.severity))
            event = event._replace(pid=self._process_of(event.pid))
        # printk's clock is that of ``monotonic``; slightly in the future: read between two ticks.
        wall_s = self._wall() - max(0.0, now_s - event.mono_s)
        if event.ends:
            self._end(event, wall_s)
            return
        place = kernel_findings.place_of(event)
        known = self._happened.get(place)
        if known is not None:
            # The worst severity reported is kept; an event after its end reopens it.
            worst = max(event, known.event, key=kernel_findings.rank_of)
            self._happened[place] = Happened(worst, known.first_wall_s, wall_s, known.times + 1)
            return
        if len(self._happened) >= _MOST_KINDS:
            # A program that crashes a thousand times must not hide a GPU that is lost.
            least = min(self._happened, key=lambda key: kernel_findings.weight_of(self._happened[key]))
            del self._happened[least]
        self._happened[place] = Happened(event, wall_s, wall_s, 1)

    def _end(self, event: KernelEvent, wall_s: float) -> None:
        """Mark as over what this event ends; one that ends nothing is ignored."""
        for place, known in self._happened.items():
            if (known.event.kind, known.event.device) == (event.ends, event.device) and not known.over_wall_s:
                self._happened[place] = known._replace(last_wall_s=wall_s, over_wall_s=wall_s)

    def _process_of(self, thread: int) -> int:
        """Return whose thread it is: the kernel names threads, ranks are known by their process."""
        if thread <= 0:
            return 0
        try:
            match = _TGID.search(beginning(f"{self._proc_root}/{thread}/status", _STATUS_BYTES))
        except OSError:
            return thread  # it is gone already; of most processes the main thread is meant
        return int(match[1]) if match is not None else thread


def _add(counter: Counter[Key], key: Key) -> bool:
    """Count, as long as there are not too many kinds; return whether it was counted."""
    if key not in counter and len(counter) >= _MOST_KINDS:
        return False
    counter[key] += 1
    return True
