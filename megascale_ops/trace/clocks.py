# SPDX-License-Identifier: Apache-2.0
"""Bring the nodes' clocks to one, by what happened on all of them at once.

CLOCK_MONOTONIC counts from each node's boot. A collective in which each rank waits for all others ends on all its ranks
at nearly the same moment, so for two nodes the differences of such ends scatter around the difference of their clocks,
late on one side or the other by the scheduler's latency in waking a process. Their median is the offset. Nodes that
share no collective with each other are joined over others that do: a spanning tree, the pairs with the most common ends
first. A node that shares none with any other falls back to its wall clock, which is as good as its NTP.

Pure. What is left of the differences after alignment is the *residual*: the 99th percentile over all ranks and
collectives of the distance between a rank's end and the median end. It holds the scheduler's lateness as well as the
clocks' error and drift, so the clocks are at least as good.
"""

from collections.abc import Iterable, Mapping, Sequence
from statistics import median_low

import msgspec

from megascale_ops.schema.folding import listed
from megascale_ops.trace.matching import Key, is_shared, key_of
from megascale_ops.trace.rank_records import NS, RankRecords

# 3: a median needs a majority; with fewer a single late wake-up would be the offset.
FEWEST_ENDS = 3
# 4,096 ends: their median is stable to a twentieth of their scatter; more cost time and add nothing.
MOST_ENDS = 4096


class NodeClock(msgspec.Struct, frozen=True):
    """``offset_ns`` is subtracted from a node's clock; ``method``: reference, collectives, or wall clock."""

    node: str
    offset_ns: int
    method: str
    common_ends: int = 0


class Clocks(msgspec.Struct, frozen=True):
    """All nodes' clocks. ``residual_p99_ns`` is -1 when no collective was seen on two ranks."""

    nodes: tuple[NodeClock, ...]
    residual_p99_ns: int
    compared_ends: int
    wall_minus_mono_ns: int  # of the reference node

    def offsets(self) -> dict[str, int]:
        """Return each node's offset in nanoseconds."""
        return {clock.node: clock.offset_ns for clock in self.nodes}

    def begun_before(self, by_ns: int) -> "Clocks":
        """Return the same clocks on one that began so much before the reference node's: no file has negative times."""
        nodes = tuple(msgspec.structs.replace(clock, offset_ns=clock.offset_ns - by_ns) for clock in self.nodes)
        return msgspec.structs.replace(self, nodes=nodes, wall_minus_mono_ns=self.wall_minus_mono_ns - by_ns)

    def sentences(self) -> list[str]:
        """Return what a person should know about the clocks."""
        residual = (
            f"ends of the same collective lie within {self.residual_p99_ns / 1000:.1f} us of their median "
            f"(p99 of {self.compared_ends:,})"
            if self.residual_p99_ns >= 0
            else "no collective was seen on two ranks, so nothing says how well the clocks agree"
        )
        if len(self.nodes) == 1:
            return [f"one node, one clock; {residual}"]
        by_wall = [clock.node for clock in self.nodes if clock.method == "wall clock"]
        aligned = sum(clock.method == "collectives" for clock in self.nodes)
        lines = [f"{len(self.nodes)} nodes, {aligned} aligned to {self.nodes[0].node} by common ends; {residual}"]
        if by_wall:
            lines.append(f"aligned by wall clock only, for want of common collectives: {listed(by_wall)}")
        return lines


