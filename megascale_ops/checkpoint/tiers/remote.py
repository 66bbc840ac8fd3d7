# SPDX-License-Identifier: Apache-2.0
"""Checkpoints in an object store, or anything else that fsspec reaches by a URL.

    <url>/step-00000120/<save>/__0_0.tensors   as in a folder
    <url>/step-00000120/<save>/manifest.json   written last: with it the checkpoint is there

There is no rename. Each save has files of its own, under a name drawn for it, so none is ever written over; the
manifest is one conditional-free write, which is whole or not there, and comes when all other files are there in their
full size. Two saves of one step may both stand; the later one counts, the other is deleted.

Every rank writes its files into a folder for passing things on (``TMPDIR``), and sends them from there.
"""

import logging
import re
import shutil
import tempfile
import uuid
from collections.abc import Iterable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import msgspec

from megascale_ops.checkpoint import contents, persist, retention, storage
from megascale_ops.checkpoint import manifest as manifests
from megascale_ops.checkpoint.allowed import Allowed
from megascale_ops.checkpoint.loading.restore import Restore
from megascale_ops.checkpoint.loading.traffic import Traffic
from megascale_ops.checkpoint.manifest import CheckpointReport, Fault, FileEntry, ManifestError
from megascale_ops.checkpoint.ranks import Ranks, require_one_step
from megascale_ops.checkpoint.retention import Rule, Standing
from megascale_ops.checkpoint.tiers import identity
from megascale_ops.checkpoint.tiers.filesystems import Store, StoreSource
from megascale_ops.checkpoint.tiers.store_names import StoreNames
from megascale_ops.checkpoint.trust import alarms
from megascale_ops.checkpoint.trust.alarms import Findings
from megascale_ops.checkpoint.trust.check import Summary
from megascale_ops.checkpoint.trust.trust import leave
from megascale_ops.checkpoint.trust.watch import Watch
from megascale_ops.checkpoint.writer_lock import WriterLock
from megascale_ops.errors import CheckpointError

if TYPE_CHECKING:
    import torch

_STEP = re.compile(r"step-(\d{8,})")
_SAVE = re.compile(r"[0-9a-f]{32}")

_log = logging.getLogger("megascale_ops.checkpoint")


class Sealed(NamedTuple):
    """A checkpoint whose manifest is there."""

    step: int
    folder: str  # below the URL
    written_wall_s: float
    metric: float | None = None


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

    # -- what is there ----------------------------------------------------------------------------------------------

    def sealed(self) -> list[Sealed]:
        """All checkpoints, the newest first; of one step the later save first.

        Raises:
            OSError: the store can't be listed.
        """
        found = [
            self._look(int(match.group(1)), f"{name}/{save}")
            for name in self.store.names()
            if (match := _STEP.fullmatch(name))
            for save in self.store.names(name)
            if _SAVE.fullmatch(save) and manifests.FILE_NAME in self.store.names(f"{name}/{save}")
        ]
        return sorted(found, key=lambda one: (-one.step, -one.written_wall_s, one.folder))

    def _look(self, step: int, folder: str) -> Sealed:
        with suppress(OSError, ManifestError):
            raw = self.store.read(f"{folder}/{manifests.FILE_NAME}", manifests.MOST_BYTES)
            found = manifests.decode(raw)
            return Sealed(step, folder, found.written_wall_s, manifests.metric_of(found))
        return Sealed(step, folder, 0.0)  # damaged or of a later version: a restore says which

    def findings(self, one: Sealed) -> bytes:
        """The bytes of what the save of one has found of what it saved.

        Raises:
            OSError: they can't be read.
        """
        return self.store.read(f"{one.folder}/{alarms.FILE_NAME}", alarms.MOST_BYTES)

    def is_there(self, one: Sealed) -> bool:
        """Whether it still is."""
        return manifests.FILE_NAME in self.store.names(one.folder)

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

        def prepare() -> tuple[int, str]:
            captured = {name: contents.capture(value) for name, value in state.items()}
            flat.update(contents.take_apart(captured, allowed))
            if ranks.leads:
                self.lock.hold(ranks.rank, ranks.world_size)
            passing.append(Path(tempfile.mkdtemp(prefix="megascale-checkpoint-")))
            return step, f"{storage.final_folder(Path(), step).name}/{uuid.uuid4().hex}"

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
            self.lock.confirm()
            sealed = msgspec.structs.replace(persist.sealed_of(step, ranks.world_size, files), metric=metric)
            self.store.put(f"{folder}/{manifests.FILE_NAME}", manifests.encode(sealed))

        try:
            prepared = ranks.agree(doing, prepare)
            require_one_step(doing, [each for each, _ in prepared])
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
            self._delete_old(step, folder, rule, frozenset(damaged))

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

    def _delete_old(self, step: int, newest: str, rule: Rule, damaged: frozenset[str]) -> None:
        try:
            self.lock.confirm()
            there = self.sealed()
            again = {one.folder for one in there if one.step == step and one.folder != newest}
            standing = [
                Standing(one.step, one.folder, one.metric, f"{self.store.url}/{one.folder}" in damaged)
                for one in there
                if one.folder not in again
            ]
            gone = [each.path for each in retention.decide(standing, rule, step) if not each.stays]
            for folder in (*gone, *again):
                self._delete(folder)
            self._clear_unsealed({one.folder for one in there})
        except CheckpointError:
            return  # they are another job's now; the next save will report it
        except OSError as exc:
            _log.warning("an old checkpoint in %s could not be deleted: %s", self.store.url, storage.describe(exc))

    def _delete(self, folder: str) -> None:
        self.store.delete(f"{folder}/{manifests.FILE_NAME}")  # first, so that what is left is none
        self.store.delete(folder)

    def _clear_unsealed(self, sealed: set[str]) -> None:
        """Delete what saves that broke off have left: we hold the lock, so nothing else is being written."""
        for name in self.store.names():
            if _STEP.fullmatch(name):
                for save in self.store.names(name):
                    if _SAVE.fullmatch(save) and f"{name}/{save}" not in sealed:
                        self.store.delete(f"{name}/{save}")
