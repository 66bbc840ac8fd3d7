# SPDX-License-Identifier: Apache-2.0
"""How often a contest chooses wrong, by arithmetic: `python kernels/benchmarks/contest_noise.py [CSV ...]`.

A row of `bench --random` has what the contest of its first calls measured of each way, and what the operator and the
serial path took later. How far the ratio of the two moved is the noise of a contest and of what it is compared with; it
grows as times shrink. Contests are then drawn anew: the times of a row taken for the truth, each measured with noise of
that size and with tails (Student's t, three degrees of freedom), and decided by several rules: how far the serial path,
and how far the model's choice, is preferred.
"""

import argparse
import csv
import math
import random
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from statistics import fmean, pstdev
from typing import NamedTuple

from megascale_kernels.autotune.choosing import default
from megascale_kernels.bench.rows import config_text
from megascale_kernels.planning.cost_model import machine_of

RESULTS = Path(__file__).parent / "results"
SERIAL = "serial"
FINEST_MS = 0.02  # noise is told by doublings of the operator's time from here on
DRAWS = 100
WORTH_TELLING = 0.03  # slower than serial by more is what nobody should get
LONG_MS = 0.64  # whose clock is throttled in a filled stream
MACHINE = machine_of("NVIDIA H200", 132)  # of all tables that are read

Ways = dict[str, float]  # a way's name and its milliseconds
Rule = Callable[[Ways, Callable[[Sequence[str], int], Ways], str], str]  # the last is the model's choice


class Held(NamedTuple):
    """One contest: rows of the shape, the model's choice, milliseconds of each way in it, and of its own choice later.

    Those of the serial path later too.
    """

    m: int
    first: str
    ways: Ways
    choice: str
    later_ms: float
    serial_ms: float

    @property
    def moved(self) -> float:
        """Logarithm of the speed-up over serial found later, over that in the contest."""
        return math.log(self.serial_ms / self.later_ms * self.ways[self.choice] / self.ways[SERIAL])


def read(paths: Sequence[Path]) -> list[Held]:
    """All contests whose choice is told."""
    found = []
    for path in paths:
        operator = "gemm_rs" if "gemm_rs" in path.name else "ag_gemm"
        for row in csv.DictReader(path.open(encoding="utf-8")):
            told = [part.rpartition(": ") for part in (row.get("ways_ms") or "").split("; ") if part]
            ways = {name: float(text.split()[0]) for name, _, text in told}
            if row["config"] in ways:
                first = default(operator, int(row["m"]), int(row["n"]), int(row["k"]), 2, MACHINE)
                first_text = SERIAL if first is None else config_text(first)
                later = float(row["ours_ms"]), float(row["serial_ms"])
                found.append(Held(int(row["m"]), first_text, ways, row["config"], *later))
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
    return lambda truth, measure, _first: choose(measure(list(truth), 5), share, microseconds)


def by_model(share: float) -> Rule:
    """Serial as it is; else the model's choice unless the fastest is faster by more than that."""

    def rule(truth: Ways, measure: Callable[[Sequence[str], int], Ways], first: str) -> str:
        measured = measure(list(truth), 5)
        best = choose(measured, 0.01, 1.0)
        is_as_good = best != SERIAL != first and measured.get(first, math.inf) <= measured[best] * (1 + share)
        return first if is_as_good else best

    return rule


