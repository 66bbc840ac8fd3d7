# SPDX-License-Identifier: Apache-2.0
"""What came out: a line for every variant and size, then ours over the best that torch can do."""

import math
from collections.abc import Sequence
from typing import NamedTuple

from megascale_kernels.bench import rows
from megascale_kernels.bench.rows import Column, geometric_mean
from megascale_kernels.bench.training.arguments import Request, Size

ALONE = "alone"  # a way without communication, no one's
LARGE = 4096  # rows: with fewer the host's time decides, above the GPU's
# Like against like: what a user gains who changes nothing but the layers.
PAIRS = (("ours-eager", "torch-eager"), ("ours-compiled", "torch-compiled"), ("ours-compiled", "torch-async"),
         ("ours-saved", "torch-compiled"), ("ours-saved", "torch-async"),
         ("ours-swiglu", "torch-compiled"), ("ours-swiglu", "torch-async"), ("ours-fused", "torch-compiled"),
         ("ours-fused", "torch-async"), ("ours-fused", "ours-swiglu"), ("ours-gated", "torch-compiled"),
         ("ours-gated", "torch-async"), ("ours-gated", "ours-fused"), ("ours-graph", "torch-graph"))  # fmt: skip


class Line(NamedTuple):
    """One variant at one size.

    Attributes:
        size: what was trained.
        variant: how.
        step_s: seconds a step; NaN when there is none.
        apart: relative distance of output and gradients from the first variant; NaN when it could not be compared.
        note: why there is no time, or what else there is to say.
    """

    size: Size
    variant: str
    step_s: float
    apart: float
    note: str

    @property
    def tokens_per_s(self) -> float:
        """Rows of the whole input a second."""
        return self.size.m / self.step_s


COLUMNS = (
    Column("model", -14, ""),
    Column("d", 6, ""),
    Column("f", 6, ""),
    Column("M", 6, ""),
    Column("variant", -16, ""),
    Column("ms/step", 9, ""),
    Column("tokens/s", 11, ""),
    Column("/torch", 7, ""),
    Column("apart", 8, ""),
    Column("note", -1, ""),
)
CSV_HEADING = ("model", "d", "f", "m", "variant", "step_ms", "tokens_per_s", "over_best_torch", "apart", "note")


def legend(request: Request) -> str:
    """What a step is, and what the columns are."""
    return (
        f"a step: forward and backward of {request.blocks} blocks x + down({request.activation}(up(rmsnorm(x)))) on "
        f"{request.ranks} ranks, all gradients, no optimizer\n"
        "step; steps one after another from an idle device, variants in turn, median over turns of the slower rank;\n"
        "/torch: the fastest of torch's variants over this one; apart: largest relative distance of output and\n"
        "gradients from the first variant"
    )


def heading() -> str:
    """The line above the rows."""
    return rows.line(COLUMNS, [column.heading for column in COLUMNS])


def best(lines: Sequence[Line], whose: str) -> Line | None:
    """The fastest variant at one size whose name begins so: torch's, ours, or the one without communication."""
    timed = [line for line in lines if line.variant.startswith(whose) and not math.isnan(line.step_s)]
    return min(timed, key=lambda line: line.step_s, default=None)


def text_line(line: Line, over_torch: float) -> str:
    """One line of the table."""
    size = line.size
    cells = [size.name, str(size.hidden), str(size.inner), str(size.m), line.variant]
    if math.isnan(line.step_s):
        return rows.line(COLUMNS, [*cells, line.note])
    figures = [f"{line.step_s * 1e3:.3f}", f"{line.tokens_per_s:.0f}", _or_dash(over_torch, ".3f")]
    return rows.line(COLUMNS, [*cells, *figures, _or_dash(line.apart, ".1e"), line.note])


def csv_line(line: Line, over_torch: float) -> list[str]:
    """The same in the CSV."""
    size = line.size
    return [
        size.name, str(size.hidden), str(size.inner), str(size.m), line.variant, f"{line.step_s * 1e3:.5f}",
        f"{line.tokens_per_s:.1f}", f"{over_torch:.4f}", f"{line.apart:.3e}", line.note,
    ]  # fmt: skip


def over_torch(lines: Sequence[Line]) -> list[float]:
    """Of each line of one size: the best of torch over it."""
    base = best(lines, "torch")
    return [base.step_s / line.step_s if base else math.nan for line in lines]


def summary(sizes: Sequence[Sequence[Line]]) -> list[str]:
    """The lines below the table.

    Args:
        sizes: the lines of each size that was measured.
    """
    out = []
    for least in (LARGE, 0):
        told = f"M >= {least}" if least else "all M"
        some = [lines for lines in sizes if lines and lines[0].size.m >= least]
        out += _best_against_best(some, told) + _bound(some, told)
        for ours, torchs in PAIRS:
            ratios = [ratio for lines in some for ratio in _ratio(lines, ours, torchs)]
            if ratios:
                out.append(f"{told}: {ours} over {torchs}: {geometric_mean(ratios):.3f} (of {len(ratios)})")
    return out


def _best_against_best(some: Sequence[Sequence[Line]], told: str) -> list[str]:
    pairs = [(best(lines, "ours"), best(lines, "torch")) for lines in some]
    found = [(torchs.step_s / ours.step_s, ours, torchs) for ours, torchs in pairs if ours and torchs]
    if not found:
        return []
    ratio, ours, torchs = min(found)
    return [
        (
            f"{told}: the best of ours over the best of torch's: {geometric_mean([one for one, _, _ in found]):.3f} "
            f"(geometric mean of {len(found)}), worst {ratio:.3f} at {ours.size.label} ({ours.variant}, "
            f"{torchs.variant})"
        )
    ]


def _bound(some: Sequence[Sequence[Line]], told: str) -> list[str]:
    """How far the best ways are from products and pointwise parts that never wait."""
    reached = []
    for whose, named in (("torch", "torch's"), ("ours", "ours")):
        pairs = [(best(lines, ALONE), best(lines, whose)) for lines in some]
        ratios = [other.step_s / alone.step_s for alone, other in pairs if alone and other]
        if ratios:
            reached.append(f"{geometric_mean(ratios):.3f} over the best of {named} (of {len(ratios)})")
    return [f"{told}: the same without communication: {', '.join(reached)}"] if reached else []


def _ratio(lines: Sequence[Line], ours: str, torchs: str) -> list[float]:
    times = {line.variant: line.step_s for line in lines}
    ratio = times.get(torchs, math.nan) / times.get(ours, math.nan)
    return [] if math.isnan(ratio) else [ratio]


def _or_dash(figure: float, form: str) -> str:
    return "-" if math.isnan(figure) else format(figure, form)
