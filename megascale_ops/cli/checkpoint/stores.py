# SPDX-License-Identifier: Apache-2.0
"""Checkpoints at a URL. Files are looked at on this machine: each is brought into ``TMPDIR``, and removed at once."""

import shutil
import tempfile
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path

from megascale_ops.checkpoint import manifest as manifests
from megascale_ops.checkpoint import storage, writer_lock
from megascale_ops.checkpoint.deletion import Glance
from megascale_ops.checkpoint.manifest import CheckpointReport, Fault, FileEntry, FileSeen
from megascale_ops.checkpoint.processes import describe_writer
from megascale_ops.checkpoint.readers import renewed
from megascale_ops.checkpoint.retention import Decision, Rule
from megascale_ops.checkpoint.tiers import store_readers, store_saves
from megascale_ops.checkpoint.tiers.filesystems import Store
from megascale_ops.checkpoint.tiers.store_names import StoreNames
from megascale_ops.checkpoint.tiers.store_readers import StoreReading
from megascale_ops.checkpoint.trust import alarms
from megascale_ops.checkpoint.trust.alarms import Findings
from megascale_ops.cli.checkpoint.folders import living
from megascale_ops.cli.checkpoint.places import Place, promised_bytes
from megascale_ops.errors import CheckpointError, UsageError

# 4 files at a time: a single stream from a store is bound by its answers.
_AT_ONCE = 4
_BLOCK_BYTES = 8 << 20


