# SPDX-License-Identifier: Apache-2.0
"""Judge one stretch of recorded collectives at once: plain columns in, a report out.

The controller feeds ``Skew`` pass by pass from heartbeats; this is for tests that have records of all ranks.

Pure.
"""

from collections.abc import Mapping
from typing import NamedTuple

import numpy as np

from megascale_ops.diagnosis.skew.detector import Skew
from megascale_ops.diagnosis.skew.matching import match
from megascale_ops.diagnosis.skew.report import SkewReport
from megascale_ops.diagnosis.skew.tables import PATIENCE, Bools, Ints, Line, Longs, Rows, arrange, before, no_rows
from megascale_ops.schema.policy import JobPolicy


class Columns(NamedTuple):
    """Finished collectives as records tell them, one row for each rank in each. Clocks are each rank's own."""

    rank: Ints
    communicator: Ints
    function: Ints
    seq: Longs
    start_ns: Longs
    end_ns: Longs
    bytes_moved: Longs

    def pick(self, which: Bools) -> "Columns":
        """Return some of the rows."""
        return Columns(
            self.rank[which], self.communicator[which], self.function[which], self.seq[which], self.start_ns[which],
            self.end_ns[which], self.bytes_moved[which],
        )  # fmt: skip


class Coded(NamedTuple):
    """The same with small dense numbers."""

    lines: list[Line]
    place_rank: Ints
    place_line: Ints
    rows: Rows
    span_s: float  # what a typical rank's rows cover
    odd: int  # rows whose clock went back


def analyse(
    columns: Columns,
    *,
    classes: Ints | None = None,
    step_s: float = 0.0,
    policy: JobPolicy | None = None,
    nodes: Mapping[int, str] | None = None,
) -> SkewReport:
    """Judge the collectives of one stretch of time.

    Args:
        columns: of all ranks, in any order.
        classes: by rank, equal numbers for equals; None: all are.
        step_s: how long a step takes, 0 where unknown.
        policy: what is worth a name; None: the default.
        nodes: which rank is where.
    """
    coded = code(columns)
    skew = Skew(coded.lines)
    size = 0 if classes is None else len(classes)
    skew.unmatched = coded.odd
    if len(coded.place_rank):
        # Nothing else will come: what is not whole is taken as it is.
        rows = coded.rows._replace(age=np.full(len(coded.rows.age), PATIENCE, np.uint8))
        kinds = arrange(coded.lines, coded.place_rank, coded.place_line)
        matched = match(rows, kinds, len(coded.place_rank))
        skew.unmatched += matched.odd + matched.dropped
        size = max(size, int(coded.place_rank.max()) + 1)
        known = np.zeros(size, np.int32) if classes is None else classes
        skew.add(matched.grids, known, coded.span_s, step_s, policy or JobPolicy())
    return skew.report(size, nodes)


def code(columns: Columns) -> Coded:
    """Number lines and places, and find each row's own work; sorts, so it costs more than all the rest."""
    good = (columns.end_ns >= columns.start_ns) & (columns.rank >= 0)
    odd = len(good) - int(np.count_nonzero(good))
    columns = columns.pick(good) if odd else columns
    if not len(columns.rank):
        empty = np.zeros(0, np.int32)
        return Coded([], empty, empty, no_rows(), 0.0, odd)
    rank, start_ns, end_ns = columns.rank, columns.start_ns, columns.end_ns
    size_bits = np.ceil(np.log2(np.maximum(columns.bytes_moved, 1))).astype(np.int64)
    key = (columns.communicator.astype(np.int64) << 26) | (columns.function.astype(np.int64) << 6) | size_bits
    keys, line = np.unique(key, return_inverse=True)
    place_keys, place = np.unique(line.astype(np.int64) << 32 | rank, return_inverse=True)
    earlier = before(rank, start_ns, end_ns)
    own_ns = np.where(earlier >= 0, start_ns - end_ns[earlier], np.nan)
    return Coded(
        lines=[Line(f"{one >> 26:08d}", str(one >> 6 & 0xFFFFF), int(one & 63)) for one in keys.tolist()],
        place_rank=(place_keys & 0xFFFF_FFFF).astype(np.int32),
        place_line=(place_keys >> 32).astype(np.int32),
        rows=Rows(
            place=place.astype(np.int32),
            seq=columns.seq.astype(np.int64),
            took_s=((end_ns - start_ns) * 1e-9).astype(np.float32),
            own_s=(own_ns * 1e-9).astype(np.float32),
            age=np.zeros(len(rank), np.uint8),
        ),
        span_s=_span_s(rank, start_ns, end_ns),
        odd=odd,
    )


def _span_s(rank: Ints, start_ns: Longs, end_ns: Longs) -> float:
    """Return how long a typical rank's rows cover."""
    ranks, index = np.unique(rank, return_inverse=True)
    first = np.full(len(ranks), np.iinfo(np.int64).max)
    last = np.full(len(ranks), np.iinfo(np.int64).min)
    np.minimum.at(first, index, start_ns)
    np.maximum.at(last, index, end_ns)
    return float(np.median(last - first)) * 1e-9
