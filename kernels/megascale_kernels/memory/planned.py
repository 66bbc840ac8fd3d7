# SPDX-License-Identifier: Apache-2.0
"""What a workspace has come to know of the shapes that pass through it; forgotten whole."""

from collections.abc import Callable
from typing import Any, TypeVar

from megascale_kernels.memory.symmetric_memory import CLOCKS

# A server whose M takes every value must not keep one of each.
MOST_PLANS = 2048

Plan = TypeVar("Plan")


class Planned:
    """Plans and contests.

    Attributes:
        plans: what was made for a kind of calls, by all that it depends on.
        contests: what finds out which way serves a shape (`autotune/contest.py`), None where that is known.
        free_clocks: the places where no contest notes the GPU's clock.
    """

    def __init__(self) -> None:
        self.plans: dict[object, Any] = {}
        self.contests: dict[Any, Any] = {}
        self.free_clocks = list(range(CLOCKS))

    def get(self, key: object, make: Callable[[], Plan]) -> Plan:
        """What was made for `key`, or is made now; what it holds may not change with anything but the key."""
        made: Plan | None = self.plans.get(key)
        if made is None:
            made = make()
            if len(self.plans) >= MOST_PLANS:
                self.plans.clear()
            self.plans[key] = made
        return made
