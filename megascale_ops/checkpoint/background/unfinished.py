# SPDX-License-Identifier: Apache-2.0
"""A restart waits for what the writer processes of the job's former processes are about to seal.

They live on for ``ORPHAN_S`` when their training processes have ended, because the copy that they write is
complete. A restart that did not wait would load an older checkpoint, and the newer one would appear behind its back.
Only who may take the folder over waits: an evaluation beside a living job has no part in its saves.
"""

import logging
import time
from pathlib import Path

from megascale_ops.checkpoint import processes, storage
from megascale_ops.checkpoint.background import shares
from megascale_ops.checkpoint.background.shares import ORPHAN_S

# 20 s beyond what an orphan has: it notices the end of its parent a second late, and the last rename takes its time.
_MOST_WAIT_S = ORPHAN_S + 20.0
# 20 s: a writer process of another node, of which only the growing of its files is seen, gives up after 15.
_QUIET_S = 20.0
_LOOK_S = 0.2

_log = logging.getLogger("megascale_ops.checkpoint")


def await_unfinished(root: Path) -> None:
    """Return when no writer process of former training processes is about to seal, or after ``_MOST_WAIT_S``.

    Raises:
        OSError: the folder can't be listed.
    """
    began_s = time.monotonic()
    for folder in _partial_folders(root):
        begun = shares.begun_in(folder)
        if begun is None:
            continue  # of a save that waits for its end: its process is gone, or holds the folder
        life = processes.life_of(begun.process, processes.this_process())
        if life in {"dead", "dying"}:
            continue
        _log.warning("waiting for the checkpoint that is still written to %s by a former process of this job", folder)
        size, moved_s = -1, time.monotonic()
        while folder.exists() and time.monotonic() - began_s < _MOST_WAIT_S:
            life = processes.life_of(begun.process, processes.this_process())
            if (now_size := storage.bytes_in(folder)) != size:
                size, moved_s = now_size, time.monotonic()
            if life in {"dead", "dying"} or (life == "unknown" and time.monotonic() - moved_s > _QUIET_S):
                break
            time.sleep(_LOOK_S)


def _partial_folders(root: Path) -> list[Path]:
    return [path for path in root.iterdir() if storage.is_partial(path)] if root.is_dir() else []
