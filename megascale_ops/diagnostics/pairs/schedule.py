# SPDX-License-Identifier: Apache-2.0
"""Which pairs of nodes to measure next, so that what is bad is named in few rounds; the pairs of a round are disjoint.

A round costs as much time as one pair, since all its pairs are measured at once. The first one pairs all nodes, each
with one below the same switch: whatever passes is good, and is what suspects are measured against from then on. So k
bad nodes leave at most 2k suspects, which the second round tells apart, and a third confirms with other partners, since
a failure may be the link's: three rounds, whatever the number of nodes, where halving groups needs log n.

Nodes that are known to be good are free meanwhile; with ``across`` they measure the ways between switches: in round r
each is paired with one below the switch 2^r further on. After log2 of the switches' number every switch has met
others at all distances, and a way that is bad has been measured from both sides.

A node that is bad with some partners only, or that calls everything good, passes with the first partner as a good one
does: with ``partners`` above one each node is measured with so many, in as many rounds, and one that fails with a share
q of the others is missed with (1 - q)^partners. The ends of a way that failed between good nodes are measured with
others until each has met three: then it is known whether it is that way, or an end that is unsteady.

Where nothing passes there is nothing to measure against: then suspects are paired anew, at twice the distance each
round, until the rounds are spent; what is left is told as unclear. Pure.
"""

import math
from collections import Counter
from collections.abc import Container, Iterable, Mapping, Sequence
from typing import NamedTuple

from megascale_ops.diagnostics.pairs.explain import Faults, Pair, explain, failed_with, pair

# Three partners of each end of a bad way: one is the other end, two say whether it is that way.
_OF_AN_END = 3


class Fleet(NamedTuple):
    """What is to be measured.

    Attributes:
        nodes: Their names, each once.
        switches: The switch of each; empty: all below one.
        across: Also the ways between switches.
        partners: With so many others each node is measured at least.
    """

    nodes: tuple[str, ...]
    switches: Mapping[str, str]
    across: bool = False
    partners: int = 1


class Search(NamedTuple):
    """How far it has come; ``told`` makes the next one of it.

    Attributes:
        fleet: What is measured.
        rounds: How many rounds were measured.
        tests: How many pairs, over all rounds.
        outcomes: Of each pair, whether it was good.
    """

    fleet: Fleet
    rounds: int
    tests: int
    outcomes: Mapping[Pair, bool]


def begin(
    nodes: Sequence[str], switches: Mapping[str, str] | None = None, *, across: bool = False, partners: int = 1
) -> Search:
    """Return a search that has measured nothing; see ``Fleet`` for what it takes.

    Raises:
        ValueError: a node is named twice, or no partner is wanted.
    """
    if partners < 1:
        raise ValueError(f"{partners} partners measure nothing: each node needs 1 or more")
    if len(set(nodes)) < len(nodes):
        raise ValueError("a node is named twice: each is measured once")
    return Search(Fleet(tuple(nodes), dict(switches or {}), across, partners), 0, 0, {})


def told(search: Search, outcomes: Mapping[Pair, bool]) -> Search:
    """Return the search after one more round."""
    return Search(search.fleet, search.rounds + 1, search.tests + len(outcomes), {**search.outcomes, **outcomes})


def verdict(search: Search) -> Faults:
    """Return what the outcomes say by now."""
    return explain(search.fleet.nodes, search.outcomes, search.fleet.switches)


def most_rounds(fleet: Fleet) -> int:
    """Return after how many rounds it ends in any case: those across switches, and as many as halving would need."""
    return _rounds_across(fleet) + fleet.partners + 2 + math.ceil(math.log2(max(2, len(fleet.nodes))))


def next_round(search: Search) -> tuple[Pair, ...]:
    """Return the pairs to measure next, each node in one of them at most; none when all is said that can be."""
    fleet = search.fleet
    if len(fleet.nodes) < 2 or search.rounds >= most_rounds(fleet):
        return ()
    if not search.rounds:
        return tuple(_neighbours(fleet))
    faults = verdict(search)
    suspects = _suspects(search, faults)
    chosen = _with_good(search, faults, suspects)
    busy = {node for both in chosen for node in both}
    waiting = [node for node in suspects if node not in busy]
    if not chosen and waiting:  # no partner that is good and new: among themselves
        chosen = _apart(waiting, search)
        busy = {node for both in chosen for node in both}
    chosen += _with_more(search, faults, busy)
    busy = {node for both in chosen for node in both}
    if fleet.across and search.rounds <= _rounds_across(fleet):
        chosen += _across(search, [node for node in fleet.nodes if node in faults.good and node not in busy])
    return tuple(chosen)


