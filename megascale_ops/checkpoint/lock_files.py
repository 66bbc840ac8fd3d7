# SPDX-License-Identifier: Apache-2.0
"""The names of writers as files in a checkpoint folder: numbered, so that of two that want it one gets it.

    <root>/.writer-00000007.json    the seventh writer of this folder; the highest number holds it

To take a folder over is to make the file of the next number, which only one can (``link`` fails where the name exists,
on NFS too, and so does an exclusive create where a file system knows no links). The highest one is never deleted:
a writer that decided on what it saw a minute ago then finds the next number taken, instead of an empty place. So
nothing depends on a look and an act being one, and fcntl's locks, which some network file systems keep to each node,
are not needed.
"""

import os
import re
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple, Protocol

import msgspec

from megascale_ops import foreign
from megascale_ops.checkpoint import writers
from megascale_ops.checkpoint.writers import Writer
from megascale_ops.errors import CheckpointError

_NAME = re.compile(r"\.writer-([0-9]{8})\.json")
_OURS = re.compile(r"\.writer-([0-9]{8})\.json(\.[0-9a-f]+\.new)?")
_MOST_NUMBER = 99_999_999
# 64 kB: a record has some 600 bytes.
_MOST_BYTES = 1 << 16


class LockFile(NamedTuple):
    """The newest name on a folder as it stood at one look. Any change of a field shows that its holder lives."""

    number: int = 0  # 0: no writer has ever held the lock
    writer: Writer | None = None
    modified_ns: int = 0
    inode: int = 0


class Names(Protocol):
    """Where writers' names stand, as ``writer_lock`` asks for them: a folder, or an object store."""

    def read_lock(self) -> LockFile:
        """The newest name."""

    def create(self, number: int, writer: Writer) -> bool:
        """Put a name there; False when another one was faster."""

    def rewrite(self, number: int, writer: Writer) -> None:
        """Change one's own record."""

    def touch(self, number: int, modified_ns: int) -> None:
        """Renew a lease."""

    def clear_older(self, number: int) -> None:
        """Remove the names of former holders."""


class FolderNames(Names):
    """The names on one folder."""

    def __init__(self, root: Path) -> None:
        self._root = root

    def read_lock(self) -> LockFile:
        """See ``read_lock``."""
        return read_lock(self._root)

    def create(self, number: int, writer: Writer) -> bool:
        """See ``create``."""
        return create(self._root, number, writer)

    def rewrite(self, number: int, writer: Writer) -> None:
        """See ``rewrite``."""
        rewrite(self._root, number, writer)

    def touch(self, number: int, modified_ns: int) -> None:
        """See ``touch``."""
        touch(self._root, number, modified_ns)

    def clear_older(self, number: int) -> None:
        """See ``clear_older``."""
        clear_older(self._root, number)


def path_of(root: Path, number: int) -> Path:
    """Where a writer's name stands."""
    return root / f".writer-{number:08d}.json"


def read_lock(root: Path) -> LockFile:
    """The newest name on the folder.

    Raises:
        OSError: the folder can't be listed.
    """
    # Twice: a holder renews by replacing, and a newcomer deletes what is older than its own.
    for _ in range(2):
        number = max((_number(path.name) for path in root.iterdir()), default=0)
        if not number:
            return LockFile()
        with suppress(FileNotFoundError):
            return _look_at(path_of(root, number), number)
    return LockFile(number)


def _look_at(path: Path, number: int) -> LockFile:
    found = path.lstat()
    try:
        writer = writers.decode(foreign.read(path, _MOST_BYTES))
    except FileNotFoundError:
        raise
    except OSError:  # a link, a device, no rights: the holder is unknown
        writer = None
    return LockFile(number, writer, found.st_mtime_ns, found.st_ino)


def _number(name: str) -> int:
    match = _NAME.fullmatch(name)
    return int(match.group(1)) if match else 0


def create(root: Path, number: int, writer: Writer) -> bool:
    """Put a name on the folder; False when another one was faster.

    Raises:
        CheckpointError: the numbers are used up.
        OSError: the file system refuses.
    """
    if number > _MOST_NUMBER:
        raise CheckpointError(f"{path_of(root, _MOST_NUMBER)} is the last one there can be: remove it")
    path, beside = path_of(root, number), _beside(root, number, writer)
    _write(beside, writer)
    try:
        os.link(beside, path)
    except FileExistsError:
        # Over NFS the answer to a link that was made may be lost, and the question be asked again.
        return read_lock(root)[:2] == (number, writer)
    except OSError:
        return _create_without_links(path, writer)
    finally:
        beside.unlink(missing_ok=True)
    return True


def _create_without_links(path: Path, writer: Writer) -> bool:
    """The same where there are no links (some FUSE mounts); between the two calls others see a file of no sense."""
    try:
        handle = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o644)
    except FileExistsError:
        return False
    with os.fdopen(handle, "wb") as stream:
        stream.write(msgspec.json.encode(writer))
    return True


def rewrite(root: Path, number: int, writer: Writer) -> None:
    """Change one's own record.

    Raises:
        OSError: the file system refuses.
    """
    beside = _beside(root, number, writer)
    try:
        _write(beside, writer)
        beside.replace(path_of(root, number))
    finally:
        beside.unlink(missing_ok=True)


def touch(root: Path, number: int, modified_ns: int) -> None:
    """Renew a lease: one call without a byte of data, so that no writer loses the folder to a full disk.

    Raises:
        OSError: the file is not there, or the file system refuses.
    """
    os.utime(path_of(root, number), ns=(modified_ns, modified_ns))


def clear_older(root: Path, number: int) -> None:
    """Remove the names of former holders of the folder, and what they left in writing one. What resists stays."""
    with suppress(OSError):
        for path in list(root.iterdir()):
            match = _OURS.fullmatch(path.name)
            if match and int(match.group(1)) < number:
                with suppress(OSError):
                    path.unlink()


def _beside(root: Path, number: int, writer: Writer) -> Path:
    return root / f".writer-{number:08d}.json.{writer.token}.new"


def _write(path: Path, writer: Writer) -> None:
    with path.open("xb") as stream:
        stream.write(msgspec.json.encode(writer))
        stream.flush()
        os.fsync(stream.fileno())
