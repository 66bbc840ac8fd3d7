# SPDX-License-Identifier: Apache-2.0
"""The faults of one simulated run: drawn beforehand from the laws, and what became of each, the truth."""

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING, NamedTuple

from megascale_ops.errors import UsageError
from megascale_ops.sim.kinds import KINDS
from megascale_ops.sim.laws import DAY_S, LAWS
from megascale_ops.sim.settings import Settings

if TYPE_CHECKING:
    import numpy as np

# 72 min in the mean (Greyhound, ATC'25); by 10 to 50 % slower: less is seldom looked for.
SLOW_MEAN_S, SLOW_LEAST, SLOW_MOST = 4320.0, 0.10, 0.50


class Fault(NamedTuple):
    """One fault as it was drawn; ``at_s`` counts from the start, ``place`` is in 0..1 of all ranks."""

    at_s: float
    kind: str
    cause: str = ""
    law: str = ""
    place: float = 0.0
    repair_s: float = 0.0  # how long its machine stays bad
    lasts_s: float = 0.0  # of a slow rank
    slower: float = 0.0  # by which share of its own work

    def rank_of(self, ranks: int) -> int:
        """Return the rank that it hits."""
        return min(ranks - 1, int(self.place * ranks))


class Truth:
    """A fault that happened: when and to whom. Owned by the world.

    A machine that stays slow over restarts has other ranks in later rounds: nodes are numbered anew in each.
    """

    __slots__ = ("at_s", "fault", "node", "rank", "ranks", "step")

    def __init__(self, fault: Fault, at_s: float, rank: int, node: str, step: int, round_: int) -> None:
        self.fault = fault
        self.at_s = at_s
        self.rank = rank
        self.ranks = {round_: rank}  # by round, as long as it lasts and its machine takes part
        self.node = node
        self.step = step  # the last that was finished before it


def draw(settings: Settings, chance: "np.random.Generator") -> list[Fault]:
    """Return the faults of all laws, in order of time."""
    found: list[Fault] = []
    for name in settings.faults:
        law = LAWS[name]
        expected = law.events_a_day(settings.ranks, settings.ranks_per_node) * settings.duration_s / DAY_S
        weights = [cause.weight for cause in law.causes]
        for _ in range(int(chance.poisson(expected))):
            cause = law.causes[_drawn(chance, weights)]
            kind = cause.shows[_drawn(chance, [weight for _, weight in cause.shows])][0]
            found.append(
                Fault(
                    at_s=float(chance.uniform(0.0, settings.duration_s)),
                    kind=kind,
                    cause=cause.name,
                    law=law.name,
                    place=float(chance.random()),
                    repair_s=cause.repair_s,
                    lasts_s=float(chance.exponential(SLOW_MEAN_S)) if kind == "slow" else 0.0,
                    slower=float(chance.uniform(SLOW_LEAST, SLOW_MOST)) if kind == "slow" else 0.0,
                )
            )
    return sorted(found)


def _drawn(chance: "np.random.Generator", weights: Sequence[float]) -> int:
    """Return which of these was drawn."""
    left = float(chance.random()) * sum(weights)
    for number, weight in enumerate(weights):
        left -= weight
        if left < 0:
            return number
    return len(weights) - 1


def read_faults(texts: Sequence[str]) -> list[Fault]:
    """Return faults that a person names: ``KIND@HOURS`` or ``KIND@HOURS:RANK_SHARE``, as in ``hang@1.5:0.25``.

    Raises:
        UsageError: one of them can't be read.
    """
    found = []
    for text in texts:
        kind, at, rest = text.partition("@")
        hours, _, place = rest.partition(":")
        try:
            at_s, where = float(hours) * 3600.0, float(place or 0.5)
        except ValueError:
            at_s = -1.0
            where = 0.0
        if not at or not 0.0 <= at_s < math.inf or not 0.0 <= where < 1.0:
            raise UsageError(f"fault {text!r} can't be read: give KIND@HOURS or KIND@HOURS:PLACE, as in hang@1.5:0.25")
        if kind not in KINDS:
            raise UsageError(f"there is no kind of fault {kind!r}: take one of {', '.join(KINDS)}")
        slow = (SLOW_MEAN_S, 0.3) if kind == "slow" else (0.0, 0.0)
        repair_s = DAY_S if kind in ("gpu_error", "host_lost") else 0.0
        found.append(Fault(at_s, kind, "named", "", where, repair_s, *slow))
    return sorted(found)
