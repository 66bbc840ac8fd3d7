# SPDX-License-Identifier: Apache-2.0
"""A GPU with one stream, as ``torch.cuda`` shows it: events that are recorded now and passed when the test says so.

The host's clock is set by the test; the GPU comes by an event when the host has recorded it, or when it has caught up,
whichever is later. It must not be asked for a time before both events are passed, as the real one must not.
"""


class FakeEvent:
    """One event; torch's own are asked and read in the same way."""

    def __init__(self, cuda: "FakeCuda") -> None:
        self._cuda = cuda
        self.passed_s = -1.0
        self.device = 0

    def record(self) -> None:
        """Stand in the stream from now on."""
        assert not self._cuda.capturing, "an event would become part of the graph"
        self._cuda.records += 1
        self.passed_s = max(self._cuda.now_s, self._cuda.busy_until_s)
        self.device = self._cuda.device

    def query(self) -> bool:
        """Say whether the GPU has come by."""
        assert not self._cuda.capturing, "a question breaks the capture"
        return 0 <= self.passed_s <= self._cuda.reached_s

    def elapsed_time(self, end_event: "FakeEvent") -> float:
        """Return milliseconds."""
        if not (self.query() and end_event.query()):
            raise AssertionError("device not ready: this would be an error, or a wait")
        if self.device != end_event.device:
            raise RuntimeError("invalid resource handle")
        return (end_event.passed_s - self.passed_s) * 1e3


class FakeCuda:
    """``torch.cuda`` as far as timers need it."""

    def __init__(self) -> None:
        self.now_s = 0.0  # the host's clock
        self.busy_until_s = 0.0  # when the GPU will have done what was launched so far
        self.reached_s = 0.0  # how far the GPU is
        self.initialized = True
        self.capturing = False
        self.device = 0
        self.records = 0
        self.made = 0

    def is_initialized(self) -> bool:
        """Say whether the script uses CUDA."""
        return self.initialized

    def is_current_stream_capturing(self) -> bool:
        """Say whether a graph is being captured."""
        return self.capturing

    def Event(self, *, enable_timing: bool) -> FakeEvent:  # noqa: N802  torch's name
        """Make an event."""
        assert enable_timing
        self.made += 1
        return FakeEvent(self)

    def launch(self, work_s: float, host_s: float = 0.001) -> None:
        """Launch work: the host needs ``host_s`` for it, the GPU ``work_s`` once it has done what came before."""
        self.busy_until_s = max(self.now_s, self.busy_until_s) + work_s
        self.now_s += host_s

    def catch_up(self) -> None:
        """Let the GPU do all that was launched."""
        self.reached_s = max(self.now_s, self.busy_until_s)
