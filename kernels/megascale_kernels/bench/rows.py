# SPDX-License-Identifier: Apache-2.0
"""What is derived from the times of one shape, and how a row of the table reads.

With G the product alone (the mean of before and after, for the clock drops under load), C the communication alone, S
both in series and T the fused operator:

    speed-up             S / T
    overlap efficiency   E = 1 - (T - G) / (S - G)        FLUX, 2406.06858, eq. 2: 0 is serial, 1 hides everything
    fraction of bound    max(G, C) / T                    what a perfect overlap of the two would reach, in NCCL's terms

E may pass 1 where the fused product is faster than cuBLAS, and the fraction may where copies are faster than NCCL.
"""

import math
from collections.abc import Sequence
from typing import NamedTuple

from megascale_kernels.bench.shapes import Shape
from megascale_kernels.planning.config import Config


class Row(NamedTuple):
    """The measurements of one shape; times in seconds, NaN where there is none.

    Attributes:
        shape: what was measured.
        gemm_s: cuBLAS alone, first in each turn.
        gemm_after_s: cuBLAS alone, last in each turn.
        comm_s: NCCL alone.
        serial_s: NCCL and cuBLAS in series.
        torch_s: torch's fused operator.
        ours_s: ours, in the configuration that a user would get.
        config: that configuration as `config_text` writes it.
        error: ||ours - reference|| / ||reference||, the largest over ranks, reference in float64.
        serial_error: the same of the serial path.
        note: why there is no number, when there is none.
    """

    shape: Shape
    gemm_s: float
    gemm_after_s: float
    comm_s: float
    serial_s: float
    torch_s: float
    ours_s: float
    config: str
    error: float
    serial_error: float
    note: str = ""

    @property
    def mean_gemm_s(self) -> float:
        """The product alone."""
        return (self.gemm_s + self.gemm_after_s) / 2

    @property
    def speedup(self) -> float:
        """Serial over ours."""
        return self.serial_s / self.ours_s

    @property
    def over_torch(self) -> float:
        """Torch's fused operator over ours."""
        return self.torch_s / self.ours_s

    @property
    def efficiency(self) -> float:
        """Ours: E."""
        return efficiency(self.ours_s, self.mean_gemm_s, self.serial_s)

    @property
    def torch_efficiency(self) -> float:
        """Torch's fused operator: E."""
        return efficiency(self.torch_s, self.mean_gemm_s, self.serial_s)

    @property
    def of_bound(self) -> float:
        """The fraction of max(GEMM, comm)."""
        return max(self.mean_gemm_s, self.comm_s) / self.ours_s


def efficiency(fused_s: float, gemm_s: float, serial_s: float) -> float:
    """FLUX's overlap efficiency; NaN where serial is not slower than the product alone, and nothing could be hidden."""
    return 1 - (fused_s - gemm_s) / (serial_s - gemm_s) if serial_s > gemm_s else math.nan


def config_text(config: Config | None) -> str:
    """A configuration in few letters: what differs from the default beyond tile and stages is named."""
    if config is None:
        return "serial"
    if config.kernel == "cublas":
        return f"cublas {'shards' if config.pieces is None else f'pieces={config.pieces}'}"
    text = f"{config.block_m}x{config.block_n}x{config.block_k}/{config.stages} g{config.group_m}"
    told = {"block_m", "block_n", "block_k", "stages", "group_m", "warps"}
    for name, default in Config._field_defaults.items():
        value = getattr(config, name)
        if name not in told and value != default:
            text += f" {name}={value}" if not isinstance(value, str) else f" {value}"
    return text


class Column(NamedTuple):
    """One column: heading, width (negative: flush left), and how the cell is made."""

    heading: str
    width: int
    cell: str


