# SPDX-License-Identifier: Apache-2.0
"""What the controller keeps of a job's collectives between two passes of the arrival-skew engine.

Taking a sample in costs some microseconds: its packed rows are put aside as they came. A pass, every second of a small
job, every six of more than 512 ranks and every ten of 12,288, unpacks all of them at once, matches them and hands them
to ``Skew``. What not all ranks have reported yet waits for the next pass. Bounds: two million rows (40 MB) wait at
most, then the oldest go.

The time is an argument.
"""

from collections.abc import Callable, Sequence
from typing import NamedTuple

import numpy as np

from megascale_ops.diagnosis.skew.detector import Skew
from megascale_ops.diagnosis.skew.matching import match
from megascale_ops.diagnosis.skew.report import SkewReport
from megascale_ops.diagnosis.skew.tables import Ints, Kind, Line, Rows, arrange, join_rows, no_rows
from megascale_ops.diagnosis.statistics.cooperative import Pieces, run_through
from megascale_ops.schema.collectives import (
    LARGE_EVERY_S,
    LARGE_WORLD,
    NOT_KNOWN,
    ROW,
    TICKS_PER_S,
    CollectiveSample,
    SampledLine,
)
from megascale_ops.schema.identity import Mesh
from megascale_ops.schema.policy import JobPolicy

LEAST_EVERY_S, RANKS_EACH_S = 1.0, 1_200.0
# A pass needs each rank: one made before most have reported counts missing reports as time.
_LARGE_EVERY_S = 1.2 * LARGE_EVERY_S
# 1/50: a pass may cost so much of a core, however slow the machine is.
_MOST_SHARE = 50.0
MOST_ROWS = 2_000_000
# 16: groups of tens of communicators; a script that makes one each step is not followed for ever.
MOST_LINES_OF_A_RANK = 256
MOST_RANK = 1 << 20
_MOST_TABLES = 16
# What is late at one place of a step is in one of several passes only, where a step takes longer than a pass.
_MOST_STEP_S = 20.0
_MOST_SPANS = 3.0
# The samples of 2,048 ranks are unpacked in one piece, 4 ms.
_PIECE = 2_048
_ROW = np.dtype([("line", "u1"), ("seq", "<u4"), ("took", "<u4"), ("own", "<u4")])


_Name = tuple[str, str, int]  # communicator, function, size bits: a line, whatever its rate


class _Blob(NamedTuple):
    """Rows of one rank as they came."""

    rows: bytes
    first: int  # where its lines begin in the table of places
    lines: int


class _Aside:
    """Samples that wait for the next pass."""

    __slots__ = ("blobs", "rows")

    def __init__(self) -> None:
        self.blobs: list[_Blob] = []
        self.rows = 0


class _Tables:
    """The lines that samples name, as ranks tell them: each list of lines is kept once."""

    __slots__ = ("known", "of_rank", "places")

    def __init__(self) -> None:
        self.of_rank: dict[int, tuple[tuple[SampledLine, ...], int]] = {}  # its newest lines, and their table
        self.known: dict[tuple[int, tuple[_Name, ...]], int] = {}
        self.places: list[int] = []  # by table and line of a sample


