# SPDX-License-Identifier: Apache-2.0
"""Save and restore a training state so that a crash at any moment costs at most the steps since the last save.

    checkpoints = CheckpointManager("/data/run7/checkpoints")
    state = {"model": model, "optimizer": optimizer, "tokens": 0}
    step = checkpoints.restore(state)                   # -1: nothing there yet
    ...
    checkpoints.save(step, state)

Every rank writes and digests its shards beside, the leading rank seals them with a manifest and one rename. A restore
verifies as it reads; if anything is wrong all ranks fall back to the checkpoint before and log it.
"""

import logging
import os
import time
from collections.abc import Iterable
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, get_args

from megascale_ops.checkpoint import manifest, readers, storage, writer_lock
from megascale_ops.checkpoint.allowed import Allowed
from megascale_ops.checkpoint.background import unfinished
from megascale_ops.checkpoint.background.save_log import SaveLog
from megascale_ops.checkpoint.loading.restore_log import RestoreLog
from megascale_ops.checkpoint.metric import measured
from megascale_ops.checkpoint.notify import tell
from megascale_ops.checkpoint.retention import Rule
from megascale_ops.checkpoint.tiers import identity
from megascale_ops.checkpoint.tiers.filesystems import is_url
from megascale_ops.checkpoint.tiers.settings import LocalTier, is_due
from megascale_ops.checkpoint.trust.file_digests import Algorithm
from megascale_ops.checkpoint.trust.trust import Trust
from megascale_ops.checkpoint.trust.verdicts import Alarm, Replicas
from megascale_ops.checkpoint.trust.watch import Watch
from megascale_ops.errors import CheckpointError, UsageError

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup
    from torch.distributed.device_mesh import DeviceMesh

    from megascale_ops.checkpoint.background.foreground import Foreground
    from megascale_ops.checkpoint.background.saver import BackgroundSaver
    from megascale_ops.checkpoint.manifest import CheckpointReport
    from megascale_ops.checkpoint.ranks import Ranks
    from megascale_ops.checkpoint.tiers.local_store import LocalStore
    from megascale_ops.checkpoint.tiers.remote import RemoteStore

Mode = Literal["sync", "async", "overlapped"]

# The same name as schema.environment.CHECKPOINT_DIR; schema and checkpoint share a floor and do not import each other.
_DIR_VARIABLE = "MEGASCALE_CHECKPOINT_DIR"

_log = logging.getLogger("megascale_ops.checkpoint")


