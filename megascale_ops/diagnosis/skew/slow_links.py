# SPDX-License-Identifier: Apache-2.0
"""Which link is slow: what the lines that move data slowly have in common, and those that do not lack.

A ring is as fast as its slowest link, so one bad cable slows every line whose ring passes it, and a bad network card
every line of its rank. The smallest thing that explains the slow lines is named: a pair that no other line has, a rank
that no line of normal speed contains, a node; else all ranks of the lines, with less confidence.

A slow *rank* does not show here: it comes late, the others wait, and the transfer itself is as fast as ever. Pure.
"""

from collections import Counter
from collections.abc import Mapping, Sequence
from typing import NamedTuple


class SlowLine(NamedTuple):
    """One line and what its transfers cost."""

    communicator: str
    function: str
    ranks: tuple[int, ...]
    ratio: float
    cost: float  # share of the time


class SlowLink(NamedTuple):
    """What is named."""

    kind: str  # link, rank, node, ring
    ranks: tuple[int, ...]
    lines: tuple[SlowLine, ...]
    ratio: float
    cost: float
    confidence: float


class _Well(NamedTuple):
    """What lines of normal speed contain."""

    ranks: set[int]
    pairs: set[tuple[int, ...]]


def locate(slow: Sequence[SlowLine], normal: Sequence[tuple[int, ...]], nodes: Mapping[int, str]) -> list[SlowLink]:
    """Return the links that explain the slow lines.

    Args:
        slow: the lines that are named.
        normal: the ranks of each line of the same kinds that is as fast as its siblings.
        nodes: which rank is where, as far as it is known.
    """
    found: list[SlowLink] = []
    left = list(slow)
    well = _Well({rank for ranks in normal for rank in ranks}, {pair for ranks in normal for pair in _pairs(ranks)})
    while left:
        culprit, kind, explained, confidence = _explain(left, well, normal, nodes)
        found.append(
            SlowLink(
                kind,
                culprit,
                tuple(explained),
                ratio=max(line.ratio for line in explained),
                cost=max(line.cost for line in explained),
                confidence=confidence,
            )
        )
        gone = set(explained)
        left = [line for line in left if line not in gone]
    return found


def _explain(
    left: list[SlowLine], well: _Well, normal: Sequence[tuple[int, ...]], nodes: Mapping[int, str]
) -> tuple[tuple[int, ...], str, list[SlowLine], float]:
    """Return the ranks that explain most of what is left, what they are, and which lines that are."""
    worst = max(left, key=lambda line: line.cost)
    # How many groups of ranks move slowly that contain a rank.
    by_rank = Counter(rank for ranks in {line.ranks for line in left} for rank in set(ranks))
    alone = _lines_of(left, worst.ranks)
    is_new_pair = len(worst.ranks) == 2 and not any(set(worst.ranks) <= set(ranks) for ranks in normal)
    if is_new_pair and not any(by_rank[rank] > 1 for rank in worst.ranks if rank not in well.ranks):
        return worst.ranks, "link", alone, 0.9
    rank = _rank_of(by_rank, [rank for rank in worst.ranks if rank not in well.ranks])
    if rank is not None:
        return (rank,), "rank", [line for line in left if rank in line.ranks], 0.9
    node = _node_of(left, worst, nodes)
    if node is not None:
        ranks, lines = node
        return ranks, "node", lines, 0.8
    pair = _pair_of(left, _pairs(worst.ranks) - well.pairs)
    if pair is not None:
        return pair, "link", [line for line in left if pair in _pairs(line.ranks)], 0.7
    return worst.ranks, "ring", alone, 0.5


def _lines_of(left: Sequence[SlowLine], ranks: tuple[int, ...]) -> list[SlowLine]:
    """Return the lines of just these ranks."""
    return [line for line in left if line.ranks == ranks]


def _rank_of(by_rank: Mapping[int, int], candidates: Sequence[int]) -> int | None:
    """Return the one candidate that takes part in more slow groups than any other; None: it is in one only, or tied."""
    best = max(candidates, key=lambda rank: by_rank[rank], default=None)
    if best is None or by_rank[best] < 2 or sum(by_rank[rank] == by_rank[best] for rank in candidates) > 1:
        return None
    return best


def _pair_of(left: Sequence[SlowLine], pairs: set[tuple[int, ...]]) -> tuple[int, ...] | None:
    """Return the one pair of neighbours that several slow lines share, if there is just one such pair."""
    by_pair = Counter(pair for line in left for pair in _pairs(line.ranks) & pairs)
    shared = [pair for pair in pairs if by_pair[pair] > 1]
    return shared[0] if len(shared) == 1 else None


def _node_of(
    left: list[SlowLine], worst: SlowLine, nodes: Mapping[int, str]
) -> tuple[tuple[int, ...], list[SlowLine]] | None:
    """Return the ranks of a node that takes part in several slow lines by different ranks, where only one does."""
    by_node: dict[str, list[SlowLine]] = {}
    for name in {nodes[rank] for rank in worst.ranks if rank in nodes}:
        by_node[name] = [line for line in left if any(nodes.get(rank) == name for rank in line.ranks)]
    most = max((len(lines) for lines in by_node.values()), default=0)
    names = [name for name, lines in by_node.items() if len(lines) == most]
    if most < 2 or len(names) != 1:
        return None
    ranks = {rank for line in by_node[names[0]] for rank in line.ranks if nodes.get(rank) == names[0]}
    return tuple(sorted(ranks)), by_node[names[0]]


def _pairs(ranks: tuple[int, ...]) -> set[tuple[int, ...]]:
    """Return the neighbours on the ring."""
    return {tuple(sorted((one, ranks[(at + 1) % len(ranks)]))) for at, one in enumerate(ranks)}
