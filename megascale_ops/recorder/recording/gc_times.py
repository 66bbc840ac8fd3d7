# SPDX-License-Identifier: Apache-2.0
"""How long Python's garbage collector has stopped this process, by the collector's own calls (``gc.callbacks``)."""

import gc
from time import monotonic


class CollectorClock:
    """Adds up the collector's pauses; two calls of 0.2 us for each, once :meth:`start` was called."""

    __slots__ = ("_began_s", "_total_s")

    def __init__(self) -> None:
        self._began_s = 0.0
        self._total_s = 0.0

    def start(self) -> None:
        """Listen from now on, for as long as the process lives."""
        gc.callbacks.append(self._seen)

    def take_s(self) -> float:
        """Return the pauses since the last call."""
        total_s, self._total_s = self._total_s, 0.0
        return total_s

    def _seen(self, phase: str, _: dict[str, int]) -> None:
        """Handle one ``gc.callbacks`` event; the collector holds the GIL from "start" to "stop"."""
        if phase == "start":
            self._began_s = monotonic()
        elif self._began_s:
            self._total_s += monotonic() - self._began_s
            self._began_s = 0.0
