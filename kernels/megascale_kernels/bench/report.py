# SPDX-License-Identifier: Apache-2.0
"""The table on the screen and in a file, and the CSV beside it, written row by row: what was measured is never lost."""

import csv
import io
from collections.abc import Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import NamedTuple

from megascale_kernels.bench import rows
from megascale_kernels.bench.rows import Row

TABLE_SUFFIX = ".csv"


class Facts(NamedTuple):
    """Where the numbers come from.

    Attributes:
        command: what was typed.
        gpu: name and number of GPUs.
        libraries: names and versions.
        date: when.
    """

    command: str
    gpu: str
    libraries: str
    date: str

    def lines(self) -> list[str]:
        """The head of every result."""
        return [f"$ {self.command}", f"{self.gpu}; {self.libraries}; {self.date}", ""]


def facts(command: str, ranks: int) -> Facts:
    """What this process stands on."""
    import torch

    from megascale_kernels.autotune.store import versions

    libraries = versions().replace(" | ", ", ")
    gpus = min(ranks, torch.cuda.device_count())
    gpu = f"{gpus} x {torch.cuda.get_device_name()}" if gpus else "no GPU"
    if gpus < ranks:
        gpu += f", shared by {ranks} ranks"
    return Facts(command, gpu, libraries, datetime.now(UTC).strftime("%Y-%m-%d %H:%M UTC"))


class Report:
    """Lines to the screen and, where a file was named, into it.

    Args:
        out: the text file; a table's CSV goes beside it with the ending .csv. None writes to the screen only.
        is_speaker: only rank 0 writes.

    Raises:
        OSError: the file cannot be written.
    """

    def __init__(self, out: Path | None, *, is_speaker: bool) -> None:
        self.out = out
        self.is_speaker = is_speaker
        self.rows: list[Row] = []
        if is_speaker and out is not None:
            out.parent.mkdir(parents=True, exist_ok=True)
            out.write_text("", encoding="utf-8")

    def line(self, text: str = "") -> None:
        """One line."""
        if not self.is_speaker:
            return
        print(text, flush=True)
        if self.out is not None:
            with self.out.open("a", encoding="utf-8") as file:
                file.write(text + "\n")

    def begin_table(self, head: Facts) -> None:
        """The head of a table."""
        self.begin(head, rows.LEGEND, rows.heading(), rows.CSV_HEADING)

    def begin(self, head: Facts, legend: str, heading: str, csv_heading: Sequence[str]) -> None:
        """The head of any table and of its CSV."""
        for text in (*head.lines(), *legend.splitlines(), "", heading):
            self.line(text)
        self._csv(csv_heading, mode="w")

    def row(self, row: Row) -> None:
        """One shape, as soon as it is measured."""
        self.rows.append(row)
        self.both(rows.text_row(row), rows.csv_row(row))

    def both(self, text: str, cells: Sequence[str]) -> None:
        """One row of any table, as a line and in the CSV."""
        self.line(text)
        self._csv(cells, mode="a")

    def end_table(self, more: list[str]) -> None:
        """The lines below the table."""
        self.line()
        for text in (*rows.summary(self.rows), *more):
            self.line(text)

    def _csv(self, cells: Sequence[str], *, mode: str) -> None:
        if self.is_speaker and self.out is not None:
            buffer = io.StringIO()
            csv.writer(buffer, lineterminator="\n").writerow(cells)
            with self.out.with_suffix(TABLE_SUFFIX).open(mode, encoding="utf-8") as file:
                file.write(buffer.getvalue())
