# SPDX-License-Identifier: Apache-2.0
"""A bar on stderr for what takes long, where a person looks; nothing anywhere else."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager

from rich.console import Console
from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TimeRemainingColumn, TransferSpeedColumn


@contextmanager
def bytes_bar(doing: str, total_bytes: int) -> Iterator[Callable[[int], None]]:
    """Yield what is told of bytes as they are done; the bar goes when all is."""
    console = Console(stderr=True)
    columns = (TextColumn("{task.description}", markup=False), BarColumn(), DownloadColumn(binary_units=True))
    bar = Progress(
        *columns, TransferSpeedColumn(), TimeRemainingColumn(),
        console=console, transient=True, disable=not console.is_terminal,
    )  # fmt: skip
    with bar:
        task = bar.add_task(doing, total=total_bytes)
        yield lambda count: bar.advance(task, count)
