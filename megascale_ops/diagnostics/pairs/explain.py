# SPDX-License-Identifier: Apache-2.0
"""From which pairs of nodes passed and which failed to what is bad: a node, a link, a switch's way to the others.

A node is *good* when it has passed with any partner: one that is bad fails with each. It is *bad* when it has failed
with two good partners or more that it reaches by different ways, and passed with none: one failure may be the link's.
A *link* is bad when its pair failed although both are good. Links that failed and share a switch are that switch's when
no pair across it passed and two or more failed. What is left over is unclear, and says why: one failure without a
second good partner, or a node that passed with some and failed with two or more others, which is unsteady or has
several bad links.

Pure.
"""

from collections import defaultdict
from collections.abc import Iterator, Mapping
from typing import NamedTuple

# Two nodes, the lesser name first.
Pair = tuple[str, str]
# Two good partners: with one, the link between them may be what is bad.
ENOUGH = 2


class Faults(NamedTuple):
    """What explains the outcomes.

    Attributes:
        nodes: Bad nodes.
        links: Pairs whose link is bad, both nodes being good.
        switches: Switches that reach no other.
        unclear: Nodes of which that can't be said, and why, a sentence's predicate.
        good: Nodes that passed with any partner.
        untested: Nodes that were in no pair.
    """

    nodes: tuple[str, ...]
    links: tuple[Pair, ...]
    switches: tuple[str, ...]
    unclear: dict[str, str]
    good: frozenset[str]
    untested: tuple[str, ...]


def pair(one: str, other: str) -> Pair:
    """Return two nodes as a pair."""
    return (one, other) if one < other else (other, one)


def explain(nodes: tuple[str, ...], outcomes: Mapping[Pair, bool], switches: Mapping[str, str]) -> Faults:
    """Explain outcomes.

    Args:
        nodes: All nodes.
        outcomes: Of each pair that was measured, whether it was good.
        switches: The switch of each node; those without one are below the same.
    """
    good = frozenset(node for both, passed in outcomes.items() if passed for node in both)
    failed = failed_with(outcomes)
    leaving = {
        switches.get(node, "")
        for both, passed in outcomes.items()
        if passed and _crossed(both, switches)
        for node in both
    }
    bad = {
        node
        for node in nodes
        if node not in good and _witnesses(node, failed[node] & good, switches, leaving) >= ENOUGH
    }
    broken = [both for both, passed in outcomes.items() if not passed and good.issuperset(both)]
    cut = set(_cut_off(outcomes, broken, switches))
    links = [both for both in broken if not cut & _crossed(both, switches)]
    unclear = dict(_unclear(nodes, outcomes, good, bad, links))
    tested = {node for both in outcomes for node in both}
    return Faults(
        tuple(sorted(bad)),
        tuple(sorted(links)),
        tuple(sorted(cut)),
        unclear,
        good,
        tuple(node for node in nodes if node not in tested),
    )


def _witnesses(node: str, partners: set[str], switches: Mapping[str, str], leaving: set[str]) -> int:
    """Return how many good partners tell the same of a node, each by a way of its own.

    Those below one other switch share its way, and count once; and those below other switches share the way out of the
    node's own, and count once together where nothing is known to pass it (``leaving``).
    """
    own = switches.get(node, "")
    near = sum(switches.get(other, "") == own for other in partners)
    far = len({switches.get(other, "") for other in partners} - {own})
    return near + (far if own in leaving else min(far, 1))


def failed_with(outcomes: Mapping[Pair, bool]) -> defaultdict[str, set[str]]:
    """Return the partners with which each node has failed."""
    found: defaultdict[str, set[str]] = defaultdict(set)
    for (one, other), passed in outcomes.items():
        if not passed:
            found[one].add(other)
            found[other].add(one)
    return found


def _crossed(both: Pair, switches: Mapping[str, str]) -> set[str]:
    """Return the switches that a pair connects; none where both are below one."""
    ends = {switches.get(node, "") for node in both}
    return ends if len(ends) > 1 else set()


def _cut_off(outcomes: Mapping[Pair, bool], broken: list[Pair], switches: Mapping[str, str]) -> Iterator[str]:
    """Yield switches across which nothing passed, most failures first; a failure is one switch's, not both's."""
    reached = {switch for both, passed in outcomes.items() if passed for switch in _crossed(both, switches)}
    left = [both for both in broken if _crossed(both, switches)]
    while left:
        counts: dict[str, int] = {}
        for both in left:
            for switch in _crossed(both, switches) - reached:
                counts[switch] = counts.get(switch, 0) + 1
        ranked = sorted(counts, key=lambda switch: -counts[switch])
        if not ranked or counts[ranked[0]] < ENOUGH or (len(ranked) > 1 and counts[ranked[1]] == counts[ranked[0]]):
            return  # of two that explain the same neither is named: their pairs are
        worst = ranked[0]
        yield worst
        left = [both for both in left if worst not in _crossed(both, switches)]


def _unclear(
    nodes: tuple[str, ...], outcomes: Mapping[Pair, bool], good: frozenset[str], bad: set[str], links: list[Pair]
) -> Iterator[tuple[str, str]]:
    """Yield the nodes of which no fault is said although they failed, or more than one could be."""
    failed = failed_with(outcomes)
    for node in nodes:
        partners = failed[node]
        if not partners or node in bad:
            continue
        of_links = [both for both in links if node in both]
        if node in good:
            if len(of_links) >= ENOUGH:
                yield node, f"failed with {_named(partners)} and passed with others: unsteady, or that many bad links"
        elif not partners & good:
            if not partners <= bad:
                yield node, f"failed with {_named(partners)}, and no partner that is known to be good was left"
            else:
                yield node, f"was measured with bad nodes only ({_named(partners)})"
        else:
            yield node, f"failed with {_named(partners & good)}: the node, or the way between them"


def _named(nodes: set[str]) -> str:
    ranked = sorted(nodes)
    return ", ".join(ranked[:3]) + (f" and {len(ranked) - 3} more" if len(ranked) > 3 else "")
