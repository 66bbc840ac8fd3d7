# SPDX-License-Identifier: Apache-2.0
"""The names of writers as objects in a store: the same as ``lock_files``, with conditional writes instead of links.

A lease is renewed by writing the name again: the store's own time stamp of it moves. Where a store has neither
conditional writes nor time stamps, two jobs that start at once may both believe to hold it; each still seals sets of
its own files, so a checkpoint is whole, but the two delete each other's old ones.
"""

import re
from contextlib import suppress

import msgspec

from megascale_ops.checkpoint import writers
from megascale_ops.checkpoint.lock_files import LockFile, Names
from megascale_ops.checkpoint.tiers.filesystems import Store
from megascale_ops.checkpoint.writers import Writer

_NAME = re.compile(r"\.writer-([0-9]{8})\.json")
_MOST_BYTES = 1 << 16


class StoreNames(Names):
    """The names of writers of one store."""

    def __init__(self, store: Store) -> None:
        self._store = store

    def read_lock(self) -> LockFile:
        """The newest name.

        Raises:
            OSError: the store can't be listed.
        """
        number = max(self._numbers(), default=0)
        if not number:
            return LockFile()
        try:
            writer = writers.decode(self._store.read(_name(number), _MOST_BYTES))
            return LockFile(number, writer, self._store.modified_ns(_name(number)))
        except FileNotFoundError:
            return LockFile(number)

    def create(self, number: int, writer: Writer) -> bool:
        """Put a name there; False when another writer was faster.

        Raises:
            OSError: the store refuses.
        """
        try:
            self._store.put(_name(number), msgspec.json.encode(writer), anew=True)
        except FileExistsError:
            return self.read_lock()[:2] == (number, writer)  # the answer to our own write may have been lost
        return True

    def rewrite(self, number: int, writer: Writer) -> None:
        """Change one's own record.

        Raises:
            OSError: the store refuses.
        """
        self._store.put(_name(number), msgspec.json.encode(writer))

    def touch(self, number: int, modified_ns: int) -> None:
        """Renew a lease; the store sets the time.

        Raises:
            OSError: the name is not there, or the store refuses.
        """
        del modified_ns
        self._store.put(_name(number), self._store.read(_name(number), _MOST_BYTES))

    def clear_older(self, number: int) -> None:
        """Remove the names of former holders; what resists stays."""
        for each in self._numbers():
            if each < number:
                with suppress(OSError):
                    self._store.delete(_name(each))

    def _numbers(self) -> list[int]:
        return [int(match.group(1)) for name in self._store.names() if (match := _NAME.fullmatch(name))]


def _name(number: int) -> str:
    return f".writer-{number:08d}.json"
