# SPDX-License-Identifier: Apache-2.0

"""How many rounds and tests of two nodes the search for bad ones takes, and how often it is right; simulated.

    python benchmarks/pairs_search.py [--draws 200] [--seed 1]

Each row is a fleet with faults at random places, drawn anew for each of the draws, and searched as node 0 of `diagnose
--between` searches (without its rounds that measure again what seems bad). A fault is *named* when the node, way or
switch is called bad; *told* when it is called unclear, with the reason; else it is *missed*. Wrong: what is called bad
and is not. `half` is a node that fails with half of the others, always the same; `flatters` one that says that all is
well whenever it is the one of a pair that measures; `accuses` one that says the opposite; `slow` one whose rate is 0.6
of the others', rates with 5 % of noise judged against the median of all pairs as `--between` does.
"""

import argparse
import random
from collections import Counter
from collections.abc import Callable
from typing import NamedTuple

from megascale_ops.diagnostics.between.meeting import figures_of, slow_pairs
from megascale_ops.diagnostics.pairs.explain import Faults, Pair
from megascale_ops.diagnostics.pairs.schedule import Search, begin, next_round, told, verdict


class Row(NamedTuple):
    """One kind of fleet."""

    nodes: int
    bad: int = 0
    kind: str = "bad"  # of the bad nodes: bad, half, flatters, accuses, slow
    links: int = 0
    below: int = 0  # nodes below each switch; 0: no switches
    partners: int = 1


ROWS = (
    Row(232),
    Row(232, 5),
    Row(232, 5, partners=3),
    Row(232, 40),
    Row(232, 5, below=8),
    Row(64, 3),
    Row(1024, 10),
    Row(1536, 10),
    Row(4096, 20),
    Row(232, links=5),
    Row(232, 5, links=5),
    Row(232, 5, links=5, partners=3),
    Row(232, 5, "half"),
    Row(232, 5, "half", partners=3),
    Row(232, 5, "half", partners=6),
    Row(232, 5, "accuses"),
    Row(232, 5, "accuses", partners=3),
    Row(232, 5, "flatters"),
    Row(232, 5, "flatters", partners=3),
    Row(232, 5, "flatters", partners=6),
    Row(232, 5, "slow"),
)


class Ended(NamedTuple):
    """One search."""

    search: Search
    named: int
    told: int
    missed: int
    wrong: int


def main() -> None:
    """Run all rows and print the table."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--draws", type=int, default=200)
    parser.add_argument("--seed", type=int, default=1)
    options = parser.parse_args()
    print(f"{options.draws} draws each, seed {options.seed}; faults over all draws\n")
    print("| fleet | rounds | tests | faults | named | told | missed | wrong |")
    print("| --- | ---: | ---: | ---: | ---: | ---: | ---: | ---: |")
    for at, row in enumerate(ROWS):
        source = random.Random(1000 * options.seed + at)
        ended = [_search(row, source) for _ in range(options.draws)]
        rounds = [one.search.rounds for one in ended]
        tests = [one.search.tests for one in ended]
        counts = [sum(getattr(one, name) for one in ended) for name in ("named", "told", "missed", "wrong")]
        print(
            f"| {_words(row)} | {_range(rounds)} | {_range(tests)} | {sum(counts[:3])} | "
            + " | ".join(map(str, counts)) + " |"
        )  # fmt: skip


def _words(row: Row) -> str:
    parts = [f"{row.nodes:,} nodes"]
    parts += [f"{row.nodes // row.below} switches"] if row.below else []
    parts += [f"{row.bad} {row.kind}"] if row.bad else []
    parts += [f"{row.links} bad links"] if row.links else []
    return ", ".join(parts) + (f"; {row.partners} partners each" if row.partners > 1 else "")


def _range(values: list[int]) -> str:
    return f"{min(values)}" if min(values) == max(values) else f"{min(values)} to {max(values)}"


def _search(row: Row, source: random.Random) -> Ended:
    """Search one fleet that is drawn."""
    nodes = [f"n{number:04}" for number in range(row.nodes)]
    bad = set(source.sample(nodes, row.bad))
    switches = {node: f"s{at // row.below}" for at, node in enumerate(nodes)} if row.below else {}
    search = begin(nodes, switches, across=bool(switches), partners=row.partners)
    links: set[Pair] = set()
    if row.links:  # a bad way counts where it is measured: among those of the first round, and others
        links = set(source.sample(list(next_round(search)), row.links))
    rates: dict[Pair, float] = {}
    answers = _answers(row.kind, bad, links, source.randrange(2**32))
    while pairs := next_round(search):
        outcomes = {both: answers(both) for both in pairs}
        if row.kind != "slow":
            search = told(search, outcomes)
            continue
        rates |= {both: (1.0 if good else 0.6) * source.gauss(1.0, 0.05) * 1e9 for both, good in outcomes.items()}
        slow = slow_pairs([one for both, rate in rates.items() for one in figures_of(both, (rate, rate, 1e-4))])
        search = told(search, {both: both not in slow for both in pairs})
        search = search._replace(outcomes={both: both not in slow for both in rates})
    return _counted(search, verdict(search), bad, links)


def _answers(kind: str, bad: set[str], links: set[Pair], seed: int) -> Callable[[Pair], bool]:
    """Return whether a pair passes; the second of it is the one that measures."""

    def is_good(both: Pair) -> bool:
        if both in links:
            return False
        if kind == "half":
            drawn = random.Random(f"{seed} {both}").random() < 0.5  # the same each time
            return not (bad.intersection(both) and drawn)
        if kind in ("flatters", "accuses") and both[1] in bad:
            return kind == "flatters"
        return kind == "accuses" or not bad.intersection(both)

    return is_good


def _counted(search: Search, faults: Faults, bad: set[str], links: set[Pair]) -> Ended:
    """Hold what is said against what is so; a way at a bad node is told with that node."""
    unclear = set(faults.unclear)
    said = Counter()
    for node in bad:
        ways = {both for both in faults.links if node in both}
        said["named" if node in faults.nodes else "told" if node in unclear or ways else "missed"] += 1
    for both in links:
        ends_told = unclear.union(faults.nodes).intersection(both)
        said["named" if both in faults.links else "told" if ends_told else "missed"] += 1
    wrong = len(set(faults.nodes) - bad) + len(faults.switches)
    wrong += sum(both not in links and not bad.intersection(both) for both in faults.links)
    return Ended(search, said["named"], said["told"], said["missed"], wrong)


if __name__ == "__main__":
    main()
