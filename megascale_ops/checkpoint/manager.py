# SPDX-License-Identifier: Apache-2.0
"""Save and restore a training state so that a crash at any moment costs at most the steps since the last save.

    checkpoints = CheckpointManager("/data/run7/checkpoints")
    state = {"model": model, "optimizer": optimizer, "tokens": 0}
    step = checkpoints.restore(state)                   # -1: nothing there yet
    ...
    checkpoints.save(step, state)

Saving: the leading rank holds the folder against other jobs, every rank writes its shards beside, all digest what they
wrote, the leading rank seals with a manifest and one rename. Restoring: all ranks verify the newest checkpoint
together, each a share of its files; if anything is wrong they all fall back to the one before and log it.
"""

import logging
import math
import os
import time
from collections.abc import Iterable
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec

from megascale_ops.checkpoint import deletion, latest, manifest, readers, storage, writer_lock
from megascale_ops.checkpoint.allowed import Allowed
from megascale_ops.checkpoint.manifest import CheckpointReport, FileEntry, Manifest
from megascale_ops.checkpoint.notify import tell
from megascale_ops.checkpoint.readers import Reading
from megascale_ops.checkpoint.retention import Rule
from megascale_ops.checkpoint.trust import alarms
from megascale_ops.checkpoint.trust.alarms import Findings
from megascale_ops.checkpoint.trust.trust import Trust, leave
from megascale_ops.checkpoint.trust.verdicts import Alarm, Replicas
from megascale_ops.errors import CheckpointError, UsageError

if TYPE_CHECKING:
    import torch
    from torch.distributed import ProcessGroup

    from megascale_ops.checkpoint.ranks import Ranks
    from megascale_ops.checkpoint.trust.check import Summary

# The same name as schema.environment.CHECKPOINT_DIR; schema and checkpoint share a floor and do not import each other.
_DIR_VARIABLE = "MEGASCALE_CHECKPOINT_DIR"

# 3: a folder would have to lose what was listed three times within a look at a few manifests.
_MOST_LOOKS = 3

_log = logging.getLogger("megascale_ops.checkpoint")


