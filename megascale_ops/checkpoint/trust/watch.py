# SPDX-License-Identifier: Apache-2.0
"""One call of ``save``, to whichever tiers it goes: what is saved is looked at once, and judged once."""

from typing import TYPE_CHECKING, Any

import msgspec

from megascale_ops import __version__
from megascale_ops.checkpoint.manifest import FileEntry, Manifest
from megascale_ops.checkpoint.trust.alarms import Findings
from megascale_ops.checkpoint.trust.trust import Trust
from megascale_ops.errors import CheckpointError

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    import torch

    from megascale_ops.checkpoint.ranks import Ranks
    from megascale_ops.checkpoint.state.variants import Variants
    from megascale_ops.checkpoint.trust.check import Described, Look, Summary
    from megascale_ops.checkpoint.trust.digests import Begun


class Watch:
    """The same calls in the same order on every rank.

    Args:
        trust: of the manager.
        step: that is saved.
        state: as given to ``save``.
        ranks: who takes part.
    """

    def __init__(self, trust: Trust, step: int, state: dict[str, Any], ranks: "Ranks") -> None:
        self.step, self.state, self.ranks = step, state, ranks
        self.variants: Variants = trust.variants()
        """How this rank's entries differ from those of others."""
        self.algorithm = trust.algorithm
        """By which its files are digested."""
        self.parent = -1
        """Step of the checkpoint that the training last restored or sealed; -1: none."""
        self.refusal = ""
        """Why the save is refused; empty: it is not."""
        self._trust = trust
        self._has_looked = self._has_concluded = False
        self._looking: tuple[Described | None, Begun | None] | None = None  # begun
        self._summary: Summary | None = None
        self._found: Findings | None = None
        self._look: Look | None = None

    def begin(self, flat: "Mapping[str, torch.Tensor]") -> None:
        """Let GPUs begin to digest what this rank holds, the first time; nothing waits."""
        if self._looking is None and not self._has_looked:
            described = self._trust.describe(flat, self.state, self.ranks)
            self._looking = described, self._trust.begin(described)

    def look(self, flat: "Mapping[str, torch.Tensor]") -> "Summary | None":
        """Digest what this rank holds, the first time; what all ranks have to hear of it."""
        self.begin(flat)
        if self._looking is not None:
            described, begun = self._looking
            self._summary = self._trust.look(described, begun=begun)
            self._looking = None  # it holds the tensors
            self._look = self._trust.looked
            self._has_looked = True
        return self._summary

    def conclude(self, summaries: "Sequence[Summary | None]") -> Findings | None:
        """Judge what all ranks have seen; collective the first time.

        Raises:
            CheckpointError: on every rank, where replicas differ and the save is to be refused for that.
        """
        if not self._has_concluded:
            self._has_concluded = True
            try:
                self._found = self._trust.conclude(self.step, summaries, self.ranks)
            except CheckpointError as exc:
                self.refusal = str(exc)
        if self.refusal:
            raise CheckpointError(self.refusal)
        return self._found

    def manifest(
        self, files: "tuple[FileEntry, ...]", written_wall_s: float, metric: float | msgspec.UnsetType
    ) -> Manifest:
        """The manifest of this save, with the program that makes it and the checkpoint that it goes on from."""
        parent = self.parent if self.parent >= 0 else msgspec.UNSET
        head = self.step, self.ranks.world_size, written_wall_s, files
        return Manifest(*head, metric=metric, code=__version__, parent=parent, **self.variants.world.told())

    def without_tensors(self) -> "Watch":
        """This one, which holds neither state nor tensors any more: it is kept until a save in the background ends."""
        self.state = {}
        if self._look is not None:
            self._look = self._look._replace(parts=())
        return self

    def sealed(self) -> None:
        """The checkpoint counts: the next one is held against it."""
        if self._look is not None:
            self._trust.sealed(self.step, self._look)
