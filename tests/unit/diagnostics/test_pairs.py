# SPDX-License-Identifier: Apache-2.0
"""The search for bad nodes and links by pairs: few rounds of disjoint pairs, right names, honest where unclear."""

import random
from collections import Counter
from collections.abc import Callable
from itertools import combinations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from megascale_ops.diagnostics.between.meeting import figures_of, slow_pairs
from megascale_ops.diagnostics.pairs.explain import Pair, failed_with, pair
from megascale_ops.diagnostics.pairs.schedule import Search, begin, most_rounds, next_round, told, verdict


def searched(search: Search, is_good: Callable[[Pair], bool]) -> Search:
    """Measure to the end; each round's pairs are disjoint, and none is measured twice."""
    while pairs := next_round(search):
        assert len({node for both in pairs for node in both}) == 2 * len(pairs)
        assert not [both for both in pairs if both in search.outcomes]
        search = told(search, {both: is_good(both) for both in pairs})
        assert search.rounds <= most_rounds(search.fleet)
    return search


def drawn(seed: int | str) -> random.Random:
    """Return a source of numbers that a failing example can name."""
    return random.Random(seed)  # noqa: S311  nothing of it is a secret


def names(count: int) -> list[str]:
    """Return names of nodes, in the order of their numbers."""
    return [f"node{number:05}" for number in range(count)]


def fails_with(bad: set[str], links: frozenset[Pair] = frozenset()) -> Callable[[Pair], bool]:
    """Return how a fleet answers in which these nodes and links are bad."""
    return lambda both: not bad.intersection(both) and both not in links


@pytest.mark.parametrize("seed", range(20))
def test_five_of_232_are_named_in_three_rounds(seed: int) -> None:
    """Whichever five are bad; a published tool needs seven rounds of larger groups. At most 126 tests of two nodes."""
    nodes = names(232)
    bad = set(drawn(seed).sample(nodes, 5))

    search = searched(begin(nodes), fails_with(bad))

    assert set(verdict(search).nodes) == bad
    assert not verdict(search).links
    assert not verdict(search).unclear
    assert search.rounds <= 3
    assert search.tests <= 126


def test_a_healthy_fleet_takes_one_round() -> None:
    """Each node is measured once; with ways between switches, one round for each doubling of their distance more."""
    nodes = names(232)

    search = searched(begin(nodes), fails_with(set()))

    assert (search.rounds, search.tests) == (1, 116)
    assert len(verdict(search).good) == 232


