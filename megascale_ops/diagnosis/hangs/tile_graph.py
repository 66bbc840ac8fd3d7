# SPDX-License-Identifier: Apache-2.0
"""Waits for tiles as a graph of ranks, followed to the ranks that nothing keeps from going on.

A wait in a collective names a group; one in an overlapped kernel names a rank, and a rank that is waited for may wait
itself: for another's tile, or in a collective. Those are victims in the middle. At the *end* of the chain is the rank
    that holds all the others up. Where there is no end the ranks wait for each other in a circle, and none of them is
    more to blame.

Pure: facts in, ranks out.
"""

from collections.abc import Callable, Collection, Iterable, Mapping
from typing import NamedTuple

from megascale_ops.schema.tiles import TileFact, TileWait


class Edge(NamedTuple):
    """A rank that waits for a tile of another."""

    waiter: int
    peer: int
    fact: TileFact
    wait: TileWait

    @property
    def place(self) -> str:
        """What it waits in, in words."""
        return f"{self.fact.operator} launch {self.fact.launch}"


class Ends(NamedTuple):
    """Where chains of waits end: ``ranks`` wait for no rank; without any, ``circle`` wait for each other."""

    ranks: tuple[int, ...]
    circle: tuple[int, ...] = ()


def edges_of(rank: int, facts: Iterable[TileFact]) -> list[Edge]:
    """Return for whose tiles a rank waits, those for which most thread blocks wait first."""
    found = [Edge(rank, wait.peer, fact, wait) for fact in facts for wait in fact.waiting if wait.peer != rank]
    return sorted(found, key=lambda edge: (-edge.wait.ctas, edge.peer))


def follow(waiters: Iterable[int], waits_for: Callable[[int], Collection[int]]) -> Ends:
    """Follow waits to their ends.

    Args:
        waiters: where to begin.
        waits_for: the ranks that a rank waits for, empty for none.
    """
    known: dict[int, tuple[int, ...]] = {}
    left = sorted(set(waiters), reverse=True)
    while left:
        rank = left.pop()
        if rank not in known:
            known[rank] = tuple(sorted(waits_for(rank)))
            left.extend(known[rank])
    ends = tuple(sorted(rank for rank, peers in known.items() if not peers))
    return Ends(ends) if ends or not known else Ends((), _circle(known))


def _circle(known: Mapping[int, tuple[int, ...]]) -> tuple[int, ...]:
    """Return ranks that wait for each other, where every rank waits for one at least."""
    passed: dict[int, int] = {}
    rank = min(known)
    while rank not in passed:
        passed[rank] = len(passed)
        rank = known[rank][0]
    return tuple(sorted(one for one, at in passed.items() if at >= passed[rank]))


def standing(own: Iterable[TileFact], edge: Edge) -> tuple[str, bool]:
    """Return where a rank is in the launch whose tile another waits for, in words, and whether that explains the wait.

    Args:
        own: what the boards of the rank that is waited for show.
        edge: the wait.
    """
    fact = next((fact for fact in own if fact.group == edge.fact.group), None)
    if fact is None:
        return f"has not come to {edge.place}, and shows no board of it", True
    if fact.launch < edge.fact.launch:
        last = f"its last is {fact.operator} launch {fact.launch}" if fact.launch else "it has launched nothing"
        return f"has not come to {edge.place} ({last})", True
    if fact.launch > edge.fact.launch:
        return f"is past {edge.place} (in {fact.operator} launch {fact.launch})", False
    if fact.operator != edge.fact.operator:
        return f"runs {fact.operator} as launch {fact.launch}, where {edge.fact.operator} is waited in", True
    if fact.is_over:
        return f"has ended {edge.place}, and what it sent has not arrived", False
    at = f" at tile {fact.in_hand}" if fact.in_hand >= 0 else ""
    return f"stands in {edge.place}{at}", True
