# SPDX-License-Identifier: Apache-2.0
"""The operations queued on a rank's GPU, from its black box, and the kernel that is the likeliest to be in front.

A kernel that does not end is in no profile: GPUs report those that have ended. Instead the longest kernel of the rank's
last profile that is none of NCCL's is named; it is a hint for people and decides nothing.
"""

from pathlib import Path

import msgspec

from megascale_agents.ownership import files
from megascale_agents.ranks.rank_watch import RankWatch
from megascale_agents.ranks.rounds import RoundWatch
from megascale_ops.blackbox import nccl_queue, nccl_words
from megascale_ops.foreign import UNREADABLE
from megascale_ops.schema.gpu_queue import GpuQueue
from megascale_ops.schema.kernels import SAMPLED_SUFFIX, RankKernels

_MOST_BYTES = 1 << 20
_MOST_NAME = 200  # characters; names of templates have thousands


def of_rank(watch: RoundWatch, rank: RankWatch, now_ns: int) -> GpuQueue | None:
    """Return the operations queued on a rank's GPU; None without records of NCCL's profiler plugin."""
    if rank.box is None:
        return None
    names = nccl_words.names_of(rank.box.communicators())
    steps = [step.number for step in rank.box.gpu_steps(1)]
    queue = nccl_queue.queue_of(rank.box.nccl(), now_ns, names, steps)
    if queue is None or not queue.operations:
        return queue
    return msgspec.structs.replace(queue, kernel=_longest(Path(watch.folder, f"{rank.rank}{SAMPLED_SUFFIX}"), watch))


def _longest(path: Path, watch: RoundWatch) -> str:
    """Return the longest kernel that a rank's sampled profile has, "" for none."""
    try:
        found = msgspec.json.decode(files.read_small(path, watch.bounds.owner, _MOST_BYTES), type=RankKernels)
    except (OSError, *UNREADABLE):
        return ""
    if found.device != "gpu":
        return ""
    return next((one.name[:_MOST_NAME] for one in found.kernels if not one.name.startswith("nccl")), "")
