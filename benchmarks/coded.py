# SPDX-License-Identifier: Apache-2.0
"""What coded computation costs, against waiting for slow ranks, restarting, and letting them go.

    python benchmarks/coded.py --out benchmarks/results/coded.txt
    python benchmarks/coded.py --only digits,runs

Parts: ``digits`` (by how much rounding grows), ``rates`` (slow ranks at published rates, by a model of steps),
``chance`` (another rank is slow in each step), ``controller`` (hours of the simulator with the real controller),
``runs`` (real runs of the examples on this machine). Figures of the first four are the same on every machine.
"""

import argparse
import io
import math
import os
import re
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator, Sequence
from functools import cache
from pathlib import Path

import numpy as np
import numpy.typing as npt

from megascale_ops.coded import GradientCode
from megascale_ops.coded.matrices import solve
from megascale_ops.errors import UsageError
from megascale_ops.schema.policy import JobPolicy
from megascale_ops.sim.faults import SLOW_LEAST, SLOW_MEAN_S, SLOW_MOST, Fault
from megascale_ops.sim.laws import DAY_S, LAWS
from megascale_ops.sim.redundancy import Redundancy, read_code
from megascale_ops.sim.settings import Settings
from megascale_ops.sim.simulate import simulate
from megascale_ops.sim.steps import NETWORK

Fields = npt.NDArray[np.float64]

CODES = (
    "",
    "s=1,kind=clustered",
    "s=1,kind=cyclic",
    "s=1,kind=cyclic,pieces=2",
    "s=1,kind=multi",
    "s=2,kind=clustered",
)
SHORT = ("no code", "clustered 1", "cyclic 1", "cyclic 1, half", "multi 1", "clustered 2")
# 64 ranks a replica: tensor parallel 8 and 8 stages, as MegaScale's 175 billion parameters.
A_REPLICA = 64
STEPS = 300
# A start and a load of a minute each, as `simulate` assumes; half of what lies between two saves is made again.
START_S = 120.0
SAVES_S = (1800.0, 60.0)


@cache
def slowest_of_a_replica() -> Fields:
    """Return 20,000 draws of a replica's work in a step: 1, with its ranks' noise (1 %; 0.5 % of their machines)."""
    spread = math.hypot(0.01, 0.005)
    found: Fields = 1.0 + spread * np.random.default_rng(0).standard_normal((20_000, A_REPLICA)).max(axis=1)
    return found


def mean_step(code: Redundancy | None, replicas: int, slow: Callable[[np.random.Generator], Fields]) -> float:
    """Return the mean time of a step, of which a step without a code, noise or slow rank takes 1.

    Args:
        code: or none.
        replicas: n.
        slow: returns by which factor each replica is slow in a step.
    """
    chance = np.random.default_rng(1)
    busy, total = np.zeros(replicas), 0.0
    for _ in range(STEPS):
        work = chance.choice(slowest_of_a_replica(), replicas) * slow(chance) * (1.0 - NETWORK)
        if code is None:
            total += float(work.max()) + NETWORK
        else:
            end, busy = code.close(work, busy)
            # A replica that is late works while the network does.
            busy = np.maximum(0.0, busy - NETWORK / code.pieces)
            total += end + NETWORK / code.pieces
    return total / STEPS


def digits() -> Iterator[str]:
    """Yield by how much rounding in the answers grows in the sum, over all runs of s neighbours and 200 drawn sets."""
    yield "Rounding: by how much errors of the answers grow in the sum at worst (all runs of s neighbours, 200 sets)."
    yield "| n | s | cyclic | cyclic, half as long answers | clustered | drawn at random (Tandon et al., algorithm 2) |"
    yield "|---|---|---|---|---|---|"
    for workers, stragglers in (
        (5, 1),
        (12, 1),
        (12, 2),
        (12, 3),
        (30, 2),
        (30, 5),
        (64, 1),
        (64, 2),
        (64, 4),
        (128, 2),
    ):
        cells = [_worst(workers, stragglers, "cyclic", 1), _worst(workers, stragglers, "cyclic", 2)]
        cells += [_worst(workers, stragglers, "clustered", 1), f"{_random(workers, stragglers):.3g}"]
        yield f"| {workers} | {stragglers} | {' | '.join(cells)} |"


