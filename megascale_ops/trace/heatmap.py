# SPDX-License-Identifier: Apache-2.0
"""Rank by time as pictures need it: step time, own work, waiting and lateness in one grid, folded when it is too tall.

In synchronous training all ranks show the same step time: the slow one makes the others wait. So the picture that names
it is *lateness*: a rank's own work (its steps without waiting and without checkpoints) above the median of its equals
in the same moment. Equals are the ranks of the same pipeline stage and tensor place, or all where no mesh is known.

Arrays are float32, (rows, columns), NaN where no step ended. Pure: the history in, arrays out.
"""

import math
from collections.abc import Collection, Sequence
from typing import Any, NamedTuple, TypeAlias

import numpy as np

from megascale_ops.ledger import StepTime
from megascale_ops.schema.folding import ranges
from megascale_ops.schema.history import FIELDS, History, Place

Grid: TypeAlias = np.ndarray[Any, np.dtype[np.float32]]

# 512 rows of two pixels fit a large screen; an eighth of them for ranks that are shown by themselves.
MOST_ROWS = 512
MOST_ALONE = 64
# 1,024 columns: more than a screen has pixels for; a pause of days makes them wider instead of more.
MOST_COLUMNS = 1024


class Times(NamedTuple):
    """All ranks on one even grid of time; the arrays are (ranks, columns), seconds, of one step on average.

    ``edges_s`` are the columns' bounds (columns + 1); ``steps`` how many steps ended; ``reached`` the furthest step of
    each column, -1 for none; ``longest`` the longest single step.
    """

    edges_s: list[float]
    steps: Grid
    step: Grid
    own: Grid
    waiting: Grid
    checkpoint: Grid
    longest: Grid
    lateness: Grid
    reached: list[int]


class Rows(NamedTuple):
    """The grid as it is drawn: ``ranks`` of each row, and the label for it. Arrays are (rows, columns)."""

    labels: list[str]
    ranks: list[tuple[int, ...]]
    step: Grid
    own: Grid
    waiting: Grid
    lateness: Grid


def lay_out(history: History, most_columns: int = MOST_COLUMNS) -> Times | None:
    """Put the buckets of a history on one even grid; None when it has none.

    A column is at least as wide as the widest bucket and as a typical step, so that a job whose steps take a minute is
    no picture of gaps.
    """
    buckets = history.buckets
    if not buckets:
        return None
    ranks = max(len(bucket.cells[0]) for bucket in buckets)
    wide_s = max(bucket.length_s for bucket in buckets)
    first_s, last_s = buckets[0].start_s, buckets[-1].start_s + buckets[-1].length_s
    typical_s = _typical_step_s(history)
    while wide_s < typical_s or (last_s - first_s) / wide_s > most_columns:
        wide_s *= 2
    columns = max(1, math.ceil((last_s - first_s) / wide_s))
    sums = np.zeros((len(FIELDS), ranks, columns), dtype=np.float32)
    reached = [-1] * columns
    for bucket in buckets:
        column = min(columns - 1, int((bucket.start_s - first_s) / wide_s))
        reached[column] = max(reached[column], bucket.step)
        for field, cells in enumerate(bucket.cells):
            into = sums[field, : len(cells), column]
            if FIELDS[field].startswith("longest"):
                np.maximum(into, cells, out=into)
            else:
                into += np.asarray(cells, dtype=np.float32)
    steps, wall, waiting, checkpoint, longest, _longest_own = sums
    counted = np.where(steps > 0, steps, np.float32("nan"))
    own = np.maximum(0, wall - waiting - checkpoint) / counted
    return Times(
        edges_s=[first_s + column * wide_s for column in range(columns + 1)],
        steps=steps,
        step=wall / counted,
        own=own,
        waiting=waiting / counted,
        checkpoint=checkpoint / counted,
        longest=np.where(steps > 0, longest, np.float32("nan")),
        lateness=_lateness(own, equals(history.facts.places, ranks)),
        reached=reached,
    )


