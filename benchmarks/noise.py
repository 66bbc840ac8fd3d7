# SPDX-License-Identifier: Apache-2.0
"""How often noise gets an innocent rank named, and how soon a slow one is named in it: many kinds of noise, drawn.

    python benchmarks/noise.py [--seed 1] [--kinds "white,memory 0.98"] [--ranks 4,16,64] [--jobs 4] [--steps 4000]
                               [--step-s 5] [--only alarms|power|traces] [--engine stragglers|skew]
                               [--repeats 6] [--well 600]

*alarms*: for each kind of noise (``tests/fakes/noisy_ranks.py``) and each number of ranks so many jobs without a slow
rank, each with figures of its own. Printed: names per rank and day, with the exact Poisson interval of 95 %; none in T
days is at most 3.7/T at the upper end of that (3/T at 95 % of one side). It says how many jobs named anybody, too: one
that names a rank again and again is one.

*power*: jobs that were well for ``--well`` steps (0: slow from the first step); then one rank becomes 2, 5, 10, 20 or
100 % slower: at once, within 500 steps, or in one step of ten (by ten times as much). Printed: in how many it was named
within 2,000 steps, after how many at the median (and on the mean, 2,000 where it was not), and how many others were.

*engine*: ``stragglers`` judges steps as hosts time them, ``skew`` the collectives of the same ranks (one all-reduce a
step, ``tests/fakes/noisy_collectives.py``).

*traces*: the recorded runs of ``tests/real/step_times``: nobody was made slow, but a busy machine starves ranks.
"""

import argparse
import copy
import math
import statistics
import sys
import time
import zlib
from collections.abc import Callable
from pathlib import Path

import numpy as np

sys.path.insert(0, str(Path(__file__).parents[1]))

from tests.fakes.noisy_collectives import NoisyCollectives
from tests.fakes.noisy_ranks import KINDS, NoisyRanks, Shares

WITHIN = 2_000
SHARES = (0.02, 0.05, 0.1, 0.2, 1.0)
GRADUAL = 500
EVERY = 10
DAY_S = 86_400.0


def interval(count: int, exposure: float) -> tuple[float, float]:
    """Return the exact (Garwood) 95 % interval of a Poisson rate."""

    def below(mean: float, most: int) -> float:
        term = total = math.exp(-mean)
        for number in range(1, most + 1):
            term *= mean / number
            total += term
        return total

    def solve(wanted: float, most: int) -> float:
        low, high = 0.0, 10.0 + 3.0 * count
        for _ in range(60):
            middle = (low + high) / 2
            low, high = (middle, high) if below(middle, most) > wanted else (low, middle)
        return low

    if count > 500:  # the normal one is as good, and e to the -700 is none
        return (count - 1.96 * count**0.5) / exposure, (count + 1.96 * count**0.5) / exposure
    return (solve(0.975, count - 1) if count else 0.0) / exposure, solve(0.025, count) / exposure


def job(options: argparse.Namespace, ranks: int) -> NoisyRanks | NoisyCollectives:
    """Return a new job."""
    if options.engine == "skew":
        return NoisyCollectives(ranks, options.step_s)
    return NoisyRanks(ranks, options.step_s)


def measure_alarms(kind: str, options: argparse.Namespace) -> int:
    """Print how often innocent ranks are named in one kind of noise; return how often that was."""
    names, jobs_with, jobs, rank_days, first = 0, 0, 0, 0.0, []
    each = []
    for ranks in options.ranks:
        of_ranks = 0
        for number in range(options.jobs):
            chance = np.random.default_rng([options.seed, zlib.crc32(kind.encode()), ranks, number])
            made = job(options, ranks)
            before = 0
            for step, shares in enumerate(KINDS[kind](chance, options.steps, ranks)):
                made.one(shares)
                if made.names and not before:
                    before = made.names
                    first.append(step)
            jobs += 1
            jobs_with += made.names > 0
            of_ranks += made.names
            rank_days += ranks * options.steps * options.step_s / DAY_S
        names += of_ranks
        each.append(f"{of_ranks}")
    low, high = interval(names, rank_days)
    begun = f", first at the median after {statistics.median(first):.0f} steps" if first else ""
    print(
        f"{kind:<16} {names:>5} names ({' + '.join(each)}) in {rank_days:,.0f} rank-days, "
        f"{jobs_with} of {jobs} jobs: {names / rank_days:.3g} [{low:.2g}, {high:.2g}] a rank and day{begun}",
        flush=True,
    )
    return names


Fault = Callable[[int], float]


def faults(share: float) -> dict[str, Fault]:
    """Return by how much a rank is slower, by steps since the fault began."""
    return {
        "sudden": lambda _: share,
        "gradual": lambda since: share * min(1.0, since / GRADUAL),
        "now and then": lambda since: share * EVERY * (since % EVERY == 0),
    }


