# SPDX-License-Identifier: Apache-2.0
"""What the kernel's log told: counted for scrapes, and kept for ten minutes as findings.

The log never blocks, so it is read with every look and an Xid is told within 0.1 s, mostly before the process that met
it has died of it. A log that was never readable (an agent without the permission, a container) is no log of ours: that
is said once. One that ceases to be readable is a check that does not know any more. Both are tried again each minute.
"""

import logging
import time
from collections import Counter
from collections.abc import Callable, Sequence

from megascale_agents import findings
from megascale_agents.checks import Status
from megascale_agents.collectors.gpu_values import Identity
from megascale_agents.collectors.kernel_log import KernelEvent, KernelLog
from megascale_agents.collectors.xid_table import meaning_of
from megascale_agents.findings import HELD_S, Happened
from megascale_ops.schema.health import HardwareFinding

log = logging.getLogger(__name__)

_AGAIN_S = 60.0
# Different numbers on different GPUs; a node with more is beyond counting.
_MOST_KINDS = 256
# What is kept ends by time alone: looked at every 5 s.
_FADE_S = 5.0


class KernelWatch:
    """Follows the log of one kernel.

    Args:
        source: The log; None where it is not to be read.
        gpu_at: Knows the GPU at a PCI address.
        wall: Wall clock.
    """

    name = "kernel_log"

    def __init__(
        self, source: KernelLog | None, gpu_at: Callable[[str], Identity | None], wall: Callable[[], float]
    ) -> None:
        self.xids: Counter[tuple[str, int, str]] = Counter()  # by GPU (its index, else its address), number, action
        self.sxids: Counter[tuple[int, str]] = Counter()
        self.newest_s: dict[tuple[str, int, str] | tuple[int, str], float] = {}  # of each of those, monotonic
        self.error = ""  # why it can't be read
        self.took_s = 0.0
        self._source = source
        self._was_read = False
        self._gpu_at = gpu_at
        self._wall = wall
        self._happened: dict[tuple[str, str, int, int], Happened] = {}
        self._due_s = 0.0
        self._fade_s = 0.0

    @property
    def is_read(self) -> bool:
        """Whether there is a log to follow."""
        return self._was_read

    def look(self, now_s: float) -> list[HardwareFinding] | None:
        """Read what is new; return what is wrong now, None when that is as before."""
        if self._source is None or now_s < self._due_s:
            return self._fade(now_s)
        began_s = time.perf_counter()
        try:
            events = self._source.look()
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
        """Take what somebody else tells of the same events, where the log itself is not read; as ``look``."""
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
        return silent + findings.of_kernel_log(self._happened.values(), self._gpu_at, wall_s)

    def status(self, found: list[HardwareFinding]) -> Status:
        """Return what the check says."""
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
            key = (which, event.number, meaning_of(event.number).action)
            if key in self.xids or len(self.xids) < _MOST_KINDS:
                self.xids[key] += 1
                self.newest_s[key] = max(event.mono_s, self.newest_s.get(key, event.mono_s))
            log.warning("Xid %d of GPU %s: %s", event.number, which, meaning_of(event.number).name)
        elif event.kind == "sxid":
            number = (event.number, findings.sxid_action(event))
            if number in self.sxids or len(self.sxids) < _MOST_KINDS:
                self.sxids[number] += 1
                self.newest_s[number] = max(event.mono_s, self.newest_s.get(number, event.mono_s))
        # printk's clock is that of ``monotonic``; a little in the future means that it was read between two ticks.
        wall_s = self._wall() - max(0.0, now_s - event.mono_s)
        place = (event.kind, event.pci, event.number, event.pid if event.kind == "oom" else 0)
        known = self._happened.get(place)
        if known is not None:
            self._happened[place] = known._replace(event=event, last_wall_s=wall_s, times=known.times + 1)
        elif len(self._happened) < _MOST_KINDS:
            self._happened[place] = Happened(event, wall_s, wall_s, 1)