@given(st.integers(2, 300), st.integers(0, 12), st.integers(0, 2**32))
def test_bad_nodes_are_named_and_no_other_is(count: int, bad_count: int, seed: int) -> None:
    """Of any number of nodes, a third of them bad at most: all, no good one, in rounds that grow as log n at most."""
    nodes = names(count)
    bad = set(drawn(seed).sample(nodes, min(bad_count, (count - 2) // 3)))

    search = searched(begin(nodes), fails_with(bad))
    faults = verdict(search)

    assert not faults.untested
    assert set(faults.nodes) <= bad
    assert bad <= set(faults.nodes) | set(faults.unclear)
    assert not bad & faults.good
    if count - len(bad) >= 4 * len(bad) + 4:  # enough that are good for each to meet two that are new
        assert set(faults.nodes) == bad
        assert not faults.unclear


@given(st.integers(12, 200), st.integers(0, 4), st.integers(0, 30), st.integers(0, 2**32))
def test_links_are_not_taken_for_nodes(count: int, bad_count: int, link_count: int, seed: int) -> None:
    """A good node is named bad only where all its links that were measured are bad, two of them to good nodes."""
    nodes, draw = names(count), drawn(seed)
    bad = set(draw.sample(nodes, min(bad_count, count // 12)))
    links = frozenset(pair(*draw.sample(nodes, 2)) for _ in range(link_count))

    search = searched(begin(nodes), fails_with(bad, links))
    faults = verdict(search)

    assert bad <= set(faults.nodes) | set(faults.unclear)
    for node in set(faults.nodes) - bad:
        assert len({both for both in links if node in both and both in search.outcomes}) >= 2
    assert set(faults.links) <= links
    measured_links = {both for both in links if both in search.outcomes and faults.good.issuperset(both)}
    assert set(faults.links) == measured_links


@given(st.integers(2, 29), st.integers(2, 8), st.integers(0, 3), st.integers(0, 2**32))
def test_a_switch_without_its_way_to_the_others_is_named(
    switch_count: int, below: int, bad_count: int, seed: int
) -> None:
    """Its nodes are good below it; it is the switch that is named, where two pairs or more were measured across it."""
    draw = drawn(seed)
    nodes = names(switch_count * below)
    switches = {node: f"leaf{number // below}" for number, node in enumerate(nodes)}
    cut = draw.choice(sorted(set(switches.values())))
    bad = set(draw.sample(nodes, min(bad_count, len(nodes) // 12)))

    def is_good(both: Pair) -> bool:
        ends = {switches[node] for node in both}
        return not bad.intersection(both) and not (len(ends) > 1 and cut in ends)

    search = searched(begin(nodes, switches, across=True), is_good)
    faults = verdict(search)

    crossing = [both for both in search.outcomes if len({switches[node] for node in both}) > 1
                and cut in {switches[node] for node in both} and faults.good.issuperset(both)]  # fmt: skip
    assert set(faults.nodes) <= bad
    assert set(faults.switches) <= {cut}
    if len({switches[node] for both in crossing for node in both}) > 2:
        assert faults.switches == (cut,)
        assert not faults.links


def test_ways_between_switches_are_measured_in_eight_rounds() -> None:
    """29 switches of eight nodes, five bad nodes, one bad way out of a switch: all named within eight rounds."""
    nodes, draw = names(232), drawn(7)
    switches = {node: f"leaf{number // 8}" for number, node in enumerate(nodes)}
    bad = set(draw.sample([node for node in nodes if switches[node] != "leaf3"], 5))

    def is_good(both: Pair) -> bool:
        ends = {switches[node] for node in both}
        return not bad.intersection(both) and not (len(ends) > 1 and "leaf3" in ends)

    search = searched(begin(nodes, switches, across=True), is_good)

    assert set(verdict(search).nodes) == bad
    assert verdict(search).switches == ("leaf3",)
    assert search.rounds <= 8
    met = {frozenset(switches[node] for node in both) for both in search.outcomes}
    assert all(sum(leaf in both and len(both) > 1 for both in met) >= 5 for leaf in set(switches.values()))


@given(st.integers(40, 300), st.integers(0, 8), st.integers(1, 3), st.integers(0, 2**32))
def test_eight_rounds_are_enough_for_any_few_bad_ones(count: int, bad_count: int, partners: int, seed: int) -> None:
    """While a tenth is bad at most, also where each node meets three others; tests grow with the nodes, not squares."""
    nodes = names(count)
    bad = set(drawn(seed).sample(nodes, min(bad_count, count // 10)))

    search = searched(begin(nodes, partners=partners), fails_with(bad))

    assert set(verdict(search).nodes) == bad
    assert search.rounds <= 8
    assert search.tests <= (partners * count + 1) // 2 + 6 * len(bad) + 4
    met = Counter(node for both in search.outcomes for node in both)
    assert min(met[node] for node in nodes if node not in bad) >= partners


@given(st.integers(40, 240), st.integers(1, 8), st.integers(0, 2**32))
def test_ways_that_are_bad_are_named_and_their_ends_are_not(count: int, link_count: int, seed: int) -> None:
    """Among those that are measured first; each end has passed with two others by then, unless these are bad, too."""
    nodes, draw = names(count), drawn(seed)
    links = frozenset(draw.sample(next_round(begin(nodes)), link_count))

    search = searched(begin(nodes), fails_with(set(), links))

    assert set(verdict(search).links) == links
    assert not verdict(search).nodes
    assert not verdict(search).unclear
    assert search.rounds <= 8
    for both in links:
        for node in both:
            assert sum(passed for of, passed in search.outcomes.items() if node in of) >= 2


@given(st.integers(60, 240), st.integers(1, 5), st.sampled_from(["half", "flatters", "accuses"]), st.integers(0, 2**32))
def test_a_node_that_is_bad_with_some_only_puts_no_blame_on_others(
    count: int, bad_count: int, kind: str, seed: int
) -> None:
    """It is named, or called unclear, or a way at it is named; a good one is named where two such speak against it."""
    nodes = names(count)
    bad = set(drawn(seed).sample(nodes, bad_count))

    def is_good(both: Pair) -> bool:
        if kind == "half":
            return not bad.intersection(both) or drawn(f"{seed} {both}").random() < 0.5
        if both[1] in bad:  # the second of a pair is the one that measures
            return kind == "flatters"
        return kind == "accuses" or not bad.intersection(both)

    search = searched(begin(nodes, partners=3), is_good)
    faults = verdict(search)

    failed = failed_with(search.outcomes)
    for node in set(faults.nodes) - bad:
        assert len(failed[node] & bad) >= 2
    for both in faults.links:
        assert bad.intersection(both)
    for node in bad & faults.good:  # it has failed with good ones, and that is told
        if len(failed[node] & faults.good) >= 2:
            assert node in faults.unclear


@pytest.mark.parametrize("seed", range(5))
def test_more_partners_find_what_one_does_not(seed: int) -> None:
    """Five nodes that fail with half of the others: of one partner half of them pass unseen, of six nearly none."""
    nodes = names(232)
    bad = set(drawn(seed).sample(nodes, 5))

    def is_good(both: Pair) -> bool:
        return not bad.intersection(both) or drawn(f"{seed} {both}").random() < 0.5

    def seen(partners: int) -> int:
        faults = verdict(searched(begin(nodes, partners=partners), is_good))
        told_of = set(faults.nodes) | set(faults.unclear) | {node for both in faults.links for node in both}
        return len(bad & told_of)

    assert seen(6) >= max(4, seen(1))


@pytest.mark.parametrize("seed", range(3))
def test_a_node_that_is_slow_by_half_is_named_by_the_median_of_all_pairs(seed: int) -> None:
    """Rates with 5 % of noise, five nodes at 0.6 of the others': judged anew each round, as node 0 does."""
    nodes, draw = names(232), drawn(seed)
    bad = set(draw.sample(nodes, 5))
    rates: dict[Pair, float] = {}

    search = begin(nodes)
    while pairs := next_round(search):
        rates |= {both: (0.6 if bad.intersection(both) else 1.0) * draw.gauss(1e9, 5e7) for both in pairs}
        slow = slow_pairs([one for both, rate in rates.items() for one in figures_of(both, (rate, rate, 1e-4))])
        search = told(search, {both: both not in slow for both in pairs})
        search = search._replace(outcomes={both: both not in slow for both in rates})

    faults = verdict(search)
    assert set(faults.nodes) <= bad
    assert bad <= set(faults.nodes) | set(faults.unclear)  # one at the border of noise passes once and fails twice
    assert len(faults.nodes) >= 4
    assert search.rounds <= 4


def test_no_partner_is_no_search() -> None:
    """Each node is measured with one other at least."""
    with pytest.raises(ValueError, match="0 partners measure nothing"):
        begin(["a", "b"], partners=0)


def test_two_that_fail_together_are_told_as_unclear() -> None:
    """There is no third to ask: neither is named."""
    faults = verdict(searched(begin(["a", "b"]), lambda _both: False))

    assert not faults.nodes
    assert not faults.links
    assert set(faults.unclear) == {"a", "b"}


def test_a_fleet_in_which_nothing_passes_ends() -> None:
    """No node is named: what they share, or the measuring itself, is bad."""
    faults = verdict(searched(begin(names(40)), lambda _both: False))

    assert not faults.nodes
    assert len(faults.unclear) == 40


def test_an_unsteady_node_is_told_as_unclear() -> None:
    """One that passes with one partner and fails with two is neither good nor named without a word."""
    outcomes = {("a", "b"): True, ("a", "c"): False, ("a", "d"): False, ("c", "d"): True}
    search = begin(["a", "b", "c", "d"])._replace(outcomes=outcomes, rounds=3)

    assert "unsteady" in verdict(search).unclear["a"]


def test_odd_ones_and_lonely_ones_are_measured() -> None:
    """One node has nothing to be measured with; of three each is measured."""
    assert next_round(begin(["a"])) == ()
    assert verdict(searched(begin(["a", "b", "c"]), lambda _both: True)).good == {"a", "b", "c"}


def test_all_pairs_say_the_same() -> None:
    """The control: explained from all pairs of a fleet, the same nodes are bad."""
    nodes = names(16)
    bad = {"node00003", "node00011"}
    every = {pair(*both): not bad.intersection(both) for both in combinations(nodes, 2)}

    assert set(verdict(begin(nodes)._replace(outcomes=every)).nodes) == bad


def test_a_node_named_twice_is_refused() -> None:
    """It would be measured with itself."""
    with pytest.raises(ValueError, match="named twice"):
        begin(["a", "a"])
