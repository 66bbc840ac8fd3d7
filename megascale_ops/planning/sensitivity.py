# SPDX-License-Identifier: Apache-2.0
"""What if an input is otherwise: the best choice then, and what it costs to have kept to the plan. Pure."""

from collections.abc import Iterator
from typing import NamedTuple

from megascale_ops.planning.choices import Choices, choose, lost
from megascale_ops.planning.inputs import Job

FACTORS = (0.5, 2.0)
_SHARES = ("hang_share", "machine_share")


class Otherwise(NamedTuple):
    """One input at another value.

    Attributes:
        name: the input.
        value: what it is then.
        best: the choices that would be the best.
        best_lost: share of time lost with these.
        kept_lost: the same with the choices of the plan.
        regret: what keeping to the plan costs, of time and idle GPUs together; 0 or more.
    """

    name: str
    value: float
    best: Choices
    best_lost: float
    kept_lost: float
    regret: float


def otherwise(job: Job, plan: Choices) -> Iterator[Otherwise]:
    """Yield each input at half and at twice its value; those that are 0 and those that can't be twice as much are out.

    Args:
        job: as it is planned for.
        plan: the choices made for it.
    """
    for name, value in job._asdict().items():
        for factor in FACTORS if value else ():
            changed = min(1.0, value * factor) if name in _SHARES else value * factor
            if changed == value or (name == "nodes" and changed < 1.0):
                continue
            other = job._replace(**{name: changed})
            best = choose(other)
            there, kept = lost(other, best), lost(other, plan)
            yield Otherwise(name, changed, best, there.time, kept.time, max(0.0, kept.price - there.price))
