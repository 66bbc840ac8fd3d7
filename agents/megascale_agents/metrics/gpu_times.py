# SPDX-License-Identifier: Apache-2.0
"""What the GPUs of this node need for the parts of a step, for Prometheus: one series a part, not one a rank.

12,288 ranks with five parts each would be 61,000 series. The median of a node's ranks separates a job that became
slower on the GPU from one whose hosts did; which rank it is, the profile and the stragglers' verdicts show.
"""

from collections.abc import Iterable, Iterator
from statistics import median
from typing import TYPE_CHECKING

from megascale_agents.ranks.rank_watch import RankWatch
from megascale_agents.ranks.rounds import RoundWatch

if TYPE_CHECKING:
    from megascale_ops.blackbox.records import GpuStepRecord

NAME = "megascale_step_gpu_seconds"
PARTS = ("data", "forward", "backward", "optimizer", "checkpoint")


def samples_of(
    ranks: Iterable[tuple[RoundWatch, RankWatch]], node: str
) -> Iterator[tuple[str, tuple[str, ...], float]]:
    """Yield the median of each part over a job's ranks here, in the newest step of each that the GPU has passed."""
    newest: dict[str, list[GpuStepRecord]] = {}
    for round_watch, watch in ranks:
        if watch.box is not None and not watch.is_gone:
            newest.setdefault(round_watch.job, []).extend(watch.box.gpu_steps(1))
    for job, steps in newest.items():
        for part in PARTS if steps else ():
            yield NAME, (job, node, part), median(getattr(step, f"{part}_s") for step in steps)
