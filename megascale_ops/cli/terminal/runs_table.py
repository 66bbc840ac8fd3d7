# SPDX-License-Identifier: Apache-2.0
"""Runs of this machine as a table, and what of them is removed."""

import time
from collections import Counter
from collections.abc import Iterable, Sequence
from datetime import tzinfo

from rich.console import Group, RenderableType
from rich.text import Text

from megascale_ops.cli.terminal.tables import data_size, plain_table
from megascale_ops.schema.runs import FAILED, FINISHED, LOST, RUNNING, STOPPED, Run
from megascale_ops.schema.wording import clock, duration, printable

STYLES = {RUNNING: "green", FINISHED: "cyan", FAILED: "red", LOST: "yellow", STOPPED: "cyan"}
# 160 characters: two lines of a terminal; `why` and --json have all of it.
REASON_LENGTH = 160


def sizes_line(runs: Sequence[Run]) -> str:
    """Return how much room runs take, in all and by kind, the largest first; a folder of several jobs counts once."""
    by_folder = {run.folder: run for run in runs}.values()
    parts: Counter[str] = Counter()
    for run in by_folder:
        parts.update(run.parts)
    told = ", ".join(f"{kind} {data_size(size)}" for kind, size in parts.most_common() if size)
    return f"{data_size(sum(parts.values()))} in all" + (f": {told}" if told else "")


def runs_view(runs: Iterable[Run], zone: tzinfo | None = None) -> RenderableType:
    """Return one row for each run, and below them why those ended that did not end well."""
    reasons = []
    table = plain_table("job", "result", "began", "lasted", "step", "restarts", "incidents", "size")
    for column in table.columns:
        column.no_wrap = True
    for run in runs:
        well = run.result in (RUNNING, FINISHED)
        end_s = run.until_wall_s or (time.time() if run.result == RUNNING else 0.0)
        table.add_row(
            run.job,
            Text(run.result, style=STYLES.get(run.result, "yellow")),
            clock(run.began_wall_s, zone)[:16] if run.began_wall_s else "",
            duration(end_s - run.began_wall_s) if end_s and run.began_wall_s else "",
            f"{run.step:,}" if run.step >= 0 else "",
            str(run.restarts),
            str(run.incidents),
            data_size(run.size_bytes),
        )
        if not well and run.reason:
            reason = printable(run.reason)
            cut = reason[:REASON_LENGTH] + ("…" if len(reason) > REASON_LENGTH else "")
            reasons.append(Text(f"{run.job}: {cut}", style="dim"))
    return Group(table, *reasons)