def measure_power(kind: str, options: argparse.Namespace) -> None:
    """Print how soon a slow rank is named in one kind of noise."""
    took: dict[tuple[str, float], list[int]] = {}
    wanted = {
        (how, share): fault
        for share in SHARES
        for how, fault in faults(share).items()
        if not options.faults or how in options.faults
    }
    others = 0
    for ranks in options.ranks:
        for number in range(options.repeats):
            chance = np.random.default_rng([options.seed, zlib.crc32(kind.encode()), ranks, number, 1])
            shares = KINDS[kind](chance, options.well + WITHIN, ranks)
            slow = int(chance.integers(ranks))
            well = job(options, ranks)
            for row in shares[: options.well]:
                well.one(row)
            for (how, share), fault in wanted.items():
                found, also = until_named(copy.deepcopy(well), shares[options.well :], slow, fault)
                others += also
                took.setdefault((how, share), []).append(found)
    cells = cells_of(took, len(options.ranks) * options.repeats)
    print(f"{kind:<16} {'; '.join(cells)}; others named {others}", flush=True)


def until_named(made: NoisyRanks | NoisyCollectives, shares: Shares, slow: int, fault: Fault) -> tuple[int, int]:
    """Return after how many steps a rank was named, -1: never, and how many others are then."""
    for since, row in enumerate(shares):
        more = np.zeros(len(row))
        more[slow] = fault(since)
        made.one(row + more)
        if slow in made.named():
            return since + 1, len(made.named()) - 1
    return -1, len(made.named())


def cells_of(took: dict[tuple[str, float], list[int]], runs: int) -> list[str]:
    """Return, for each way to be slow: in how many runs it was named, after how many steps at the median, and mean."""
    parts = []
    for how in ("sudden", "gradual", "now and then"):
        cells = []
        for share in SHARES:
            all_of_them = sorted(one if one > 0 else 10**9 for one in took.get((how, share), []))
            if all_of_them:
                found = sum(one < 10**9 for one in all_of_them)
                middle = all_of_them[(len(all_of_them) - 1) // 2]
                mean = statistics.fmean(min(one, WITHIN) for one in all_of_them)
                cells.append(f"{share:.0%} {found}/{runs} {middle if middle < 10**9 else '-'} ({mean:.0f})")
        if cells:
            parts.append(f"{how}: {', '.join(cells)}")
    return parts


def measure_traces(folder: Path) -> int:
    """Print what is said of recorded runs in which nobody was slow; return how many names."""
    from tests.real.recorded_steps import read

    names = 0
    for path in sorted(folder.glob("*.steps")):
        recorded = read(path)
        made = NoisyRanks(recorded.own_s.shape[1], 0.0)
        for own_s, wall_s in zip(recorded.own_s, recorded.wall_s, strict=True):
            made.tell(own_s, float(wall_s))
        rank_days = recorded.wall_s.sum() * recorded.own_s.shape[1] / DAY_S
        low, high = interval(made.names, rank_days)
        steps, ranks = recorded.own_s.shape
        print(f"{path.stem:<16} {made.names} names in {steps:,} steps of {ranks} ranks, "
              f"{rank_days:.3f} rank-days: [{low:.2g}, {high:.2g}] a rank and day", flush=True)  # fmt: skip
        names += made.names
    return names


def main() -> int:
    """Measure and print; end with 1 where noise got anybody named."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--kinds", type=lambda text: text.split(","), default=list(KINDS))
    parser.add_argument("--ranks", type=lambda text: [int(one) for one in text.split(",")], default=[4, 16, 64])
    parser.add_argument("--jobs", type=int, default=4, help="of each kind and number of ranks")
    parser.add_argument("--steps", type=int, default=4_000)
    parser.add_argument("--step-s", type=float, default=5.0)
    parser.add_argument("--repeats", type=int, default=6, help="slow ranks of each sort and number of ranks")
    parser.add_argument("--well", type=int, default=600, help="steps before the fault")
    parser.add_argument("--faults", type=lambda text: text.split(","), default=[])
    parser.add_argument("--engine", choices=["stragglers", "skew"], default="stragglers")
    parser.add_argument("--only", choices=["alarms", "power", "traces"])
    options = parser.parse_args()
    unknown = set(options.kinds) - set(KINDS)
    if unknown:
        parser.error(f"no such noise: {', '.join(sorted(unknown))}; there are {', '.join(KINDS)}")
    print(f"seed {options.seed}, {options.engine}, steps of {options.step_s:g} s, "
          f"{'/'.join(map(str, options.ranks))} ranks", flush=True)  # fmt: skip
    began_s = time.process_time()
    names = 0
    if options.only in {None, "alarms"}:
        names += sum([measure_alarms(kind, options) for kind in options.kinds])
    if options.only in {None, "power"}:
        for kind in options.kinds:
            measure_power(kind, options)
    if options.only in {None, "traces"}:
        names += measure_traces(Path(__file__).parents[1] / "tests" / "real" / "step_times")
    print(f"{names} names in all; {time.process_time() - began_s:.0f} s of a core")
    return 0 if names == 0 else 1


if __name__ == "__main__":
    sys.exit(main())
