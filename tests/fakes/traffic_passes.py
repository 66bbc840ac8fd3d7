# SPDX-License-Identifier: Apache-2.0
"""Made-up traffic, handed to the arrival-skew engine pass by pass, as a controller would."""

from collections.abc import Callable, Iterator

import numpy as np

from megascale_ops.diagnosis.skew.detector import Skew
from megascale_ops.diagnosis.skew.matching import match
from megascale_ops.diagnosis.skew.report import SkewReport
from megascale_ops.diagnosis.skew.tables import Ints, Kind, Line, arrange
from megascale_ops.schema.policy import JobPolicy
from tests.fakes.skew_columns import code
from tests.fakes.traffic import Fault, Traffic


class Passes:
    """One job and the engine that watches it."""

    def __init__(self, traffic: Traffic, policy: JobPolicy | None = None, classes: Ints | None = None) -> None:
        self.traffic = traffic
        self.policy = policy or JobPolicy()
        self.classes = traffic.classes if classes is None else classes
        self.lines: list[Line] = []
        self.skew = Skew(self.lines)
        self._kinds: list[Kind] = []
        self.step_s = 0.0

    def run(
        self,
        steps: int,
        each: int = 5,
        *,
        fault_of: Callable[[float], Fault] | None = None,
        first_of: Callable[[float], Fault] | None = None,
    ) -> Iterator[tuple[int, SkewReport]]:
        """Make steps, ``each`` to a pass; yield how many were made and what is known then.

        Args:
            steps: how many.
            each: in a pass.
            fault_of: from the seconds of a clean step to a fault in every piece of work.
            first_of: the same, to a fault before the first collective of a step.
        """
        if not self.step_s:
            clean = Traffic(self.traffic.shape, 7, step_s=self.traffic.step_s, noise=self.traffic.noise)
            for _ in range(3):
                clean.step()
            self.step_s = float(clean.ready_s.max()) / 3
        spread = fault_of(self.step_s) if fault_of else None
        first = first_of(self.step_s) if first_of else None
        for made in range(0, steps, each):
            met = [one for _ in range(each) for one in self.traffic.step(first=first, spread=spread)]
            coded = code(self.traffic.columns(met))
            if not self._kinds:
                self.lines[:] = coded.lines
                self._kinds = arrange(coded.lines, coded.place_rank, coded.place_line)
            matched = match(coded.rows, self._kinds, len(coded.place_rank))
            assert not len(matched.waiting.place)
            self.skew.add(matched.grids, self.classes, each * self.step_s, self.step_s, self.policy)
            yield made + each, self.skew.report(self.traffic.shape.ranks)

    def named(self, steps: int, each: int = 5, **faults: Callable[[float], Fault] | None) -> set[int]:
        """Make steps; return every rank that was named at any time."""
        found: set[int] = set()
        for _, report in self.run(steps, each, **faults):
            found |= {culprit.rank for culprit in report.culprits}
        return found


def none_of(ranks: int) -> Fault:
    """Return no fault."""
    return lambda _step: np.zeros(ranks)
