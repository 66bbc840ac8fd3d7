# SPDX-License-Identifier: Apache-2.0
"""The heat maps and the step-time curve as data for ``report.js``: numbers, edges, labels and the incidents' marks.

Arrays travel as base64 of little-endian float32, a fifth of their size as text. Times of day are shifted to the
report's zone here, because Plotly knows no zones.
"""

import base64
from typing import Any

import numpy as np

from megascale_ops.schema.events import Incident
from megascale_ops.trace.heatmap import Grid, Rows, Times, median
from megascale_ops.trace.report_facts import HOLDS, LEAST_RANGE, Report

# 99.5: a single cell of a warm-up must not pale everything else.
_MOST_PERCENTILE = 99.5
# 90: the latest rank is late for a tenth of the time at least, or it may look as late as the ones that are.
_ROW_PERCENTILE = 90
# The slowest rank and the suspects have their labels whatever is left out of them; more would stand over each other.
_ALWAYS_LABELLED = 1
# 40 marks: of more incidents the newest are marked.
MOST_MARKED = 40


def plot_of(report: Report) -> dict[str, Any] | None:
    """Return what ``report.js`` draws; None where no steps are known."""
    times, rows = report.times, report.rows
    if times is None or rows is None:
        return None
    offset_s = _offset_s(report)
    return {
        "edges": [round((edge + offset_s) * 1000) for edge in times.edges_s],
        "labels": rows.labels,
        "keep": _kept_labels(report, rows),
        "folded": len(rows.labels) < len(times.own),
        "reached": times.reached,
        "late": _packed(rows.lateness),
        "step": _packed(rows.step),
        "own": _packed(rows.own),
        "waiting": _packed(rows.waiting),
        "lateRange": [0.0, _late_range(rows, report.step_s)],
        "stepRange": _step_range(rows),
        "typical": _listed(median(times.step)),
        "longest": _listed(_greatest(times)),
        "marks": [_mark(told.incident, report, offset_s) for told in report.gathered.told[-MOST_MARKED:]],
    }


def _offset_s(report: Report) -> float:
    from datetime import datetime

    offset = datetime.fromtimestamp(report.gathered.began_wall_s, tz=report.gathered.zone).utcoffset()
    return offset.total_seconds() if offset is not None else 0.0


def _packed(values: Grid) -> dict[str, Any]:
    raw = np.ascontiguousarray(values, dtype="<f4").tobytes()
    return {"rows": values.shape[0], "columns": values.shape[1], "f4": base64.b64encode(raw).decode("ascii")}


def _listed(values: Grid) -> list[float | None]:
    return [round(float(value), 6) if np.isfinite(value) else None for value in values]


def _greatest(times: Times) -> Grid:
    known = np.where(np.isfinite(times.longest), times.longest, np.float32(-1))
    greatest: Grid = known.max(axis=0)
    return np.where(greatest >= 0, greatest, np.float32("nan"))


def _late_range(rows: Rows, step_s: float) -> float:
    late = np.nan_to_num(np.maximum(rows.lateness, 0), nan=0.0)
    high = float(np.percentile(late, _ROW_PERCENTILE, axis=1).max()) if late.size else 0.0
    return max(high, LEAST_RANGE * step_s, 1e-6)


def _kept_labels(report: Report, rows: Rows) -> list[int]:
    """Return the rows of those that a person looks for: the suspects and the slowest."""
    wanted = [*(hood.rank for hood in report.suspects), *(slow.rank for slow in report.slowest[:_ALWAYS_LABELLED])]
    place = {row[0]: number for number, row in enumerate(rows.ranks) if len(row) == 1}
    return sorted({place[rank] for rank in wanted if rank in place})


def _step_range(rows: Rows) -> list[float]:
    known = rows.step[np.isfinite(rows.step)]
    if not known.size:
        return [0.0, 1.0]
    low, middle, high = (float(value) for value in np.percentile(known, (100 - _MOST_PERCENTILE, 50, _MOST_PERCENTILE)))
    return [min(low, middle * (1 - LEAST_RANGE)), max(high, middle * (1 + LEAST_RANGE))]


def _mark(incident: Incident, report: Report, offset_s: float) -> dict[str, Any]:
    marks = incident.marks
    began = marks.began or marks.detected
    ended = marks.caught_up or marks.stepped or marks.stopped or marks.named or began
    if incident.state in HOLDS:
        ended = report.gathered.until_wall_s
    stopped = bool(marks.ordered or marks.stopped)
    return {
        "from": round((began + offset_s) * 1000),
        "until": round((max(began, ended) + offset_s) * 1000),
        "name": f"#{incident.id.rpartition('-')[2]} {incident.verdict.fault if incident.verdict else 'not judged yet'}",
        "stopped": stopped,
    }