class CheckpointManager:
    """Checkpoints of one training job in one folder, which all its nodes must see.

    Every rank constructs one with the same arguments. ``save`` and ``restore`` are collective over the process group
    when torch.distributed is initialised at that moment, and work in a single process when it is not.

    A state is a dict from names to values. A value with ``state_dict`` and ``load_state_dict`` (module, optimizer,
    scheduler) is saved and loaded through them. Any other value (tensor, number, string, nested dict) is saved as it
    is; on restore its tensors are loaded in place and the entry of the state is replaced by what was saved. A name
    must mean the same on every rank that has it: what differs is wrapped in ``PerRank`` (a loader) or ``RandomStates``.
    Of a dict of which ranks hold other keys (the layers of pipeline stages) each gets those that it has.

    The first save puts the job's name on the folder, for as long as the process lives: another job that saves there is
    refused. Restoring needs no such right.

    What is not a tensor is stored as data: plain Python values, NumPy arrays, torch's dtypes and devices. Anything else
    is refused by the save, with its place. So no checkpoint runs code when it is loaded, whatever wrote it, but for
    what ``pickled`` and ``allow_pickle`` name.

    Args:
        path: the folder; made when it is not there. Or a URL of any file system that fsspec knows (``s3://bucket/run7``).
        keep: how many checkpoints stay (3: the newest, one to fall back to, one more while a new one is written).
        keep_every: the first at or after every multiple of so many steps stays, too; 0: none for that reason.
        keep_best: so many with the best ``metric`` stay, too; 0: none for that reason.
        higher_is_better: of the metric; a loss is better when it is lower.
        process_group: torch's process group; None means the default one.
        types: named tuples, dataclasses and enums that stand in the state; stored as their fields.
        pickled: places in the state (``"optimizer.x"``) whose values are pickled, and unpickled only where they are
            named again.
        allow_pickle: load a checkpoint of an older version, which is a pickle; None: as
            MEGASCALE_CHECKPOINT_ALLOW_PICKLE says (1: yes).
        local: a folder that each node has for itself (``/dev/shm/checkpoints``), or a ``LocalTier``: saves go there
            first, with a copy on another node, and a restart takes the newest that is whole anywhere.
        shared_every: a save goes to ``path`` every so many steps, by multiples; 1: every one. The first always does.
        mode: when ``save`` returns. ``sync``: the checkpoint is whole and on disk. ``async``: the state is copied to
            host memory, of which it takes as much again; a process of its own writes it to ``path``. ``overlapped``:
            the same, and what only an optimizer in the state overwrites may still be copied from the GPU; its next step
            waits. So it is with the local tier: this process's writer writes to the node first.
        deadline_s: a save in the background is given up when nothing was written for so long.
        replicas: what ranks hold alike (data-parallel copies of weights and optimizer states) is compared at each save,
            and a rank whose copy differs is told: "check". "refuse": then the save fails, too. "off": not compared.
        replicated: names of other entries, or of places in them (``"ema"``), that must be equal on all ranks.
        freshness: tell where no weight has changed since the save before though the optimizer has stepped.
        mesh: the device mesh of the job, by whose names ranks are told (``dp=1 tp=0``); None: that of the sharded
            tensors in the state.
        digests: of the files, "xxh3_128" or "sha256": ten times slower, and not to be forged (``trust.file_digests``).

    Raises:
        UsageError: ``mode``, ``replicas`` or ``digests`` is another word, ``mode`` is not ``sync`` for memory://,
            ``keep`` is less than 1, another number below 0, ``types`` has something else, or a folder cannot be
            written to.
    """

    def __init__(
        self,
        path: str | Path,
        *,
        keep: int = 3,
        keep_every: int = 0,
        keep_best: int = 0,
        higher_is_better: bool = False,
        process_group: "ProcessGroup | None" = None,
        types: Iterable[type] = (),
        pickled: Iterable[str] = (),
        allow_pickle: bool | None = None,
        local: str | Path | LocalTier | None = None,
        shared_every: int = 1,
        mode: Mode = "sync",
        deadline_s: float = 600.0,
        replicas: Replicas = "check",
        replicated: Iterable[str] = (),
        freshness: bool = True,
        digests: Algorithm = "xxh3_128",
        mesh: "DeviceMesh | None" = None,
    ) -> None:
        if mode not in get_args(Mode):
            raise UsageError(f"mode is {mode!r}; it is one of {', '.join(get_args(Mode))}")
        self.rule = Rule(keep, keep_every, keep_best, higher_is_better).checked()
        # Of a URL this is a name only; what is done with it is done by the remote store.
        self.path = Path(path) if is_url(path) else Path(path).absolute()
        self._said = str(path) if is_url(path) else str(self.path)
        self._remote: RemoteStore | None = None
        self.skipped: list[CheckpointReport] = []
        self._restore_before = storage.restore_before()
        self._process_group = process_group
        self._mode: Mode = mode
        self._deadline_s = deadline_s
        self._log_of_saves, self._log_of_restores = SaveLog(), RestoreLog()
        self._restored, self._sealed_at_restore = -1, -1
        self._foreground: Foreground | None = None
        self._trust = Trust(replicas, replicated, freshness=freshness, algorithm=digests, mesh=mesh)
        if allow_pickle is None:
            allow_pickle = os.environ.get(manifest.ALLOW_VARIABLE, "") == "1"
        self._allowed = Allowed.of(pickled, types, old_pickles=allow_pickle)
        if is_url(path):
            from megascale_ops.checkpoint.tiers import remote  # costs torch and fsspec

            self._remote = remote.RemoteStore(self._said)
            if mode != "sync" and self._remote.store.is_of_one_process:
                raise UsageError(
                    f"mode={mode!r} writes in a process of its own, and what is at {path} only this one sees: "
                    "leave mode out"
                )
        else:
            storage.prepare_root(self.path)
        if shared_every < 1:
            raise UsageError(f"shared_every is {shared_every}: save every step at most, so 1 at least")
        self._shared_every, self._last_shared, self._last_local = shared_every, -1, -1
        self._tier = local if local is None or isinstance(local, LocalTier) else LocalTier(local)
        self._local_store: LocalStore | None = None
        if self._tier is not None:
            storage.prepare_root(Path(self._tier.checked().path).absolute())

    @classmethod
    def from_environment(
        cls,
        default: str | Path = "checkpoints",
        *,
        keep: int = 3,
        keep_every: int = 0,
        keep_best: int = 0,
        higher_is_better: bool = False,
        process_group: "ProcessGroup | None" = None,
        types: Iterable[type] = (),
        pickled: Iterable[str] = (),
        allow_pickle: bool | None = None,
        local: str | Path | LocalTier | None = None,
        shared_every: int = 1,
        mode: Mode = "sync",
        deadline_s: float = 600.0,
        replicas: Replicas = "check",
        replicated: Iterable[str] = (),
        freshness: bool = True,
        digests: Algorithm = "xxh3_128",
        mesh: "DeviceMesh | None" = None,
    ) -> "CheckpointManager":
        """A manager of the folder that ``megascale-ops run`` names in MEGASCALE_CHECKPOINT_DIR, else of ``default``."""
        return cls(
            os.environ.get(_DIR_VARIABLE) or default,
            keep=keep,
            keep_every=keep_every,
            keep_best=keep_best,
            higher_is_better=higher_is_better,
            process_group=process_group,
            types=types,
            pickled=pickled,
            allow_pickle=allow_pickle,
            local=local,
            shared_every=shared_every,
            mode=mode,
            deadline_s=deadline_s,
            replicas=replicas,
            replicated=replicated,
            freshness=freshness,
            digests=digests,
            mesh=mesh,
        )

    @property
    def alarms(self) -> tuple[Alarm, ...]:
        """What the last save has found: replicas that differ, weights that do not move."""
        return self._trust.alarms

    @property
    def keep(self) -> int:
        """How many of the newest stay."""
        return self.rule.keep

    def save(self, step: int, state: dict[str, Any], *, metric: float | None = None, everywhere: bool = False) -> None:
        """Save a state; when this returns, the checkpoint is whole and on disk, or as ``mode`` says.

        In the background one save is in flight: a second one waits for it. How it went is logged; a failure leaves the
        training alone, is raised by ``wait`` and ``close``, and the next save to ``path`` tries again.

        With a local tier or ``shared_every`` it goes where it is due, which may be nowhere. Where the local tier fails
        a warning says so and training goes on.

        Args:
            step: the step that was finished, the same on every rank.
            state: see the class.
            metric: what the state is measured by (a validation loss), for ``keep_best``; that of the leading rank
                counts. One that is not finite is left out: a state without a measure is no best one.
            everywhere: save to all tiers, whatever is due; for the last one.

        Raises:
            CheckpointError: on every rank, when any rank could not do its part (disk full, no rights, ...), or when
                another job writes into this folder. The checkpoints before stay as they are and nothing of this one
                remains.
            UsageError: a step below 0, an empty state, or a buddy was asked for and there is one node.
        """
        if step < 0:
            raise UsageError(f"a checkpoint cannot have step {step}")
        if not state:
            raise UsageError("a checkpoint of an empty state would restore nothing")
        to_shared = everywhere or is_due(step, self._last_shared, self._shared_every)
        to_local = self._tier is not None and (everywhere or is_due(step, self._last_local, self._tier.every))
        if not (to_shared or to_local):
            return
        tell("save_begin", step)
        self._log_of_saves.begin(step)
        began_s, is_sealed = time.monotonic(), False
        try:
            watch = Watch(self._trust, step, state, self._ranks())
            watch.parent = self._parent_of_now()
            if self._mode == "sync":
                is_sealed = self._save_waiting(watch, metric, to_shared=to_shared, to_local=to_local)
            else:
                self._save_behind(watch, metric, to_shared=to_shared, to_local=to_local)
            self._last_local = step if to_local else self._last_local
            self._last_shared = step if to_shared else self._last_shared
        except CheckpointError:
            self._log_of_saves.fail()
            raise
        finally:
            self._log_of_saves.stall(time.monotonic() - began_s, self._is_in_flight)
            tell("save_end", step)
        if is_sealed:
            self._log_of_saves.seal(step, 0.0)

    def restore(self, state: dict[str, Any]) -> int:
        """Load the newest checkpoint that verifies into a state, in place.

        What was passed over, and why, is logged by the leading rank and kept in ``skipped``.

        Args:
            state: see the class; it may name fewer entries than were saved.

        Returns:
            The step of the checkpoint, or -1 when there is none.

        Raises:
            CheckpointError: on every rank, when there are checkpoints but none verifies, when the newest is of a later
                program or a pickle that was not allowed, or when the state does not fit the checkpoint. After the
                first the tensors of the state may hold parts of a damaged one.
        """
        from megascale_ops.checkpoint.tiers.newest import Search

        began_s = time.monotonic()
        ranks = self._ranks()
        if self._foreground is not None:
            self._foreground.settle(ranks)
        if ranks.leads:
            self._look_for_writers(ranks)
        self.skipped = []
        local = None if self._tier is None else self._local()
        before, self._restore_before = self._restore_before, -1  # what this process saves from now on is its own
        search = Search(self.path, self._said, self._allowed, self._remote, local, self.skipped, before=before)
        marked = readers.reading if self._remote is None else self._remote.reading
        try:
            with marked(self.path, ranks.rank, ranks.world_size) as reader:
                chosen = search.load(state, ranks, reader)
        except CheckpointError:
            self._log_of_restores.fail(len(self.skipped))
            raise
        self.traffic = search.traffic
        if chosen is None:
            return -1
        took_s, read_bytes = time.monotonic() - began_s, search.traffic.read_bytes
        self._log_of_restores.load(chosen.step, took_s, read_bytes, search.tier, len(self.skipped))
        self._last_local, self._last_shared = chosen.step, search.newest_shared
        self._restored, self._sealed_at_restore = chosen.step, self._log_of_saves.saves.sealed_step
        self._trust.restored()
        if self._foreground is not None:
            self._foreground.forget()
        tell("restored", chosen.step)
        return chosen.step

    def wait_copied(self) -> None:
        """Let nothing that follows on the GPU overwrite what is still copied; for writes that no optimizer makes."""
        if self._foreground is not None:
            self._foreground.saver.wait_copied()

    def wait(self, deadline_s: float = 600.0) -> None:
        """Wait until the save in flight is sealed; each rank for itself.

        Raises:
            CheckpointError: the last save failed, or it is not sealed by then; it goes on.
        """
        if self._foreground is not None:
            self._foreground.saver.wait(deadline_s)

    def close(self, deadline_s: float | None = None, *, clear_local: bool = False) -> None:
        """Wait for the save in flight, and give the folder back to other jobs before this process ends.

        A later save takes it again if it can; so does the interpreter's end. A copy to a buddy has ten seconds.

        Args:
            deadline_s: after so many seconds the save in flight is given up; None: when nothing is written any more.
            clear_local: delete what this job has on this node; for the end of a job, not for a restart. Where the save
                in flight fails it stays: it may be the newest.

        Raises:
            CheckpointError: the last save in the background failed, or was given up.
        """
        foreground, self._foreground = self._foreground, None
        is_well = False
        try:
            if foreground is not None:
                foreground.saver.close(deadline_s)
            is_well = True
        finally:
            self._lock().release()
            if self._local_store is not None:
                self._local_store.close(clear=clear_local and is_well)

    @property
    def _background(self) -> "BackgroundSaver | None":
        """The saves in the background, once there was one."""
        return self._foreground.saver if self._foreground is not None else None

    def _lock(self) -> writer_lock.WriterLock:
        return writer_lock.lock_of(self.path) if self._remote is None else self._remote.lock

    def _local(self) -> "LocalStore":
        """The tier on the nodes; importing it costs torch."""
        from megascale_ops.checkpoint.tiers.local_store import LocalStore

        assert self._tier is not None, "asked for only where there is one"
        if self._local_store is None:
            remote = self._remote
            identify = partial(identity.of_folder, self.path) if remote is None else remote.identity
            patience_s = 0.0 if self._mode == "sync" else self._deadline_s
            self._local_store = LocalStore(self._tier, self._said, identify, patience_s)
        return self._local_store

    def _ranks(self) -> "Ranks":
        from megascale_ops.checkpoint.ranks import Ranks

        return Ranks(self._process_group)

    def _save_waiting(self, watch: Watch, metric: float | None, *, to_shared: bool, to_local: bool) -> bool:
        """Save to the tiers that are due, the nodes first; whether a checkpoint is sealed."""
        is_sealed = False
        if to_local:
            is_sealed = self._local().save(watch.step, watch.state, self._allowed, watch.ranks, watch)
        if to_shared:
            of = measured(watch.step, metric)
            if self._remote is not None:
                self._remote.save(watch, self._allowed, metric=of, rule=self.rule, damaged=self._damaged())
            else:
                from megascale_ops.checkpoint.tiers import shared_folder

                shared_folder.save(self.path, watch, self._allowed, metric=of, rule=self.rule, damaged=self._damaged())
            is_sealed = True
        if is_sealed:
            watch.sealed()
        return is_sealed

    def _save_behind(self, watch: Watch, metric: float | None, *, to_shared: bool, to_local: bool) -> None:
        """Copy the state and have the writer processes save it to the tiers that are due."""
        from megascale_ops.checkpoint.background.foreground import Foreground

        if self._foreground is None:
            self._foreground = Foreground(
                self._said,
                self.rule,
                self._lock,
                overlapped=self._mode == "overlapped",
                deadline_s=self._deadline_s,
                log=self._log_of_saves,
            )
        self._foreground.save(
            watch,
            self._allowed,
            metric=measured(watch.step, metric),
            damaged=self._damaged(),
            to_shared=to_shared,
            local=self._local() if to_local else None,
        )

    def _parent_of_now(self) -> int:
        """The step of the checkpoint that this training restored or, later, sealed last, as far as it is known."""
        sealed = self._log_of_saves.saves.sealed_step
        return sealed if sealed != self._sealed_at_restore else self._restored

    def _is_in_flight(self) -> bool:
        return self._background is not None and self._background.is_in_flight

    def _damaged(self) -> frozenset[str]:
        return frozenset(report.path for report in self.skipped)

    def _look_for_writers(self, ranks: "Ranks") -> None:
        """Wait for what former processes of this job still write; warn where a save will be refused (no error)."""
        try:
            answer = self._lock().poll_lock_of_the_living(ranks.rank, ranks.world_size)
            if answer.verb == "take" and self._remote is None:
                unfinished.await_unfinished(unfinished.in_folder(self.path))
            elif answer.verb == "take" and self._remote is not None:
                unfinished.await_in_store(self._remote.store)
        except OSError:
            return  # the search for checkpoints lists the same folder and raises what is wrong with it
        if answer.verb == "refuse":
            _log.warning("this process can restore from %s and will not be able to save: %s", self._said, answer.reason)
