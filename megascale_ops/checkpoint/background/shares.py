# SPDX-License-Identifier: Apache-2.0
"""How the writer processes of all ranks meet: by small files in the folder that they write to.

    .step-00000120.7.partial/.begun.json      the leading rank's writer has made the folder, for this save
    .step-00000120.7.partial/.share-3.json    rank 3's files are on disk, with their digests; or why not

They need no connection of their own and none of the process groups, whose collectives belong to the training; they can
finish when all training processes are gone; and a process that may write here may write the checkpoint anyway. The
shares are removed before the seal, and who has begun with the rename itself: a restart waits for that process.
"""

import os
import re
from contextlib import suppress
from pathlib import Path

import msgspec

from megascale_ops import foreign
from megascale_ops.checkpoint import storage
from megascale_ops.checkpoint.background.messages import Job
from megascale_ops.checkpoint.manifest import FileEntry
from megascale_ops.checkpoint.writers import Process
from megascale_ops.whole_file import write_whole

# 100 s after the end of its training process a writer process gives up: a restart waits so long (``unfinished``) for
# what it would lose otherwise.
ORPHAN_S = 100.0

BEGUN = ".begun.json"
_SHARE = ".share-{}.json"
_SHARE_NAME = re.compile(r"\.share-([0-9]{1,9})\.json")
# 16 MB: a rank has two files, and one for each value that a user asked to pickle.
MOST_BYTES = 16 << 20


class Begun(msgspec.Struct, frozen=True):
    """The folder is there for the save of this token; ``process`` is the leading rank's writer."""

    token: str
    process: Process


class Share(msgspec.Struct, frozen=True):
    """What became of one rank's part. ``failure``: why there is none."""

    token: str
    rank: int
    files: tuple[FileEntry, ...] = ()
    failure: str = ""


def share_name(rank: int) -> str:
    """The file in which a rank's writer tells of its part."""
    return _SHARE.format(rank)


def share_rank(name: str) -> int:
    """The rank that tells by a file of this name; -1: none does."""
    match = _SHARE_NAME.fullmatch(name)
    return int(match.group(1)) if match else -1


def begin(root: Path, step: int, writer: int, begun: Begun) -> Path:
    """Make the folder of a save and tell the other writers; what interrupted saves left is cleared away.

    Raises:
        OSError: the file system refuses.
    """
    folder = storage.begin(root, step, writer)
    write_whole(folder / BEGUN, msgspec.json.encode(begun))
    return folder


def begun_in(folder: Path) -> Begun | None:
    """For which save a folder is there; None where there is none, or it can't be read."""
    try:
        return msgspec.json.decode(foreign.read(folder / BEGUN, MOST_BYTES), type=Begun)
    except (OSError, *foreign.UNREADABLE):
        return None


def tell(folder: Path, share: Share) -> None:
    """Tell the leading rank's writer.

    Raises:
        OSError: the file system refuses.
    """
    write_whole(folder / share_name(share.rank), msgspec.json.encode(share))


def collect(folder: Path, token: str, known: dict[int, Share]) -> None:
    """Add to ``known`` what ranks have told since the last look; files of another save do not count.

    Raises:
        OSError: the folder can't be listed.
    """
    for path in folder.iterdir():
        rank = share_rank(path.name)
        if rank < 0 or rank in known:
            continue
        share = _read(path)
        if share is not None and (share.token, share.rank) == (token, rank):
            known[rank] = share


def renew(folder: Path) -> None:
    """Show the other ranks' writers that the save goes on; one call without a byte of data."""
    with suppress(OSError):
        os.utime(folder / BEGUN)


def renewed_ns(folder: Path) -> int:
    """When that was done last, by the file system's clock; 0: the folder is not there."""
    with suppress(OSError):
        return (folder / BEGUN).stat().st_mtime_ns
    return 0


def give_up(root: Path, job: Job, reason: str) -> None:
    """Give back the space of a save that will not be, and tell the leading rank's writer; what resists stays.

    Called by the writer process, or in its place by the training process when it has died.

    Args:
        root: the checkpoint folder.
        job: the save, as this rank's writer was told.
        reason: why, one sentence.
    """
    folder = storage.partial_folder(root, job.step, job.writer)
    begun = begun_in(folder)
    if begun is None or begun.token != job.token:
        return  # not made yet, or another save's already
    if job.leads:
        storage.abandon(root, job.step, job.writer)
        return
    with suppress(OSError):
        for image in job.files:  # first, so that a full disk has room for the sentence
            (folder / image.name).unlink(missing_ok=True)
        tell(folder, Share(job.token, job.rank, failure=reason))


def clear(folder: Path, world_size: int) -> None:
    """Remove what ranks told the leading one, so that nothing of it is sealed.

    Who makes the save stays until it is sealed: a restart that came in between would not wait for it.

    Raises:
        OSError: the file system refuses.
    """
    for rank in range(world_size):
        (folder / share_name(rank)).unlink(missing_ok=True)


def _read(path: Path) -> Share | None:
    try:
        return msgspec.json.decode(foreign.read(path, MOST_BYTES), type=Share)
    except (OSError, *foreign.UNREADABLE):
        return None
