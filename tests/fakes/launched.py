# SPDX-License-Identifier: Apache-2.0
"""An operator launched several times in a row on emulated ranks, with what went in and what came out."""

from typing import Any, NamedTuple

import torch
from megascale_kernels.autotune.trial import launcher
from torch import Tensor

from tests.fakes.emulated_ranks import EmulatedRanks
from tests.fakes.products import Case, Operands, gathered_error, operands, summed_error

LAUNCHES = 3  # the third uses the slot of the first


class Launched(NamedTuple):
    """What happened.

    Attributes:
        operator: "ag_gemm", "gemm_rs" or "gemm_ar".
        case: sizes and configuration.
        ranks: the ranks, with their world.
        given: per launch and rank the operands.
        outs: per launch and rank the output.
    """

    operator: str
    case: Case
    ranks: EmulatedRanks
    given: list[list[Operands]]
    outs: list[list[Tensor]]

    @property
    def worst(self) -> float:
        """The largest error of all launches and ranks, in units of what rounding allows."""
        return max(
            self._error(rank, given, out)
            for given, row in zip(self.given, self.outs, strict=True)
            for rank, out in enumerate(row)
        )

    def _error(self, rank: int, given: list[Operands], out: Tensor) -> float:
        if self.operator == "ag_gemm":
            return gathered_error(out, rank, given)
        m = self.case.m
        rows = slice(rank * m, (rank + 1) * m) if self.operator == "gemm_rs" else slice(None)
        return summed_error(out, rows, given)

    def same_bits(self, other: "Launched") -> bool:
        """Whether all outputs are equal to another's, bit by bit."""
        pairs = zip(self.outs, other.outs, strict=True)
        return all(torch.equal(a, b) for mine, theirs in pairs for a, b in zip(mine, theirs, strict=True))


def launched(operator: str, case: Case, *, launches: int = LAUNCHES, **options: Any) -> Launched:  # noqa: ANN401
    """Launch on all ranks, without a pause in between, over poisoned memory; `options` are those of `EmulatedRanks`."""
    ranks = EmulatedRanks(case.ranks, case.dtype, counted=case.counted, **options)
    made = [prepared(operator, case, seed) for seed in range(launches)]
    for given, outs in made:
        put(operator, case, ranks, given, outs)
    ranks.run()
    return Launched(operator, case, ranks, [given for given, _ in made], [outs for _, outs in made])


def prepared(operator: str, case: Case, seed: int) -> tuple[list[Operands], list[Tensor]]:
    """Operands and poisoned outputs of every rank."""
    rows_in = case.m * case.ranks if operator == "gemm_rs" else case.m
    rows_out = case.m * case.ranks if operator == "ag_gemm" else case.m
    outs = [torch.full((rows_out, case.n), float("nan"), dtype=case.dtype) for _ in range(case.ranks)]
    return operands(case, rows_in, seed), outs


def put(
    operator: str,
    case: Case,
    ranks: EmulatedRanks,
    given: list[Operands],
    outs: list[Tensor],
    only: list[int] | None = None,
) -> list[Any]:
    """Call the operator's launcher on all ranks, or only some; what it returned."""
    launch = launcher(operator)

    def host(workspace: Any) -> Any:  # noqa: ANN401 (an emulated workspace)
        mine = given[workspace.rank]
        return launch(mine.x, mine.weight, outs[workspace.rank], mine.bias, workspace, case.config)

    return ranks.call(host, only)
