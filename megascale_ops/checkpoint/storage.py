# SPDX-License-Identifier: Apache-2.0
"""Checkpoint folders on a file system: written beside, sealed by one rename, deleted by one rename.

    <root>/step-00000120/            a whole checkpoint: shards, plan.msgpack, manifest.json
    <root>/.step-00000120.7.partial/ being written by the seventh writer of this folder; the next one deletes it
    <root>/.step-00000120.replaced/  the former checkpoint of a step that is being saved again; still counts
    <root>/.step-00000120.deleted/   being deleted

A rename is atomic, so at any moment a visible folder is a whole one. What the bytes mean is decided in ``manifest``.

Two writers cannot harm each other, whatever the state of their lock (``writer_lock``): each writes into a folder of its
own number, and the later one moves the earlier one's away before it deletes it, so that nothing is left to be sealed.
"""

import contextlib
import os
import re
import shutil
import stat
import tempfile
from collections.abc import Callable
from pathlib import Path

from megascale_ops import foreign
from megascale_ops.checkpoint import manifest as manifests
from megascale_ops.checkpoint.manifest import FileEntry, FileSeen, Manifest
from megascale_ops.checkpoint.trust import file_digests
from megascale_ops.checkpoint.trust.file_digests import FileDigest
from megascale_ops.errors import CheckpointError, UsageError
from megascale_ops.whole_file import sync_folder, write_whole

# The same name as schema.environment.RESTORE_BEFORE; schema and checkpoint share a floor.
_RESTORE_BEFORE = "MEGASCALE_RESTORE_BEFORE"
_MOST_DIGITS = 18
_VISIBLE = re.compile(r"step-(\d{8,})")
_REPLACED = re.compile(r"\.step-(\d{8,})\.replaced")
_LEFTOVER = re.compile(r"\.step-(\d{8,})(\.\d+)?\.(partial|deleted)")

# 1 MB: below it the calls cost, above it a digest finds the bytes no longer in the core's own cache.
_READ_BYTES = 1 << 20


def final_folder(root: Path, step: int) -> Path:
    """Where the whole checkpoint of a step stands."""
    return root / final_step_name(step)


def final_step_name(step: int) -> str:
    """The name under which the checkpoint of a step stands."""
    return f"step-{step:08d}"


def partial_folder(root: Path, step: int, writer: int) -> Path:
    """Where the checkpoint of a step is written before it is sealed; ``writer`` is its writer's number."""
    return root / f".step-{step:08d}.{writer}.partial"


def step_of(folder: Path) -> int:
    """The step that a visible or replaced folder stands for; -1 for any other name."""
    match = _VISIBLE.fullmatch(folder.name) or _REPLACED.fullmatch(folder.name)
    return int(match.group(1)) if match else -1


def is_partial(folder: Path) -> bool:
    """Whether a folder is of a save that is not sealed."""
    match = _LEFTOVER.fullmatch(folder.name)
    return match is not None and match.group(3) == "partial"


def describe(error: OSError) -> str:
    """The system's words for an error: ``No space left on device``."""
    return error.strerror or str(error) or type(error).__name__


def prepare_root(root: Path) -> None:
    """Make the checkpoint folder and prove, by writing a file, that it can be written to.

    Raises:
        UsageError: it cannot; one sentence with the path and the system's reason.
    """
    try:
        root.mkdir(parents=True, exist_ok=True)
        # By name and closed before it is removed: permission bits alone lie on NFS and to root.
        handle, probe = tempfile.mkstemp(prefix=".probe-", dir=root)
        os.close(handle)
        Path(probe).unlink()
    except OSError as exc:
        raise UsageError(f"cannot write checkpoints to {root}: {describe(exc)}") from exc


def restore_before() -> int:
    """Return the step before which checkpoints are restored by preference, as the runner names it; -1: any may be."""
    told = os.environ.get(_RESTORE_BEFORE, "")
    return int(told) if told.isascii() and told.isdigit() and len(told) <= _MOST_DIGITS else -1


def candidates(root: Path) -> list[Path]:
    """Every folder that may hold a whole checkpoint, newest step first."""
    if not root.is_dir():
        return []
    found = [path for path in root.iterdir() if step_of(path) >= 0 and path.is_dir()]
    # At the same step the sealed folder goes before the one that it replaces ("s" sorts after ".").
    return sorted(found, key=lambda path: (step_of(path), path.name), reverse=True)


def digest(path: Path, algorithm: str = file_digests.DEFAULT) -> FileEntry:
    """Size and digest of a file as it stands.

    Raises:
        OSError: the file cannot be read, or is no regular file.
    """
    with foreign.opened(path) as handle:
        return FileEntry(path.name, *digested(handle, os.fstat(handle).st_size, algorithm))


