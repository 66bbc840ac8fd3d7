# SPDX-License-Identifier: Apache-2.0
"""When is a round formed, and from which nodes?

A round wants ``max_nodes`` runners and takes ``min_nodes``. The first formation waits a last call for late ones. After
a failure new nodes are not waited for: as soon as every node of the round before that still lives has joined, it
starts. Evicted nodes stay out while the others suffice; when they don't, as few of them as are needed are taken back.

Pure: joined nodes and their times in, the nodes in order, or what is waited for, out.
"""

from collections.abc import Collection, Mapping, Sequence
from typing import NamedTuple


class Formation(NamedTuple):
    """``nodes`` in order of node rank when the round can be formed, else empty; ``reason`` is why (not)."""

    nodes: tuple[str, ...]
    reason: str
    again_in_s: float = 0.0  # poll again then; 0: only on an event


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
    evicted: Collection[str] = (),
    asked: Mapping[str, int] | None = None,
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
        evicted: nodes that the job would rather go on without.
        asked: node to the place that its launch line asks for; a round before counts for more.
    """
    evicted, alive = frozenset(evicted), frozenset(alive)  # of 12,288 nodes each is looked up
    welcome = {node: joined_s for node, joined_s in joined.items() if node not in evicted}
    pending = [node for node in before if node in alive and node not in joined and node not in evicted]
    left_s = waiting_since_s + straggler_s - now_s
    why_wait = f"{', '.join(pending)} lives and has not joined yet" if pending and left_s > 0 else ""
    if len(welcome) < min_nodes:
        if len(joined) < min_nodes:
            return Formation((), f"{len(joined)} of at least {min_nodes} nodes have joined")
        return Formation((), why_wait, left_s) if why_wait else _take_back(joined, welcome, before, min_nodes)
    formed = _order(welcome, before, max_nodes, asked or {})
    if len(welcome) >= max_nodes:
        return Formation(formed, f"all {max_nodes} nodes have joined")
    why = f"every living node of the round before has joined ({len(welcome)})"
    if not before:
        left_s = max(welcome.values()) + last_call_s - now_s
        why_wait = f"last call: {left_s:.1f} s for up to {max_nodes} nodes" if left_s > 0 else ""
        why = f"{len(welcome)} of {max_nodes} nodes after the last call"
    return Formation((), why_wait, left_s) if why_wait else Formation(formed, why)


def _take_back(
    joined: Mapping[str, float], welcome: Mapping[str, float], before: Sequence[str], min_nodes: int
) -> Formation:
    """Fill a round up with as few evicted nodes as are needed."""
    back = sorted(set(joined) - set(welcome))[: min_nodes - len(welcome)]
    nodes = {node: joined[node] for node in (*welcome, *back)}
    why = f"{len(welcome)} nodes are too few without {', '.join(back)}, evicted and taken back"
    return Formation(_order(nodes, before, min_nodes, {}), why)


def _order(
    joined: Mapping[str, float], before: Sequence[str], max_nodes: int, asked: Mapping[str, int]
) -> tuple[str, ...]:
    """Keep the order of the round before; newcomers follow in the order that they ask for, then as they came."""
    known = [node for node in before if node in joined]
    last = len(joined) + max(asked.values(), default=0)
    newcomers = joined.keys() - set(known)
    ordered = sorted(newcomers, key=lambda node: (asked.get(node, last), joined[node], node))
    return tuple([*known, *ordered][:max_nodes])
