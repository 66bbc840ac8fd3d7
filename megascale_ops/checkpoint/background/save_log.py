# SPDX-License-Identifier: Apache-2.0
"""What this process knows of its saves, told to observers with every change; for saves of either kind."""

import threading
import time
from collections.abc import Callable
from typing import Any

import msgspec

from megascale_ops.checkpoint.notify import Saves, tell_saves


class SaveLog:
    """Kept by one manager; changed by the training thread and by threads that hear of background saves."""

    def __init__(self) -> None:
        self.saves = Saves()
        self._busy = threading.Lock()

    def begin(self, step: int) -> None:
        """A save begins."""
        self._change(step=step)

    def stall(self, stall_s: float, is_in_flight: Callable[[], bool]) -> None:
        """The training goes on, and so may the save, which may also end just now."""
        self._change(stall_s=stall_s, in_flight=is_in_flight)

    def seal(self, step: int, write_s: float) -> None:
        """A save is whole; ``write_s`` of it ran beside the training."""
        self._change(sealed_step=step, write_s=write_s, sealed_wall_s=time.time(), in_flight=0)

    def leave(self) -> None:
        """A save for the nodes was left out there, which is no failure."""
        self._change(in_flight=0)

    def fail(self) -> None:
        """A save has failed."""
        self._change(failed=self.saves.failed + 1, in_flight=0)

    def _change(self, **changes: Any) -> None:  # noqa: ANN401  fields of several types
        with self._busy:
            known = {name: int(value()) if callable(value) else value for name, value in changes.items()}
            self.saves = msgspec.structs.replace(self.saves, **known)
            tell_saves(self.saves)
