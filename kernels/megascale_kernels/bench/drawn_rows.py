# SPDX-License-Identifier: Apache-2.0
"""The table of shapes that were drawn at random: its rows and its columns.

Beside what every table has there is the weight's layout, our kernel where the operator chose the serial path, and what
a call costs the host. "ours" is the operator as a user calls it, its fall-backs included.
"""

import math
from collections.abc import Mapping, Sequence
from statistics import median
from typing import NamedTuple

from megascale_kernels.bench import rows
from megascale_kernels.bench.drawn import ALL_M, Drawn, Rows
from megascale_kernels.bench.published import MODELS
from megascale_kernels.bench.report import Facts, Report
from megascale_kernels.bench.rows import Column, Row
from megascale_kernels.planning.config import Config

SERIAL = rows.config_text(None)


class HostTimes(NamedTuple):
    """Seconds that one call holds the host, on a stream that is not full; NaN where it was not measured."""

    serial_s: float = math.nan
    torch_s: float = math.nan
    ours_s: float = math.nan


class Foretold(NamedTuple):
    """What the cost model says before the first call, seconds; NaN where no kernel can serve the shape."""

    kernel_s: float = math.nan
    serial_s: float = math.nan


class DrawnRow(NamedTuple):
    """The measurements of one shape.

    Attributes:
        drawn: what was measured.
        row: the figures that every table has; its `config` is "serial" where the operator took the serial path.
        kernel_s: where it did, our kernel in the configuration it would have taken; NaN elsewhere, and where no kernel
            can serve the shape.
        kernel_config: that configuration as `config_text` writes it, "" without one.
        host: what a call costs the host.
        foretold: what the cost model said.
        ways: what the contest of the shape measured, the fastest first, "" where there was none.
    """

    drawn: Drawn
    row: Row
    kernel_s: float = math.nan
    kernel_config: str = ""
    host: HostTimes = HostTimes()
    foretold: Foretold = Foretold()
    ways: str = ""

    @property
    def is_serial(self) -> bool:
        """Whether the operator chose the serial path."""
        return self.row.config == SERIAL

    @property
    def is_in_pieces(self) -> bool:
        """Whether it took cuBLAS's products with copies between them."""
        return self.row.config.startswith("cublas")

    @property
    def share(self) -> float:
        """Communication alone, as a share of the serial path."""
        return self.row.comm_s / self.row.serial_s

    @property
    def lost(self) -> float:
        """How many times as fast the path that the operator did not choose is; NaN where there is none."""
        return self.row.serial_s / self.kernel_s if self.is_serial else self.row.ours_s / self.row.serial_s


def _columns() -> tuple[Column, ...]:
    known = {column.heading: column for column in rows.COLUMNS}
    return (
        Column("model", -18, "{r.shape.name}"),
        Column("TP", -4, "{r.shape.scale}"),
        Column("w", -2, "{d.drawn.layout}"),
        *(known[name] for name in ("M", "N", "K", "GEMM", "after", "comm", "serial", "torch", "ours")),
        Column("kernel", 7, "{kernel}"),
        *(known[name] for name in ("speed-up", "/torch", "E", "E torch", "bound", "error", "(serial)")),
        Column("us(serial)", 10, "{host[0]}"),
        Column("us(torch)", 9, "{host[1]}"),
        Column("us(ours)", 8, "{host[2]}"),
        known["config"],
    )


COLUMNS = _columns()
NAMED = 6  # columns that say which shape it is
LEGEND = (
    "ours: the operator as it is called, with the path that it chooses; kernel: our kernel where that was the serial\n"
    "path; TP ending in ~: one size is not the model's; w: the weight is kept [N, K] or [K, N]; us: microseconds that\n"
    "one call holds the host\n" + rows.LEGEND
)
CSV_HEADING = (
    *rows.CSV_HEADING, "layout", "kernel_ms", "kernel_config", "host_serial_us", "host_torch_us", "host_ours_us",
    "ways_ms",
)  # fmt: skip


def begin(report: Report, head: Facts, count: int, seed: int, between: Rows = ALL_M) -> None:
    """The head of a table and of its CSV: the same seed, number of GPUs and operator draw the same shapes."""
    said = (
        f"{count} shapes at random, seed {seed}: M {between.least} to {between.most}, sizes of {len(MODELS)} models\n"
    )
    report.begin(head, said + LEGEND, rows.line(COLUMNS, [column.heading for column in COLUMNS]), CSV_HEADING)


def text_row(found: DrawnRow) -> str:
    """One row of the table; what was not measured is a dash."""
    row = found.row
    if row.note:
        return rows.line(COLUMNS, [*(column.cell.format(r=row, d=found) for column in COLUMNS[:NAMED]), row.note])
    cells = {
        "kernel": _or_dash(found.kernel_s * 1e3, ".3f"),
        "host": [_or_dash(seconds * 1e6, ".0f") for seconds in found.host],
    }
    return rows.line(
        COLUMNS, [column.cell.format(r=row, d=found, **cells, **rows.milliseconds(row)) for column in COLUMNS]
    )


def csv_row(found: DrawnRow) -> list[str]:
    """One row of the CSV."""
    host = [f"{seconds * 1e6:.2f}" for seconds in found.host]
    return [
        *rows.csv_row(found.row), found.drawn.layout, f"{found.kernel_s * 1e3:.5f}", found.kernel_config, *host,
        found.ways,
    ]  # fmt: skip


def ways_text(turns: Mapping[Config | None, Sequence[float]]) -> str:
    """What a contest measured of each way, ms, the fastest first: the median of its turns, and (all of them)."""
    middle = {way: median(seconds) for way, seconds in turns.items()}
    told = []
    for way in sorted(middle, key=middle.__getitem__):
        each = " ".join(f"{seconds * 1e3:.4f}" for seconds in turns[way])
        told.append(f"{rows.config_text(way)}: {middle[way] * 1e3:.4f} ({each})")
    return "; ".join(told)


def _or_dash(figure: float, form: str) -> str:
    return "-" if math.isnan(figure) else format(figure, form)
