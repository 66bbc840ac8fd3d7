# SPDX-License-Identifier: Apache-2.0
"""A restart waits for what the writer processes of the job's former processes are about to seal.

They live on for ``ORPHAN_S`` when their training processes have ended, because the copy that they write is
complete. A restart that did not wait would load an older checkpoint, and the newer one would appear behind its back.
Only a process that may take the folder over waits: an evaluation beside a living job has no part in its saves.
"""

import logging
import time
from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple, Protocol

from megascale_ops.checkpoint import manifest as manifests
from megascale_ops.checkpoint import processes, storage
from megascale_ops.checkpoint.background import shares
from megascale_ops.checkpoint.background.shares import ORPHAN_S, Begun

if TYPE_CHECKING:
    from megascale_ops.checkpoint.tiers.filesystems import Store

# 20 s beyond what an orphan has: it notices the end of its parent a second late, and the last rename takes its time.
_MOST_WAIT_S = ORPHAN_S + 20.0
# 20 s: a writer process of another node, of which only the growing of its files is seen, gives up after 15.
_QUIET_S = 20.0
_LOOK_S = 0.2
# 1 s: each look at a store is a few requests.
_STORE_LOOK_S = 1.0

_log = logging.getLogger("megascale_ops.checkpoint")


class Unfinished(Protocol):
    """A save that is not sealed yet."""

    def __str__(self) -> str:
        """Where it is."""

    def begun(self) -> Begun | None:
        """Which process makes it; None: a save that waits for its end, whose process is gone or holds the folder."""

    def is_there(self) -> bool:
        """Whether it is still not sealed, and not given up."""

    def sign(self) -> object:
        """What changes while it is written."""


class _InFolder(NamedTuple):
    folder: Path

    def __str__(self) -> str:
        return str(self.folder)

    def begun(self) -> Begun | None:
        return shares.begun_in(self.folder)

    def is_there(self) -> bool:
        return self.folder.exists()

    def sign(self) -> object:
        return storage.bytes_in(self.folder)


class _InStore(NamedTuple):
    store: "Store"
    folder: str

    def __str__(self) -> str:
        return f"{self.store.url}/{self.folder}"

    def begun(self) -> Begun | None:
        from megascale_ops.checkpoint.background.store_place import begun_at

        return begun_at(self.store, self.folder)

    def is_there(self) -> bool:
        names = self.store.names(self.folder)
        return bool(names) and manifests.FILE_NAME not in names

    def sign(self) -> object:
        return self.store.listing(self.folder)


def in_folder(root: Path) -> list[Unfinished]:
    """What is not sealed in a folder.

    Raises:
        OSError: it can't be listed.
    """
    return [_InFolder(path) for path in root.iterdir() if storage.is_partial(path)] if root.is_dir() else []


def in_store(store: "Store") -> list[Unfinished]:
    """What is not sealed in a store.

    Raises:
        OSError: it can't be listed.
    """
    from megascale_ops.checkpoint.tiers import store_saves

    return [_InStore(store, folder) for folder, there in store_saves.saves(store) if manifests.FILE_NAME not in there]


def await_unfinished(found: Iterable[Unfinished], look_s: float = _LOOK_S) -> None:
    """Return when no writer process of former training processes is about to seal, or after ``_MOST_WAIT_S``.

    Args:
        found: what is not sealed.
        look_s: how often to look.

    Raises:
        OSError: what holds it does not answer.
    """
    began_s = time.monotonic()
    for one in found:
        begun = one.begun()
        if begun is None:
            continue
        life = processes.life_of(begun.process, processes.this_process())
        if life in {"dead", "dying"}:
            continue
        _log.warning("waiting for the checkpoint that is still written to %s by a former process of this job", one)
        sign: object = None
        moved_s = time.monotonic()
        while one.is_there() and time.monotonic() - began_s < _MOST_WAIT_S:
            life = processes.life_of(begun.process, processes.this_process())
            if (now_sign := one.sign()) != sign:
                sign, moved_s = now_sign, time.monotonic()
            if life in {"dead", "dying"} or (life == "unknown" and time.monotonic() - moved_s > _QUIET_S):
                break
            time.sleep(look_s)


def await_in_store(store: "Store") -> None:
    """The same for a store.

    Raises:
        OSError: the store does not answer.
    """
    await_unfinished(in_store(store), _STORE_LOOK_S)
