# SPDX-License-Identifier: Apache-2.0
"""GPUs as a copier sees them: what is put on their streams stands in a log, in order, and nothing runs."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, Self

from megascale_ops.checkpoint.background.copying import Copy


class FakeEvent:
    """An event on one stream."""

    def __init__(self, log: list[str]) -> None:
        self._log = log
        self.name = ""

    def record(self, stream: "FakeStream") -> None:
        """Stand behind all that is on the stream."""
        stream.events += 1
        self.name = f"{stream.name}#{stream.events}"
        self._log.append(f"event {self.name}")

    def synchronize(self) -> None:
        """Let the host wait."""
        self._log.append(f"host waits for {self.name}")


class FakeStream:
    """A stream of one device."""

    def __init__(self, name: str, log: list[str]) -> None:
        self.name = name
        self.events = 0
        self._log = log

    def wait_stream(self, other: "FakeStream") -> None:
        """Wait for what is on another one."""
        self._log.append(f"{self.name} waits for {other.name}")

    def wait_event(self, event: FakeEvent) -> None:
        """Wait for an event."""
        self._log.append(f"{self.name} waits for {event.name}")


class FakeSource:
    """A tensor on a device; its storage is known by a number."""

    def __init__(self, name: str, device: str, storage: int, log: list[str]) -> None:
        self.name = name
        self.device = device
        self._storage = storage
        self._log = log

    def untyped_storage(self) -> Self:
        """Its own storage."""
        return self

    def data_ptr(self) -> int:
        """Where it lies."""
        return self._storage

    def record_stream(self, stream: FakeStream) -> None:
        """Stay allocated as long as the stream needs it."""
        self._log.append(f"{self.name} is kept for {stream.name}")


class FakeGpus:
    """``torch.cuda`` as far as a copier needs it.

    Attributes:
        log: everything, in order.
        capturing: a graph is being captured.
    """

    def __init__(self) -> None:
        self.log: list[str] = []
        self.capturing = False

    def Stream(self, device: str) -> FakeStream:  # noqa: N802  torch's name
        """Make a stream."""
        return FakeStream(f"copies of {device}", self.log)

    def Event(self, *, blocking: bool) -> FakeEvent:  # noqa: N802  torch's name
        """Make an event; a host that waits for it must sleep."""
        assert blocking
        return FakeEvent(self.log)

    def current_stream(self, device: str) -> FakeStream:
        """The training's."""
        return FakeStream(f"training on {device}", self.log)

    def is_current_stream_capturing(self) -> bool:
        """Whether a graph is being captured."""
        return self.capturing

    @contextmanager
    def device(self, _device: str) -> Iterator[None]:
        """Work there."""
        yield

    stream = device

    def copy_all(self, share: list[Copy], *, non_blocking: bool) -> None:
        """Stand for the copies themselves."""
        assert non_blocking
        self.log.extend(f"copy {each.source.name}" for each in share)  # type: ignore[attr-defined]  # a fake one

    def source(self, name: str, storage: int, device: str = "gpu0") -> Copy:
        """A copy to be made."""
        source: Any = FakeSource(name, device, storage, self.log)
        return Copy(source, source)
