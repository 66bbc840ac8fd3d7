# SPDX-License-Identifier: Apache-2.0
"""The operations that NCCL gave to a rank's GPU and that have not ended, as NCCL's profiler plugin saw them.

The host's side of a collective (torch's flight recorder, Python's calls) shows that it was given to the GPU. Only a
profiler of NCCL's knows whether the GPU has begun it, channel by channel. One of which no channel has begun waits
for what was launched before it on its stream.
"""

from typing import Annotated

import msgspec
from msgspec import Meta

from megascale_ops.schema.ranges import Count, Line, RankOrNone, Seconds, Step, Word

# 16: two for each of eight communicators, which is what a rank of a large model waits in at most.
MOST_OPERATIONS = 16


class GpuOperation(msgspec.Struct, frozen=True, omit_defaults=True, gc=False):
    """One collective, send or receive that has not ended."""

    communicator: Word  # NCCL's id in hexadecimal, equal on all ranks
    function: Word  # NCCL's word: AllReduce
    seq: Step  # its number of this function on this communicator
    name: Line = ""  # the communicator's, where it has one
    peer: RankOrNone = -1  # of a send or a receive, in the communicator's own numbers; -1: a collective
    waited_s: Seconds = 0.0  # since it was given to the GPU
    begun: bool = False


class GpuQueue(msgspec.Struct, frozen=True, omit_defaults=True, gc=False):
    """What a GPU has before it, oldest first; ``state`` changes whenever it is seen to begin or to end anything.

    ``is_partial``: operations that may be before these were not timed (thinned out, or the budget forbade it), so that
    nothing follows from those that have not begun.
    """

    operations: Annotated[tuple[GpuOperation, ...], Meta(max_length=256)] = ()
    state: Count = 0
    is_partial: bool = False
    kernel: Line = ""  # the longest in the rank's last kernel profile, NCCL's own left out; "": none was made
