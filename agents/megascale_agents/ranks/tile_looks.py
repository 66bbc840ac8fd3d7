# SPDX-License-Identifier: Apache-2.0
"""Where a rank's overlapped kernels are: its progress boards, read while the kernels spin.

This needs no answer of the rank, so it works for a process that is stuck, and for a kernel that no deadline ends. One
sample shows where a kernel is; whether it moved the judge sees from the next one.
"""

from megascale_agents.ranks.tile_boards import Boards, start_of
from megascale_ops.schema.tiles import TileFact


class TileLooks:
    """Looks at the boards of one job's ranks on this node.

    Args:
        folder: where the job's black boxes are.
        boards: where else boards lie; /dev/shm when not given.
    """

    def __init__(self, folder: str, boards: Boards | None = None) -> None:
        self._folder = folder
        self._beside = Boards("")
        self._boards = boards or Boards()

    def copies(self, pid: int, start_ticks: int, uid: int) -> list[bytes]:
        """Return the boards of one process as they are, also of one that has ended."""
        return self._boards.copies(self._folder, (pid, start_of(start_ticks)), uid)

    def of(
        self, pid: int, start_ticks: int, uid: int, world_size: int, *, everywhere: bool = True
    ) -> tuple[TileFact, ...]:
        """Return the facts of one process's boards, one for each of its workspaces.

        Args:
            pid: the process.
            start_ticks: when it began, in clock ticks after boot.
            uid: whose it is.
            world_size: ranks of its job.
            everywhere: also where boards lie that scripts have made by hand. Data loaders make and remove files there
                all the time, and each time it has to be listed anew: 4 ms for a thousand files.
        """
        boards = self._boards if everywhere else self._beside
        return boards.facts(self._folder, (pid, start_of(start_ticks)), uid, world_size)
