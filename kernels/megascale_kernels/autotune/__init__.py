# SPDX-License-Identifier: Apache-2.0
"""Which configuration an operator runs with, the same on every rank, for less than a microsecond or two a call.

Three sources, the first that answers wins: what `tune` measured in this process, what an earlier `tune` left in the
cache file, and the cost model's best guess. The answer None means the serial path (NCCL + cuBLAS): measured faster, or
predicted so, or a GPU that was never measured. Where the model is not sure, the first calls of a shape are a contest
(`contest.py`) and the fastest stays.

Ranks that chose differently would cut their flags differently and wait for each other. So the file is read once per
workspace, by rank 0 alone, and handed to all; everything after that is a pure function of what was handed out.

Rows come in many sizes (serving), so a tuned choice is kept for a *bucket* of M: sizes above 6/8 and up to 8/8 of a
power of two share one, sizes above 4/8 and up to 6/8 another. N and K belong to the model and are taken as they are.
"""

from megascale_kernels.autotune.choosing import choose, contenders
from megascale_kernels.autotune.contest import Contest
from megascale_kernels.autotune.space import candidates
from megascale_kernels.autotune.tuning import Tuned, tune

__all__ = ["Contest", "Tuned", "candidates", "choose", "contenders", "tune"]
