# SPDX-License-Identifier: Apache-2.0
"""How often a contest chooses wrong, by arithmetic: `python kernels/benchmarks/contest_noise.py [CSV ...]`.

A row of `bench --random` has what the contest of its first calls measured of each way, and what the operator and the
serial path took later. How far the ratio of the two moved is the noise of a contest and of what it is compared with; it
grows as times shrink. Contests are then drawn anew: the times of a row taken for the truth, each measured with noise of
that size and with tails (Student's t, three degrees of freedom), and decided by several rules.
"""

import argparse
import csv
import math
import random
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from statistics import fmean, pstdev
from typing import NamedTuple

RESULTS = Path(__file__).parent / "results"
SERIAL = "serial"
FINEST_MS = 0.02  # noise is told by doublings of the operator's time from here on
DRAWS = 100
WORTH_TELLING = 0.03  # slower than serial by more is what nobody should get

Ways = dict[str, float]  # a way's name and its milliseconds
Rule = Callable[[Ways, Callable[[Sequence[str], int], Ways]], str]


class Held(NamedTuple):
    """One contest: rows of the shape, milliseconds of each way in it, and of its choice and the serial path later."""

    m: int
    ways: Ways
    choice: str
    later_ms: float
    serial_ms: float

    @property
    def moved(self) -> float:
        """Logarithm of the speed-up over serial found later, over that in the contest."""
        return math.log(self.serial_ms / self.later_ms * self.ways[self.choice] / self.ways[SERIAL])


def read(paths: Sequence[Path]) -> list[Held]:
    """The contests that serial took part in."""
    found = []
    for path in paths:
        for row in csv.DictReader(path.open(encoding="utf-8")):
            told = [part.rpartition(": ") for part in (row.get("ways_ms") or "").split("; ") if part]
            ways = {name: float(text.split()[0]) for name, _, text in told}
            if SERIAL in ways and row["config"] in ways:
                held = Held(int(row["m"]), ways, row["config"], float(row["ours_ms"]), float(row["serial_ms"]))
                found.append(held)
    return found


def noise_by_size(contests: Sequence[Held]) -> dict[int, float]:
    """Standard deviation of `Held.moved` where serial was not chosen, by doublings of the operator's time."""
    by_size: dict[int, list[float]] = {}
    for held in contests:
        if held.choice != SERIAL:
            by_size.setdefault(size_of(held.later_ms), []).append(held.moved)
    return {size: pstdev(moved) for size, moved in sorted(by_size.items())}


def size_of(milliseconds: float) -> int:
    """How many doublings of `FINEST_MS` a time is, rounded down."""
    return max(0, int(math.log2(milliseconds / FINEST_MS)))


def by_margin(share: float, microseconds: float) -> Rule:
    """Serial unless the fastest is faster by more than that."""
    return lambda truth, measure: choose(measure(list(truth), 5), share, microseconds)


def by_final(close: float, turns: int) -> Rule:
    """All within `close` of the fastest have so many turns more."""

    def rule(truth: Ways, measure: Callable[[Sequence[str], int], Ways]) -> str:
        first = measure(list(truth), 5)
        left = [way for way in first if first[way] <= min(first.values()) * (1 + close)]
        more = measure(left, turns)
        return choose({way: (5 * first[way] + turns * more[way]) / (5 + turns) for way in left}, 0.01, 1.0)

    return rule


def choose(ways: Mapping[str, float], share: float, microseconds: float) -> str:
    """The fastest, or serial."""
    best = min(ways, key=ways.__getitem__)
    is_as_good = ways.get(SERIAL, math.inf) <= ways[best] * (1 + share) + microseconds / 1e3
    return SERIAL if is_as_good else best


def drawn_again(contests: Sequence[Held], noise: Mapping[int, float], rule: Rule, between_turns: float) -> str:
    """What a rule would choose, in a line: how often it is slower than serial, and what it loses against the best.

    Args:
        contests: whose times are taken for the truth.
        noise: by size, of the ratio of two ways.
        rule: how it is decided.
        between_turns: share of the noise's variance that more turns would average away.
    """
    rng = random.Random(1)  # noqa: S311 - noise, no secrets
    worst, wrong, regret = 1.0, 0, []
    for held in contests:
        truth = held.ways
        size = max((one for one in noise if one <= size_of(min(truth.values()))), default=min(noise))
        deviation = noise[size] / math.sqrt(2)
        for _ in range(DRAWS):
            kept = {way: deviation * math.sqrt(1 - between_turns) * with_tails(rng) for way in truth}

            def measure(
                ways: Sequence[str], turns: int, truth: Ways = truth, kept: Ways = kept, much: float = deviation
            ) -> Ways:
                here = much * math.sqrt(between_turns * 5 / turns)
                return {way: truth[way] * math.exp(kept[way] + here * with_tails(rng)) for way in ways}

            chosen = truth[rule(truth, measure)]
            wrong += chosen > truth[SERIAL] * (1 + WORTH_TELLING)
            worst = min(worst, truth[SERIAL] / chosen)
            regret.append(chosen / min(truth.values()) - 1)
    return f"{100 * wrong / len(regret):9.3f} %  {worst:9.3f}  {100 * fmean(regret):9.3f} %"


def with_tails(rng: random.Random) -> float:
    """Student's t of three degrees of freedom, of variance one."""
    return rng.gauss(0, 1) / math.sqrt(sum(rng.gauss(0, 1) ** 2 for _ in range(3)))


RULES: dict[str, Rule] = {
    "the least median": by_margin(0.0, 0.0),
    "1 % and 1 us for serial (as it is)": by_margin(0.01, 1.0),
    "2 % and 1 us": by_margin(0.02, 1.0),
    "3 % and 1 us": by_margin(0.03, 1.0),
    "5 % and 1 us": by_margin(0.05, 1.0),
    "as it is, 10 turns more within 10 %": by_final(0.1, 10),
    "as it is, 10 turns more within 20 %": by_final(0.2, 10),
}


def main() -> None:
    """Print the noise that was measured, and what becomes of contests drawn with it."""
    made = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    made.add_argument("--rows", default="256-1023", help="M of the contests that are drawn again")
    made.add_argument("csv", nargs="*", type=Path, help="tables of bench --random; all in results/ when left out")
    options = made.parse_args()
    least, most = map(int, options.rows.split("-"))
    contests = read(options.csv or sorted(RESULTS.glob("random_*2gpu*.csv")))
    noise = noise_by_size(contests)
    print(
        f"{len(contests)} contests with the serial path in them; speed-up over serial later, over that in the contest:"
    )
    for size, deviation in noise.items():
        moved = [held.moved for held in contests if held.choice != SERIAL and size_of(held.later_ms) == size]
        print(f"  from {FINEST_MS * 2**size:.2f} ms: {len(moved):4d}, mean {100 * fmean(moved):5.1f} %, deviation "
              f"{100 * deviation:4.1f} %, least {100 * min(moved):5.1f} %")  # fmt: skip
    few = [held for held in contests if least <= held.m <= most]
    print(f"\n{len(few)} of them with M {least} to {most}, each drawn again {DRAWS} times; of all choices")
    for between in (1.0, 0.0):
        print(f"\nnoise that {'turns' if between else 'contests'} have{'' if between else ', whatever their turns'}")
        print(f"  {'rule':36s}  over 3 % behind serial, worst, lost against the best on average")
        for name, rule in RULES.items():
            print(f"  {name:36s}{drawn_again(few, noise, rule, between)}", flush=True)


if __name__ == "__main__":
    main()
