# SPDX-License-Identifier: Apache-2.0
"""A save in a folder that all nodes see; its seal is one rename."""

from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from megascale_ops.checkpoint import deletion, latest, lock_files, storage
from megascale_ops.checkpoint.background import shares
from megascale_ops.checkpoint.background.messages import Job
from megascale_ops.checkpoint.background.places import Looks, Place
from megascale_ops.checkpoint.background.shares import Begun, Share
from megascale_ops.checkpoint.background.written_file import write_file
from megascale_ops.checkpoint.manifest import FileEntry, Manifest
from megascale_ops.errors import CheckpointError


class FolderPlace(Place):
    """One save of a job whose root is a folder."""

    # 5 ms to 0.5 s: one small file a look.
    looks = Looks(0.005, 0.5)

    def __init__(self, job: Job) -> None:
        self._job, self._root = job, Path(job.root)
        self._folder = storage.partial_folder(self._root, job.step, job.writer)
        self._seen_bytes = -1

    def begin(self, begun: Begun) -> None:
        """Make the folder."""
        shares.begin(self._root, self._job.step, self._job.writer, begun)

    def begun(self) -> Begun | None:
        """For which save it is there."""
        return shares.begun_in(self._folder)

    def write(self, files: Sequence[tuple[str, memoryview]], heard: Callable[[int], None]) -> list[FileEntry]:
        """Write and sync, one after the other."""
        with ThreadPoolExecutor(1) as pool:
            return [
                write_file(self._folder / name, data, self._job.algorithm, pool, lambda: heard(1))
                for name, data in files
            ]

    def tell(self, share: Share) -> None:
        """By a file of this rank."""
        shares.tell(self._folder, share)

    def collect(self, known: dict[int, Share]) -> None:
        """From these files."""
        shares.collect(self._folder, self._job.token, known)

    def renew(self) -> None:
        """By a time stamp; of the leading rank alone, for the bytes of others are seen."""
        if self._job.leads:
            shares.renew(self._folder)

    def sign_of_lead(self) -> object:
        """This time stamp."""
        return shares.renewed_ns(self._folder)

    def sign_of_all(self) -> object:
        """How many bytes are there."""
        return storage.bytes_in(self._folder)

    def confirm(self) -> None:
        """By the newest name on the folder."""
        newest = lock_files.read_lock(self._root)
        if newest.number not in {0, self._job.writer}:  # 0: deleted by a person
            who = newest.writer.who() if newest.writer else "another writer"
            raise CheckpointError(f"{who} has taken this folder over")

    def clear(self) -> None:
        """Remove these files."""
        shares.clear(self._folder, self._job.sealed.world_size)

    def seal(self, sealed: Manifest) -> None:
        """Write the manifest and rename the folder."""
        storage.seal(self._root, sealed, self._job.writer, without=shares.BEGUN)

    def sealed(self) -> Manifest | None:
        """From the folder of the step."""
        found = latest.read_manifest(storage.final_folder(self._root, self._job.step))
        return found if isinstance(found, Manifest) else None

    def delete_old(self) -> None:
        """As a save that waits does."""
        job = self._job
        deletion.after_save(self._root, job.rule, job.step, frozenset(job.damaged), self.confirm)

    def give_up(self, reason: str) -> None:
        """Remove the folder, or this rank's files."""
        shares.give_up(self._root, self._job, reason)
