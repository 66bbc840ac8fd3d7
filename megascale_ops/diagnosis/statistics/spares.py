# SPDX-License-Identifier: Apache-2.0
"""How many spare nodes a job needs, from how often nodes fail and how long they are out.

Nodes fail independently, each at ``rate`` a day, and are out for ``out_s`` each time. So a node is out at a moment with
probability p = 1 - exp(-rate * out), and of n nodes k are out with the binomial's probability. The number of spares is
the smallest with which all places are filled 99 % of the time. Faults that take several nodes at once (a switch, a
rack) are no part of it.

Pure: counts in, a number with its inputs out.
"""

import math
from typing import NamedTuple

DAY_S = 86_400.0
ENOUGH = 0.99
# Of no failure in T node-days, 3 / T is the rate that would have shown one with 95 %: the "rule of three".
RULE_OF_THREE = 3.0


class Spares(NamedTuple):
    """The answer and what it rests on. ``shares[k]``: how often k spares are enough, 0..1, up to the answer."""

    spares: int
    nodes: int
    rate: float  # failures a node and day
    is_bound: bool  # none has failed yet: the rate is the upper bound
    out_s: float
    p_out: float  # of one node, at any moment
    shares: tuple[float, ...]


def rate_of(failures: int, node_days: float) -> tuple[float, bool]:
    """Return failures a node and day, and whether that is only an upper bound since none was seen.

    Raises:
        ValueError: nothing was watched.
    """
    if node_days <= 0.0:
        raise ValueError("no node was watched yet, so that no rate is known")
    return (failures / node_days, False) if failures else (RULE_OF_THREE / node_days, True)


def spares_for(nodes: int, rate: float, out_s: float, *, is_bound: bool = False, enough: float = ENOUGH) -> Spares:
    """Return how many spares ``nodes`` need so that all places are filled with probability ``enough``.

    Args:
        nodes: places of the job, 1 or more.
        rate: failures a node and day.
        out_s: how long a node is out each time, seconds.
        is_bound: the rate is only an upper bound.
        enough: 0..1, below 1.
    """
    p_out = -math.expm1(-rate * out_s / DAY_S)
    shares: list[float] = []
    total = 0.0
    for k in range(nodes + 1):
        total += _binomial(nodes, k, p_out)
        shares.append(min(1.0, total))
        if total >= enough or k == nodes:
            break
    return Spares(len(shares) - 1, nodes, rate, is_bound, out_s, p_out, tuple(shares))


def _binomial(n: int, k: int, p: float) -> float:
    """Return the probability of k among n; by logarithms, for n of a hundred thousand overflows otherwise."""
    if p <= 0.0 or p >= 1.0:
        return float(k == (n if p >= 1.0 else 0))
    log_choose = math.lgamma(n + 1) - math.lgamma(k + 1) - math.lgamma(n - k + 1)
    return math.exp(log_choose + k * math.log(p) + (n - k) * math.log1p(-p))
