# SPDX-License-Identifier: Apache-2.0
"""Many heartbeats at once that tell nothing but that ranks went on: as columns, where a heartbeat has an object a rank.

Of thousands of nodes nearly all only go on, nearly always: every rank is where its equals are, in the same phase of the
same step, and nothing else is as it was not in the heartbeat before. Who has many such heartbeats hands them in
together; whatever differs in anything else is a heartbeat of its own.
"""

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from megascale_ops.schema.progress import CollectivePosition, Progress

Fields = npt.NDArray[np.float64]
Ranks = npt.NDArray[np.intp]
Numbers = npt.NDArray[np.float64]


class Sign(NamedTuple):
    """One node's heartbeat: the fields of ``Heartbeat``, and how many ranks it tells of."""

    node: str
    agent_id: str
    seq: int
    mono_s: float
    wall_s: float
    size: int


class Signs(NamedTuple):
    """The same of many nodes, as columns: each node comes once."""

    nodes: Sequence[str]
    agent_ids: npt.NDArray[np.object_]
    seq: npt.NDArray[np.int64]
    mono_s: Numbers
    wall_s: Numbers
    size: npt.NDArray[np.int64]

    def at(self, number: int) -> Sign:
        """Return one of them."""
        return Sign(
            self.nodes[number],
            self.agent_ids[number],
            self.seq.item(number),
            self.mono_s.item(number),
            self.wall_s.item(number),
            self.size.item(number),
        )


class Told(NamedTuple):
    """What all of these ranks tell of themselves.

    ``progress``: its points in time count from when the heartbeat was sent, so they are negative.
    """

    progress: Progress
    collective: CollectivePosition | None

    def progress_at(self, mono_s: float) -> Progress:
        """Return the progress that a heartbeat sent then, by its node's clock, tells."""
        told = self.progress
        return Progress(
            state=told.state,
            step=told.step,
            step_is_absolute=told.step_is_absolute,
            steps_seen=told.steps_seen,
            phase=told.phase,
            phase_since_mono_s=mono_s + told.phase_since_mono_s,
            moved_mono_s=mono_s + told.moved_mono_s,
            beat_mono_s=mono_s + told.beat_mono_s,
            step_p50_s=told.step_p50_s,
            step_p99_s=told.step_p99_s,
        )


class Steady(NamedTuple):
    """The heartbeats of some nodes of one job's round, or of nodes that report no job (``of_no_job``).

    ``told``: None of nodes that report no rank, since nothing changed, and of ranks that stand where they stood, of
    which ``beat_ago_s`` says how long before it was sent their recorders' threads beat last; -1.0: no rank is reported.
    ``ranks``: those of all signs, in their order.
    ``steps``: finished since the heartbeats before, oldest first, (ranks, 12): the fields of ``StepWork`` in order, a
    loss that is none or no number as NaN.
    """

    job: str
    round: int
    signs: Signs
    told: Told | None
    ranks: Ranks
    steps: Sequence[Fields]
    beat_ago_s: float = -1.0

    @property
    def tells(self) -> bool:
        """Ranks are reported."""
        return self.told is not None or self.stands

    @property
    def of_no_job(self) -> bool:
        """The nodes report no job: their agents tell that they are there, and nothing else."""
        return not self.job

    @property
    def stands(self) -> bool:
        """All ranks are reported, and none has moved."""
        return self.told is None and self.beat_ago_s >= 0.0


class Taken(NamedTuple):
    """What became of it: nodes that must speak for themselves; how soon the others are to speak again, 0: as usual."""

    refused: list[str]
    again_s: float = 0.0
