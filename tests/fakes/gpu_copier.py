# SPDX-License-Identifier: Apache-2.0
"""A copier as if its tensors lay on a GPU: nothing is copied before its end is waited for, and everything is told."""

from collections.abc import Iterable

from megascale_ops.checkpoint.background.copying import Copier, Copy, Started


class GpuCopier(Copier):
    """Copies that were started run when they are finished or ended.

    Attributes:
        told: ``start``, ``finish`` and ``end`` with how many copies, in order.
    """

    def __init__(self) -> None:
        super().__init__(overlapped=False)
        self.told: list[tuple[str, int]] = []
        self._running: dict[int, list[Copy]] = {}

    def start(self, copies: Iterable[Copy], overwritten_by_steps: frozenset[int]) -> Started:
        """Remember them."""
        del overwritten_by_steps
        started, share = Started({}, {}), list(copies)
        self._running[id(started)] = share
        self.told.append(("start", len(share)))
        self._kept = started  # its address stays its own
        return started

    def finish(self, started: Started) -> None:
        """Copy them."""
        self._run("finish", started)

    def end(self, started: Started) -> None:
        """Copy them, too."""
        self._run("end", started)

    def _run(self, what: str, started: Started) -> None:
        share = self._running.pop(id(started))
        self.told.append((what, len(share)))
        self.copy_now(share)