def _patterns(workers: int, stragglers: int) -> Iterator[list[int]]:
    chance = np.random.default_rng(2)
    for first in range(workers):
        yield [(first + one) % workers for one in range(stragglers)]
    for _ in range(200):
        yield list(chance.choice(workers, stragglers, replace=False))


def _worst(workers: int, stragglers: int, kind: str, pieces: int) -> str:
    try:
        code = GradientCode(workers, stragglers, kind, pieces=pieces)
    except UsageError:
        return "refused"
    zero = np.zeros(pieces)
    found = 0.0
    for absent in _patterns(workers, stragglers):
        arrived = {(one, 0): zero[: code.length(pieces)] for one in range(workers) if one not in absent}
        found = max(found, code.combine(arrived, pieces).lost)
    return f"{found:.3g}"


def _random(workers: int, stragglers: int) -> float:
    """Return the same of a code whose numbers are drawn: rows are solved for in the null space of a random matrix."""
    chance = np.random.default_rng(0)
    kernel = chance.standard_normal((stragglers, workers))
    kernel[:, -1] = -kernel[:, :-1].sum(axis=1)
    matrix = np.zeros((workers, workers))
    for worker in range(workers):
        held = [(worker + one) % workers for one in range(stragglers + 1)]
        matrix[worker, held[0]] = 1.0
        matrix[worker, held[1:]] = -np.linalg.solve(kernel[:, held[1:]], kernel[:, held[0]])
    return max(solve(np.delete(matrix, absent, axis=0), 1)[2] for absent in _patterns(workers, stragglers))


def rates() -> Iterator[str]:
    """Yield the time of a job whose ranks become slow at published rates, with what is done about it."""
    law = LAWS["fail-slow"]
    yield "Slow ranks that stay slow for 72 minutes in the mean. Time for the same steps, of a job with neither slow"
    yield f"rank nor code; {A_REPLICA} ranks a replica, noise 1 %, n replicas. Rate 1: {law.source}."
    yield "left: they are waited for. restarted at once: known at once, and well after a restart. evicted: let go when"
    yield "they have cost what a restart costs (a start, a load, half of what lies between two saves), with saves every"
    yield "30 minutes, or every minute; each is counted for itself. Codes let none go. Means of 300 steps each."
    heads = " | ".join(SHORT[1:])
    yield f"| n | rate | by | left | restarted at once | evicted, saves 1800 s | evicted, saves 60 s | {heads} | best |"
    yield "|---|---|---|---|---|---|---|" + "---|" * len(SHORT)
    for replicas in (8, 32, 128):
        base = mean_step(None, replicas, lambda _, count=replicas: np.ones(count))  # type: ignore[misc]  # bound now
        for times in (1, 10, 100):
            for label, slower in (("10 to 50 %", -1.0), ("100 %", 1.0), ("400 %", 4.0)):
                yield _row(replicas, times, label, slower, base, law.a_day * times)


def _row(replicas: int, times: int, label: str, slower: float, base: float, a_day: float) -> str:
    ranks = replicas * A_REPLICA
    a_second = a_day * ranks / DAY_S
    at_once = a_second * SLOW_MEAN_S  # how many are slow at a time, in the mean: Poisson
    names = ("left", "restarted", "evicted", "evicted, saves 60 s", *SHORT[1:])
    by_count: dict[str, list[float]] = {}
    weights = [math.exp(-at_once) * at_once**count / math.factorial(count) for count in range(_most(at_once))]
    for code, name in zip(CODES, ("left", *SHORT[1:]), strict=True):
        read = read_code(code, replicas)
        by_count[name] = [mean_step(read, replicas, _slow(replicas, count, slower)) for count in range(len(weights))]
    cells = {
        name: sum(weight * mean for weight, mean in zip(weights, means, strict=True)) / sum(weights) / base
        for name, means in by_count.items()
    }
    excess = [(1.0 - NETWORK) * (slower if slower > 0 else share) for share in np.linspace(SLOW_LEAST, SLOW_MOST, 9)]
    for name, saves_s in zip(names[2:4], SAVES_S, strict=True):
        lost = float(np.mean([_let_go(one, START_S + saves_s / 2) for one in excess]))
        cells[name] = 1.0 + a_second * lost
    cells["restarted"] = 1.0 + a_second * (START_S + SAVES_S[0] / 2)
    best = min(names, key=lambda name: cells[name])
    return f"| {replicas} | {times} | {label} | " + " | ".join(f"{cells[name]:.3f}" for name in names) + f" | {best} |"


