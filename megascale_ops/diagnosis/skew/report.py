# SPDX-License-Identifier: Apache-2.0
"""The answer of the arrival-skew engine: waiting ranks, late ranks, culprits, and what they cost. Pure."""

from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from megascale_ops.diagnosis.skew.slow_links import SlowLink
from megascale_ops.diagnosis.skew.tables import Floats

Doubles = npt.NDArray[np.float64]


class Culprit(NamedTuple):
    """A rank that the others wait for by its own doing. Shares are of the time, which is as much as of a step."""

    rank: int
    excess: float  # own work beyond the median of its equals
    cost: float  # what all would gain if it were as fast as the next slowest
    waited: float  # what a typical equal waits
    late_p50_s: float
    last: float  # share of its collectives in which it came last
    noise: float
    blocks: int  # for so long
    since_s: float
    every: float = 0.0  # one late start in so many blocks; 0: it is late all the time
    a_minute: float = 0.0  # by so much its excess grows; 0: it does not
    jump_s: float = 0.0  # the mean of single late starts
    together: tuple[int, ...] = ()  # others that are late all the time: ``cost`` is what fixing all of them gains


class SkewReport(NamedTuple):
    """What is known now; arrays by rank."""

    span_s: float  # watched in all
    block_s: float
    waiting: Doubles
    excess: Floats
    late_p50_s: Floats
    late_p99_s: Floats
    last: Doubles
    culprits: tuple[Culprit, ...]
    links: tuple[SlowLink, ...]
    silent: tuple[int, ...]
    matched: int
    unmatched: int
    noise: float

    def gpu_hours_a_day(self, cost: float) -> float:
        """Return what a share of every step is worth, in hours of one of the job's GPUs."""
        return cost * len(self.waiting) * 24.0
