# SPDX-License-Identifier: Apache-2.0
"""Where every CTA is and which rank waits for which: readable while a kernel spins, and after its process was killed.

    with map_board("job7.rank0") as board:             # kernels write it; or BoardCopier(workspace, "job7.rank0")
        workspace = Workspace(..., progress=board.words)

    python -m megascale_kernels.progress /dev/shm/job7.rank* --watch

A reader needs neither torch nor a GPU. The pieces, one verb each:

    board_file    make a board that other processes see
    view          read it
    text          describe it in words
    wait_chain    follow the waits from rank to rank through several boards
"""

from megascale_kernels.progress.board_file import BoardCopier, MappedBoard, map_board
from megascale_kernels.progress.text import describe
from megascale_kernels.progress.view import BoardView, RoleView, Wait, read_board, writer_lives
from megascale_kernels.progress.wait_chain import Blame, blame

__all__ = [
    "Blame",
    "BoardCopier",
    "BoardView",
    "MappedBoard",
    "RoleView",
    "Wait",
    "blame",
    "describe",
    "map_board",
    "read_board",
    "writer_lives",
]
