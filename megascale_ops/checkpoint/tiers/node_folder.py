# SPDX-License-Identifier: Apache-2.0
"""The folder of one job on one node: sets of files, of which each node has its own and a copy of a buddy's.

    <path>/<name>-<identity>/owner.json      of which shared storage it is the near tier
    <path>/<name>-<identity>/step-00000120/  manifest and plan of the whole set, this node's shards, copies

The same layout as a shared folder, but that files may be missing: they are on other nodes. The identity is drawn when
the shared storage is used first and kept there, so what an earlier job has left under the same path is not this one's.
"""

import errno
import os
import shutil
from pathlib import Path

import msgspec

from megascale_ops import foreign
from megascale_ops.checkpoint import latest, plan, storage
from megascale_ops.checkpoint import manifest as manifests
from megascale_ops.checkpoint.manifest import Fault, Manifest
from megascale_ops.checkpoint.tiers.sets import Held
from megascale_ops.foreign import UNREADABLE
from megascale_ops.whole_file import sync_folder, write_whole

_OWNER = "owner.json"
_MOST_BYTES = 1 << 16


class _Owner(msgspec.Struct, frozen=True):
    shared: str
    identity: str


def folder_of(path: Path, shared: str, identity: str) -> Path:
    """Where a job's sets are below the path that all jobs of a node may use."""
    name = "".join(each if each.isalnum() or each in "-_." else "_" for each in shared.rstrip("/").rpartition("/")[2])
    return path / f"{name[:40] or 'checkpoints'}-{identity[:16]}"


def prepare(root: Path, shared: str, identity: str) -> None:
    """Make a job's folder; what an earlier job of the same shared storage has left beside it goes.

    Raises:
        UsageError: it can't be written to.
        OSError: the file system refuses.
    """
    storage.prepare_root(root)
    write_whole(root / _OWNER, msgspec.json.encode(_Owner(shared, identity)))
    for beside in root.parent.iterdir():
        if beside != root and (owner := _owner_of(beside)) and owner.shared == shared and owner.identity != identity:
            shutil.rmtree(beside, ignore_errors=True)


def _owner_of(folder: Path) -> _Owner | None:
    try:
        return msgspec.json.decode(foreign.read(folder / _OWNER, _MOST_BYTES), type=_Owner)
    except (OSError, *UNREADABLE):
        return None


def is_one(folder: Path) -> bool:
    """Whether a folder is that of a job on a node."""
    return _owner_of(folder) is not None


def inventory(root: Path) -> list[Held]:
    """What a node has: of each set the files that are here in their full size. Reads manifests and nothing else."""
    return [held for folder in storage.candidates(root) if (held := _held(folder)) is not None]


def _held(folder: Path) -> Held | None:
    sealed = latest.read_manifest(folder)
    if isinstance(sealed, Fault) or manifests.judge_step(sealed, storage.step_of(folder)):
        return None
    present = [
        number for number, entry in enumerate(sealed.files) if storage.size_of(folder / entry.name) == entry.size_bytes
    ]
    names = tuple(entry.name for entry in sealed.files)
    return Held(sealed.step, set_id_of(sealed), names, tuple(present), sealed.written_wall_s)


def set_id_of(sealed: Manifest) -> str:
    """What names a set: the digest of its manifest."""
    return manifests.seal_of(sealed)


def find(root: Path, step: int, set_id: str) -> Path | None:
    """The folder of a set, where it is here."""
    for folder in storage.candidates(root):
        if storage.step_of(folder) == step:
            sealed = latest.read_manifest(folder)
            if not isinstance(sealed, Fault) and set_id_of(sealed) == set_id:
                return folder
    return None


def seal(root: Path, sealed: Manifest, raw_plan: bytes, writer: int) -> Path:
    """Make a set visible on this node; unlike in a shared folder only this node's files are here.

    Raises:
        OSError: the file system refuses.
    """
    partial, final = storage.partial_folder(root, sealed.step, writer), storage.final_folder(root, sealed.step)
    write_whole(partial / plan.FILE_NAME, raw_plan)
    write_whole(partial / manifests.FILE_NAME, manifests.encode(sealed), durably=True)
    storage.discard(final)
    partial.rename(final)
    sync_folder(root)
    return final


def require_room(root: Path, need_bytes: int, share: float, keep: int) -> None:
    """Prove that so many bytes may be written; where there are too few, older sets go first, but for the newest.

    Args:
        root: the folder.
        need_bytes: what is to be written here, copies of a buddy included.
        share: of the file system, which stays free.
        keep: sets that stay in any case.

    Raises:
        OSError: there is no room; the text says how much is free and how much is needed.
    """
    while True:
        found = os.statvfs(root)
        free = found.f_bavail * found.f_frsize
        spare = int(found.f_blocks * found.f_frsize * share)
        if free - spare >= need_bytes:
            return
        folders = storage.candidates(root)
        if len(folders) <= keep:
            said = f"{_size(need_bytes)} are needed and {_size(free)} are free, of which {_size(spare)} stay free"
            raise OSError(errno.ENOSPC, said)
        storage.discard(folders[-1])


def keep_newest(root: Path, step: int, keep: int) -> None:
    """Delete all sets but so many of the newest up to a step; later ones are of an attempt that is over.

    Raises:
        OSError: the file system refuses.
    """
    ours = [folder for folder in storage.candidates(root) if storage.step_of(folder) <= step][:keep]
    for folder in storage.candidates(root):
        if folder not in ours:
            storage.discard(folder)


def clear(root: Path) -> None:
    """Delete a job's folder; what resists is logged by no one and goes with the next job."""
    shutil.rmtree(root, ignore_errors=True)


def _size(count: int) -> str:
    """Return bytes in the unit that shows them: a container's /dev/shm has 64 MB, a node's a terabyte."""
    scale, unit = (1e9, "GB") if count >= 1e8 else (1e6, "MB") if count >= 1e5 else (1e3, "kB")
    return f"{count / scale:.2f} {unit}"
