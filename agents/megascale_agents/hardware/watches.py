# SPDX-License-Identifier: Apache-2.0
"""One watch for each thing that is looked at in turn: it reads, keeps what the next look needs, returns findings.

``read`` is called in a thread of the check's own and touches nothing but its source; ``ingest_reading`` is called by
the daemon with what was read. ``pace`` carries its reason. GPUs have a class, which others ask as well; a collector of
the table has ``CollectorWatch``.
"""

from collections.abc import Callable
from typing import Any, Protocol, TypeAlias

from megascale_agents.collectors import gpu_values, nvml, table
from megascale_agents.collectors.collector import NotHereError, Pace, Place, Sample
from megascale_agents.collectors.kernel_events import KernelEvent
from megascale_agents.hardware import findings
from megascale_ops.schema.health import HardwareFinding

# Only the watch itself takes what it reads.
Raw: TypeAlias = Any


class Watch(Protocol):
    """What ``Hardware`` needs of each."""

    name: str
    pace: Pace

    def read(self) -> Raw:
        """Look; may raise anything, ``NotHereError`` where there is nothing to look at."""

    def ingest_reading(self, raw: Raw, now_s: float) -> list[HardwareFinding]:
        """Take what was read; return what is wrong."""


class GpuWatch:
    """GPUs by NVML. Every 5 s: a throttled GPU is named within two looks; at most 0.4 % of a core."""

    name = "gpu"
    pace = Pace(5.0, 10.0, 0.004)

    def __init__(self, clock: Callable[[], float]) -> None:
        self.gpus: tuple[gpu_values.Gpu, ...] = ()
        self._clock = clock
        self._nvml = nvml.Nvml()
        self._sample: gpu_values.Sample | None = None
        self._most_links: dict[int, int] = {}
        self._xids: list[KernelEvent] = []

    def read(self) -> gpu_values.Sample:
        """See ``Watch.read``."""
        try:
            return self._nvml.read(self._clock())
        except nvml.NoDriverError as error:
            raise NotHereError(str(error)) from error

    def ingest_reading(self, raw: gpu_values.Sample, now_s: float) -> list[HardwareFinding]:
        """See ``Watch.ingest_reading``."""
        del now_s  # the sample has its own time
        before, last = {gpu.identity.ordinal: gpu for gpu in self.gpus}, self._sample
        added = {index: gpu.throttled_s for index, gpu in before.items()}
        self._sample, self.gpus = raw, gpu_values.parse(raw, last, added)
        for gpu in self.gpus:
            active = int(gpu.gauges.get("nvlink_active_links", 0))
            self._most_links[gpu.identity.ordinal] = max(active, self._most_links.get(gpu.identity.ordinal, 0))
            ordinal = gpu.identity.ordinal
            numbers = [number for index, number in raw.xids if index == ordinal]
            self._xids += [_xid(gpu.identity, number, raw.mono_s) for number in numbers]
        passed_s = raw.mono_s - last.mono_s if last is not None else 0.0
        return findings.of_gpus(self.gpus, before, passed_s, self._most_links)

    def take_xids(self) -> list[KernelEvent]:
        """Return the Xids from the library since the last call."""
        told, self._xids = self._xids, []
        return told

    def at(self, pci: str) -> gpu_values.Identity | None:
        """Return the GPU at a PCI address, also when it is lost."""
        return next((gpu.identity for gpu in self.gpus if gpu.identity.pci == pci), None)

    def of(self, pid: int) -> str:
        """Return the UUID of the GPU on which a process computes, "" where that is not known.

        A script that allocates before it has chosen its GPU has a context on the first one too: of several the one
        counts of which the process holds the most memory.
        """
        theirs = [gpu for gpu in self.gpus if pid in gpu.pids]
        most = max(theirs, key=lambda gpu: gpu.held.get(pid, 0), default=None)
        return most.identity.uuid if most is not None else ""


def _xid(identity: gpu_values.Identity, number: int, mono_s: float) -> KernelEvent:
    return KernelEvent("xid", mono_s, f"NVML told of Xid {number}", pci=identity.pci, number=number)


class CollectorWatch:
    """A collector of the table: what it has seen last, and what is wrong by that."""

    def __init__(self, name: str, place: Callable[[], Place]) -> None:
        self.name = name
        self.samples: tuple[Sample, ...] = ()
        self._collector = table.collector(name)
        self.pace = self._collector.PACE
        self._judge: Callable[[Any, float], list[HardwareFinding]] | None = getattr(self._collector, "judge", None)
        self._place = place
        self._value: Any = None
        self._looked_s = 0.0

    def read(self) -> Raw:
        """See ``Watch.read``."""
        try:
            return self._collector.read(self._place())
        except FileNotFoundError as error:
            raise NotHereError(f"there is no {error.filename}") from error

    def ingest_reading(self, raw: Raw, now_s: float) -> list[HardwareFinding]:
        """See ``Watch.ingest_reading``."""
        passed_s, self._looked_s = now_s - self._looked_s, now_s
        self._value = self._collector.parse(raw, self._value)
        self.samples = tuple(self._collector.samples(self._value))
        return self._judge(self._value, passed_s) if self._judge is not None else []
