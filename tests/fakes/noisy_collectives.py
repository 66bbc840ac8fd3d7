# SPDX-License-Identifier: Apache-2.0
"""The job of ``noisy_ranks`` as its collectives show it: one all-reduce a step, and the arrival-skew engine on it."""

import numpy as np

from megascale_ops.diagnosis.skew.detector import Skew
from megascale_ops.diagnosis.skew.tables import Grid, Kind, Line
from megascale_ops.schema.policy import JobPolicy
from tests.fakes.noisy_ranks import OWN, Shares

# Of a step: what moving the data takes.
_MOVING = 0.02


class NoisyCollectives:
    """A job whose ranks meet once a step, a pass each step, and the engine that judges who comes late.

    Attributes:
        names: how often a rank was named.
    """

    def __init__(self, ranks: int, step_s: float, policy: JobPolicy | None = None) -> None:
        self.names = 0
        self._skew = Skew([Line("world", "all_reduce")])
        self._policy = policy or JobPolicy()
        self._step_s = step_s
        self._step = 0
        places = np.arange(ranks, dtype=np.int32)[None]
        self._kind = Kind("all_reduce", 20, np.zeros(1, np.int32), places, places, 1.0)
        self._classes = np.zeros(ranks, np.int32)
        self._named: set[int] = set()

    def named(self) -> set[int]:
        """Return who is named now."""
        return set(self._named)

    def one(self, shares: Shares) -> None:
        """Let the job make one step: by how much longer than usual each rank works, as a share of a step."""
        own_s = np.maximum(OWN + shares, 0.0) * self._step_s
        took_s = own_s.max() - own_s + _MOVING * self._step_s
        took, own = (values.astype(np.float32)[None, :, None] for values in (took_s, own_s))
        grid = Grid(self._kind, np.array([self._step]), took, own, whole=True)
        span_s = float(own_s.max()) + (1 - OWN) * self._step_s
        self._skew.add([grid], self._classes, span_s, span_s, self._policy)
        named = {culprit.rank for culprit in self._skew.report().culprits}
        self.names += len(named - self._named)
        self._named = named
        self._step += 1