def _most(mean: float) -> int:
    """Return how many slow ranks at a time are looked at: all but one in ten thousand moments, 40 at most."""
    left, count, chance = 1.0 - math.exp(-mean), 1, math.exp(-mean)
    while left > 1e-4 and count < 40:
        chance *= mean / count
        left -= chance
        count += 1
    return count


def _slow(replicas: int, count: int, slower: float) -> Callable[[np.random.Generator], Fields]:
    """Return a function that makes ``count`` ranks slow, for as long as it is asked, each of some replica."""
    where = np.random.default_rng(count)
    factors = np.ones(replicas)
    for replica in where.integers(0, replicas, count):
        share = slower if slower > 0 else float(where.uniform(SLOW_LEAST, SLOW_MOST))
        factors[replica] = max(factors[replica], 1.0 + share)
    return lambda _: factors


def _let_go(excess: float, price_s: float) -> float:
    """Return what a slow rank costs, seconds, that is let go once it has cost ``price_s``, which it costs again.

    Args:
        excess: by which share steps are longer.
        price_s: of a restart. How long it would stay slow is exponential.
    """
    mean_cost_s = excess * SLOW_MEAN_S
    stays = math.exp(-price_s / mean_cost_s)
    return mean_cost_s * (1.0 - stays) + price_s * stays


def chance() -> Iterator[str]:
    """Yield the time of a step in which each replica is slow by chance, another one each time: none can be let go."""
    yield "Another replica in each step: each is slow with a probability, independently, so that none can be let go."
    yield "Time of a step, of one without both. Slowness is a factor of the work, which codes multiply."
    yield f"| n | slow with | by | {' | '.join(SHORT)} | best |"
    yield "|---|---|---|" + "---|" * (len(SHORT) + 1)
    for replicas in (8, 32, 128):
        base = mean_step(None, replicas, lambda _, count=replicas: np.ones(count))  # type: ignore[misc]  # bound now
        for probability in (0.0, 0.001, 0.01, 0.05):
            for slower in (0.3, 1.0, 4.0, 9.0) if probability else (0.0,):

                def slow(
                    drawn: np.random.Generator, n: int = replicas, p: float = probability, x: float = slower
                ) -> Fields:
                    return 1.0 + x * (drawn.random(n) < p)

                yield _chance_row(replicas, f"{probability:.1%} | {slower:.0%}", base, slow)
    yield ""
    yield "As virtual machines in the papers: work takes 1 and an exponential time more, drawn anew in each step."
    yield f"| n | mean of that | {' | '.join(SHORT)} | best |"
    yield "|---|---|" + "---|" * (len(SHORT) + 1)
    for replicas in (12, 30):
        for mean in (0.1, 0.5, 1.0, 2.0):
            yield _chance_row(
                replicas, f"{mean:g}", 1.0, lambda drawn, n=replicas, m=mean: 1.0 + drawn.exponential(m, n)
            )  # type: ignore[misc]  # bound now


def _chance_row(replicas: int, what: str, base: float, slow: Callable[[np.random.Generator], Fields]) -> str:
    cells = []
    for code in CODES:
        try:
            cells.append(mean_step(read_code(code, replicas), replicas, slow) / base)
        except UsageError:
            cells.append(math.inf)
    best = SHORT[int(np.argmin(cells))]
    return f"| {replicas} | {what} | " + " | ".join(f"{one:.3f}" for one in cells) + f" | {best} |"


