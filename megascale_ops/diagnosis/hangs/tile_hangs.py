# SPDX-License-Identifier: Apache-2.0
"""Ranks that wait for tiles of others in overlapped kernels: the culprit, asked for before anything about groups.

A progress board is read while its kernel spins, also where no deadline will end it. The ranks whose boards show waits
are victims, whatever their hosts do meanwhile: a host runs ahead of its GPU, and may stand in a collective that is
queued behind the kernel. Chains are followed through tiles and collectives alike (``diagnosis.hangs.tile_graph``).

What the rank at the end does instead gives the patience: a first compilation, an evaluation or an upload may take as
long as anywhere else.

Pure: stands in, an answer or None out.
"""

from collections import Counter
from collections.abc import Sequence

from megascale_ops.diagnosis.hangs.call_order import describe
from megascale_ops.diagnosis.hangs.causes import Cause, Patience, cause_of
from megascale_ops.diagnosis.hangs.questions import CLEAR, MOST_TOLD, Answer, finding_of
from megascale_ops.diagnosis.hangs.rank_wait import RankWait
from megascale_ops.diagnosis.hangs.tile_graph import Edge, edges_of, follow, standing
from megascale_ops.schema.folding import named
from megascale_ops.schema.health import Finding

# These causes explain more than that the rank's tile does not come.
_SAYS_MORE = frozenset({"frozen", "busy"})
# 3 waits are spelled out in a sentence; the findings have up to MOST_TOLD.
_MOST_SPELLED = 3


def tile_waits(stands: Sequence[RankWait]) -> Answer | None:
    """Name the ranks at the end of the chains that begin with a wait for a tile; None where no tile is waited for."""
    by_rank = {stand.rank: stand for stand in stands}
    edges = {stand.rank: edges_of(stand.rank, stand.look.tiles) for stand in stands if stand.tile_wait}
    if not edges:
        return None
    ends = follow(edges, lambda rank: _waits_for(rank, by_rank, edges))
    findings = tuple(_finding(by_rank[rank], found[0]) for rank, found in list(edges.items())[:MOST_TOLD])
    if not ends.ranks:
        texts = [_spelled(edges[rank][0]) for rank in ends.circle if rank in edges]
        why = f"ranks wait for each other in a circle: {'; '.join(texts[:_MOST_SPELLED])}; nobody is more to blame"
        # 2 looks: two that were taken apart may show two waits that followed each other.
        stands_still = all(by_rank[rank].look.tiles_alike > 1 for rank in ends.circle if rank in edges)
        patience = Patience.NONE if stands_still else None
        return Answer("collective_order", (), 0.5, why, patience, "a name, had one of them waited for nobody", findings)
    # A rank that waits in an unrecorded call is no culprit, and an unknown rank may be one.
    roots = [rank for rank in ends.ranks if rank not in by_rank or not by_rank[rank].waits]
    return _blame(roots, by_rank, edges, findings) if roots else None


def _waits_for(rank: int, by_rank: dict[int, RankWait], edges: dict[int, list[Edge]]) -> list[int]:
    """Return the ranks that a rank waits for: by tile, or all members of its collective that have not entered it."""
    if rank in edges:
        return [edge.peer for edge in edges[rank]]
    stand = by_rank.get(rank)
    if stand is None or stand.inside is None:
        return []
    group, seq = stand.inside.group, stand.inside.seq
    behind = [
        other.rank
        for other in by_rank.values()
        if any(position.group == group and position.entered < seq for position in other.positions)
    ]
    unknown = [other.rank for other in by_rank.values() if not other.positions and not other.waits]
    return behind or [one for one in unknown if one != rank]


def _blame(
    roots: Sequence[int], by_rank: dict[int, RankWait], edges: dict[int, list[Edge]], findings: tuple[Finding, ...]
) -> Answer:
    causes = {rank: cause_of(by_rank[rank]) for rank in roots if rank in by_rank}
    lines, explained = [], True
    for rank in roots:
        direct = [edge for found in edges.values() for edge in found if edge.peer == rank]
        text, explains = _stands(rank, direct, by_rank)
        explained = explained and explains
        doing = f": {causes[rank].text}" if rank in causes else ": nothing is known of it"
        lines.append(f"rank {rank} {text}{_waited(direct)}{doing}")
    why = "; ".join(lines[:_MOST_SPELLED]) + (f" ({len(edges)} ranks wait for tiles)" if len(edges) > 1 else "")
    main = _main(list(causes.values()))
    sure = 0.95 if main is None or main.confidence >= CLEAR else max(0.6, min(CLEAR, main.confidence + 0.1))
    if main is not None and main.patience is Patience.MOVING:
        sure = main.confidence
    if not explained or len(roots) > len(edges):
        sure = min(sure, 0.6)
    patience = max((cause.patience for cause in causes.values()), key=list(Patience).index, default=Patience.SILENT)
    fault = main.fault if main is not None and main.fault in _SAYS_MORE else "tile_timeout"
    otherwise = f"nothing, had {named(list(roots))} sent the tile; another name, had it waited for a rank itself"
    return Answer(fault, list(roots), sure, why, patience, otherwise, findings)


def _stands(rank: int, direct: Sequence[Edge], by_rank: dict[int, RankWait]) -> tuple[str, bool]:
    """Describe where a rank is that others wait for: by tile, or else in a collective in the middle of a chain."""
    if direct:
        return standing(by_rank[rank].look.tiles if rank in by_rank else (), direct[0])
    places = Counter(stand.inside for stand in by_rank.values() if stand.inside is not None and not stand.tile_wait)
    if not places:
        return "holds them up", False
    fact, count = places.most_common(1)[0]
    there = f"{count} {'rank waits' if count == 1 else 'ranks wait'}"
    return f"has not come to {describe(fact)}, where {there} whose tiles others wait for", True


def _waited(direct: Sequence[Edge]) -> str:
    texts = [f"rank {edge.waiter} at tile {edge.wait.tile}" for edge in direct[:_MOST_SPELLED]]
    more = f" and {len(direct) - _MOST_SPELLED} more" if len(direct) > _MOST_SPELLED else ""
    return f", for which {' and '.join(texts)}{more} {'waits' if len(direct) == 1 else 'wait'}" if direct else ""


def _main(causes: Sequence[Cause]) -> Cause | None:
    count = Counter(cause.fault for cause in causes)
    return max(causes, key=lambda cause: (count[cause.fault], cause.confidence, cause.fault), default=None)


def _spelled(edge: Edge) -> str:
    return f"rank {edge.waiter} waits in {edge.place} at tile {edge.wait.tile} for rank {edge.peer}"


def _finding(stand: RankWait, edge: Edge) -> Finding:
    look = stand.look
    done = f"; {edge.fact.done} of {edge.fact.tiles} tiles are done" if edge.fact.done >= 0 else ""
    looks = f"; the same in {look.tiles_alike} looks" if look.tiles_alike > 1 else ""
    return finding_of("tile_wait", f"{_spelled(edge)}{done}{looks}", "progress board", stand, edge.wait.ctas)
