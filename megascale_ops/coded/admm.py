# SPDX-License-Identifier: Apache-2.0
"""One agent's part of coded stochastic incremental ADMM: what a turn makes of its variables and of the token.

Agents hold data of their own and look for one x that minimises the sum of their costs f_i. A token z goes round; the
agent that has it takes a stochastic gradient at its own x_i, which its edge workers compute by a gradient code, so that
the slowest need not be waited for, and moves x_i, its multiplier y_i and z. Chen, Ye, Xiao, Skoglund and Poor, "Coded
Stochastic ADMM for Decentralized Consensus Optimization With Edge Computing", IEEE Internet of Things Journal, 2021
(arXiv 2010.00914). At turn k (from 1), with tau = c_tau * sqrt(k) and gamma = c_gamma / sqrt(k):

    x' = (rho * z + tau * x + y - gradient) / (rho + tau)
    y' = y + rho * gamma * (z - x')
    z' = z + ((x' - x) - (y' - y) / rho) / agents

The first is the minimum of the linearised augmented Lagrangian with a proximal term; the last keeps z the mean of
x_i - y_i / rho over all agents, which all begin at zero.
"""

import math

import numpy as np
import numpy.typing as npt

from megascale_ops.errors import UsageError

Vector = npt.NDArray[np.float64]


class Agent:
    """The variables of one agent.

    Args:
        size: numbers of x.
        agents: how many there are.
        rho: the penalty for disagreeing with the token; larger: smaller and steadier moves.
        c_tau: of the proximal term; with ``rho`` below the cost's curvature the token runs away. The defaults are for
            costs whose curvature is near one, as of least squares over samples of unit variance.
        c_gamma: of the multiplier's step.
        decays: tau and gamma change with the turn, as stochastic gradients need; else they stay.

    Raises:
        UsageError: a number can't be.
    """

    def __init__(
        self,
        size: int,
        agents: int,
        *,
        rho: float = 1.0,
        c_tau: float = 1.0,
        c_gamma: float = 1.0,
        decays: bool = True,
    ) -> None:
        if size < 1 or agents < 1:
            raise UsageError(f"{agents} agents with {size} numbers can't agree on anything: take one or more of both")
        if not (0.0 < rho < math.inf and 0.0 <= c_tau < math.inf and 0.0 < c_gamma < math.inf):
            raise UsageError(f"rho {rho:g}, c_tau {c_tau:g} and c_gamma {c_gamma:g} must be positive numbers")
        self.x: Vector = np.zeros(size)
        self.y: Vector = np.zeros(size)
        self._agents, self._rho, self._c_tau, self._c_gamma, self._decays = agents, rho, c_tau, c_gamma, decays

    def turn(self, number: int, token: Vector, gradient: Vector) -> Vector:
        """Take one turn and return the token as it goes on.

        Args:
            number: of the turn over all agents, from 1.
            token: z, (size,).
            gradient: of this agent's cost at its x, or of a mini-batch of it, (size,).
        """
        root = math.sqrt(number) if self._decays else 1.0
        tau, gamma = self._c_tau * root, self._c_gamma / root
        x = (self._rho * token + tau * self.x + self.y - gradient) / (self._rho + tau)
        y = self.y + self._rho * gamma * (token - x)
        moved: Vector = token + ((x - self.x) - (y - self.y) / self._rho) / self._agents
        self.x, self.y = x, y
        return moved
