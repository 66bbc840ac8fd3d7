# SPDX-License-Identifier: Apache-2.0
"""The checkpoints below one URL as a listing shows them: which are sealed, what is missing, which go. Loads no torch.

    <url>/step-00000120/<save>/manifest.json   the seal
    <url>/step-00000120/<save>/.doomed         it is about to be deleted: no restore begins to read it any more

There is no rename that takes a checkpoint out of sight. So a deletion marks it first and looks for readers then, and a
reader puts its mark down first and looks for the deletion's then: whichever comes second sees the other.
"""

import logging
import re
from collections.abc import Callable, Collection, Iterable, Mapping
from contextlib import suppress
from typing import NamedTuple

from megascale_ops.checkpoint import manifest as manifests
from megascale_ops.checkpoint import retention
from megascale_ops.checkpoint.deletion import Glance
from megascale_ops.checkpoint.manifest import Fault, FileSeen, Manifest, ManifestError
from megascale_ops.checkpoint.retention import Decision, Rule, Standing
from megascale_ops.checkpoint.storage import describe, final_step_name
from megascale_ops.checkpoint.tiers import store_readers
from megascale_ops.checkpoint.tiers.filesystems import Listed, Store
from megascale_ops.errors import CheckpointError

_STEP = re.compile(r"step-(\d{8,})")
_SAVE = re.compile(r"[0-9a-f]{32}")
_DOOMED = ".doomed"

_log = logging.getLogger("megascale_ops.checkpoint")


class Sealed(NamedTuple):
    """A checkpoint whose manifest is there."""

    step: int
    folder: str  # below the URL
    written_wall_s: float
    metric: float | None = None


def folder_of(step: int, save: str) -> str:
    """Where below the URL a save of a step has its files; ``save`` are 32 hexadecimal digits."""
    return f"{final_step_name(step)}/{save}"


def step_of(folder: str) -> int:
    """The step that a folder below a URL stands for, by its name alone; -1: it is none of a checkpoint."""
    match = _STEP.fullmatch(folder.split("/", maxsplit=1)[0])
    return int(match.group(1)) if match else -1


def saves(store: Store, only: str = "") -> list[tuple[str, dict[str, Listed]]]:
    """Every save that there is, sealed or not, with its files.

    Args:
        store: the files below a URL.
        only: the folder of one step; empty: of all steps.

    Raises:
        OSError: the store can't be listed.
    """
    return [
        (f"{name}/{save}", store.listing(f"{name}/{save}"))
        for name in ([only] if only else store.names())
        if _STEP.fullmatch(name)
        for save in store.names(name)
        if _SAVE.fullmatch(save)
    ]


def sealed(store: Store) -> list[Sealed]:
    """All checkpoints that no deletion has begun with, the newest first; of one step the later save first.

    Raises:
        OSError: the store can't be listed.
    """
    found = [_look(store, folder) for folder, there in saves(store) if _counts(there)]
    return sorted(found, key=lambda one: (-one.step, -one.written_wall_s, one.folder))


def copied(store: Store) -> str:
    """A sentence about a step that lies here as it does in a folder, which by URL is not looked for; empty: none does.

    Raises:
        OSError: the store can't be listed.
    """
    steps = (name for name in store.names() if _STEP.fullmatch(name))
    name = next((each for each in steps if manifests.FILE_NAME in store.names(each)), "")
    if not name:
        return ""
    there = f"{store.url}/{name}"
    return f"{there} was copied from a folder: a save in a store lies deeper, so move its files to {there}/{'0' * 32}/"


def glances(store: Store, only: str = "") -> list[tuple[str, Glance]]:
    """The same with what is wrong by manifest and sizes: the folder of each and what was seen of it.

    Raises:
        OSError: the store can't be listed.
    """
    found = [(folder, glance(store, folder, there)) for folder, there in saves(store, only) if _counts(there)]
    return sorted(found, key=lambda one: (-one[1].step, -_written(one[1]), one[0]))


def _counts(there: Collection[str]) -> bool:
    return manifests.FILE_NAME in there and _DOOMED not in there


def _written(seen: Glance) -> float:
    return seen.manifest.written_wall_s if seen.manifest is not None else 0.0


def _look(store: Store, folder: str) -> Sealed:
    step = step_of(folder)
    read = read_manifest(store, folder)
    if isinstance(read, Fault):  # damaged or of a later version: a restore says which
        return Sealed(step, folder, 0.0)
    return Sealed(step, folder, read.written_wall_s, manifests.metric_of(read))


def read_manifest(store: Store, folder: str) -> Manifest | Fault:
    """The manifest of a save, or why it can't be believed; never raises."""
    try:
        return manifests.decode(store.read(f"{folder}/{manifests.FILE_NAME}", manifests.MOST_BYTES))
    except ManifestError as exc:
        return exc.fault
    except FileNotFoundError:
        return Fault(manifests.FILE_NAME, "missing")
    except OSError as exc:
        return Fault(manifests.FILE_NAME, "unreadable", describe(exc))


