# SPDX-License-Identifier: Apache-2.0
"""Where the writer processes of all ranks make one save and meet: a folder, or an object store."""

from collections.abc import Callable, Sequence
from typing import NamedTuple, Protocol

from megascale_ops.checkpoint.background.shares import Begun, Share
from megascale_ops.checkpoint.manifest import FileEntry, Manifest


class Looks(NamedTuple):
    """How often a place is looked at for what other writers did: first, and at most, in seconds."""

    first_s: float
    most_s: float


class Place(Protocol):
    """One save in one place. What a file system or a library refuses is an OSError."""

    looks: Looks

    def begin(self, begun: Begun) -> None:
        """Make the place of the save, clear away what interrupted saves have left, and tell the other writers."""

    def begun(self) -> Begun | None:
        """For which save the place is there; None where there is none, or it can't be read."""

    def write(self, files: Sequence[tuple[str, memoryview]], heard: Callable[[int], None]) -> list[FileEntry]:
        """Write files, digest them, and have them on disk.

        Args:
            files: names and bytes.
            heard: called again and again, with how many bytes have moved since, at least; what it raises ends it.
        """

    def tell(self, share: Share) -> None:
        """Tell the leading rank's writer what became of this rank's part."""

    def collect(self, known: dict[int, Share]) -> None:
        """Add what ranks have told since the last look."""

    def renew(self) -> None:
        """Show the other ranks' writers that the save goes on."""

    def sign_of_lead(self) -> object:
        """What changes while the leading rank's writer shows that the save goes on."""

    def sign_of_all(self) -> object:
        """What changes while any writer goes on."""

    def confirm(self) -> None:
        """Prove that the training process's lock is still the newest one.

        Raises:
            CheckpointError: another job has taken the place over.
        """

    def clear(self) -> None:
        """Remove what writers told each other, but for who makes the save: a restart waits for that process."""

    def seal(self, sealed: Manifest) -> None:
        """Make the checkpoint visible; only then nothing tells any more who made it.

        Raises:
            CheckpointError: a file is not there as it was written, or another job came.
        """

    def sealed(self) -> Manifest | None:
        """The manifest of the checkpoint of this step, where one is there."""

    def delete_old(self) -> None:
        """Delete what has no reason to stay beside it; never raises."""

    def give_up(self, reason: str) -> None:
        """Give back the space of a save that will not be, and tell the leading rank's writer; never raises.

        Called by the writer process, or in its place by the training process when it has died.
        """