class StorePlace(Place):
    """The checkpoints below one URL, or those of one step."""

    is_part = False

    def __init__(self, store: Store, only: str = "") -> None:
        self.said, self.is_one = store.url, bool(only)
        self._store, self._only = store, only
        self._glances = store_saves.glances(store, only)[: 1 if only else None]

    def glances(self) -> list[Glance]:
        """Each by its manifest and one listing."""
        return [seen for _, seen in self._glances]

    def readers(self) -> dict[int, tuple[str, ...]]:
        """By their marks."""
        try:
            return store_readers.readers_of(self._store)
        except OSError:
            return {}

    def holder(self) -> str:
        """By the newest name in the store."""
        try:
            return living(StoreNames(self._store).read_lock().writer)
        except OSError:
            return ""

    def verified(self) -> Iterator[CheckpointReport]:
        """Each file against its digest, as it comes from the store."""
        from megascale_ops.cli.terminal.progress import bytes_bar

        for folder, seen in self._glances:
            if seen.manifest is None:
                yield CheckpointReport(seen.path, seen.step, seen.faults)
                continue
            with bytes_bar(f"step {seen.step}", promised_bytes(seen)) as told, _passing() as passing:
                faults = self._faults(folder, seen, passing, told)
            if not faults or store_saves.is_there(self._store, folder):
                yield CheckpointReport(seen.path, seen.step, tuple(faults), seen.manifest)

    def elsewhere(self, seen: Glance) -> tuple[str, ...]:
        """None: a store has all."""
        del seen
        return ()

    def findings(self, path: str) -> Findings | None:
        """From its own file."""
        try:
            name = f"{self._folder_of(path)}/{alarms.FILE_NAME}"
            return alarms.decode(self._store.read(name, alarms.MOST_BYTES))
        except OSError:
            return None

    @contextmanager
    def fetched(self, path: str) -> Iterator[Path]:
        """A copy of it in ``TMPDIR``, gone at the end; the checkpoint is marked while it is copied."""
        from megascale_ops.cli.terminal.progress import bytes_bar

        folder = self._folder_of(path)
        step = store_saves.step_of(folder)
        with _passing() as passing, renewed(StoreReading(self._store, describe_writer(0, 1))) as reader:
            reader.mark(step)
            if not store_saves.is_there(self._store, folder):
                raise CheckpointError(f"{path} was deleted meanwhile: ask once more")
            seen, there = store_saves.glance(self._store, folder), passing / storage.final_step_name(step)
            there.mkdir()
            assert seen.manifest is not None, "it was verified"
            doing = f"copied: step {step}"
            with bytes_bar(doing, promised_bytes(seen)) as told, ThreadPoolExecutor(_AT_ONCE) as pool:
                list(pool.map(lambda entry: self._copy(folder, entry, there, told), seen.manifest.files))
            (there / manifests.FILE_NAME).write_bytes(manifests.encode(seen.manifest))
            yield there

    def living_writer(self) -> str:
        """By its name in the store."""
        return writer_lock.living_writer(self._store.url, StoreNames(self._store))

    def decide(self, rule: Rule, damaged: set[str]) -> list[Decision]:
        """As a save would."""
        decided = store_saves.plan(self._store, rule, damaged=damaged)
        return [one._replace(path=f"{self._store.url}/{one.path}") for one in decided]

    def delete(self, decisions: list[Decision]) -> set[str]:
        """None under a reader; the oldest first."""
        names, gone = StoreNames(self._store), set[str]()
        first = names.read_lock()
        for one in reversed([each for each in decisions if not each.stays]):
            if names.read_lock().number != first.number:
                who = self.holder() or "a job"
                raise CheckpointError(f"stopped before step {one.step}: {who} began to write to {self.said}")
            if store_saves.delete(self._store, self._folder_of(one.path)):
                gone.add(one.path)
        return gone

    def _folder_of(self, path: str) -> str:
        return path.removeprefix(f"{self._store.url}/")

    def _faults(self, folder: str, seen: Glance, passing: Path, told: Callable[[int], object]) -> list[Fault]:
        """What is wrong with one by its digests; a file whose size is wrong is not read."""
        assert seen.manifest is not None, "looked at"
        known = {fault.file: fault for fault in seen.faults}

        def look(entry: FileEntry) -> Fault | None:
            if entry.name in known:
                return None
            try:
                self._copy(folder, entry, passing, told)
            except OSError as error:
                return manifests.judge_file(entry, FileSeen(entry.name, error=storage.describe(error)))
            try:
                return manifests.judge_file(entry, storage.observe(passing, entry))
            finally:
                (passing / entry.name).unlink(missing_ok=True)

        with ThreadPoolExecutor(_AT_ONCE) as pool:
            found = list(pool.map(look, seen.manifest.files))
        return [*seen.faults, *(fault for fault in found if fault is not None)]

    def _copy(self, folder: str, entry: FileEntry, into: Path, told: Callable[[int], object]) -> None:
        """Bring one file here, as far as it is promised.

        Raises:
            OSError: the store, or this disk, refuses.
        """
        with (into / entry.name).open("wb") as file:
            for start in range(0, entry.size_bytes, _BLOCK_BYTES):
                stop = min(start + _BLOCK_BYTES, entry.size_bytes)
                file.write(self._store.read_range(f"{folder}/{entry.name}", start, stop))
                told(stop - start)


@contextmanager
def _passing() -> Iterator[Path]:
    folder = Path(tempfile.mkdtemp(prefix="megascale-checkpoint-"))
    try:
        yield folder
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def store_of(url: str) -> StorePlace:
    """Return the checkpoints at a URL; of one of a step, or of a save of it, that one.

    Raises:
        UsageError: there are none, fsspec does not know it, or a package for it is not installed; one sentence.
        OSError: the store can't be listed.
    """
    parts = url.rstrip("/").split("/")
    at = next((place for place, part in enumerate(parts) if place > 2 and store_saves.step_of(part) >= 0), len(parts))
    store, only = Store("/".join(parts[:at])), "".join(parts[at : at + 1])
    found = StorePlace(store, only)
    if found.glances():
        return found
    try:
        store.require_there()
        said = store_saves.copied(store)
    except FileNotFoundError:
        bucket = "/".join(parts[:3])
        raise UsageError(f"there is no {bucket}: {url} names a bucket that the store does not have") from None
    if said:
        raise UsageError(f"no checkpoint is read from {url}: {said}")
    raise UsageError(f"no checkpoint is at {url}: one is a folder step-00000120 that CheckpointManager has saved")
