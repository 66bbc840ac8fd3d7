# SPDX-License-Identifier: Apache-2.0
"""When is a round formed, and from whom?

A round wants ``max_nodes`` runners and takes ``min_nodes``. The first formation waits a last call for late ones. After
a failure nobody waits for strangers: as soon as every node of the round before that still lives has joined, it starts.

Pure: told who has joined and when, answers with the nodes in order, or with what is waited for.
"""

from collections.abc import Collection, Mapping, Sequence
from typing import NamedTuple


class Formation(NamedTuple):
    """``nodes`` in order of node rank when the round can be formed, else empty; ``reason`` says why (not)."""

    nodes: tuple[str, ...]
    reason: str
    again_in_s: float = 0.0  # ask again then; 0: only when something happens


def form(
    joined: Mapping[str, float],
    *,
    min_nodes: int,
    max_nodes: int,
    before: Sequence[str],
    alive: Collection[str],
    now_s: float,
    waiting_since_s: float,
    last_call_s: float,
    straggler_s: float,
) -> Formation:
    """Decide whether a round is formed now.

    Args:
        joined: node to the time it joined, on the clock of ``now_s``.
        min_nodes: fewer are no round.
        max_nodes: more are not used.
        before: nodes of the round before in their order; empty for the first.
        alive: those of them that still show signs of life.
        now_s: the time now.
        waiting_since_s: when gathering for this round began.
        last_call_s: what the first formation waits after the last join.
        straggler_s: what a living node of the round before may take to join.
    """
    if len(joined) >= max_nodes:
        return Formation(_order(joined, before, max_nodes), f"all {max_nodes} nodes have joined")
    if len(joined) < min_nodes:
        return Formation((), f"{len(joined)} of at least {min_nodes} nodes have joined")
    if not before:
        left_s = max(joined.values()) + last_call_s - now_s
        if left_s > 0:
            return Formation((), f"last call: {left_s:.1f} s for up to {max_nodes} nodes", left_s)
        return Formation(_order(joined, before, max_nodes), f"{len(joined)} of {max_nodes} nodes after the last call")
    pending = [node for node in before if node in alive and node not in joined]
    left_s = waiting_since_s + straggler_s - now_s
    if pending and left_s > 0:
        return Formation((), f"{', '.join(pending)} lives and has not joined yet", left_s)
    return Formation(
        _order(joined, before, max_nodes), f"every living node of the round before has joined ({len(joined)})"
    )


def _order(joined: Mapping[str, float], before: Sequence[str], max_nodes: int) -> tuple[str, ...]:
    """Keep the order of the round before; newcomers follow in the order they came."""
    place = {node: index for index, node in enumerate(before)}
    ordered = sorted(joined, key=lambda node: (place.get(node, len(place)), joined[node], node))
    return tuple(ordered[:max_nodes])
