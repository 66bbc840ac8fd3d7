# SPDX-License-Identifier: Apache-2.0
"""Kernel timings: what is asked of a rank, what it found, and what people see of it.

A rank is asked through ``<box dir>/<rank>.profile.json`` and answers with ``<rank>.kernels.json``; what it samples by
itself stands in ``<rank>.sampled.json``. All are written beside and renamed, and small: 40 rows of 200 bytes.
"""

from typing import Annotated

import msgspec
from msgspec import Meta

from megascale_ops.schema.ranges import Count, Line, Microseconds, RankList, Seconds, Step, Text, Word

REQUEST_SUFFIX = ".profile.json"
RESULT_SUFFIX = ".kernels.json"
SAMPLED_SUFFIX = ".sampled.json"
# 40 kernels have 95 % and more of a transformer's time; the rest is counted in ``left_out``.
MOST_KERNELS = 40
# 100 steps: a million kernels, the most to be added up beside the training.
MOST_STEPS = 100
# 10 min: for the slowest steps there are. Until then the rank's profiler may be on.
MOST_DEADLINE_S = 600.0


class ProfileRequest(msgspec.Struct, frozen=True):
    """What an agent asks of a rank: profile the next ``steps`` steps, unless they end after ``until_mono_s``."""

    id: str
    steps: int
    until_mono_s: float  # of this machine's monotonic clock


class KernelTime(msgspec.Struct, frozen=True, omit_defaults=True, gc=False):
    """All calls of one kernel (of one operator, without its children, where there is no GPU), in microseconds."""

    name: Line
    calls: Count
    total_us: Microseconds
    median_us: Microseconds
    # A quarter of the calls is as fast as this: what a machine that is busy now and then leaves alone.
    low_us: Microseconds


class RankKernels(msgspec.Struct, frozen=True, omit_defaults=True, gc=False):
    """What one rank's profiler saw; ``error`` is why there is nothing."""

    id: Word = ""  # of the request; of a sample the number of its step
    device: Word = ""  # gpu, cpu
    steps: Count = 0
    first_step: Step = -1  # the step finished before the first that was profiled is one less
    span_s: Seconds = 0.0  # wall time of these steps
    own_s: Seconds = 0.0  # what switching the profiler on and off cost the rank
    # The longest in all first, at most MOST_KERNELS.
    kernels: Annotated[tuple[KernelTime, ...], Meta(max_length=MOST_KERNELS)] = ()
    left_out: Count = 0  # kernels beyond these
    left_out_us: Microseconds = 0.0
    error: Text = ""


class ProfileAsk(msgspec.Struct, frozen=True, forbid_unknown_fields=True, omit_defaults=True):
    """Body of ``POST /v1/jobs/JOB/profile``. No ranks: all of them. 0 steps: what was sampled last."""

    steps: Count = 2
    ranks: RankList = ()
    deadline_s: Seconds = 60.0


class ProfileRow(msgspec.Struct, frozen=True, omit_defaults=True):
    """One kernel on one rank, beside the same kernel on its equals."""

    rank: int
    kernel: str
    calls: int
    median_us: float
    total_us: float
    share: float = 0.0  # of the wall time of the profiled steps
    ratio: float = 0.0  # of the median to that of its equals; 0: no equals to compare with
    others_us: float = 0.0
    is_slow: bool = False
    is_waiting: bool = False  # a collective: its time shows when the others came


class ProfileRank(msgspec.Struct, frozen=True, omit_defaults=True):
    """One rank that was asked."""

    rank: int
    node: str = ""
    text: str = ""  # why there is nothing of it
    path: str = ""  # all that it found, on its node
    span_s: float = 0.0
    own_s: float = 0.0
    ratio: float = 0.0  # of the time of all kernels that could be compared to what its equals need for them
    is_slow: bool = False


class ProfileView(msgspec.Struct, frozen=True, omit_defaults=True):
    """Answer to both requests about a profile; rows that stand out first, then the longest."""

    job: str
    id: str
    state: str  # waiting, done
    steps: int = 0
    device: str = ""
    verdict: str = ""  # sentences
    ranks: tuple[ProfileRank, ...] = ()
    rows: tuple[ProfileRow, ...] = ()
    left_out: int = 0  # rows beyond MOST_ROWS