COLUMNS = (
    Column("shape", -10, "{r.shape.name}"),
    Column("scale", -6, "{r.shape.scale}"),
    Column("M", 5, "{r.shape.m}"),
    Column("N", 6, "{r.shape.n}"),
    Column("K", 6, "{r.shape.k}"),
    Column("GEMM", 7, "{gemm:.3f}"),
    Column("after", 7, "{after:.3f}"),
    Column("comm", 7, "{comm:.3f}"),
    Column("serial", 7, "{serial:.3f}"),
    Column("torch", 7, "{torch:.3f}"),
    Column("ours", 7, "{ours:.3f}"),
    Column("speed-up", 8, "{r.speedup:.2f}"),
    Column("/torch", 6, "{r.over_torch:.2f}"),
    Column("E", 6, "{r.efficiency:.2f}"),
    Column("E torch", 7, "{r.torch_efficiency:.2f}"),
    Column("bound", 6, "{r.of_bound:.3f}"),
    Column("error", 8, "{r.error:.1e}"),
    Column("(serial)", 8, "{r.serial_error:.1e}"),
    Column("config", -1, "{r.config}"),
)
LEGEND = (
    "times in ms; GEMM and after: cuBLAS alone, first and last of each turn; comm: NCCL alone; serial: one after the\n"
    "other; torch: its fused operator; speed-up: serial / ours; /torch: torch / ours; E: overlap efficiency,\n"
    "1 - (ours - GEMM) / (serial - GEMM); bound: max(GEMM, comm) / ours; error: from float64, ours and (serial)"
)


def heading() -> str:
    """The line above the rows."""
    return line(COLUMNS, [column.heading for column in COLUMNS])


def text_row(row: Row) -> str:
    """One row of the table."""
    if row.note:
        cells = [column.cell.format(r=row) for column in COLUMNS[:5]]
        return line(COLUMNS, [*cells, row.note])
    return line(COLUMNS, [column.cell.format(r=row, **milliseconds(row)) for column in COLUMNS])


def milliseconds(row: Row) -> dict[str, float]:
    """A row's times by the names that the columns' cells use."""
    return {
        "gemm": row.gemm_s * 1e3, "after": row.gemm_after_s * 1e3, "comm": row.comm_s * 1e3,
        "serial": row.serial_s * 1e3, "torch": row.torch_s * 1e3, "ours": row.ours_s * 1e3,
    }  # fmt: skip


def line(columns: Sequence[Column], cells: list[str]) -> str:
    """Cells under their headings; fewer cells than columns end the line early."""
    padded = [
        cell.ljust(-column.width) if column.width < 0 else cell.rjust(column.width)
        for cell, column in zip(cells, columns, strict=False)
    ]
    return "  ".join(padded).rstrip()


CSV_HEADING = (
    "shape", "scale", "m", "n", "k", "gemm_ms", "gemm_after_ms", "comm_ms", "serial_ms", "torch_ms", "ours_ms",
    "speedup", "over_torch", "efficiency", "torch_efficiency", "of_bound", "error", "serial_error", "config", "note",
)  # fmt: skip


def csv_row(row: Row) -> list[str]:
    """One row of the CSV: the same figures with more digits."""
    times = (row.gemm_s, row.gemm_after_s, row.comm_s, row.serial_s, row.torch_s, row.ours_s)
    derived = (row.speedup, row.over_torch, row.efficiency, row.torch_efficiency, row.of_bound)
    return [
        row.shape.name, row.shape.scale, *map(str, row.shape[2:]), *(f"{time_s * 1e3:.5f}" for time_s in times),
        *(f"{figure:.4f}" for figure in derived), f"{row.error:.3e}", f"{row.serial_error:.3e}", row.config, row.note,
    ]  # fmt: skip


def summary(rows: list[Row]) -> list[str]:
    """The lines below the table: geometric means, and the worst of everything."""
    good = [row for row in rows if not row.note]
    lines = []
    if good:
        slowest = min(good, key=lambda row: row.speedup)
        lines.append(
            f"over serial: {geometric_mean([row.speedup for row in good]):.3f} (geometric mean of {len(good)}), "
            f"worst {slowest.speedup:.3f} at {slowest.shape.label}"
        )
    against = [row for row in good if not math.isnan(row.torch_s)]
    if against:
        slowest = min(against, key=lambda row: row.over_torch)
        ahead = sum(row.over_torch > 1 for row in against)
        lines.append(
            f"over torch's fused operator: {geometric_mean([row.over_torch for row in against]):.3f}, ahead on "
            f"{ahead} of {len(against)}, worst {slowest.over_torch:.3f} at {slowest.shape.label}"
        )
    hidden = [row.efficiency for row in good if not math.isnan(row.efficiency)]
    if hidden:
        lines.append(f"overlap efficiency: {sum(hidden) / len(hidden):.2f} on average, worst {min(hidden):.2f}")
    failed = len(rows) - len(good)
    return [*lines, *([f"failed: {failed} of {len(rows)} shapes"] if failed else [])]


def geometric_mean(ratios: list[float]) -> float:
    """The mean of ratios; NaN of none."""
    return math.exp(sum(map(math.log, ratios)) / len(ratios)) if ratios else math.nan
