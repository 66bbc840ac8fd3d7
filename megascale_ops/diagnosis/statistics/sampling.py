# SPDX-License-Identifier: Apache-2.0
"""Ranks sampled with golden-ratio spacing, so that the sample aligns with no mesh axis.

Every 16th of 1,024 ranks is the first GPU of its node wherever nodes have 8 GPUs, or 16, and tensor-parallel rank 0 of
most meshes: what those alone do would pass for what all do. Multiples of the golden ratio, less what is whole, lie
evenly between 0 and 1 and have no distance in common with anything. Pure.
"""

from collections.abc import Sequence
from functools import lru_cache
from typing import TypeVar

import numpy as np
import numpy.typing as npt

Value = TypeVar("Value", bound=np.generic)

_GOLDEN = (5**0.5 - 1) / 2


@lru_cache(maxsize=32)  # a group uses the same few with every step
def some_of(count: int, most: int) -> Sequence[int]:
    """Return some ``most`` of ``count`` places in order, evenly spread; all where they are less than twice as many."""
    if count < 2 * most:
        return range(count)
    return tuple(sorted({int(one * _GOLDEN % 1.0 * count) for one in range(most)}))


def values_of_some(values: "npt.NDArray[Value]", most: int) -> "npt.NDArray[Value]":
    """Return the values of some places; all where they are less than twice as many."""
    return values if len(values) < 2 * most else values[np.array(some_of(len(values), most))]