def by_final(close: float, turns: int) -> Rule:
    """All within `close` of the fastest have so many turns more."""

    def rule(truth: Ways, measure: Callable[[Sequence[str], int], Ways], _first: str) -> str:
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
    """What a rule would choose, in a line.

    How often it is slower than serial, the worst, what it loses against the best, how often two contests differ.

    Args:
        contests: whose times are taken for the truth.
        noise: by size, of the ratio of two ways.
        rule: how it is decided.
        between_turns: share of the noise's variance that more turns would average away.
    """
    rng = random.Random(1)  # noqa: S311 - noise, no secrets
    worst, wrong, differing, regret = 1.0, 0, 0, []
    for held in contests:
        truth = held.ways
        size = max((one for one in noise if one <= size_of(min(truth.values()))), default=min(noise))
        deviation = noise[size] / math.sqrt(2)
        chosen_before = ""
        for number in range(DRAWS):
            kept = {way: deviation * math.sqrt(1 - between_turns) * with_tails(rng) for way in truth}

            def measure(
                ways: Sequence[str], turns: int, truth: Ways = truth, kept: Ways = kept, much: float = deviation
            ) -> Ways:
                here = much * math.sqrt(between_turns * 5 / turns)
                return {way: truth[way] * math.exp(kept[way] + here * with_tails(rng)) for way in ways}

            way = rule(truth, measure, held.first)
            differing += number % 2 == 1 and way != chosen_before
            chosen_before = way
            chosen, serial = truth[way], truth.get(SERIAL, math.inf)
            wrong += chosen > serial * (1 + WORTH_TELLING)
            worst = min(worst, serial / chosen)
            regret.append(chosen / min(truth.values()) - 1)
    return (
        f"{100 * wrong / len(regret):9.3f} %  {worst:9.3f}  {100 * fmean(regret):9.3f} %  "
        f"{200 * differing / len(regret):9.2f} %"
    )


def with_tails(rng: random.Random) -> float:
    """Student's t of three degrees of freedom, of variance one."""
    return rng.gauss(0, 1) / math.sqrt(sum(rng.gauss(0, 1) ** 2 for _ in range(3)))


RULES: dict[str, Rule] = {
    "the least median": by_margin(0.0, 0.0),
    "1 % and 1 us for serial (as it was)": by_margin(0.01, 1.0),
    "and 1 % for the model's choice": by_model(0.01),
    "and 2 % (as it is)": by_model(0.02),
    "and 3 %": by_model(0.03),
    "2 % and 1 us": by_margin(0.02, 1.0),
    "3 % and 1 us": by_margin(0.03, 1.0),
    "5 % and 1 us": by_margin(0.05, 1.0),
    "as it was, 10 turns more within 10 %": by_final(0.1, 10),
    "as it was, 10 turns more within 20 %": by_final(0.2, 10),
}


def main() -> None:
    """Print the noise that was measured, and what becomes of contests drawn with it."""
    made = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    made.add_argument("--rows", default="256-1023", help="M of the contests that are drawn again")
    made.add_argument("csv", nargs="*", type=Path, help="tables of bench --random; all in results/ when left out")
    options = made.parse_args()
    least, most = map(int, options.rows.split("-"))
    told = read(options.csv or sorted(RESULTS.glob("random_*2gpu*.csv")))
    contests = [held for held in told if SERIAL in held.ways]
    noise = noise_by_size(contests)
    print(
        f"{len(contests)} contests with the serial path in them; speed-up over serial later, over that in the contest:"
    )
    for size, deviation in noise.items():
        moved = [held.moved for held in contests if held.choice != SERIAL and size_of(held.later_ms) == size]
        print(f"  from {FINEST_MS * 2**size:.2f} ms: {len(moved):4d}, mean {100 * fmean(moved):5.1f} %, deviation "
              f"{100 * deviation:4.1f} %, least {100 * min(moved):5.1f} %")  # fmt: skip
    redrawn = {
        f"of them with M {least} to {most}": [held for held in contests if least <= held.m <= most],
        f"of all with M {most + 1} and more": [held for held in told if held.m > most],
        f"of all that take {LONG_MS} ms or more": [held for held in told if min(held.ways.values()) >= LONG_MS],
    }
    for which, some in redrawn.items():
        print(f"\n{len(some)} {which}, each drawn again {DRAWS} times; of all choices")
        for between in (1.0, 0.0):
            print("\nnoise that turns have" if between else "\nnoise that contests have, whatever their turns")
            print(f"  {'rule':36s}  over 3 % behind serial, worst, lost against the best on average, two that differ")
            for name, rule in RULES.items():
                print(f"  {name:36s}{drawn_again(some, noise, rule, between)}", flush=True)


if __name__ == "__main__":
    main()
