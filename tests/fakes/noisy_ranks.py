# SPDX-License-Identifier: Apache-2.0
"""Own work of many ranks with noise of many kinds, in columns: nobody is slow, whatever it looks like.

Each kind draws its own figures (how much, how long) from the seed, so that another seed is another job and not the same
one again. Shapes: steps, ranks; shares of a step.
"""

from collections.abc import Callable, Mapping

import numpy as np
import numpy.typing as npt

from megascale_ops.diagnosis.stragglers import step_table
from megascale_ops.diagnosis.stragglers.detector import Watch
from megascale_ops.schema.history import Place
from megascale_ops.schema.policy import JobPolicy

Shares = npt.NDArray[np.float64]
Kind = Callable[[np.random.Generator, int, int], Shares]

# Of a step's time; the rest is what nobody can change.
OWN = 0.8


def remembering(noise: Shares, memory: float, chance: np.random.Generator) -> Shares:
    """Return noise that keeps the share ``memory`` of what it was, as spread as what it is made of, from the first."""
    found = np.empty_like(noise)
    level = chance.standard_normal(noise.shape[1]) * noise.std()
    fresh = (1 - memory**2) ** 0.5
    for step, column in enumerate(noise):
        level = memory * level + fresh * column
        found[step] = level
    return found


def _white(chance: np.random.Generator, steps: int, ranks: int, spread: float = 0.0) -> Shares:
    return (spread or chance.uniform(0.005, 0.03)) * chance.standard_normal((steps, ranks))


def _heavy(chance: np.random.Generator, steps: int, ranks: int) -> Shares:
    return chance.uniform(0.005, 0.02) * chance.standard_t(chance.uniform(2.1, 4.0), (steps, ranks))


def _with_memory(memory: float) -> Kind:
    def make(chance: np.random.Generator, steps: int, ranks: int) -> Shares:
        slow = remembering(_white(chance, steps, ranks, chance.uniform(0.01, 0.04)), memory, chance)
        return slow + _white(chance, steps, ranks, 0.005)

    return make


def _walk(chance: np.random.Generator, steps: int, ranks: int) -> Shares:
    """Walks at random, and turns round at bounds."""
    bound = chance.uniform(0.02, 0.06)
    walk = chance.uniform(-bound, bound, ranks) + np.cumsum(
        chance.uniform(0.001, 0.004) * chance.standard_normal((steps, ranks)), axis=0
    )
    return bound - np.abs((walk + bound) % (4 * bound) - 2 * bound) + _white(chance, steps, ranks, 0.005)


def _periodic(chance: np.random.Generator, steps: int, ranks: int) -> Shares:
    """Garbage collections, cron jobs, scrubbing: every rank in its turn."""
    period, duty = chance.integers(20, 2_000), chance.uniform(0.01, 0.2)
    at = (np.arange(steps)[:, None] + chance.integers(0, period, ranks)) % period
    return chance.uniform(0.05, 0.5) * (at < max(1, duty * period)) + _white(chance, steps, ranks, 0.008)


def _thermal(chance: np.random.Generator, steps: int, ranks: int) -> Shares:
    period = chance.uniform(200, 3_000) * chance.uniform(0.8, 1.25, ranks)
    turn = np.arange(steps)[:, None] / period + chance.random(ranks)
    return chance.uniform(0.01, 0.05) * np.sin(2 * np.pi * turn) + _white(chance, steps, ranks, 0.005)


def _regimes(chance: np.random.Generator, steps: int, ranks: int) -> Shares:
    """Two ways to run (a clock, a page placement), each kept for a while."""
    high, low = chance.uniform(20, 500), chance.uniform(100, 1_000)
    state = chance.random(ranks) < high / (high + low)
    found = np.empty((steps, ranks))
    for step in range(steps):
        state ^= chance.random(ranks) < np.where(state, 1 / high, 1 / low)
        found[step] = state
    return chance.uniform(0.03, 0.15) * found + _white(chance, steps, ranks, 0.008)