def _neighbours(fleet: Fleet) -> Iterable[Pair]:
    """Pair nodes below the same switch; those left over, one a switch at most, with each other."""
    left: list[str] = []
    for group in _by_switch(fleet).values():
        yield from (pair(one, other) for one, other in zip(group[::2], group[1::2], strict=False))
        left += group[len(group) // 2 * 2 :]
    yield from (pair(one, other) for one, other in zip(left[::2], left[1::2], strict=False))


def _by_switch(fleet: Fleet) -> dict[str, list[str]]:
    groups: dict[str, list[str]] = {}
    for node in fleet.nodes:
        groups.setdefault(fleet.switches.get(node, ""), []).append(node)
    return groups


def _suspects(search: Search, faults: Faults) -> list[str]:
    """Return nodes of which more has to be known: neither good nor bad yet, and those that were left over."""
    settled = faults.good | set(faults.nodes)
    return [node for node in search.fleet.nodes if node not in settled]


def _with_good(search: Search, faults: Faults, suspects: Sequence[str]) -> list[Pair]:
    """Pair each suspect with a good node that it has not met: below its own switch, else below one it has not met."""
    switches = search.fleet.switches
    free = {node: None for node in search.fleet.nodes if node in faults.good}
    failed = failed_with(search.outcomes)
    chosen = []
    for node in suspects:
        new = [other for other in free if pair(node, other) not in search.outcomes]
        met = {switches.get(other, "") for other in failed[node]} - {switches.get(node, "")}
        near = (other for other in new if switches.get(other, "") == switches.get(node, ""))
        fresh = (other for other in new if switches.get(other, "") not in met)
        partner = next(near, None) or next(fresh, None) or next(iter(new), None)
        if partner is not None:
            del free[partner]
            chosen.append(pair(node, partner))
    return chosen


def _with_more(search: Search, faults: Faults, busy: Container[str]) -> list[Pair]:
    """Pair good nodes that have to meet more others: with each other, else with any that is good and new."""
    met: Counter[str] = Counter(node for both in search.outcomes for node in both)
    ends = {node for both in faults.links for node in both}
    free = {node: None for node in search.fleet.nodes if node in faults.good and node not in busy}
    short = {node: None for node in free if met[node] < max(search.fleet.partners, _OF_AN_END if node in ends else 1)}
    chosen: list[Pair] = []
    while short:
        node = next(iter(short))
        del short[node], free[node]
        partner = _new_partner(node, short, search) or _new_partner(node, free, search)
        if partner is not None:
            short.pop(partner, None)
            del free[partner]
            chosen.append(pair(node, partner))
    return chosen


def _new_partner(node: str, others: Iterable[str], search: Search) -> str | None:
    """Return one of these that the node has not met, below its own switch where there is one."""
    switches = search.fleet.switches
    other = None
    for one in others:
        if pair(node, one) in search.outcomes:
            continue
        if switches.get(one, "") == switches.get(node, ""):
            return one
        other = other or one
    return other


def _apart(waiting: Sequence[str], search: Search) -> list[Pair]:
    """Pair nodes that have not met, at twice the distance each round."""
    step = min(1 << (search.rounds - 1), max(1, len(waiting) // 2))
    chosen: list[Pair] = []
    free = dict.fromkeys(waiting)
    for at, node in enumerate(waiting):
        if node not in free:
            continue
        del free[node]
        ranked = [*waiting[at + step :], *waiting[at + 1 : at + step]]
        partner = next((one for one in ranked if one in free and pair(node, one) not in search.outcomes), None)
        if partner is not None:
            del free[partner]
            chosen.append(pair(node, partner))
    return chosen


def _rounds_across(fleet: Fleet) -> int:
    return math.ceil(math.log2(max(1, len(_by_switch(fleet))))) if fleet.across else 0


def _across(search: Search, free: Sequence[str]) -> list[Pair]:
    """Pair good nodes below different switches, 2^r switches apart: half of a switch's nodes each way.

    What is left over of them, for there is one node or an odd one, is paired at the same distance where it can be.
    """
    wanted = set(free)
    groups = [[node for node in group if node in wanted] for group in _by_switch(search.fleet).values()]
    if len(groups) < 2:
        return []
    apart = (1 << (search.rounds - 1)) % len(groups)
    chosen: list[Pair] = []
    for is_half in (True, False):
        most = [-(-len(group) // 2) if is_half else len(group) for group in groups]
        for at, group in enumerate(groups):
            other = groups[(at + apart) % len(groups)]
            for _ in range(min(most[at], len(group), len(other))):
                new = next((one for one in other if pair(group[0], one) not in search.outcomes), None)
                if group is other or new is None:
                    break
                other.remove(new)
                chosen.append(pair(group.pop(0), new))
    return chosen
