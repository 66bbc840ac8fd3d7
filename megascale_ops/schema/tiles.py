# SPDX-License-Identifier: Apache-2.0
"""Where a rank's overlapped kernels are: which launch, how far, and which ranks' tiles they wait for.

A kernel that overlaps a collective with its product waits tile by tile for single ranks. So a wait names a rank, where
one in a collective names a group. All ranks here are the job's own, not those of the kernel's group.
"""

from typing import Annotated

import msgspec
from msgspec import Meta

from megascale_ops.schema.ranges import Count, Line, Rank, RankOrNone, Step, Word

# 8: as many ranks as share memory on a host. A kernel's CTAs wait for one or two of them.
MOST_PEERS = 8


class TileWait(msgspec.Struct, frozen=True, omit_defaults=True, gc=False):
    """What some of a launch's thread blocks wait for, or waited for when they gave up."""

    peer: RankOrNone  # -1: a rank that is not known by its number in the job
    tile: Step = -1  # the first tile that can't go on; -1: not known
    ctas: Count = 1  # how many wait for that rank
    gave_up: bool = False  # its deadline has passed


class TileFact(msgspec.Struct, frozen=True, omit_defaults=True, gc=False):
    """The newest launch in one workspace of a rank, as its progress board shows it."""

    group: Line  # the same on all ranks of the workspace
    operator: Word  # ag_gemm, gemm_rs, ...; none before the first launch
    launch: Count  # counted from 1; 0 before the first
    done: Step = -1  # tiles that are done; -1: not known
    tiles: Count = 0
    in_hand: Step = -1  # the highest tile in hand, -1: none
    is_over: bool = False  # every thread block has ended the launch
    waits: Annotated[tuple[TileWait, ...], Meta(max_length=2 * MOST_PEERS)] = ()
    members: Annotated[tuple[Rank, ...], Meta(max_length=MOST_PEERS)] = ()  # empty: not known

    @property
    def waiting(self) -> tuple[TileWait, ...]:
        """Its waits for ranks that are known, most thread blocks first."""
        return tuple(wait for wait in self.waits if wait.peer >= 0)


def describe(fact: TileFact) -> str:
    """Return one line for people."""
    if not fact.launch:
        return f"{fact.group}: no launch yet"
    done = f"{fact.done} of {fact.tiles} tiles done" if fact.done >= 0 else f"{fact.tiles} tiles"
    waits = [
        f"{wait.ctas} thread block{'' if wait.ctas == 1 else 's'} {'gave up on' if wait.gave_up else 'wait for'} "
        f"{f'rank {wait.peer}' if wait.peer >= 0 else 'a rank that is not known'} at tile {wait.tile}"
        for wait in fact.waits
    ]
    return ", ".join([f"{fact.group}: {fact.operator} launch {fact.launch}", done, *waits])