def _typical_step_s(history: History) -> float:
    """Return the median over all buckets' mean step times."""
    means = [sum(bucket.cells[1]) / steps for bucket in history.buckets if (steps := sum(bucket.cells[0]))]
    return sorted(means)[len(means) // 2] if means else 0.0


def equals(places: Sequence[Place], ranks: int) -> list[list[int]]:
    """Return the ranks that do the same work, by group."""
    groups: dict[tuple[int, int], list[int]] = {}
    known = {place.rank: (place.mesh.pp, place.mesh.tp) for place in places}
    for rank in range(ranks):
        groups.setdefault(known.get(rank, (-1, -1)), []).append(rank)
    return list(groups.values())


def median(values: Grid, axis: int = 0) -> Grid:
    """Return the median over an axis, of what is known; NaN where nothing is."""
    known = np.isfinite(values).any(axis=axis)
    found: Grid = np.full(known.shape, np.nan, dtype=np.float32)
    if known.any():
        found[known] = np.nanmedian(values[:, known] if axis == 0 else values[known], axis=axis)
    return found


def _lateness(own: Grid, groups: Sequence[Sequence[int]]) -> Grid:
    late: Grid = np.full_like(own, np.nan)
    for group in groups:
        late[group] = own[group] - median(own[group])
    return late


def step_times(times: Times, groups: Sequence[Sequence[int]]) -> list[StepTime]:
    """Return what the ledger needs of each column: time covered by steps, and lost inside of them.

    Straggle is what the typical rank waited, as far as the slowest rank's own work above its equals' median explains
    it; a checkpoint of one rank holds all of them up, so the longest counts.
    """
    found = []
    steps = median(np.where(times.steps > 0, times.steps, np.float32("nan")))
    wall, waiting = median(times.step), median(times.waiting)
    lost = np.zeros(len(times.reached), dtype=np.float32)
    for group in groups:
        late = times.lateness[group]
        lost = np.maximum(lost, np.max(np.where(np.isfinite(late), late, 0), axis=0, initial=0))
    saved = np.max(np.where(np.isfinite(times.checkpoint), times.checkpoint, 0), axis=0, initial=0)
    for column in np.flatnonzero(np.isfinite(steps)).tolist():
        count = float(steps[column])
        found.append(
            StepTime(
                start_s=times.edges_s[column],
                until_s=times.edges_s[column + 1],
                covered_s=count * float(wall[column]),
                straggle_s=count * float(min(lost[column], waiting[column])),
                checkpoint_s=count * float(saved[column]),
            )
        )
    return found


def worst(times: Times) -> list[int]:
    """Return all ranks, the latest on average first."""
    late = np.nan_to_num(np.maximum(times.lateness, 0), nan=0.0).mean(axis=1)
    return [int(rank) for rank in np.argsort(-late, kind="stable")]


def fold(times: Times, places: Sequence[Place], named: Collection[int] = (), most_rows: int = MOST_ROWS) -> Rows:
    """Return the rows to draw: each rank, or the worst ranks and those that are named by themselves, the rest folded.

    A folded row shows neighbouring ranks: the mean of their times, and the lateness of the latest of them.
    """
    ranks = times.own.shape[0]
    nodes = {place.rank: place.node for place in places}
    if ranks <= most_rows:
        rows: list[tuple[int, ...]] = [(rank,) for rank in range(ranks)]
    else:
        room = min(MOST_ALONE, most_rows // 2)
        alone = list(dict.fromkeys([*(rank for rank in named if 0 <= rank < ranks), *worst(times)]))[:room]
        rest = sorted(set(range(ranks)) - set(alone))
        size = math.ceil(len(rest) / (most_rows - room))
        folded = [tuple(rest[first : first + size]) for first in range(0, len(rest), size)]
        rows = [*((rank,) for rank in sorted(alone)), *folded]
    return Rows(
        labels=[_label(row, nodes) for row in rows],
        ranks=rows,
        step=_rows(times.step, rows, "mean"),
        own=_rows(times.own, rows, "mean"),
        waiting=_rows(times.waiting, rows, "mean"),
        lateness=_rows(times.lateness, rows, "max"),
    )


def _rows(values: Grid, rows: Sequence[tuple[int, ...]], how: str) -> Grid:
    if len(rows) == len(values):
        return values
    drawn: Grid = np.full((len(rows), values.shape[1]), np.nan, dtype=np.float32)
    for place, row in enumerate(rows):
        of_row = values[list(row)]
        known = np.isfinite(of_row)
        any_known = known.any(axis=0)
        if how == "max":
            drawn[place, any_known] = np.where(known, of_row, -np.inf).max(axis=0)[any_known]
        else:
            drawn[place, any_known] = (np.where(known, of_row, 0).sum(axis=0) / np.maximum(1, known.sum(axis=0)))[
                any_known
            ]
    return drawn


def _label(row: tuple[int, ...], nodes: dict[int, str]) -> str:
    if len(row) == 1:
        node = nodes.get(row[0], "")
        return f"rank {row[0]}" + (f" · {node}" if node else "")
    on = sorted({nodes[rank] for rank in row if rank in nodes})
    where = f" · {on[0]}" + (f" and {len(on) - 1} more" if len(on) > 1 else "") if on else ""
    return f"ranks {ranges(row, 2)}{where}"
