# SPDX-License-Identifier: Apache-2.0
"""Where this rank goes to seal a set with the others: rank 0's end of ``gathering``, or alone without a connection."""

import os
import time
from collections.abc import Callable

from megascale_ops.checkpoint import manifest as manifests
from megascale_ops.checkpoint.manifest import FileEntry, Manifest
from megascale_ops.checkpoint.ranks import Ranks
from megascale_ops.checkpoint.tiers.copies import own_host
from megascale_ops.checkpoint.tiers.gathering import Gathering, Part, Round, take_part
from megascale_ops.errors import CheckpointError

Seal = Callable[[Manifest, bytes], object]


class Desk:
    """This rank's way to the others. Made by ``of``.

    Args:
        auth: what connections show.
        address: of rank 0's end; None: this rank is alone.
        gathering: rank 0's end, on rank 0.
        deadline_s: how long ranks wait for each other.
    """

    def __init__(
        self, auth: bytes, address: tuple[str, int] | None, gathering: Gathering | None, deadline_s: float
    ) -> None:
        self._auth, self._address, self._gathering, self._deadline_s = auth, address, gathering, deadline_s
        self._alone: dict[str, Round] = {}

    @classmethod
    def of(cls, doing: str, ranks: Ranks, deadline_s: float) -> "Desk":
        """Open rank 0's end and tell all ranks of it; collective.

        Raises:
            CheckpointError: on every rank, where it can't be opened.
        """
        if ranks.world_size == 1:
            return cls(b"", None, None, deadline_s)
        opened: list[Gathering] = []

        def listen() -> tuple[bytes, tuple[str, int]]:
            auth = os.urandom(32)
            opened.append(Gathering(own_host(), auth, ranks.world_size, deadline_s))
            return auth, opened[0].address

        auth, address = ranks.lead(doing, listen)
        return cls(auth, address, opened[0] if opened else None, deadline_s)

    def expect(self, save: str, seal: Callable[[tuple[FileEntry, ...]], Manifest]) -> None:
        """On rank 0: a save begins, and ``seal`` makes its manifest of all files."""
        if self._gathering is not None:
            self._gathering.expect(save, seal)
        elif self._address is None:
            self._alone = {save: Round(1, seal)}

    def take_part(
        self, save: str, rank: int, files: tuple[FileEntry, ...], failure: str, plan: bytes, seal: Seal
    ) -> Manifest:
        """Tell this rank's part, seal on this node, and return when all nodes have.

        Raises:
            CheckpointError: there will be no set.
        """
        part = Part(self._auth, save, rank, files, failure, plan)
        if self._address is not None:
            return take_part(self._address, part, seal, self._deadline_s)
        agreed = self._alone.pop(save).come(part, time.monotonic())
        if agreed.failure:
            raise CheckpointError(agreed.failure)
        sealed = manifests.decode(agreed.manifest)
        seal(sealed, agreed.plan)
        return sealed

    def close(self) -> None:
        """Stop listening."""
        if self._gathering is not None:
            self._gathering.close()
