# SPDX-License-Identifier: Apache-2.0
"""A rank in the wait graph: its report, its evidence, and where it waits."""

from typing import NamedTuple

from megascale_ops.diagnosis.hangs.evidence import Look, Position
from megascale_ops.diagnosis.rank_view import RankView
from megascale_ops.schema.messages import CollectiveFact


class RankWait(NamedTuple):
    """One rank: its report, its evidence, and where it waits."""

    rank: int
    view: RankView
    look: Look
    positions: tuple[Position, ...]
    inside: CollectiveFact | None  # the collective that it waits in
    waits: bool  # also where it is not known in which
    tile_wait: bool = False  # for a tile of another rank

    @property
    def step(self) -> int:
        """The last step that it has finished."""
        progress = self.view.report.progress
        return progress.step if progress is not None else -1
