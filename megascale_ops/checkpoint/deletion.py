# SPDX-License-Identifier: Apache-2.0
"""Look at a checkpoint folder, have ``retention`` decide, and delete what goes: after a save, and for the command line.

Nothing is deleted under a reader that came at the last moment: the folder is moved away first, then the marks are read,
and it is moved back where one has come. A reader that found it gone looks for another one.
"""

import logging
from collections.abc import Callable, Collection, Iterable
from pathlib import Path

import msgspec

from megascale_ops.checkpoint import latest, readers, retention, storage
from megascale_ops.checkpoint import manifest as manifests
from megascale_ops.checkpoint.manifest import Fault, FileSeen, Manifest
from megascale_ops.checkpoint.retention import Decision, Rule, Standing
from megascale_ops.errors import CheckpointError

_log = logging.getLogger("megascale_ops.checkpoint")


class Glance(msgspec.Struct, frozen=True):
    """One checkpoint folder by its manifest and the sizes of its files; no digest was computed."""

    path: str
    step: int
    manifest: Manifest | None
    faults: tuple[Fault, ...] = ()
    size_bytes: int = 0  # of what is there

    @property
    def ok(self) -> bool:
        """Whether nothing is wrong as far as was looked."""
        return not self.faults


def glance(folder: Path) -> Glance:
    """Look at one checkpoint without reading its shards; never raises."""
    step, size_bytes, manifest = storage.step_of(folder), storage.bytes_in(folder), latest.read_manifest(folder)
    if isinstance(manifest, Fault):
        return Glance(str(folder), step, None, (manifest,), size_bytes)
    found = [manifests.judge_step(manifest, step)]
    for entry in manifest.files:
        size = storage.size_of(folder / entry.name)
        seen = FileSeen(entry.name, None if size < 0 else size, entry.digest)
        found.append(manifests.judge_file(entry, seen))
    return Glance(str(folder), step, manifest, tuple(fault for fault in found if fault), size_bytes)


def plan(
    root: Path,
    rule: Rule,
    *,
    newest_step: int | None = None,
    damaged: Collection[str] = (),
    by_metric: bool = True,
    clear: bool = True,
) -> list[Decision]:
    """What becomes of each checkpoint of a folder, newest first.

    Args:
        root: the folder.
        rule: what its owner wants.
        newest_step: see ``retention.decide``.
        damaged: paths that are known not to verify.
        by_metric: read the manifests, which say the metric; one that can't be read is damage. For ``keep_best``.
        clear: remove the marks of readers that are gone.

    Raises:
        OSError: the folder can't be listed.
    """
    reading = readers.readers_of(root, clear=clear)
    return retention.decide(
        [_standing(path, damaged, reading, by_metric=by_metric) for path in storage.candidates(root)],
        rule,
        newest_step,
    )


def _standing(
    path: Path, damaged: Collection[str], reading: dict[int, tuple[str, ...]], *, by_metric: bool
) -> Standing:
    step, metric, is_damaged = storage.step_of(path), None, str(path) in damaged
    if by_metric and not is_damaged:
        manifest = latest.read_manifest(path)
        is_damaged = isinstance(manifest, Fault)
        metric = None if isinstance(manifest, Fault) else manifests.metric_of(manifest)
    return Standing(step, str(path), metric, is_damaged, reading.get(step, ()))


def carry_out(
    root: Path, decisions: Iterable[Decision], before: Callable[[Decision], object] | None = None
) -> list[Decision]:
    """Delete what goes, the oldest first; what a reader has marked meanwhile stays.

    Args:
        root: the folder.
        decisions: what was decided.
        before: called ahead of each deletion; what it raises ends them.

    Returns:
        What was deleted.

    Raises:
        OSError: the file system refuses.
    """
    deleted = []
    for one in reversed([each for each in decisions if not each.stays]):
        if before is not None:
            before(one)
        if delete_unread(root, Path(one.path)):
            deleted.append(one)
    return deleted


def after_save(root: Path, rule: Rule, step: int, damaged: Collection[str], confirm: Callable[[], object]) -> None:
    """Delete what has no reason to stay beside the checkpoint that was just sealed; never raises.

    Args:
        root: the folder.
        rule: what its owner wants.
        step: of the new checkpoint.
        damaged: paths that are known not to verify.
        confirm: raises CheckpointError when another job holds the folder now.
    """
    others = frozenset(damaged) - {str(storage.final_folder(root, step))}
    try:
        confirm()
        carry_out(root, plan(root, rule, newest_step=step, damaged=others, by_metric=rule.keep_best > 0))
    except CheckpointError:
        return  # they are another job's now; the next save will report it
    except OSError as exc:  # the new checkpoint is whole; too many old ones are no reason to stop training
        _log.warning("an old checkpoint in %s could not be deleted: %s", root, storage.describe(exc))


def delete_unread(root: Path, folder: Path) -> bool:
    """Delete one checkpoint unless it is read; whether it is gone.

    Raises:
        OSError: the file system refuses.
    """
    step = storage.step_of(folder)
    doomed = storage.move_away(folder)
    if doomed is None:
        return True
    if step in readers.readers_of(root) and not folder.exists():
        storage.move_back(doomed, folder)
        return False
    storage.delete_moved(doomed)
    return True
