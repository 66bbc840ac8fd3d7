# SPDX-License-Identifier: Apache-2.0
"""Checkpoints in a folder: of a job, of a run, or the part of a job's that one of its nodes keeps."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import msgspec

from megascale_ops.checkpoint import deletion, latest, lock_files, processes, readers, storage, writer_lock
from megascale_ops.checkpoint.deletion import Glance
from megascale_ops.checkpoint.manifest import CheckpointReport, Fault
from megascale_ops.checkpoint.retention import Decision, Rule
from megascale_ops.checkpoint.tiers import node_folder
from megascale_ops.checkpoint.trust import alarms
from megascale_ops.checkpoint.trust.alarms import Findings
from megascale_ops.checkpoint.writers import Writer
from megascale_ops.cli.checkpoint.places import Place, promised_bytes
from megascale_ops.errors import CheckpointError, UsageError

# As a run folder names it; also in cli/sources/runs.
_OF_A_RUN = "checkpoints"
_WANTED = "give a folder of checkpoints, one of them, or a run folder"


class Folder(Place):
    """A folder that holds checkpoints, and those of it that are meant, the newest first."""

    is_part = False

    def __init__(self, root: Path, folders: list[Path], *, is_one: bool = False) -> None:
        self.said, self.is_one = str(root), is_one
        self._root, self._folders = root, folders

    def glances(self) -> list[Glance]:
        """Each by its manifest and sizes."""
        return [deletion.glance(folder) for folder in self._folders]

    def readers(self) -> dict[int, tuple[str, ...]]:
        """By their marks."""
        try:
            return readers.readers_of(self._root)
        except OSError:
            return {}

    def holder(self) -> str:
        """By the newest name on the folder."""
        try:
            return living(lock_files.read_lock(self._root).writer)
        except OSError:
            return ""

    def verified(self) -> Iterator[CheckpointReport]:
        """Each file against its digest."""
        from megascale_ops.cli.terminal.progress import bytes_bar

        for folder in self._folders:
            seen = deletion.glance(folder)
            with bytes_bar(f"step {seen.step}", promised_bytes(seen)) as told:
                report = latest.inspect(folder, told=told)
            if report.ok or folder.exists():
                yield report

    def elsewhere(self, seen: Glance) -> tuple[str, ...]:
        """None: a folder has all."""
        del seen
        return ()

    def findings(self, path: str) -> Findings | None:
        """From its own file."""
        return alarms.read(Path(path))

    @contextmanager
    def fetched(self, path: str) -> Iterator[Path]:
        """The folder itself, marked; where no mark can be written it is read without."""
        folder = Path(path)
        with readers.reading(folder.parent, 0, 1) as reader:
            reader.mark(storage.step_of(folder))
            if not folder.exists():
                raise CheckpointError(f"{folder} was deleted meanwhile: ask once more")
            yield folder

    def living_writer(self) -> str:
        """By its name on the folder."""
        return writer_lock.living_writer(self._root)

    def decide(self, rule: Rule, damaged: set[str]) -> list[Decision]:
        """As a save would."""
        return deletion.plan(self._root, rule, damaged=damaged, clear=False)

    def delete(self, decisions: list[Decision]) -> set[str]:
        """None under a reader."""
        first = lock_files.read_lock(self._root)

        def before(one: Decision) -> None:
            if lock_files.read_lock(self._root).number != first.number:
                who = self.holder() or "a job"
                raise CheckpointError(f"stopped before step {one.step}: {who} began to write to {self._root}")

        return {one.path for one in deletion.carry_out(self._root, decisions, before)}


class NodeFolder(Folder):
    """What one node keeps of a job's sets: its ranks' files and copies of a buddy's. What is not here is no damage."""

    is_part = True

    def glances(self) -> list[Glance]:
        """Without what other nodes have."""
        return [msgspec.structs.replace(seen, faults=_here(seen.faults)) for seen in super().glances()]

    def verified(self) -> Iterator[CheckpointReport]:
        """The files that are here."""
        for report in super().verified():
            yield msgspec.structs.replace(report, faults=_here(report.faults))

    def elsewhere(self, seen: Glance) -> tuple[str, ...]:
        """Those that are promised and not here."""
        faults = deletion.glance(Path(seen.path)).faults
        return tuple(fault.file for fault in faults if fault not in _here(faults))

    @contextmanager
    def fetched(self, path: str) -> Iterator[Path]:
        """The folder, where all of its files are here."""
        seen = deletion.glance(Path(path))
        lacking = len(self.elsewhere(seen))
        if lacking:
            files = len(seen.manifest.files) if seen.manifest is not None else 0
            raise CheckpointError(f"{path} has {files - lacking} of {files} files, the others are on other nodes")
        with super().fetched(path) as folder:
            yield folder


def _here(faults: tuple[Fault, ...]) -> tuple[Fault, ...]:
    """The faults but for files that are on other nodes."""
    return tuple(fault for fault in faults if fault.kind != "missing" or fault.file == "manifest.json")


def folder_of(path: str) -> Folder:
    """Return the checkpoints of a folder, or of the one folder below it that has some.

    Raises:
        UsageError: there are none; one sentence.
        OSError: it can't be read.
    """
    given = Path(path).absolute()
    if not given.exists():
        raise UsageError(f"there is no {path}: {_WANTED}")
    if not given.is_dir():
        raise UsageError(f"{path} is no folder: {_WANTED}")
    if storage.step_of(given) >= 0:
        kind = NodeFolder if node_folder.is_one(given.parent) else Folder
        return kind(given.parent, [given], is_one=True)
    for root in (given, given / _OF_A_RUN):
        folders = storage.candidates(root)
        if folders:
            return (NodeFolder if node_folder.is_one(root) else Folder)(root, folders)
    jobs = [each for each in sorted(given.iterdir()) if node_folder.is_one(each) and storage.candidates(each)]
    if len(jobs) == 1:
        return NodeFolder(jobs[0], storage.candidates(jobs[0]))
    if jobs:
        names = ", ".join(each.name for each in jobs)
        raise UsageError(f"{path} has the sets of {len(jobs)} jobs: give one of {names}")
    raise UsageError(f"no checkpoint is in {path}: one is a folder step-00000120 that CheckpointManager has saved")


def living(writer: Writer | None) -> str:
    """Return a writer by name, unless it has ended as far as this machine knows; "" where no process is known."""
    if writer is None or writer.released or processes.life_of(writer.process, processes.this_process()) == "dead":
        return ""
    return writer.who()
