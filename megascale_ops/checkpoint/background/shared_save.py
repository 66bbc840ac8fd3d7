# SPDX-License-Identifier: Apache-2.0
"""One save as the writer processes of all ranks make it together, in one folder (``shares``).

The leading rank's writer makes the folder; every writer puts its rank's files there and tells their digests; the
leading one waits for all, seals, and deletes what has no reason to stay. The seal comes last and is one rename, so a
save that ends anywhere before it is none.
"""

import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Protocol

import msgspec

from megascale_ops.checkpoint import deletion, latest, lock_files, plan, processes, storage
from megascale_ops.checkpoint.background import shares
from megascale_ops.checkpoint.background.messages import FileImage, Job
from megascale_ops.checkpoint.background.shares import Begun, Share
from megascale_ops.checkpoint.background.written_file import write_file
from megascale_ops.checkpoint.manifest import FileEntry, Manifest
from megascale_ops.checkpoint.ranks import EchoError
from megascale_ops.checkpoint.trust import alarms
from megascale_ops.errors import CheckpointError

# 600 s without a new byte in the folder: slower storage is broken storage.
PATIENCE_S = 600.0
# 15 s when the training processes have ended: one that ended before it handed its copy over will never do so, and a
# restart waits. Some network file systems show another node's bytes some seconds late.
ORPHAN_PATIENCE_S = 15.0
_ORPHAN_LOOK_S = 1.0
# 10 s: how often a writer looks whether the save goes on and shows it, to its training process, and the leading rank's
# by a time stamp to the others.
_RENEW_S = 10.0
# 5 ms to 0.5 s: how often the folder is looked at for what other writers did; one small file a look.
_FIRST_LOOK_S, _MOST_LOOK_S = 0.005, 0.5
# 5 s: on a network file system another node's rename may be seen in two steps.
_SETTLES_S = 5.0


class Trainer(Protocol):
    """What a save has to know of the training process."""

    def hear(self, wait_s: float) -> None:
        """Let time pass; raises CheckpointError when the save is to be given up."""

    def show_progress(self, token: str) -> None:
        """Tell it that the save goes on."""

    def is_orphaned(self) -> bool:
        """Whether it has ended."""

    def has_gone_on(self) -> bool:
        """Whether it has sent the next job."""

    def needs_no_outcome(self) -> bool:
        """Whether it knows how the save ended, or has ended."""


