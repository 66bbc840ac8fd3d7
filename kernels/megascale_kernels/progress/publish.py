# SPDX-License-Identifier: Apache-2.0
"""Publish a workspace's board, unasked, to the supervisor that started this process.

A rank that hangs in a kernel can't be asked where: its board has to be in a known place before anything
goes wrong. So where the environment names the folder that a supervisor reads (`MEGASCALE_BOX_DIR`, set by
`megascale-ops run`), every workspace puts its board there as `RANK.NUMBER.board`: on the CPU the board *is* that file,
on a GPU the file is a copy that a thread brings up to date. Without the variable nothing is written.

A board is evidence and never worth a failed training: where it can't be made (a full folder, memory that the GPU does
not map) one line is logged.
"""

import atexit
import contextlib
import itertools
import logging
import os
from pathlib import Path
from typing import TYPE_CHECKING

import torch.distributed as dist

from megascale_kernels.errors import Unsupported
from megascale_kernels.progress.board_file import BoardCopier, BoardOwner, MappedBoard

if TYPE_CHECKING:
    from torch import Tensor

logger = logging.getLogger(__name__)

FOLDER_VARIABLE = "MEGASCALE_BOX_DIR"
# 0.5 s: the hang detector reads after seconds; 33 KB twice a second are nothing beside a kernel's own traffic.
COPY_EVERY_S = 0.5
_NUMBERS = itertools.count()


class Published:
    """A board that others see.

    Attributes:
        path: its file.
        words: the board itself, where kernels write straight into the file; None where it is a copy.
    """

    def __init__(self, path: Path, board: MappedBoard | BoardCopier) -> None:
        self.path = path
        self.words: Tensor | None = board.words if isinstance(board, MappedBoard) else None
        self._board = board
        self._pid = os.getpid()
        if self.words is None:
            atexit.register(self._stop)  # a thread that makes CUDA copies must not outlive the interpreter

    def _stop(self) -> None:
        """Copy a last time; the file stays for the report on how the process ended."""
        if self._pid == os.getpid():
            self._board.close()

    def close(self) -> None:
        """Copy no more and take the file away, but not in a forked child; safe to call again."""
        if self._pid == os.getpid():
            atexit.unregister(self._stop)
            self._stop()
            self._pid = 0
            with contextlib.suppress(OSError):
                self.path.unlink()


def publish(workspace: BoardOwner) -> Published | None:
    """Publish a workspace's board; None where no supervisor is set, or it can't be made."""
    folder = os.environ.get(FOLDER_VARIABLE, "")
    if not folder:
        return None
    path = Path(folder) / f"{dist.get_rank()}.{next(_NUMBERS)}.board"
    try:
        if workspace.board.is_cuda:
            return Published(path, BoardCopier(workspace, path, COPY_EVERY_S))
        board = MappedBoard(path, workspace.rank, workspace.world_size, for_gpu=False)
        board.introduce(workspace.agreement.number, workspace.members)
        return Published(path, board)
    except (OSError, Unsupported) as error:
        logger.warning("the progress board %s is shown to nobody: %s", path, error)
        return None
