# SPDX-License-Identifier: Apache-2.0
"""One save as the writer processes of all ranks make it together, in one place (``places``).

The leading rank's writer makes the place; every writer puts its rank's files there and tells their digests; the
leading one waits for all, seals, and deletes what has no reason to stay. The seal comes last and is one rename in a
folder, one file in a store, so a save that ends anywhere before it is none.
"""

import time
from collections.abc import Callable
from typing import TYPE_CHECKING, Protocol

import msgspec

from megascale_ops.checkpoint import plan, processes
from megascale_ops.checkpoint.background.messages import Job
from megascale_ops.checkpoint.background.place_of_job import place_of
from megascale_ops.checkpoint.background.shares import Begun, Share
from megascale_ops.checkpoint.ranks import EchoError
from megascale_ops.checkpoint.trust import alarms
from megascale_ops.errors import CheckpointError

if TYPE_CHECKING:
    from megascale_ops.checkpoint.background.places import Place
    from megascale_ops.checkpoint.manifest import FileEntry

# 600 s without a new byte in the folder: slower storage is broken storage.
PATIENCE_S = 600.0
# 15 s when the training processes have ended: one that ended before it handed its copy over will never do so, and a
# restart waits. Some network file systems show another node's bytes some seconds late.
ORPHAN_PATIENCE_S = 15.0
_ORPHAN_LOOK_S = 1.0
# 10 s: how often a writer looks whether the save goes on and shows it to the others.
_RENEW_S = 10.0
# 1 s: how often a writer shows its training process that bytes move; one small message.
_SHOW_S = 1.0
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
        self._place: Place = place_of(job)
        self._own: tuple[FileEntry, ...] = ()
        self._seen: object = None
        self._renewed_s = self._shown_s = time.monotonic()

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
            self._place.begin(Begun(job.token, processes.this_process()))
            if self._trainer.is_orphaned():  # a restart that has looked meanwhile has not seen it
                raise CheckpointError("the training process ended before the folder was made")
        else:
            self._await("the leading rank's writer makes the folder", self._is_begun)
        files = [(image.name, data[image.start : image.start + image.length]) for image in job.files]
        more = {plan.FILE_NAME: job.plan, alarms.FILE_NAME: job.found}
        files += [(name, memoryview(raw)) for name, raw in more.items() if raw]
        self._own = tuple(self._place.write(files, self._hear))
        self._place.tell(Share(job.token, job.rank, self._own))
        return sum(entry.size_bytes for entry in self._own)

    def seal(self) -> bool:
        """Wait for the other ranks' files, seal the checkpoint, and delete what has no reason to stay.

        Raises:
            CheckpointError: another rank's part failed, another job has taken the folder, or a file is missing.
            OSError: the file system refuses.
        """
        job, known = self._job, {self._job.rank: Share(self._job.token, self._job.rank, self._own)}
        world_size = job.sealed.world_size

        def are_all_there() -> bool:
            self._place.collect(known)
            for share in known.values():
                if share.failure:
                    raise EchoError(f"on rank {share.rank}: {share.failure}")
            return len(known) >= world_size

        self._await("all ranks' writers are done", are_all_there)
        files = sorted((entry for share in known.values() for entry in share.files), key=lambda entry: entry.name)
        self._place.clear()
        self._listen(0.0)
        self._place.confirm()
        sealed = msgspec.structs.replace(job.sealed, files=tuple(files), written_wall_s=time.time())
        self._place.seal(sealed)
        self._place.delete_old()
        return True

    def await_seal(self) -> bool:
        """Wait until the leading rank's writer has sealed; False when the training process need not be told.

        Raises:
            CheckpointError: it has given the save up, or does not come to an end.
        """
        trainer = self._trainer
        self._await("the leading rank's writer seals", lambda: trainer.needs_no_outcome() or not self._is_begun())
        deadline_s = time.monotonic() + _SETTLES_S
        while not trainer.needs_no_outcome():
            found = self._place.sealed()
            if found is not None and set(self._own) <= set(found.files):
                return True
            if time.monotonic() > deadline_s:
                raise EchoError("another rank's part of it failed")
            trainer.hear(self._place.looks.most_s)
        return False

    def was_given_up(self) -> bool:
        """Whether the leading rank's writer has removed the folder."""
        return not self._job.leads and not self._is_begun()

    def give_up(self, reason: str) -> None:
        """Give back what it takes in its place."""
        self._place.give_up(reason)

    def _is_begun(self) -> bool:
        begun = self._place.begun()
        return begun is not None and begun.token == self._job.token

    def _hear(self, moved_bytes: int) -> None:
        """Between two parts of a file: show that it goes on, and listen."""
        now_s = time.monotonic()
        if moved_bytes and now_s - self._shown_s > _SHOW_S:
            self._shown_s = now_s
            self._trainer.show_progress(self._job.token)
        if moved_bytes and now_s - self._renewed_s > _RENEW_S:
            self._renewed_s = now_s
            self._place.renew()
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
        sign: object = None
        pause_s, moved_s, looked_s, was_orphaned = self._place.looks.first_s, time.monotonic(), 0.0, False
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
            pause_s = min(pause_s * 1.5, self._place.looks.most_s)

    def _sign_of_life(self) -> object:
        """What changes while the save goes on. Only the leading rank's writer looks at all files."""
        if not self._job.leads:
            return self._place.sign_of_lead()
        sign = self._place.sign_of_all()
        if sign != self._seen:
            self._seen = sign
            self._place.renew()
        return sign
