# SPDX-License-Identifier: Apache-2.0
"""Runs of this machine as a table, and what of them is removed."""

import time
from collections.abc import Iterable
from datetime import tzinfo

from rich.console import RenderableType
from rich.text import Text

from megascale_ops.cli.terminal.cards import clock, duration, printable
from megascale_ops.cli.terminal.tables import data_size, plain_table
from megascale_ops.schema.runs import FAILED, FINISHED, LOST, RUNNING, Run

STYLES = {RUNNING: "green", FINISHED: "cyan", FAILED: "red", LOST: "yellow"}
# 60 characters: the beginning of a reason; `why` and --json have all of it.
REASON_LENGTH = 60


def runs_view(runs: Iterable[Run], zone: tzinfo | None = None) -> RenderableType:
    """Return one row for each run; why it ended where it did not end well."""
    table = plain_table("job", "result", "began", "lasted", "step", "restarts", "incidents", "size", "why")
    for run in runs:
        well = run.result in (RUNNING, FINISHED)
        end_s = run.until_wall_s or (time.time() if run.result == RUNNING else 0.0)
        reason = printable(run.reason)
        table.add_row(
            run.job,
            Text(run.result, style=STYLES.get(run.result, "yellow")),
            clock(run.began_wall_s, zone)[:19] if run.began_wall_s else "",
            duration(end_s - run.began_wall_s) if end_s and run.began_wall_s else "",
            f"{run.step:,}" if run.step >= 0 else "",
            str(run.restarts),
            str(run.incidents),
            data_size(run.size_bytes),
            "" if well else reason[:REASON_LENGTH] + ("…" if len(reason) > REASON_LENGTH else ""),
        )
    return table