class CheckpointManager:
    """Checkpoints of one training job in one folder, which all its nodes must see.

    Every rank constructs one with the same arguments. ``save`` and ``restore`` are collective over the process group
    when torch.distributed is initialised at that moment, and work in a single process when it is not.

    A state is a dict from names to values. A value with ``state_dict`` and ``load_state_dict`` (module, optimizer,
    scheduler) is saved and loaded through them. Any other value (tensor, number, string, nested dict) is saved as it
    is; on restore its tensors are loaded in place and the entry of the state is replaced by what was saved. A name
    must mean the same on every rank that has it: give what differs (a random generator's state) a name per rank.

    The first save puts the job's name on the folder, for as long as the process lives: another job that saves there is
    refused. Restoring needs no such right.

    What is not a tensor is stored as data: plain Python values, NumPy arrays, torch's dtypes and devices. Anything else
    is refused by the save, with its place. So no checkpoint runs code when it is loaded, whatever wrote it, but for
    what ``pickled`` and ``allow_pickle`` name.

    Args:
        path: the folder; made when it is not there.
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
        replicas: what ranks hold alike (data-parallel copies of weights and optimizer states) is compared at each save,
            and a rank whose copy differs is told: "check". "refuse": then the save fails, too. "off": not compared.
        replicated: names of other entries, or of places in them (``"ema"``), that must be equal on all ranks.
        freshness: tell where no weight has changed since the save before though the optimizer has stepped.

    Raises:
        UsageError: ``replicas`` is none of these, ``keep`` is less than 1, another number below 0, ``types`` has
            something else, or the folder cannot be written to.
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
        replicas: Replicas = "check",
        replicated: Iterable[str] = (),
        freshness: bool = True,
    ) -> None:
        self.rule = Rule(keep, keep_every, keep_best, higher_is_better).checked()
        self.path = Path(path).absolute()
        self.skipped: list[CheckpointReport] = []
        self._process_group = process_group
        if allow_pickle is None:
            allow_pickle = os.environ.get(manifest.ALLOW_VARIABLE, "") == "1"
        self._allowed = Allowed.of(pickled, types, old_pickles=allow_pickle)
        self._trust = Trust(replicas, replicated, freshness=freshness)
        storage.prepare_root(self.path)

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
        replicas: Replicas = "check",
        replicated: Iterable[str] = (),
        freshness: bool = True,
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
            replicas=replicas,
            replicated=replicated,
            freshness=freshness,
        )

    @property
    def alarms(self) -> tuple[Alarm, ...]:
        """What the last save has found: replicas that differ, weights that do not move."""
        return self._trust.alarms

    @property
    def keep(self) -> int:
        """How many of the newest stay."""
        return self.rule.keep

    def save(self, step: int, state: dict[str, Any], *, metric: float | None = None) -> None:
        """Save a state; when this returns, the checkpoint is whole and on disk.

        Args:
            step: the step that was finished, the same on every rank.
            state: see the class.
            metric: what the state is measured by (a validation loss), for ``keep_best``; that of the leading rank
                counts. One that is not finite is left out: a state without a measure is no best one.

        Raises:
            CheckpointError: on every rank, when any rank could not do its part (disk full, no rights, ...), or when
                another job writes into this folder. The checkpoints before stay as they are and nothing of this one
                remains.
        """
        if step < 0:
            raise UsageError(f"a checkpoint cannot have step {step}")
        if not state:
            raise UsageError("a checkpoint of an empty state would restore nothing")
        tell("save_begin", step)
        try:
            self._save(step, state, self._ranks(), _measured(step, metric))
        finally:
            tell("save_end", step)

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
                last the state may be loaded in part.
        """
        ranks = self._ranks()
        if ranks.leads:
            self._look_for_writers(ranks)
        with readers.reading(self.path, ranks.rank, ranks.world_size) as reader:
            chosen = self._choose(ranks, reader)
            if chosen is None:
                return -1
            self._read(chosen, state, ranks)
        self._trust.restored()
        tell("restored", chosen.step)
        return chosen.step

    def close(self) -> None:
        """Give the folder back to other jobs before this process ends. A later save takes it again if it can."""
        writer_lock.lock_of(self.path).release()

    def _ranks(self) -> "Ranks":
        from megascale_ops.checkpoint.ranks import Ranks

        return Ranks(self._process_group)

    def _save(self, step: int, state: dict[str, Any], ranks: "Ranks", metric: float | msgspec.UnsetType) -> None:
        from megascale_ops.checkpoint import contents, persist

        doing = f"saving step {step} to {self.path}"
        lock = writer_lock.lock_of(self.path)
        flat: dict[str, torch.Tensor] = {}
        writer = 0

        def prepare() -> tuple[int, int]:
            captured = {name: contents.capture(value) for name, value in state.items()}
            flat.update(contents.take_apart(captured, self._allowed))
            number = lock.hold(ranks.rank, ranks.world_size) if ranks.leads else 0
            if ranks.leads:
                storage.begin(self.path, step, number)
            return step, number

        def write() -> "tuple[list[FileEntry], Summary | None]":
            folder = storage.partial_folder(self.path, step, writer)
            seen = self._trust.look(self._trust.describe(flat, state, ranks))
            persist.write(folder, flat, ranks)
            return persist.digest_own(folder, ranks), seen

        def seal(entries: Iterable[FileEntry], found: Findings | None) -> None:
            lock.confirm()
            entries = (*entries, *leave(storage.partial_folder(self.path, step, writer), found))
            files = tuple(sorted(entries, key=lambda entry: entry.name))
            wall_s = time.time()
            sealed = Manifest(step=step, world_size=ranks.world_size, written_wall_s=wall_s, files=files, metric=metric)
            storage.seal(self.path, sealed, writer)

        try:
            prepared = ranks.agree(doing, prepare)
            writer = prepared[0][1]
            _require_one_step(doing, [each for each, _ in prepared])
            shares = ranks.agree(doing, write)
            found = self._trust.conclude(step, [seen for _, seen in shares], ranks)
            entries = [entry for own, _ in shares for entry in own]
            ranks.agree(doing, lambda: seal(entries, found) if ranks.leads else None)
        except CheckpointError:
            if ranks.leads and lock.number:
                storage.abandon(self.path, step, lock.number)
            raise
        self._trust.sealed(step)
        if ranks.leads:
            self._delete_old(step, lock)

    def _delete_old(self, step: int, lock: writer_lock.WriterLock) -> None:
        damaged = {report.path for report in self.skipped} - {str(storage.final_folder(self.path, step))}
        try:
            lock.confirm()
            by_metric = self.rule.keep_best > 0
            decided = deletion.plan(self.path, self.rule, newest_step=step, damaged=damaged, by_metric=by_metric)
            deletion.carry_out(self.path, decided)
        except CheckpointError:
            return  # they are another job's now; the next save will report it
        except OSError as exc:  # the new checkpoint is whole; too many old ones are no reason to stop training
            _log.warning("an old checkpoint in %s could not be deleted: %s", self.path, storage.describe(exc))

    def _look_for_writers(self, ranks: "Ranks") -> None:
        """Warn early that a later save will be refused. No error: an evaluation restores beside a job that trains."""
        try:
            answer = writer_lock.lock_of(self.path).poll_lock(ranks.rank, ranks.world_size)
        except OSError:
            return  # the search for checkpoints lists the same folder and raises what is wrong with it
        if answer.verb == "refuse":
            _log.warning("this process can restore from %s and will not be able to save: %s", self.path, answer.reason)

    def _read(self, chosen: CheckpointReport, state: dict[str, Any], ranks: "Ranks") -> None:
        from megascale_ops.checkpoint import persist

        folder, sealed = Path(chosen.path), chosen.manifest
        assert sealed is not None, "a checkpoint without a manifest does not verify"
        if ranks.leads and sealed.version <= manifest.LAST_PICKLED and self._allowed.old_pickles:
            _log.warning("unpickling %s, which an older version wrote: that runs what its writer wanted", folder)
        if ranks.leads:
            alarms.remind(folder)
        doing = f"restoring step {chosen.step} from {folder}"
        ranks.agree(doing, lambda: persist.read_into(folder, sealed, state, self._allowed))
        ranks.agree(doing, lambda: latest.require_unchanged(folder, chosen) if ranks.leads else None)

    def _choose(self, ranks: "Ranks", reader: Reading) -> CheckpointReport | None:
        """Agree on the newest checkpoint that every rank finds whole; the leading rank has marked it."""
        doing = f"looking for checkpoints in {self.path}"
        for _ in range(_MOST_LOOKS):
            self.skipped = []
            folders = ranks.agree(doing, lambda: storage.candidates(self.path) if ranks.leads else [])[0]
            looked = self._first_whole(doing, folders, ranks, reader)
            if looked is not None:
                return looked
            if not folders:
                return None
            if not self._is_any_gone(doing, ranks):
                break
        raise CheckpointError(
            f"none of the {len(folders)} checkpoints in {self.path} verifies, the newest: "
            f"{self.skipped[0].sentence()}. To start from step 0, move that folder away."
        )

    def _first_whole(self, doing: str, folders: list[Path], ranks: "Ranks", reader: Reading) -> CheckpointReport | None:
        """The first of these that verifies; what is passed over goes to ``skipped``."""
        for folder in folders:
            if ranks.leads:
                reader.mark(storage.step_of(folder))
            share = partial(latest.inspect, folder, part=ranks.rank, parts=ranks.world_size)
            report = manifest.merge(ranks.agree(doing, share))
            if report.ok:
                return report
            if any(fault.kind == "other version" for fault in report.faults):
                raise CheckpointError(
                    f"{doing} failed: the newest, of step {report.step}, is of a later version "
                    f"({report.faults[0].detail}): update this program, or move {report.path} away"
                )
            self.skipped.append(report)
            if ranks.leads:
                _log.warning("skipped: %s", report.sentence())
        return None

    def _is_any_gone(self, doing: str, ranks: "Ranks") -> bool:
        """Whether a checkpoint was deleted after it was listed: then others have come, and one looks again."""
        return ranks.agree(doing, lambda: not all(Path(one.path).exists() for one in self.skipped))[0]


def _measured(step: int, metric: float | None) -> float | msgspec.UnsetType:
    """What a manifest says of a metric."""
    if metric is None:
        return msgspec.UNSET
    number = float(metric)
    if not math.isfinite(number):
        _log.warning("the metric of step %d is %s, so the checkpoint is saved without", step, number)
        return msgspec.UNSET
    return number


def _require_one_step(doing: str, steps: list[int]) -> None:
    if len(set(steps)) > 1:
        raise CheckpointError(f"{doing} failed: the ranks are at different steps, {sorted(set(steps))}")
