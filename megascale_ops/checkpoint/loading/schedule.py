# SPDX-License-Identifier: Apache-2.0
"""Who reads which file, and when, so that every rank gets what it needs and each file is read once. Pure.

A digest is of a whole file, so a file of which any rank needs any byte is read whole, by one rank, front to back in
blocks. Each block goes to the other ranks that need something of it. All ranks compute the same schedule from the same
needs, so nothing is negotiated.

Time is counted in rounds: in a round each file in progress moves by one block. A rank takes part in ``MOST_AT_ONCE``
files at a time, which bounds its memory whatever the number of ranks; those of which it needs little do not count, or
the handful of scalars that a sharded optimizer has in every file would make all ranks wait for each other.

The reader of a file is a rank that needs it, where one of these can open it, the least busy of them: so the ranks of
a replica group share what they all need, and a rank that reads its own shard sends nothing.
"""

import heapq
from collections import defaultdict
from collections.abc import Mapping, Sequence
from typing import NamedTuple

from megascale_ops.checkpoint.loading.ranges import Range, count

# 8: from eight sources at 1.5 GB/s each, a disk's share, a rank receives 12 GB/s, as much as 100 Gbit/s carry.
MOST_AT_ONCE = 8
# A rank that needs less than a sixteenth of a file is no reason to hold the file back.
_LITTLE = 16
# 8 MB: with two blocks in memory for each file at a time, 128 MB; calls and messages cost nothing beside it.
BLOCK_BYTES = 8 << 20

Needs = Mapping[int, Sequence[Range]]
"""What one rank needs: by file number, which bytes."""


class Unreadable(NamedTuple):
    """A file that is needed and that no rank can open."""

    file: int


class Transfer(NamedTuple):
    """One file: who reads it, from which round on, and who gets something of it."""

    file: int
    reader: int
    first_round: int
    receivers: tuple[int, ...]  # without the reader
    to_all: bool  # all ranks need the same bytes of it: sent by broadcast

    def rounds(self, size_bytes: int, block_bytes: int) -> range:
        """The rounds in which it moves."""
        return range(self.first_round, self.first_round + -(-size_bytes // block_bytes))


def plan(
    sizes: Sequence[int],
    needs: Sequence[Needs],
    holders: Sequence[Sequence[int]] | None = None,
    *,
    block_bytes: int = BLOCK_BYTES,
    at_once: int = MOST_AT_ONCE,
) -> list[Transfer | Unreadable]:
    """What is to be read, in the order in which it begins.

    Args:
        sizes: bytes of each file, by number.
        needs: of each rank.
        holders: for each file the ranks that can open it; None: every rank can.
        block_bytes: what is read at once.
        at_once: in how many files a rank takes part at a time.
    """
    needing: defaultdict[int, list[int]] = defaultdict(list)
    for rank, wanted in enumerate(needs):
        for file, ranges in wanted.items():
            if ranges:
                needing[file].append(rank)
    busy_bytes = [0] * len(needs)
    # For each rank the rounds at which it has a hand free again.
    free: list[list[int]] = [[0] * at_once for _ in needs]
    found: list[Transfer | Unreadable] = []
    # The largest first, so that what is left at the end is small; files that few ranks need before those of many.
    for file in sorted(needing, key=lambda number: (-sizes[number], len(needing[number]), number)):
        able = range(len(needs)) if holders is None else holders[file]
        own = needing[file] if holders is None else [rank for rank in needing[file] if rank in set(able)]
        candidates = own or able
        if not candidates:
            found.append(Unreadable(file))
            continue
        reader = min(candidates, key=lambda rank: (busy_bytes[rank], rank))
        busy_bytes[reader] += sizes[file]
        much = [rank for rank in needing[file] if count(needs[rank][file]) * _LITTLE >= sizes[file]]
        hands = {reader, *much}
        first = max(free[rank][0] for rank in hands)
        transfer = Transfer(
            file,
            reader,
            first,
            tuple(rank for rank in needing[file] if rank != reader),
            to_all=len(needs) > 1 and len(needing[file]) == len(needs) and _alike(needs, file),
        )
        found.append(transfer)
        for rank in hands:
            heapq.heapreplace(free[rank], transfer.rounds(sizes[file], block_bytes).stop)
    return sorted(found, key=lambda each: (each.first_round if isinstance(each, Transfer) else -1, each.file))


def _alike(needs: Sequence[Needs], file: int) -> bool:
    first = needs[0][file]
    return all(each[file] == first for each in needs)
