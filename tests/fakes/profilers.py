# SPDX-License-Identifier: Apache-2.0
"""A profiler that is switched on and off, and tells the events that a test gives it."""

from collections.abc import Iterator

from megascale_ops.recorder.torch_hooks.kernel_times import Span


class FakeProfiler:
    """Stands for torch's. ``on`` says whether it is on; ``log`` has each switch."""

    def __init__(self, spans: list[Span], device: str = "cpu") -> None:
        self.spans = spans
        self.device = device
        self.on = False
        self.log: list[str] = []
        self.refuses = ""
        self.fails = ""

    def refusal(self) -> str:
        """Say why it cannot be switched on."""
        return self.refuses

    def start(self) -> None:
        """Switch it on."""
        assert not self.on
        if self.fails:
            raise RuntimeError(self.fails)
        self.on = True
        self.log.append("on")

    def stop(self) -> Iterator[Span]:
        """Switch it off."""
        assert self.on
        self.on = False
        self.log.append("off")
        return iter(self.spans)
