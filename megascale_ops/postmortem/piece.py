# SPDX-License-Identifier: Apache-2.0
"""What one file holds of one rank."""

from pathlib import Path
from typing import NamedTuple


class Piece(NamedTuple):
    """What one file holds of one rank; ``rank`` is -1 where nothing tells it."""

    path: Path
    rank: int
    data: bytes

    @property
    def text(self) -> str:
        """The data as text."""
        return self.data.decode("utf-8", "replace").replace("\r\n", "\n")
