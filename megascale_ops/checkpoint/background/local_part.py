# SPDX-License-Identifier: Apache-2.0
"""This rank's part of a set on the nodes that is written in the background: what follows when its files are there.

The writer process has written and digested them, or could not. Then the ranks tell each other, each node seals its part
of the set, and its files travel to the buddy: the work of the local tier, done in a thread. How a rank's files fared is
told once, whichever of its threads knows first; the other ranks then need not wait for it.
"""

import logging
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Protocol

from megascale_ops.checkpoint.manifest import FileEntry

_log = logging.getLogger("megascale_ops.checkpoint")


class OpenSet(Protocol):
    """A set that was begun on all nodes, as the local tier gives it."""

    @property
    def folder(self) -> Path:
        """Where this rank's files go."""

    def finish(self, files: tuple[FileEntry, ...], failure: str) -> bool:
        """Tell the other ranks how this rank's files fared, and seal or drop the set with them; whether it is sealed.

        Never raises; a set that is left out is told as a warning.
        """


class LocalPart:
    """How this rank's files fared, told once.

    Args:
        opened: the set.
        ended: called in a thread when that is over, with whether the set is sealed.
    """

    def __init__(self, opened: OpenSet, ended: Callable[[bool], None]) -> None:
        self.folder = str(opened.folder)
        self._opened, self._ended = opened, ended
        self._busy = threading.Lock()
        self._is_told = self._is_over = False

    @property
    def is_over(self) -> bool:
        """Whether the set is sealed or left out."""
        return self._is_over

    def tell(self, files: tuple[FileEntry, ...] = (), failure: str = "") -> None:
        """Tell; the second time nothing."""
        with self._busy:
            if self._is_told:
                return
            self._is_told = True
        threading.Thread(target=self._finish, args=(files, failure), name="checkpoint-set", daemon=True).start()

    def _finish(self, files: tuple[FileEntry, ...], failure: str) -> None:
        is_sealed = False
        try:
            is_sealed = self._opened.finish(files, failure)
        except Exception:  # noqa: BLE001  whatever it is, the training must not wait for it
            _log.exception("a checkpoint on the nodes could not be finished")
        finally:
            self._is_over = True
            self._ended(is_sealed)
