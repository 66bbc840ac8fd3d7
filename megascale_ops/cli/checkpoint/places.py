# SPDX-License-Identifier: Apache-2.0
"""What a PATH means: checkpoints in a folder, on a node, or at a URL; and what the verbs ask of each, in one shape."""

from collections.abc import Iterator
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Protocol

from megascale_ops.checkpoint.deletion import Glance
from megascale_ops.checkpoint.manifest import CheckpointReport
from megascale_ops.checkpoint.retention import Decision, Rule
from megascale_ops.checkpoint.trust.alarms import Findings


class Place(Protocol):
    """Checkpoints that a PATH stands for. They go by their paths, as a glance has them.

    Attributes:
        said: how sentences name the place.
        is_one: whether a single checkpoint is meant.
        is_part: whether of each there may be a part only, the rest being on other nodes.
    """

    said: str
    is_one: bool
    is_part: bool

    def glances(self) -> list[Glance]:
        """Each by its manifest and sizes, the newest first."""

    def readers(self) -> dict[int, tuple[str, ...]]:
        """Which processes restore which step."""

    def holder(self) -> str:
        """The process that writes there, as far as one look tells; empty: none is known to."""

    def verified(self) -> Iterator[CheckpointReport]:
        """Read all files of each, with a bar; one that was deleted meanwhile is left out."""

    def elsewhere(self, seen: Glance) -> tuple[str, ...]:
        """The files of a checkpoint that are on other nodes."""

    def findings(self, path: str) -> Findings | None:
        """What the save of a checkpoint has found of what it saved."""

    def fetched(self, path: str) -> AbstractContextManager[Path]:
        """A folder with all files of a checkpoint that is kept meanwhile, to be read by this process.

        Raises:
            CheckpointError: it is gone, or not all of it is there.
        """

    def living_writer(self) -> str:
        """The process that writes there; waits for a lease where only time can tell."""

    def decide(self, rule: Rule, damaged: set[str]) -> list[Decision]:
        """What becomes of each by a rule, where these are damaged."""

    def delete(self, decisions: list[Decision]) -> set[str]:
        """Delete what goes, and return the paths of it.

        Raises:
            CheckpointError: a job began to write there.
            OSError: it can't be deleted.
        """


def promised_bytes(seen: Glance) -> int:
    """Return the size of a checkpoint by its manifest; by what is there where it has none."""
    return sum(entry.size_bytes for entry in seen.manifest.files) if seen.manifest is not None else seen.size_bytes
