# SPDX-License-Identifier: Apache-2.0
"""How a row of the table of layers reads, and what all of them come to."""

import math
from collections.abc import Callable, Iterable

from megascale_kernels.bench.moe.measure import STEPS, MoeRow

LEGEND_OF_TRAINING = """\
Whole layers, forward and backward: experts divided among the ranks (/TP2: and each cut among two), SwiGLU experts of
three matrices, tokens of all ranks; gradients of tokens, gates and both weights. Milliseconds, the maximum over ranks,
the median of rounds, in turn.
  products  torch._grouped_mm, the two products and their four gradients on rows that lie as they should, nothing else
  bytes     tokens to each peer and back by copy engine, twice
  plain     index, all_to_all_single, grouped products, all_to_all_single, index back, index_add in fp32; autograd
  tuned     the serial path without waits of the host (moe/sync_free.py): all-gather, sort, Triton permute, grouped
            product, Triton SwiGLU, grouped product, Triton reduction, reduce-scatter; the same
            backwards, one kernel for the gradients of SwiGLU and gates
  kernels   route + dispatch + combine, and the overlapped backward, as the model has it or --config
  ours      the operator by itself: the way that the first calls' forwards found the fastest, named behind the row
  of bound  max(products, bytes) / ours"""
LEGEND = """\
Whole layers, forward: experts divided among the ranks (/TP2: and each cut among two), SwiGLU experts of three
matrices, tokens of all ranks.
Milliseconds, the maximum over ranks, the median of rounds, contenders in turn.
  products  torch._grouped_mm, both products on rows that lie as they should, nothing else
  bytes     tokens to each peer and back by copy engine
  plain     index, all_to_all_single, grouped products, all_to_all_single, index back, index_add in fp32
  tuned     the serial path without waits of the host (moe/sync_free.py): all-gather, sort, Triton permute, grouped
            product, Triton SwiGLU, grouped product, Triton reduction, reduce-scatter
  kernels   route + dispatch + combine, as the model has it or --config; below these three names their own times
  ours      the operator by itself: the way that its first calls found the fastest, named behind the row
  of bound  max(products, bytes) / ours"""
TIMES = ("products", "bytes", "plain", "tuned", "kernels", "ours", *STEPS)
HEADING = (
    f"{'layer':<18}{'E':>4}{'k':>3}{'H':>6}{'I':>6}{'tokens':>7}{'std':>6}"
    + "".join(f"{name:>9}" for name in TIMES)
    + f"{'/plain':>8}{'/tuned':>8}{'of bound':>9}{'error':>9}"
)
CSV_HEADING = (
    "layer", "experts", "top_k", "hidden", "inner", "tokens", "std", "shards", *(f"{name}_s" for name in TIMES),
    "error", "config", "note", "more", "way",
)  # fmt: skip


def text_row(row: MoeRow) -> str:
    """One layer as a line."""
    shape, ours = row.shape, row.of("ours")
    name = shape.name + f"/TP{shape.shards}" * (shape.shards > 1)
    text = f"{name:<18}{shape.experts:>4}{shape.top_k:>3}{shape.hidden:>6}{shape.inner:>6}{shape.tokens:>7}"
    text += f"{shape.skew:>6g}"
    text += "".join(f"{row.of(name) * 1e3:>9.3f}" for name in TIMES)
    text += f"{row.of('plain') / ours:>8.2f}{row.of('tuned') / ours:>8.2f}{row.bound / ours:>9.2f}{row.error:>9.1e}"
    extra = {name: value for name, value in row.seconds.items() if name not in TIMES}
    text += "".join(f"  {name} {value * 1e3:.3f}" for name, value in extra.items())
    text += f"  by {row.way}" if row.way else ""
    return text + (f"  {row.note}" if row.note else "")


def csv_row(row: MoeRow) -> list[str]:
    """One layer as cells."""
    extra = " ".join(f"{name}={value:.6g}" for name, value in row.seconds.items() if name not in TIMES)
    times = [f"{row.of(name):.6g}" for name in TIMES]
    return [*(str(value) for value in row.shape), *times, f"{row.error:.3g}", row.config, row.note, extra, row.way]


def mean(values: Iterable[float]) -> float:
    """The geometric mean; NaN of nothing."""
    found = [value for value in values if value > 0]
    return math.exp(sum(map(math.log, found)) / len(found)) if found else math.nan


def summary(rows: list[MoeRow]) -> list[str]:
    """Geometric means and the worst."""
    measured = [row for row in rows if row.of("ours") > 0]
    ratios: dict[str, Callable[[MoeRow], float]] = {
        "over plain": lambda row: row.of("plain") / row.of("ours"),
        "over tuned": lambda row: row.of("tuned") / row.of("ours"),
        "over our kernels": lambda row: row.of("kernels") / row.of("ours"),
        "of bound": lambda row: row.bound / row.of("ours"),
    }
    series = sum(row.way == "series" for row in measured)
    lines = [f"{len(measured)} of {len(rows)} layers measured, {series} of them run in series"]
    for name, ratio in ratios.items():
        if measured:
            worst = min(measured, key=ratio)
            lines.append(
                f"{name}: {mean(map(ratio, measured)):.3f} in the geometric mean, at worst {ratio(worst):.3f} "
                f"({worst.shape.label})"
            )
    return lines