def _nodes(chance: np.random.Generator, steps: int, ranks: int) -> Shares:
    """What the ranks of a node have in common."""
    each = min(8, max(1, ranks // 4))
    shared = _with_memory(chance.choice([0.0, 0.9, 0.98, 0.995]))(chance, steps, -(-ranks // each))
    return np.repeat(shared, each, axis=1)[:, :ranks] + _white(chance, steps, ranks, 0.005)


def _bursts(chance: np.random.Generator, steps: int, ranks: int) -> Shares:
    rate, length = 1 / chance.uniform(100, 1_500), chance.uniform(3, 30)
    state = np.zeros(ranks, bool)
    height = np.zeros(ranks)
    found = np.empty((steps, ranks))
    for step in range(steps):
        begins = ~state & (chance.random(ranks) < rate)
        height = np.where(begins, chance.uniform(0.1, 1.5, ranks), height)
        state = begins | (state & (chance.random(ranks) >= 1 / length))
        found[step] = state * height
    return found + _white(chance, steps, ranks, 0.008)


def _modes(chance: np.random.Generator, steps: int, ranks: int) -> Shares:
    """Sequence lengths of a few buckets, by chance on each rank and in each step."""
    lengths = chance.uniform(-0.2, 0.3, chance.integers(2, 5))
    return chance.choice(lengths - lengths.mean(), (steps, ranks)) + _white(chance, steps, ranks, 0.008)


def _long(chance: np.random.Generator, steps: int, ranks: int) -> Shares:
    """A few sequences are very long."""
    return chance.uniform(0.05, 0.5) * (chance.lognormal(0.0, chance.uniform(0.3, 0.8), (steps, ranks)) - 1)


def _drift(chance: np.random.Generator, steps: int, ranks: int) -> Shares:
    """All together become slower, or faster, and there and back."""
    all_of_them = chance.uniform(-0.3, 0.6) * np.sin(np.arange(steps) / chance.uniform(500, 5_000))
    return all_of_them[:, None] + _white(chance, steps, ranks)


def _uneven(chance: np.random.Generator, steps: int, ranks: int) -> Shares:
    """Each machine is as fast as it is, for good."""
    machines = chance.uniform(0.01, 0.08) * chance.standard_normal(ranks)
    return machines + _white(chance, steps, ranks)


def _skewed(chance: np.random.Generator, steps: int, ranks: int) -> Shares:
    """The same, and the slow ones are further from the middle than the fast ones."""
    return chance.exponential(chance.uniform(0.01, 0.06), ranks) + _white(chance, steps, ranks)


def _generations(chance: np.random.Generator, steps: int, ranks: int) -> Shares:
    """A fifth to a half of the machines are of an older kind."""
    older = chance.permutation(ranks) < max(2, chance.uniform(0.2, 0.5) * ranks)
    return chance.uniform(0.03, 0.2) * older + _white(chance, steps, ranks)


KINDS: dict[str, Kind] = {
    "white": _white,
    "heavy tails": _heavy,
    "memory 0.5": _with_memory(0.5),
    "memory 0.9": _with_memory(0.9),
    "memory 0.95": _with_memory(0.95),
    "memory 0.98": _with_memory(0.98),
    "memory 0.99": _with_memory(0.99),
    "memory 0.999": _with_memory(0.999),
    "walk": _walk,
    "periodic": _periodic,
    "thermal": _thermal,
    "regimes": _regimes,
    "nodes": _nodes,
    "bursts": _bursts,
    "modes": _modes,
    "long sequences": _long,
    "drift of all": _drift,
    "uneven": _uneven,
    "skewed machines": _skewed,
    "generations": _generations,
}


def _mixture(chance: np.random.Generator, steps: int, ranks: int) -> Shares:
    """Two or three kinds at once."""
    names = chance.choice(list(KINDS), chance.integers(2, 4), replace=False)
    return np.sum([KINDS[name](chance, steps, ranks) for name in names if name not in MADE_OF_OTHERS], axis=0)


def _changing(chance: np.random.Generator, steps: int, ranks: int) -> Shares:
    """One kind, and another from some step on."""
    names = [name for name in KINDS if name not in MADE_OF_OTHERS]
    before, after = (KINDS[name](chance, steps, ranks) for name in chance.choice(names, 2, replace=False))
    at = int(steps * chance.uniform(0.2, 0.8))
    return np.concatenate([before[:at], after[at:]])


MADE_OF_OTHERS = {"mixture", "changing"}
KINDS |= {"mixture": _mixture, "changing": _changing}


class NoisyRanks:
    """A job that is told in rows, and the watch that judges it."""

    def __init__(self, ranks: int, step_s: float, ranks_per_node: int = 8, policy: JobPolicy | None = None) -> None:
        self.watch = Watch()
        self.policy = policy or JobPolicy()
        self.step = 0
        self._step_s = step_s
        self._places: Mapping[int, Place] = {rank: Place(rank, f"n{rank // ranks_per_node}") for rank in range(ranks)}
        self._rows = np.zeros((ranks, 16))
        self._rows[:, step_table.RANK] = range(ranks)
        self._rows[:, step_table.LOSS] = np.nan

    @property
    def names(self) -> int:
        """How often a rank was named."""
        return sum(group.names for group in self.watch.groups.values())

    def named(self) -> set[int]:
        """Return who is named now."""
        return {rank.rank for _, rank, _ in self.watch.held()}

    def one(self, shares: Shares) -> None:
        """Let the job make one step: by how much longer than usual each rank works, as a share of a step."""
        own_s = np.maximum(OWN + shares, 0.0) * self._step_s
        self.tell(own_s, float(own_s.max()) + (1 - OWN) * self._step_s)

    def tell(self, own_s: Shares, wall_s: float) -> None:
        """Tell one step: the own work of each rank, and how long the step was."""
        rows = self._rows
        rows[:, step_table.STEP] = self.step
        rows[:, step_table.WALL_S] = wall_s
        rows[:, step_table.WAITING_S] = wall_s - own_s
        rows[:, step_table.FORWARD_S] = own_s
        self.watch.take_rows(rows, self._places, ())
        self.watch.advance(self.policy, len(own_s))
        self.step += 1
