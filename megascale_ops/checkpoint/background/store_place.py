# SPDX-License-Identifier: Apache-2.0
"""A save in an object store, or anything else that fsspec reaches by a URL; its seal is the manifest, put last.

    <url>/step-00000120/<token>/.begun.json     the leading rank's writer has begun
    <url>/step-00000120/<token>/.share-3.json   rank 3's files are there, with their digests; or why not
    <url>/step-00000120/<token>/.alive-3        written again while rank 3's writer goes on

The folder's name is the token of the save, so nothing of another save can lie in it. Files are written from the host
buffer, part by part: no second copy is made on a disk, and a part that is under way when the save is given up is
dropped by the store.
"""

from collections.abc import Callable, Sequence
from contextlib import suppress
from functools import cache

import msgspec

from megascale_ops import foreign
from megascale_ops.checkpoint.background.messages import Job
from megascale_ops.checkpoint.background.places import Looks, Place
from megascale_ops.checkpoint.background.shares import MOST_BYTES, Begun, Share, share_name, share_rank
from megascale_ops.checkpoint.background.uploads import upload_all
from megascale_ops.checkpoint.manifest import FILE_NAME, FileEntry, Manifest
from megascale_ops.checkpoint.tiers import store_saves
from megascale_ops.checkpoint.tiers.filesystems import Store
from megascale_ops.checkpoint.tiers.store_names import StoreNames
from megascale_ops.errors import CheckpointError

BEGUN = ".begun.json"
_ALIVE = ".alive-{}"


class StorePlace(Place):
    """One save of a job whose root is a URL.

    Raises:
        UsageError: fsspec, or a package that it needs for the URL, is missing.
    """

    # 0.1 to 2 s: each look is a request, of each rank.
    looks = Looks(0.1, 2.0)

    def __init__(self, job: Job) -> None:
        self._job, self._store = job, _store_at(job.root)
        self._folder = store_saves.folder_of(job.step, job.token)

    def begin(self, begun: Begun) -> None:
        """Say so; what interrupted saves have left goes, for the job holds the store."""
        self.confirm()
        store_saves.clear_unsealed(self._store, but=[self._folder])
        self._store.put(self._path(BEGUN), msgspec.json.encode(begun))

    def begun(self) -> Begun | None:
        """Whether it was said."""
        return begun_at(self._store, self._folder)

    def write(self, files: Sequence[tuple[str, memoryview]], heard: Callable[[int], None]) -> list[FileEntry]:
        """Several at a time; each is looked at when it is there."""
        there = [(name, self._path(name), data) for name, data in files]
        written = upload_all(self._store, there, self._job.algorithm, heard)
        listed = self._store.listing(self._folder)
        for entry in written:
            size = listed[entry.name].size_bytes if entry.name in listed else 0
            if size != entry.size_bytes:
                raise OSError(f"{entry.name} has {size} bytes in the store instead of {entry.size_bytes}")
        return written

    def tell(self, share: Share) -> None:
        """By a file of this rank."""
        self._store.put(self._path(share_name(share.rank)), msgspec.json.encode(share))

    def collect(self, known: dict[int, Share]) -> None:
        """From these files."""
        for name in self._store.names(self._folder):
            rank = share_rank(name)
            if rank < 0 or rank in known:
                continue
            with suppress(FileNotFoundError, *foreign.UNREADABLE):
                share = msgspec.json.decode(self._store.read(self._path(name), MOST_BYTES), type=Share)
                if (share.token, share.rank) == (self._job.token, rank):
                    known[rank] = share

    def renew(self) -> None:
        """Each rank by a file of its own: what is under way is not seen in a store."""
        with suppress(OSError):
            self._store.put(self._path(_ALIVE.format(self._job.rank)), b"")

    def sign_of_lead(self) -> object:
        """When the leading rank did so last."""
        return self._store.listing(self._folder).get(_ALIVE.format(0))

    def sign_of_all(self) -> object:
        """Names, sizes and times of all that is there but for what the leading rank's writer renews."""
        there = self._store.listing(self._folder)
        there.pop(_ALIVE.format(0), None)
        return there

    def confirm(self) -> None:
        """By the newest name in the store. It was put there by the training process, so it has to be seen."""
        newest = StoreNames(self._store).read_lock()
        if not newest.number:
            raise CheckpointError("the writer process does not see what its training process has written there")
        if newest.number != self._job.writer:
            who = newest.writer.who() if newest.writer else "another writer"
            raise CheckpointError(f"{who} has taken this place over")

    def clear(self) -> None:
        """Remove what writers told each other."""
        for name in self._store.names(self._folder):
            if share_rank(name) >= 0 or name.startswith(_ALIVE.format("")):
                self._store.delete(self._path(name))

    def seal(self, sealed: Manifest) -> None:
        """Put the manifest."""
        store_saves.seal(self._store, self._folder, sealed, self.confirm)
        with suppress(OSError):  # it does no harm there
            self._store.delete(self._path(BEGUN))

    def sealed(self) -> Manifest | None:
        """Of this very save."""
        found = store_saves.read_manifest(self._store, self._folder)
        return found if isinstance(found, Manifest) else None

    def delete_old(self) -> None:
        """As a save that waits does."""
        job = self._job
        newest = job.step, self._folder
        store_saves.after_save(self._store, job.rule, newest, frozenset(job.damaged), self.confirm)

    def give_up(self, reason: str) -> None:
        """Delete all of it, or this rank's files; what resists is cleared away by the next save."""
        job = self._job
        with suppress(OSError):
            begun = self.begun()
            if begun is None or begun.token != job.token or self._is_sealed():
                return
            if job.leads:
                store_saves.remove(self._store, self._folder)
                return
            self.tell(Share(job.token, job.rank, failure=reason))
            for image in job.files:
                self._store.delete(self._path(image.name))

    def _is_sealed(self) -> bool:
        """Whether the manifest is there: then its writer may still be about to remove the sign that it has begun."""
        return FILE_NAME in self._store.names(self._folder)

    def _path(self, name: str) -> str:
        return f"{self._folder}/{name}"


def begun_at(store: Store, folder: str) -> Begun | None:
    """For which save a folder of a store was begun; None: for none, or it was sealed, or it can't be read."""
    try:
        return msgspec.json.decode(store.read(f"{folder}/{BEGUN}", MOST_BYTES), type=Begun)
    except (OSError, *foreign.UNREADABLE):
        return None


@cache
def _store_at(url: str) -> Store:
    return Store(url)
