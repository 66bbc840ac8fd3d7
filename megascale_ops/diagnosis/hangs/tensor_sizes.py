# SPDX-License-Identifier: Apache-2.0
"""Whether two ranks brought equally much to a collective, by the sizes in a flight recorder.

What meets in a collective is a number of elements: 4 x 4 and 16 are the same to NCCL and to Gloo, which see pointers
and counts. Torch's own analyser compares shapes, and so accuses ranks that differ in nothing that could hang. Tensors
are compared one by one where both brought equally many, else by their sum: an all_gather into a list and one into a
single tensor meet.

Pure: texts as in ``CollectiveFact.sizes`` in, answers out.
"""

import math
from functools import lru_cache

import msgspec

_decode = msgspec.json.Decoder(list[list[int]])


@lru_cache(maxsize=4096)
def elements(sizes: str) -> tuple[int, ...] | None:
    """Return how many elements each tensor has; None where the text was cut, as that of hundreds of tensors is."""
    try:
        return tuple(math.prod(shape) for shape in _decode.decode(sizes))
    except (msgspec.MsgspecError, RecursionError):
        return None


def are_same(one: str, other: str) -> bool:
    """Return whether two texts of sizes can meet. Texts that were cut carry a checksum, and must be equal."""
    if one == other:
        return True
    mine, theirs = elements(one), elements(other)
    if mine is None or theirs is None:
        return False
    if len(mine) == len(theirs):
        return mine == theirs
    return sum(mine) == sum(theirs)


def parts_that_differ(one: str, other: str) -> tuple[int, ...]:
    """Return which tensors differ, counted from 0; nothing where they can't be matched."""
    mine, theirs = elements(one) or (), elements(other) or ()
    if len(mine) != len(theirs) or len(mine) < 2:
        return ()
    return tuple(at for at, (here, there) in enumerate(zip(mine, theirs, strict=True)) if here != there)
