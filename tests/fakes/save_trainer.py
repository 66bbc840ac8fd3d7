# SPDX-License-Identifier: Apache-2.0
"""A training process as a save in its writer process sees it: time passes at once, and what comes meanwhile is told."""

from collections.abc import Callable

from megascale_ops.errors import CheckpointError


class SaveTrainer:
    """Each time the save lets time pass, the next of ``events`` happens; after the last the save is given up.

    Attributes:
        orphaned: the training process has ended.
        told: a new job shows that it knows the outcome.
        heard: how often time passed.
    """

    def __init__(self, *events: Callable[[], object], orphaned: bool = False) -> None:
        self.orphaned = orphaned
        self.told = False
        self.heard = 0
        self._events = list(events)

    def hear(self, wait_s: float) -> None:
        """Let time pass."""
        self.heard += 1
        if self._events:
            self._events.pop(0)()
        elif wait_s:
            raise CheckpointError("the training process has given it up")

    def show_progress(self, token: str) -> None:
        """Take notice."""

    def is_orphaned(self) -> bool:
        """Whether it has ended."""
        return self.orphaned

    def has_gone_on(self) -> bool:
        """Whether the next job has come."""
        return self.told

    def needs_no_outcome(self) -> bool:
        """Whether it knows how the save ended."""
        return self.told or self.orphaned