def controller() -> Iterator[str]:
    """Yield steps made in two hours around the real controller, with a slow rank, under each choice."""
    yield "Two hours of 64 ranks (8 replicas), the real controller, seed 7; a rank is slow from 0.3 h on. Steps made."
    yield "| by | " + " | ".join(name for name, _, _ in _CHOICES) + " |"
    yield "|---|" + "---|" * len(_CHOICES)
    for slower in (0.3, 4.0):
        cells = []
        for _, code, policy in _CHOICES:
            fault = Fault(0.3 * 3600.0, "slow", "named", "", 0.3, 0.0, 2.0 * 3600.0, slower)
            run = simulate(Settings(64, 2.0, 7, (), pp=1, coded=code, policy=policy), [fault])
            named = "named" if run.faults[0].is_right else "NOT NAMED"
            cells.append(f"{run.steps} ({named}, {run.evictions} let go)")
        yield f"| {slower:.0%} | " + " | ".join(cells) + " |"


_WARN = JobPolicy(actions={"straggler": "warn"})
_CHOICES = (
    ("left", "", _WARN),
    ("the policy as it comes", "", JobPolicy()),
    ("clustered 1, none let go", "s=1,kind=clustered", _WARN),
    ("clustered 1, the policy as it comes", "s=1,kind=clustered", JobPolicy()),
    ("multi 1, none let go", "s=1,kind=multi", _WARN),
)

# Work is sleeping, so that 13 ranks on few cores do not slow each other down: 50 ms a partition.
_RUN = ("--samples", "27720", "--work-s", "0.05", "--steps", "60")
_RUNS = (
    ("no code", ("--code", "none")),
    ("cyclic 1", ("--code", "cyclic", "--stragglers", "1")),
    ("cyclic 2", ("--code", "cyclic", "--stragglers", "2")),
    ("cyclic 1, half", ("--code", "cyclic", "--stragglers", "1", "--pieces", "2")),
    ("multi 1", ("--code", "multi", "--stragglers", "1")),
)


def runs() -> Iterator[str]:
    """Yield what a step takes in real runs of the example: a master and twelve workers, one of them slow."""
    yield (
        "Real runs, ms a step: `megascale-ops run --nproc-per-node 13 -- examples/train_coded.py "
        + " ".join(_RUN)
        + "`"
    )
    yield "| worker 2 takes | " + " | ".join(name for name, _ in _RUNS) + " |"
    yield "|---|" + "---|" * len(_RUNS)
    for times in (1, 2, 5):
        cells = [_run(*code, "--slow-worker", "2", "--slow-times", str(times)) for _, code in _RUNS]
        yield f"| {times} times as long | " + " | ".join(cells) + " |"


def _run(*options: str) -> str:
    script = Path(__file__).parents[1] / "examples" / "train_coded.py"
    with tempfile.TemporaryDirectory() as folder:
        command = [sys.executable, "-m", "megascale_ops.cli", "run", "--nproc-per-node=13", "--job=coded", "--"]
        done = subprocess.run(
            [*command, str(script), *_RUN, *options],
            capture_output=True,
            text=True,
            check=True,
            timeout=300,
            env={**os.environ, "XDG_STATE_HOME": folder},
        )
    found = re.search(r"done: (\d+) steps in ([\d.]+) s", done.stdout)
    assert found is not None, done.stdout
    return f"{1000.0 * float(found[2]) / int(found[1]):.0f}"


PARTS: dict[str, Callable[[], Iterator[str]]] = {
    "digits": digits,
    "rates": rates,
    "chance": chance,
    "controller": controller,
    "runs": runs,
}


def main(arguments: Sequence[str] | None = None) -> None:
    """Make the tables that were asked for."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", default=",".join(PARTS), help="parts, with commas")
    parser.add_argument("--out", type=Path)
    asked = parser.parse_args(arguments)
    names = [name.strip() for name in asked.only.split(",")]
    if unknown := [name for name in names if name not in PARTS]:
        sys.exit(f"there is no part {unknown[0]!r}: take some of {', '.join(PARTS)}")
    text = io.StringIO()
    for name in names:
        for line in PARTS[name]():
            print(line, flush=True)
            text.write(f"{line}\n")
        print(flush=True)
        text.write("\n")
    if asked.out:
        asked.out.write_text(text.getvalue().rstrip() + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
