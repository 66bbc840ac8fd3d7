# SPDX-License-Identifier: Apache-2.0
"""Random products split over ranks, their float64 results, and how far a correct kernel may be from those.

The bound is what rounding allows and no more: half a unit in the last place for every rounding to the output's type
(the result, and each partial that travels), and a little for fp32 sums.
"""

from typing import NamedTuple

import torch
from megascale_kernels.memory.operands import Weight
from megascale_kernels.planning.config import Config
from torch import Tensor

FP32_SLACK = 2.0**-20  # of the sum of absolute terms: K and W are small here
TINY = 1e-6  # fp16 has subnormals of 6e-8


class Case(NamedTuple):
    """An operator's sizes and how it is run.

    Attributes:
        ranks: how many.
        m: rows per rank (of the gathered input, or of the scattered output).
        n: columns of the output.
        k: what is summed over, on one rank.
        dtype: of everything but the sum.
        is_nk: the weight lies as [N, K].
        bias: there is one.
        config: tiles and carrier.
        counted: the device counts the launches.
    """

    ranks: int
    m: int
    n: int
    k: int
    dtype: torch.dtype = torch.bfloat16
    is_nk: bool = True
    bias: bool = False
    config: Config = Config(16, 32, 32, group_m=2)
    counted: bool = False


class Operands(NamedTuple):
    """What one rank multiplies."""

    x: Tensor
    weight: Weight
    bias: Tensor | None

    @property
    def terms(self) -> Tensor:
        """The exact product."""
        return self.x.double() @ self.w

    @property
    def magnitude(self) -> Tensor:
        """The sums of absolute terms."""
        return self.x.double().abs() @ self.w.abs()

    @property
    def w(self) -> Tensor:
        """The logical weight, [K, N]."""
        matrix = self.weight.matrix.double()
        return matrix.T if self.weight.is_nk else matrix


def operands(case: Case, rows: int, seed: int) -> list[Operands]:
    """Random operands of every rank; a scattered sum has one bias for all."""
    generator = torch.Generator().manual_seed(seed)

    def random(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator).to(case.dtype)

    bias = random(case.n) if case.bias else None
    made = []
    for _ in range(case.ranks):
        matrix = random(case.n, case.k) if case.is_nk else random(case.k, case.n)
        weight = Weight(matrix, is_nk=case.is_nk, k_size=case.k, n_size=case.n)
        made.append(Operands(random(rows, case.k), weight, bias))
    return made


def gathered_error(out: Tensor, rank: int, given: list[Operands]) -> float:
    """How far a rank's all-gather + GEMM is off, in units of what rounding allows; NaN counts as infinitely far."""
    whole = Operands(torch.cat([one.x for one in given]), given[rank].weight, given[rank].bias)
    return _error(out, whole.terms, whole.magnitude, whole.bias, torch.zeros_like(whole.terms))


def summed_error(out: Tensor, rows: slice, given: list[Operands]) -> float:
    """The same of rows of a sum over ranks, whose partials travel in the output's type."""
    terms = torch.stack([one.terms[rows] for one in given])
    magnitude = sum((one.magnitude[rows] for one in given), torch.zeros_like(terms[0]))
    return _error(out, terms.sum(0), magnitude, given[0].bias, terms.abs().sum(0))


def _error(out: Tensor, exact: Tensor, magnitude: Tensor, bias: Tensor | None, travelled: Tensor) -> float:
    if bias is not None:
        exact, magnitude = exact + bias.double(), magnitude + bias.double().abs()
    roundoff = torch.finfo(out.dtype).eps / 2
    allowed = roundoff * (exact.abs() + travelled) * (1 + 2 * roundoff) + FP32_SLACK * magnitude + TINY
    assert out.shape == exact.shape
    return float(((out.double() - exact).abs() / allowed).nan_to_num(nan=float("inf")).max())
