# SPDX-License-Identifier: Apache-2.0
"""Follow waits from rank to rank through the boards of several ranks, to the rank that waits for none.

A rank that waits is a victim as long as the rank it waits for does not wait: a rank that is waited for and waits for
none holds the others up, because it computes still, is frozen, is behind, or is dead. If all ranks that are waited for
wait themselves, they wait in a circle, and no board names a culprit.
"""

from collections.abc import Iterable, Mapping
from typing import NamedTuple

from megascale_kernels.progress.text import folds, shows
from megascale_kernels.progress.view import BoardView


class Blame(NamedTuple):
    """What several boards show together.

    Attributes:
        waits: per rank the ranks it waits for, most waiting CTAs first.
        suspects: ranks that are waited for, directly or through others, and wait for none.
        lines: the same for a person, the suspects first.
    """

    waits: Mapping[int, tuple[int, ...]]
    suspects: tuple[int, ...]
    lines: tuple[str, ...]


def blame(views: Iterable[BoardView]) -> Blame:
    """Find the ranks that hold the others up.

    Raises:
        ValueError: two boards are of the same rank.
    """
    boards: dict[int, BoardView] = {}
    for view in views:
        if view.rank in boards:
            raise ValueError(f"two of these boards are of rank {view.rank}: give one board per rank, all of one job")
        boards[view.rank] = view
    # A CTA that waits for another part of a tile of its own rank waits for the peer of that part.
    waits = {
        rank: tuple(dict.fromkeys(fold.peer for fold in folds(boards[rank]) if fold.peer != rank))
        for rank in sorted(boards)
    }
    waited_for = {peer for peers in waits.values() for peer in peers}
    suspects = tuple(sorted(peer for peer in waited_for if not waits.get(peer)))
    return Blame(waits, suspects, tuple(_lines(boards, waits, suspects)))


def _lines(boards: Mapping[int, BoardView], waits: Mapping[int, tuple[int, ...]], suspects: Iterable[int]) -> list[str]:
    lines = [f"first suspect: rank {rank} waits for nobody, and {_behind(rank, waits)}" for rank in suspects]
    held = [rank for rank, peers in waits.items() if peers]
    if held and not lines:
        lines.append(f"no first suspect: {_ranks(held)} wait in a circle")
    for rank in waits:
        if not waits[rank]:
            lines.append(f"rank {rank} waits for nobody; it shows {shows(boards[rank])}")
        for peer in waits[rank]:
            sign = (
                f"rank {peer} shows {shows(boards[peer])}" if peer in boards else f"no board of rank {peer} was given"
            )
            lines.append(f"rank {rank} waits for rank {peer}; {sign}")
    return lines


def _behind(suspect: int, waits: Mapping[int, tuple[int, ...]]) -> str:
    behind: set[int] = set()
    reached = {suspect}
    while reached:
        reached = {rank for rank, peers in waits.items() if reached & set(peers)} - behind
        behind |= reached
    return f"{_ranks(sorted(behind))} wait{'s' if len(behind) == 1 else ''} for it, directly or through others"


def _ranks(ranks: Iterable[int]) -> str:
    names = [str(rank) for rank in ranks]
    return f"rank {names[0]}" if len(names) == 1 else f"ranks {', '.join(names)}"
