# SPDX-License-Identifier: Apache-2.0
"""What this process knows of its restores, told to observers with every change."""

from typing import Any, Literal

import msgspec

from megascale_ops.checkpoint.notify import Restores, tell_restores

# Where a checkpoint was read: the nodes' tier, there also a buddy's copy, the shared folder, the object store.
Tier = Literal["node", "buddy", "shared", "store"]


class RestoreLog:
    """Kept by one manager; changed by the thread that restores."""

    def __init__(self) -> None:
        self.restores = Restores()

    def load(self, step: int, restore_s: float, read_bytes: int, tier: Tier, passed_over: int) -> None:
        """A checkpoint was loaded, after so many that were damaged."""
        counts = {tier: getattr(self.restores, tier) + 1}
        self._change(passed_over, step=step, restore_s=restore_s, read_bytes=read_bytes, **counts)

    def fail(self, passed_over: int) -> None:
        """Nothing was loaded though there are checkpoints, so many of them damaged."""
        self._change(passed_over, failed=self.restores.failed + 1)

    def _change(self, passed_over: int, **changes: Any) -> None:  # noqa: ANN401  fields of several types
        total = self.restores.passed_over + passed_over
        self.restores = msgspec.structs.replace(self.restores, passed_over=total, **changes)
        tell_restores(self.restores)
