# SPDX-License-Identifier: Apache-2.0
"""Checkpoints in an object store, or anything else that fsspec reaches by a URL.

    <url>/step-00000120/<save>/__0_0.tensors   as in a folder
    <url>/step-00000120/<save>/manifest.json   written last: with it the checkpoint is there

There is no rename. Each save has files of its own, under a name drawn for it, so none is ever written over; the
manifest is one conditional-free write, which is whole or not there, and comes when all other files are there in their
full size. Two saves of one step may both stand; the later one counts, the other is deleted.

Every rank writes its files into a folder for passing things on (``TMPDIR``), and sends them from there.
"""

import shutil
import tempfile
import time
import uuid
from collections.abc import Iterable, Sequence
from contextlib import AbstractContextManager, suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec

from megascale_ops.checkpoint import persist
from megascale_ops.checkpoint.allowed import Allowed
from megascale_ops.checkpoint.loading.restore import Restore
from megascale_ops.checkpoint.loading.traffic import Traffic
from megascale_ops.checkpoint.manifest import CheckpointReport, Fault, FileEntry
from megascale_ops.checkpoint.processes import describe_writer
from megascale_ops.checkpoint.ranks import Ranks, require_one_step
from megascale_ops.checkpoint.readers import Mark, renewed
from megascale_ops.checkpoint.retention import Rule
from megascale_ops.checkpoint.state.variants import Told
from megascale_ops.checkpoint.tiers import identity, store_saves
from megascale_ops.checkpoint.tiers.filesystems import Store, StoreSource
from megascale_ops.checkpoint.tiers.store_names import StoreNames
from megascale_ops.checkpoint.tiers.store_readers import StoreReading
from megascale_ops.checkpoint.tiers.store_saves import Sealed
from megascale_ops.checkpoint.trust import alarms
from megascale_ops.checkpoint.trust.alarms import Findings
from megascale_ops.checkpoint.trust.check import Summary
from megascale_ops.checkpoint.trust.trust import leave
from megascale_ops.checkpoint.trust.watch import Watch
from megascale_ops.checkpoint.writer_lock import WriterLock
from megascale_ops.errors import CheckpointError

if TYPE_CHECKING:
    import torch


class RemoteStore:
    """The checkpoints of one job below a URL.

    Raises:
        UsageError: it can't be written to.
    """

    def __init__(self, url: str) -> None:
        self.store = Store(url)
        self.store.prepare()
        self.lock = WriterLock(self.store.url, StoreNames(self.store))

    def identity(self) -> str:
        """What ``tiers.identity`` keeps, drawn if there is none."""
        with suppress(FileExistsError):
            if identity.FILE_NAME not in self.store.names():
                self.store.put(identity.FILE_NAME, identity.drawn(), anew=True)
        return identity.read(self.store.read(identity.FILE_NAME, identity.MOST_BYTES))

    def reading(self, _path: Path, rank: int, world_size: int) -> AbstractContextManager[Mark]:
        """A mark of this process in the store, as ``readers.reading`` makes one in a folder."""
        return renewed(StoreReading(self.store, describe_writer(rank, world_size)))

    # -- what is there ----------------------------------------------------------------------------------------------

    def sealed(self) -> list[Sealed]:
        """All checkpoints, the newest first; of one step the later save first.

        Raises:
            CheckpointError: there is none but what was copied here from a folder, so training would start anew.
            OSError: the store can't be listed.
        """
        found = store_saves.sealed(self.store)
        if not found and (said := store_saves.copied(self.store)):
            raise CheckpointError(said)
        return found

    def findings(self, one: Sealed) -> bytes:
        """The bytes of what the save of one has found of what it saved.

        Raises:
            OSError: they can't be read.
        """
        return self.store.read(f"{one.folder}/{alarms.FILE_NAME}", alarms.MOST_BYTES)

    def is_there(self, one: Sealed) -> bool:
        """Whether it still is."""
        return store_saves.is_there(self.store, one.folder)

    def load(
        self, one: Sealed, state: dict[str, Any], allowed: Allowed, ranks: Ranks
    ) -> tuple[CheckpointReport, Traffic]:
        """Load one, verifying what is read of it; collective."""
        source = StoreSource(self.store, one.folder)
        restore = Restore(source, one.step, ranks)
        sealed = restore.manifest()
        if isinstance(sealed, Fault):
            return CheckpointReport(source.said, one.step, (sealed,)), restore.traffic
        faults = restore.sizes(sealed)
        if faults:
            return CheckpointReport(source.said, one.step, tuple(faults), sealed), restore.traffic
        return restore.load(sealed, state, allowed), restore.traffic

    # -- saving -----------------------------------------------------------------------------------------------------

    def save(
        self,
        watch: Watch,
        allowed: Allowed,
        *,
        metric: float | msgspec.UnsetType,
        rule: Rule,
        damaged: Iterable[str] = (),
    ) -> None:
        """Save a state and delete what has no reason to stay; collective.

        Raises:
            CheckpointError: on every rank, when any could not do its part, or when another job writes there.
        """
        step, state, ranks = watch.step, watch.state, watch.ranks
        doing = f"saving step {step} to {self.store.url}"
        flat: dict[str, torch.Tensor] = {}
        passing: list[Path] = []
        folder = ""

        def prepare() -> tuple[int, str, Told]:
            told = watch.variants.take_apart(state, allowed, flat)
            if ranks.leads:
                self.lock.hold(ranks.rank, ranks.world_size)
            passing.append(Path(tempfile.mkdtemp(prefix="megascale-checkpoint-")))
            return step, store_saves.folder_of(step, uuid.uuid4().hex), told

        def write() -> tuple[list[FileEntry], Summary | None]:
            seen = watch.look(flat)
            persist.write(passing[0], flat, ranks)
            entries = persist.digest_own(passing[0], ranks, watch.algorithm)
            self._upload(passing[0], folder, entries)
            return entries, seen

        def seal(entries: list[FileEntry], found: Findings | None) -> None:
            more = leave(passing[0], found, watch.algorithm)
            self._upload(passing[0], folder, more)
            files = tuple(sorted((*entries, *more), key=lambda entry: entry.name))
            sealed = watch.manifest(files, time.time(), metric)
            store_saves.seal(self.store, folder, sealed, self.lock.confirm)

        try:
            prepared = ranks.agree(doing, prepare)
            require_one_step(doing, [each for each, _, _ in prepared])
            watch.variants.settle(doing, [told for _, _, told in prepared], flat, ranks)
            folder = prepared[0][1]
            shares = ranks.agree(doing, write)
            found = watch.conclude([seen for _, seen in shares])
            written = [entry for own, _ in shares for entry in own]
            ranks.lead(doing, lambda: seal(written, found))
        except CheckpointError:
            self._abandon(folder if ranks.leads else "")
            raise
        finally:
            for each in passing:
                shutil.rmtree(each, ignore_errors=True)
        if ranks.leads:
            store_saves.after_save(self.store, rule, (step, folder), frozenset(damaged), self.lock.confirm)

    def _upload(self, passing: Path, folder: str, entries: Sequence[FileEntry]) -> None:
        """Upload files; each is removed at once."""
        for entry in entries:
            local = passing / entry.name
            self.store.upload(str(local), f"{folder}/{entry.name}", entry.size_bytes)
            local.unlink()

    def _abandon(self, folder: str) -> None:
        """Delete what a save that failed has left; the next one does it otherwise."""
        if folder:
            with suppress(OSError):
                self.store.delete(folder)