class SharedSave:
    """This rank's part of one save."""

    def __init__(self, job: Job, trainer: Trainer) -> None:
        self._job = job
        self._trainer = trainer
        self._root = Path(job.root)
        self._folder = storage.partial_folder(self._root, job.step, job.writer)
        self._own: tuple[FileEntry, ...] = ()
        self._seen_bytes = -1
        self._renewed_s = time.monotonic()

    def write(self, data: memoryview) -> int:
        """Write this rank's files; how many bytes they are.

        Args:
            data: the host buffer.

        Raises:
            CheckpointError: the save is to be given up, or its folder does not come.
            OSError: the file system refuses.
        """
        job = self._job
        if job.leads:
            shares.begin(self._root, job.step, job.writer, Begun(job.token, processes.this_process()))
            if self._trainer.is_orphaned():  # a restart that has looked meanwhile has not seen it
                raise CheckpointError("the training process ended before the folder was made")
        else:
            self._await("the leading rank's writer makes the folder", self._is_begun)
        with ThreadPoolExecutor(1) as pool:
            entries = [self._write(image, data, pool) for image in job.files]
            if job.plan:
                path = self._folder / plan.FILE_NAME
                entries.append(write_file(path, memoryview(job.plan), job.algorithm, pool, self._hear))
            if job.found:
                path = self._folder / alarms.FILE_NAME
                entries.append(write_file(path, memoryview(job.found), job.algorithm, pool, self._hear))
        self._own = tuple(entries)
        shares.tell(self._folder, Share(job.token, job.rank, self._own))
        return sum(entry.size_bytes for entry in entries)

    def seal(self) -> bool:
        """Wait for the other ranks' files, seal the checkpoint, and delete what has no reason to stay.

        Raises:
            CheckpointError: another rank's part failed, another job has taken the folder, or a file is missing.
            OSError: the file system refuses.
        """
        job, known = self._job, {self._job.rank: Share(self._job.token, self._job.rank, self._own)}
        world_size = job.sealed.world_size

        def are_all_there() -> bool:
            shares.collect(self._folder, job.token, known)
            for share in known.values():
                if share.failure:
                    raise EchoError(f"on rank {share.rank}: {share.failure}")
            return len(known) >= world_size

        self._await("all ranks' writers are done", are_all_there)
        files = sorted((entry for share in known.values() for entry in share.files), key=lambda entry: entry.name)
        shares.clear(self._folder, world_size)
        self._listen(0.0)
        self._confirm()
        sealed = msgspec.structs.replace(job.sealed, files=tuple(files), written_wall_s=time.time())
        storage.seal(self._root, sealed, job.writer)
        deletion.after_save(self._root, job.rule, job.step, frozenset(job.damaged), self._confirm)
        return True

    def await_seal(self) -> bool:
        """Wait until the leading rank's writer has sealed; False when the training process need not be told.

        Raises:
            CheckpointError: it has given the save up, or does not come to an end.
        """
        trainer, final = self._trainer, storage.final_folder(self._root, self._job.step)
        self._await("the leading rank's writer seals", lambda: trainer.needs_no_outcome() or not self._is_begun())
        deadline_s = time.monotonic() + _SETTLES_S
        while not trainer.needs_no_outcome():
            found = latest.read_manifest(final)
            if isinstance(found, Manifest) and set(self._own) <= set(found.files):
                return True
            if time.monotonic() > deadline_s:
                raise EchoError("another rank's part of it failed")
            trainer.hear(_MOST_LOOK_S)
        return False

    def was_given_up(self) -> bool:
        """Whether the leading rank's writer has removed the folder."""
        return not self._job.leads and not self._is_begun()

    def _write(self, image: FileImage, data: memoryview, pool: ThreadPoolExecutor) -> FileEntry:
        part = data[image.start : image.start + image.length]
        return write_file(self._folder / image.name, part, self._job.algorithm, pool, self._hear)

    def _confirm(self) -> None:
        """Prove that the training process's lock is still the newest one.

        Raises:
            CheckpointError: another job has taken the folder over.
            OSError: the folder can't be listed.
        """
        newest = lock_files.read_lock(self._root)
        if newest.number not in {0, self._job.writer}:  # 0: deleted by a person
            who = newest.writer.who() if newest.writer else "another writer"
            raise CheckpointError(f"{who} has taken this folder over")

    def _is_begun(self) -> bool:
        begun = shares.begun_in(self._folder)
        return begun is not None and begun.token == self._job.token

    def _hear(self) -> None:
        """Between two parts of a file: show that it goes on, and listen."""
        if time.monotonic() - self._renewed_s > _RENEW_S:
            self._renewed_s = time.monotonic()
            self._trainer.show_progress(self._job.token)
            if self._job.leads:
                shares.renew(self._folder)
        self._listen(0.0)

    def _listen(self, wait_s: float) -> None:
        """Let time pass.

        Raises:
            CheckpointError: the save is to be given up. So it is when the next one is sent before this one was
                reported: the ranks have agreed that it failed.
        """
        self._trainer.hear(wait_s)
        if self._trainer.has_gone_on() and (self._job.leads or not self._own):
            raise EchoError("all ranks have gone on to another save")

    def _await(self, what: str, is_so: Callable[[], bool]) -> None:
        """Look until something is so; as long as the save goes on there is no end of patience.

        Raises:
            CheckpointError: nothing has moved for ``PATIENCE_S``, or the save is to be given up.
        """
        pause_s, moved_s, looked_s, sign, was_orphaned = _FIRST_LOOK_S, time.monotonic(), 0.0, -1, False
        while not is_so():
            now_s, is_orphaned = time.monotonic(), self._trainer.is_orphaned()
            if is_orphaned and not was_orphaned:
                was_orphaned, moved_s = True, now_s
            if now_s - looked_s > (_ORPHAN_LOOK_S if is_orphaned else _RENEW_S):
                looked_s, before = now_s, sign
                sign = self._sign_of_life()
                if sign != before:
                    moved_s = now_s
                    self._trainer.show_progress(self._job.token)
            patience_s = ORPHAN_PATIENCE_S if is_orphaned else PATIENCE_S
            if now_s - moved_s > patience_s:
                raise CheckpointError(f"nothing was written for {patience_s:.0f} s while waiting until {what}")
            self._listen(pause_s)
            pause_s = min(pause_s * 1.5, _MOST_LOOK_S)

    def _sign_of_life(self) -> int:
        """A number that changes while the save goes on. Only the leading rank's writer looks at all files."""
        if not self._job.leads:
            return shares.renewed_ns(self._folder)
        size = storage.bytes_in(self._folder)
        if size != self._seen_bytes:
            self._seen_bytes = size
            shares.renew(self._folder)
        return size