def align(all_records: Sequence[RankRecords]) -> Clocks:
    """Return the clocks of all nodes that the records come from; the lowest rank's node is the reference.

    Raises:
        ValueError: there are no records.
    """
    if not all_records:
        raise ValueError("no rank, no clock")
    ordered = sorted(all_records, key=lambda records: records.identity.rank)
    walls: dict[str, int] = {}
    for records in ordered:
        walls.setdefault(records.identity.node, _wall_minus_mono_ns(records))
    by_node: dict[str, dict[Key, int]] = {node: {} for node in walls}
    for records in ordered:
        _first_ends(records, by_node[records.identity.node])
    reference = ordered[0].identity.node
    found = _join(reference, _differences(by_node))
    nodes = []
    for node, wall_ns in walls.items():
        if node in found:
            offset_ns, count = found[node]
            nodes.append(NodeClock(node, offset_ns, "reference" if node == reference else "collectives", count))
        else:
            nodes.append(NodeClock(node, walls[reference] - wall_ns, "wall clock"))
    residual_ns, compared = _residual(ordered, {clock.node: clock.offset_ns for clock in nodes})
    return Clocks(tuple(nodes), residual_ns, compared, walls[reference])


def _wall_minus_mono_ns(records: RankRecords) -> int:
    return round((records.identity.started_wall_s - records.identity.started_mono_s) * NS)


def _first_ends(records: RankRecords, ends: dict[Key, int]) -> None:
    """Keep the earliest end on a node of each collective: the rank that woke first was late by the least."""
    for span in records.spans[-MOST_ENDS:]:
        if span.ended_ns and is_shared(span):
            key = key_of(span)
            known = ends.get(key)
            if known is None or span.ended_ns < known:
                ends[key] = span.ended_ns


def _differences(by_node: Mapping[str, Mapping[Key, int]]) -> dict[tuple[str, str], list[int]]:
    """Return, for pairs of nodes, the differences of common ends (second minus first).

    Each collective is compared with its first node only: n nodes cost n differences and not n squared, and nodes that
    share a collective are still joined.
    """
    seen: dict[Key, tuple[str, int]] = {}
    pairs: dict[tuple[str, str], list[int]] = {}
    for node, ends in by_node.items():
        for key, ended_ns in ends.items():
            first = seen.setdefault(key, (node, ended_ns))
            if first[0] != node:
                pairs.setdefault((first[0], node), []).append(ended_ns - first[1])
    return pairs


def _join(reference: str, pairs: Mapping[tuple[str, str], list[int]]) -> dict[str, tuple[int, int]]:
    """Return offset and number of common ends of each node that can be reached from the reference."""
    edges = sorted(pairs.items(), key=lambda item: (-len(item[1]), item[0]))
    edges = [edge for edge in edges if len(edge[1]) >= FEWEST_ENDS]
    neighbours: dict[str, list[tuple[str, int, int]]] = {}
    roots: dict[str, str] = {}
    for (first, second), differences in edges:
        if _root(roots, first) == _root(roots, second):
            continue
        roots[_root(roots, first)] = _root(roots, second)
        offset_ns = median_low(differences)
        neighbours.setdefault(first, []).append((second, offset_ns, len(differences)))
        neighbours.setdefault(second, []).append((first, -offset_ns, len(differences)))
    found = {reference: (0, 0)}
    ahead = [reference]
    while ahead:
        node = ahead.pop()
        for other, offset_ns, count in neighbours.get(node, ()):
            if other not in found:
                found[other] = (found[node][0] + offset_ns, count)
                ahead.append(other)
    return found


def _root(roots: dict[str, str], node: str) -> str:
    while node in roots:
        node = roots[node]
    return node


def _residual(all_records: Iterable[RankRecords], offsets: Mapping[str, int]) -> tuple[int, int]:
    """Return the 99th percentile of the distance of ends to their median, and of how many; -1 for none."""
    ends: dict[Key, list[int]] = {}
    for records in all_records:
        offset_ns = offsets[records.identity.node]
        for span in records.spans[-MOST_ENDS:]:
            if span.ended_ns and is_shared(span):
                ends.setdefault(key_of(span), []).append(span.ended_ns - offset_ns)
    distances = []
    for together in ends.values():
        if len(together) > 1:
            middle = median_low(together)
            distances += [abs(end - middle) for end in together]
    if not distances:
        return -1, 0
    distances.sort()
    return distances[(len(distances) - 1) * 99 // 100], len(distances)