def observe(folder: Path, expected: FileEntry, told: Callable[[int], object] | None = None) -> FileSeen:
    """Look at a file that a manifest promises. Never raises: what cannot be read is an observation too.

    No more is read than the manifest promises, whatever grows there meanwhile; ``told`` hears of bytes as they are
    read.
    """
    try:
        with foreign.opened(folder / expected.name) as handle:
            size_bytes = os.fstat(handle).st_size
            if size_bytes != expected.size_bytes:
                return FileSeen(expected.name, size_bytes)
            return FileSeen(expected.name, *digested(handle, size_bytes, expected.digest, told))
    except FileNotFoundError:
        return FileSeen(expected.name)
    except OSError as exc:
        return FileSeen(expected.name, error=describe(exc))


def digested(handle: int, most_bytes: int, like: str, told: Callable[[int], object] | None = None) -> tuple[int, str]:
    """How many bytes were read, at most ``most_bytes``, and their digest; ``told`` hears of them as they are read."""
    taken, count = FileDigest(like), 0
    buffer = memoryview(bytearray(min(_READ_BYTES, max(most_bytes, 1))))
    while count < most_bytes and (got := os.readv(handle, [buffer[: most_bytes - count]])):
        taken.update(buffer[:got])
        count += got
        if told is not None:
            told(got)
    return count, taken.text()


def begin(root: Path, step: int, writer: int) -> Path:
    """Clear away what interrupted saves left behind and make the folder of a new one.

    Raises:
        OSError: the file system refuses.
    """
    for path in root.iterdir():
        if leftover := _LEFTOVER.fullmatch(path.name):
            _remove(path, int(leftover.group(1)))
    folder = partial_folder(root, step, writer)
    folder.mkdir(mode=0o755)
    return folder


def abandon(root: Path, step: int, writer: int) -> None:
    """Drop a checkpoint that will not be finished, to give its space back now. What resists waits for ``begin``."""
    shutil.rmtree(partial_folder(root, step, writer), ignore_errors=True)


def seal(root: Path, manifest: Manifest, writer: int, *, without: str = "") -> Path:
    """Write the manifest and make the checkpoint visible, replacing a former one of the same step.

    Args:
        root: the checkpoint folder.
        manifest: what it promises.
        writer: number of the lock that the folder was begun under.
        without: a file that goes right before the rename, and not sooner.

    Raises:
        CheckpointError: a promised file is not here as it was written; nothing was sealed.
        OSError: the file system refuses.
    """
    partial, final = partial_folder(root, manifest.step, writer), final_folder(root, manifest.step)
    for entry in manifest.files:
        if size_of(partial / entry.name) != entry.size_bytes:
            raise CheckpointError(f"{entry.name} is not here as its rank wrote it; all nodes must share this folder")
    write_whole(partial / manifests.FILE_NAME, manifests.encode(manifest), durably=True)
    replaced = root / f".{final.name}.replaced"
    if final.exists():
        discard(replaced)
        final.rename(replaced)
    if without:
        (partial / without).unlink(missing_ok=True)
    partial.rename(final)
    sync_folder(root)
    discard(replaced)
    return final


def size_of(path: Path) -> int:
    """Bytes of a regular file; -1 where there is none."""
    with contextlib.suppress(OSError), foreign.opened(path) as handle:
        return os.fstat(handle).st_size
    return -1


def bytes_in(folder: Path) -> int:
    """Bytes of all files right in a folder, promised or not; what can't be seen counts nothing."""
    total = 0
    with contextlib.suppress(OSError), os.scandir(folder) as entries:
        for entry in entries:
            with contextlib.suppress(OSError):
                found = entry.stat(follow_symlinks=False)
                total += found.st_size if stat.S_ISREG(found.st_mode) else 0
    return total


def discard(folder: Path) -> None:
    """Delete a folder so that no moment shows half of it. A folder that is not there is fine.

    Raises:
        OSError: the file system refuses.
    """
    if folder.exists():
        _remove(folder, step_of(folder))


def _remove(folder: Path, step: int) -> None:
    """Move a folder out of the way, then delete it: its writer may live and be about to seal it.

    Deleted in place, it could be renamed to a checkpoint half-way through.
    """
    doomed = move_away(folder, step)
    if doomed is not None:
        delete_moved(doomed)


def move_away(folder: Path, step: int | None = None) -> Path | None:
    """Take a folder out of sight, to be deleted or moved back; None: it was not there any more.

    Args:
        folder: the folder.
        step: what it is of, where its name is not that of a checkpoint.

    Raises:
        OSError: the file system refuses.
    """
    doomed = folder.with_name(f".step-{step_of(folder) if step is None else step:08d}.deleted")
    if folder == doomed:
        return doomed
    if os.path.lexists(doomed):
        delete_moved(doomed)
    try:
        folder.rename(doomed)
    except FileNotFoundError:
        return None  # it was sealed, or deleted, just now
    return doomed


def move_back(doomed: Path, folder: Path) -> None:
    """Put what was moved away where it was.

    Raises:
        OSError: the file system refuses.
    """
    doomed.rename(folder)


def delete_moved(doomed: Path) -> None:
    """Delete what was moved away.

    Raises:
        OSError: the file system refuses.
    """
    if doomed.is_symlink() or not doomed.is_dir():
        doomed.unlink()
    else:
        shutil.rmtree(doomed)
