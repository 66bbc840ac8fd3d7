# SPDX-License-Identifier: Apache-2.0
"""What a user says about a tier on the nodes, and which save goes where. Pure."""

from dataclasses import dataclass
from pathlib import Path

from megascale_ops.errors import UsageError


@dataclass(frozen=True)
class LocalTier:
    """Checkpoints on each node's own memory or disk, beside those in the shared storage.

    Attributes:
        path: a folder that each node has for itself (``/dev/shm/checkpoints``, a local NVMe disk).
        every: save there every so many steps; 1: at every call of ``save``.
        keep: so many sets stay; with copies on a buddy 2 at least, since the newest is still being sent.
        buddy: whether each node keeps a copy of another one's files; None: where there is more than one node.
        room: this share of the file system stays free: a full ``/dev/shm`` takes the memory of the training.
    """

    path: str | Path
    every: int = 1
    keep: int = 2
    buddy: bool | None = None
    room: float = 0.05

    def checked(self) -> "LocalTier":
        """This tier.

        Raises:
            UsageError: a number can't be.
        """
        if self.every < 1:
            raise UsageError(f"LocalTier(every={self.every}): save every step at most, so 1 at least")
        least = 1 if self.buddy is False else 2
        if self.keep < least:
            why = (
                "one at least must stay"
                if least == 1
                else "while the newest is sent to the buddy the one before counts"
            )
            raise UsageError(f"LocalTier(keep={self.keep}): {why}, so {least} at least")
        if not 0 <= self.room < 1:
            raise UsageError(f"LocalTier(room={self.room}): a share of the file system, from 0 to below 1")
        return self


def is_due(step: int, last_step: int, every: int) -> bool:
    """Whether a save of a step goes to a tier of which the last one was ``last_step`` (-1: none).

    By multiples, so that a script that saves at steps 7, 14, 21 with ``every=10`` is due at 14 and 21.
    """
    return step // every > last_step // every or step <= last_step