class SkewWatch:
    """One round of one job.

    Args:
        world_size: how many ranks it has.
    """

    def __init__(self, world_size: int) -> None:
        self.world_size = world_size
        self.nodes: dict[int, str] = {}
        self.host_timed: set[int] = set()  # ranks of which only Python's collectives are known, timed by the host
        self.lost = 0
        self.report: SkewReport | None = None
        self._lines: list[Line] = []
        self._line_numbers: dict[tuple[str, str, int], int] = {}
        self._places: dict[tuple[int, int], int] = {}  # (rank, line)
        self._lines_of: dict[int, int] = {}  # rank -> how many
        self._tables = _Tables()
        self._aside = _Aside()
        self._spans_s: dict[int, float] = {}
        self._carried = no_rows()
        self._kinds: list[Kind] = []
        self._kinds_of = 0  # places that the kinds were made of
        self._meshes: dict[int, Mesh] = {}
        self._alone: set[int] = set()  # ranks that send to others and do not declare their stage
        self._class_numbers: dict[tuple[int, ...], int] = {}
        self._next_s = 0.0
        self._is_passing = False
        self.skew = Skew(self._lines)

    def know(self, rank: int, node: str, mesh: Mesh) -> None:
        """Note where a rank is, on the machines and in the mesh."""
        self.nodes[rank] = node
        self._meshes[rank] = mesh

    def ingest_samples(self, node: str, samples: Sequence[CollectiveSample]) -> None:
        """Put the samples of a node aside."""
        for sample in samples:
            rank = sample.rank
            if not 0 <= rank < min(MOST_RANK, max(self.world_size, 1)) or len(sample.rows) % ROW.size:
                self.lost += 1
                continue
            self.nodes.setdefault(rank, node)
            if sample.point_to_point:
                self._alone.add(rank)
            (self.host_timed.add if sample.host_timed else self.host_timed.discard)(rank)
            self.lost += sample.lost
            if sample.span_s > 0:
                self._spans_s[rank] = self._spans_s.get(rank, 0.0) + sample.span_s
            if sample.rows:
                self._aside.blobs.append(_Blob(sample.rows, self._table(sample), len(sample.lines)))
                self._aside.rows += len(sample.rows) // ROW.size
        while self._aside.rows > MOST_ROWS:
            gone = len(self._aside.blobs.pop(0).rows) // ROW.size
            self._aside.rows -= gone
            self.lost += gone

    def _table(self, sample: CollectiveSample) -> int:
        """Return where the places of a sample's lines stand."""
        tables = self._tables
        lines, table = tables.of_rank.get(sample.rank, ((), -1))
        if table >= 0 and lines == sample.lines:
            return table
        places = [self._place(sample.rank, line) for line in sample.lines]
        key = sample.rank, tuple(_name_of(line) for line in sample.lines)
        known = tables.known.get(key)
        if known is None:
            known = tables.known[key] = len(tables.places)
            tables.places.extend(places)
        tables.of_rank[sample.rank] = sample.lines, known
        return known

    def _place(self, rank: int, line: SampledLine) -> int:
        """Return a rank's place in a line; -1 when it has too many."""
        name = _name_of(line)
        number = self._line_numbers.get(name)
        weight = float(1 << min(max(line.bits, 0), 30))
        if number is None:
            number = self._line_numbers[name] = len(self._lines)
            self._lines.append(Line(*name, weight))
        elif self._lines[number].weight != weight:
            self._lines[number] = self._lines[number]._replace(weight=weight)
            self._kinds_of = 0
        place = self._places.get((rank, number))
        if place is None:
            if self._lines_of.get(rank, 0) >= MOST_LINES_OF_A_RANK:
                return -1
            self._lines_of[rank] = self._lines_of.get(rank, 0) + 1
            place = self._places[rank, number] = len(self._places)
        return place

    def poll_window(
        self, now_s: float, step_s: float, policy: JobPolicy, clock: Callable[[], float]
    ) -> SkewReport | None:
        """Make a pass if it is time (see ``pieces``)."""
        return run_through(self.pieces(now_s, step_s, policy, clock))

    def pieces(
        self, now_s: float, step_s: float, policy: JobPolicy, clock: Callable[[], float]
    ) -> Pieces[SkewReport | None]:
        """Make a pass if it is time; return what is known after it, None when nothing was done.

        Samples may be taken in between two pieces: they wait for the next pass.

        Args:
            now_s: monotonic seconds.
            step_s: how long a step of the job takes, 0 where not known.
            policy: the job's.
            clock: to see what the pass costs.
        """
        if self._is_passing or now_s < self._next_s or not self._aside.blobs:
            return None
        least_s = _LARGE_EVERY_S if self.world_size > LARGE_WORLD else LEAST_EVERY_S
        every_s = max(least_s, self.world_size / RANKS_EACH_S, min(step_s, _MOST_STEP_S))
        if not self._next_s:  # the first one waits until there is something to compare
            self._next_s = now_s + every_s
            return None
        self._is_passing, cost_s, pass_ = True, 0.0, self._pass(step_s, policy)
        try:
            is_over = False
            while not is_over:
                began_s = clock()
                is_over = next(pass_, True) is not None
                cost_s += clock() - began_s
                if not is_over:
                    yield
        finally:
            self._is_passing = False
        self._next_s = now_s + max(every_s, _MOST_SHARE * cost_s)
        return self.report

    def _pass(self, step_s: float, policy: JobPolicy) -> Pieces[None]:
        spans_s = np.array(list(self._spans_s.values()) or [0.0])
        # The mean, since of large jobs some have reported twice; cut, since a broken clock may show years.
        span_s = float(np.minimum(spans_s, _MOST_SPANS * np.median(spans_s)).mean())
        self._spans_s.clear()
        parts = yield from self._unpack()
        if self._kinds_of != len(self._places):
            self._arrange()
            yield
        rows = join_rows([self._carried, *parts])
        yield
        matched = match(rows, self._kinds, len(self._places))
        self._carried = matched.waiting
        self.skew.unmatched += matched.odd + matched.dropped
        yield
        classes = self._classes()
        yield
        yield from self.skew.adding(matched.grids, classes, span_s, step_s, policy)
        yield
        self.report = self.skew.report(self.world_size, self.nodes)

    def _unpack(self) -> Pieces[list[Rows]]:
        """Return what was put aside as rows, in parts."""
        blobs, self._aside = self._aside.blobs, _Aside()
        places = np.array([*self._tables.places, -1], np.int32)
        if len(self._tables.known) > _MOST_TABLES * max(1, len(self._lines_of)):
            self._tables = _Tables()  # lines that come and go: no blob that waits points to those of the past
        found = []
        for first in range(0, len(blobs), _PIECE):
            found.append(self._rows_of(blobs[first : first + _PIECE], places))
            yield
        return found

    def _rows_of(self, blobs: Sequence[_Blob], places: Ints) -> Rows:
        """Return the rows of some ranks.

        Args:
            blobs: theirs.
            places: of every line of every table, and -1 at the end.
        """
        packed = np.frombuffer(b"".join([blob.rows for blob in blobs]), _ROW)
        counts = np.array([len(blob.rows) for blob in blobs]) // ROW.size
        bounds = np.array([(blob.first, blob.lines) for blob in blobs], np.int32)
        line, took, own = packed["line"].astype(np.int32), packed["took"].copy(), packed["own"].copy()
        at = np.repeat(bounds[:, 0], counts)
        at += line
        if (line.max(initial=0) >= bounds[:, 1].min(initial=0)) and (
            odd := line >= np.repeat(bounds[:, 1], counts)
        ).any():
            at[odd] = len(places) - 1  # a line that the sample does not name
        place = places[at]
        own_s = own.astype(np.float32)
        own_s /= TICKS_PER_S
        own_s[own == NOT_KNOWN] = np.nan
        took_s = took.astype(np.float32)
        took_s /= TICKS_PER_S
        rows = Rows(place, packed["seq"].astype(np.int64), took_s, own_s, np.zeros(len(place), np.uint8))
        good = (place >= 0) & (took != NOT_KNOWN)
        if good.all():
            return rows
        self.skew.unmatched += len(good) - int(np.count_nonzero(good))
        return rows.pick(good)

    def _arrange(self) -> None:
        ranks, lines = (np.array(column, np.int32) for column in zip(*self._places, strict=True))
        self._kinds = arrange(self._lines, ranks, lines)
        self._kinds_of = len(self._places)

    def _classes(self) -> Ints:
        """Return which ranks are equals: those of one pipeline stage and one set of experts.

        Of a rank that sends to others and does not declare its stage, only those are equals that are in its
        smallest communicator: stages do different work.
        """
        classes = np.full(self.world_size, -1, np.int32)
        smallest: dict[int, tuple[int, int]] = {}
        if any(self._meshes.get(rank, Mesh()).pp < 0 for rank in self._alone):
            for kind in self._kinds:
                for line, ranks in zip(kind.lines.tolist(), kind.ranks.tolist(), strict=True):
                    for rank in ranks:
                        smallest[rank] = min(smallest.get(rank, (MOST_RANK, 0)), (len(ranks), line))
        for rank in self._lines_of:
            mesh = self._meshes.get(rank, Mesh())
            key: tuple[int, ...] = (mesh.pp, mesh.ep)
            if mesh.pp < 0 and rank in self._alone and rank in smallest:
                key = (-2, smallest[rank][1])
            classes[rank] = self._class_numbers.setdefault(key, len(self._class_numbers))
        return classes


def _name_of(line: SampledLine) -> _Name:
    return line.communicator, line.function, line.size_bits