def glance(store: Store, folder: str, there: Mapping[str, Listed] | None = None) -> Glance:
    """Look at one checkpoint by its manifest and one listing, without reading its shards.

    Args:
        store: the files below a URL.
        folder: of the checkpoint.
        there: what is in it, where it was listed.

    Raises:
        OSError: the store can't be listed.
    """
    there = store.listing(folder) if there is None else there
    step, read = step_of(folder), read_manifest(store, folder)
    size_bytes, path = sum(each.size_bytes for each in there.values()), f"{store.url}/{folder}"
    if isinstance(read, Fault):
        return Glance(path, step, None, (read,), size_bytes)
    found = [manifests.judge_step(read, step)]
    for entry in read.files:
        size = there[entry.name].size_bytes if entry.name in there else None
        found.append(manifests.judge_file(entry, FileSeen(entry.name, size, entry.digest)))
    return Glance(path, step, read, tuple(fault for fault in found if fault), size_bytes)


def is_whole(store: Store, folder: str, promised: Manifest) -> bool:
    """Whether every file of a manifest is there in its full size.

    Raises:
        OSError: the store can't be listed.
    """
    there = store.listing(folder)
    return all(entry.name in there and there[entry.name].size_bytes == entry.size_bytes for entry in promised.files)


def is_there(store: Store, folder: str) -> bool:
    """Whether a checkpoint still is, and no deletion has begun with it."""
    return _counts(store.names(folder))


def seal(store: Store, folder: str, promised: Manifest, confirm: Callable[[], object]) -> None:
    """Put the manifest, after all else; where another job has cleared files away meanwhile it is taken back.

    Args:
        store: the files below a URL.
        folder: of the save.
        promised: its manifest.
        confirm: raises CheckpointError when another job holds the place now.

    Raises:
        CheckpointError: a file is not there in its full size, or another job came.
        OSError: the store refuses.
    """

    def prove(otherwise: str) -> None:
        confirm()
        if not is_whole(store, folder, promised):
            raise CheckpointError(otherwise)

    prove("a file is not here as its rank wrote it; all ranks must write to this store")
    store.put(f"{folder}/{manifests.FILE_NAME}", manifests.encode(promised))
    try:
        prove("its files were cleared away while it was sealed")
    except CheckpointError:
        with suppress(OSError):
            store.delete(f"{folder}/{manifests.FILE_NAME}")
        raise


def plan(
    store: Store, rule: Rule, *, newest: tuple[int, str] | None = None, damaged: Collection[str] = ()
) -> list[Decision]:
    """What becomes of each checkpoint below a URL, the newest first; files that are missing are damage.

    Args:
        store: the files below a URL.
        rule: what its owner wants.
        newest: step and folder of the checkpoint that was just sealed: others of its step go. None: of each step that
            was saved again the former ones go.
        damaged: URLs of checkpoints that are known not to verify.

    Raises:
        OSError: the store can't be listed.
    """
    reading, seen = store_readers.readers_of(store), set[int]()
    standing: list[Standing] = []
    again: list[Decision] = []
    for folder, one in glances(store):
        who = reading.get(one.step, ())
        if folder != newest[1] if newest and one.step == newest[0] else one.step in seen:
            again.append(Decision(one.step, folder, tuple(f"read by {each}" for each in who)))
            continue
        is_damaged = one.path in damaged or not one.ok
        if not is_damaged:
            seen.add(one.step)
        metric = manifests.metric_of(one.manifest) if one.manifest is not None else None
        standing.append(Standing(one.step, folder, metric, is_damaged, who))
    return [*retention.decide(standing, rule, newest[0] if newest else None), *again]


def delete(store: Store, folder: str) -> bool:
    """Delete one checkpoint unless a restore reads it; whether it is gone.

    Raises:
        OSError: the store refuses.
    """
    store.put(f"{folder}/{_DOOMED}", b"")
    if step_of(folder) in store_readers.readers_of(store):
        store.delete(f"{folder}/{_DOOMED}")
        return False
    remove(store, folder)
    return True


def remove(store: Store, folder: str) -> None:
    """Delete all of a save, its manifest first: what a deletion that breaks off leaves is no checkpoint.

    Raises:
        OSError: the store refuses.
    """
    store.delete(f"{folder}/{manifests.FILE_NAME}")
    store.delete(folder)
    store.delete_if_empty(folder.partition("/")[0])


def clear_unsealed(store: Store, but: Iterable[str] = ()) -> None:
    """Delete what saves and deletions that broke off have left; by the holder of the lock alone.

    Raises:
        OSError: the store refuses.
    """
    stays = frozenset(but)
    for folder, there in saves(store):
        if folder not in stays and not _counts(there):
            remove(store, folder)


def after_save(
    store: Store, rule: Rule, newest: tuple[int, str], damaged: Collection[str], confirm: Callable[[], object]
) -> None:
    """Delete what has no reason to stay beside the checkpoint that was just sealed; never raises.

    Args:
        store: the files below a URL.
        rule: what its owner wants.
        newest: step and folder of the new checkpoint.
        damaged: URLs of checkpoints that are known not to verify.
        confirm: raises CheckpointError when another job holds the place now.
    """
    try:
        confirm()
        for one in plan(store, rule, newest=newest, damaged=damaged):
            if not one.stays:
                delete(store, one.path)
        clear_unsealed(store)
        store_readers.readers_of(store, clear=True)
    except CheckpointError:
        return  # they are another job's now; the next save will report it
    except OSError as exc:
        _log.warning("an old checkpoint in %s could not be deleted: %s", store.url, describe(exc))
