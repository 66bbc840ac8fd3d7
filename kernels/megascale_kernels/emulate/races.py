# SPDX-License-Identifier: Apache-2.0
"""Which accesses are ordered, and which only happened to come out right.

Two accesses of the same byte, at least one of which writes, must be ordered by what one program released and the other
acquired, by a stream, or by both being atomic at a scope that includes both programs. A log per region keeps, for
each program and each set of bytes, its last access; a later access of the same bytes by the same program stands for
the earlier ones. A new access is compared with the whole log at once (numpy), and nearly always nothing is
left to look at: only accesses that overlap *and* are unordered.

The report of an unordered pair names what is missing, where that is known.
"""

from pathlib import PurePath
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from megascale_kernels.emulate.clocks import BULK, CTA, GPU, ORDERED, SPREAD, SYS, Strand
from megascale_kernels.emulate.events import Who
from megascale_kernels.emulate.memory import Region
from megascale_kernels.emulate.programs import Trail, lines_of
from megascale_kernels.emulate.spans import Span, first_common

RACE = "race"
UNDRAINED = "publish before drain"
UNSYNCED = "publish before barrier"
UNFENCED = "missing proxy fence"
NARROW = "scope too narrow"
EXPLANATIONS = {
    RACE: "nothing orders the two",
    UNDRAINED: "the TMA store may still be on its way when the flag is seen: drain_tma_stores() before the release",
    UNSYNCED: "other threads of the CTA may not have come so far: debug_barrier() before the release",
    UNFENCED: "the TMA unit does not see what the threads acquired or wrote: fence_before_tma() in between",
    NARROW: "both are atomic, but the scope of one does not include the other rank",
}

WRITE, ATOMIC, TMA, SCALAR = 1, 2, 4, 8
# Columns of a log; _KIND is the index of the access's class in a clock, _FIRST that of its program's first class.
_LO, _HI, _KIND, _EPOCH, _FLAGS, _FIRST, _FENCES, _SCOPE, _RELEASES, _RANK = range(10)
_COLUMNS = 10
_NONE: NDArray[np.int64] = np.zeros(0, dtype=np.int64)


class Access(NamedTuple):
    """One side of a finding.

    Attributes:
        who: the program.
        operation: load, store, TMA load, TMA store, or the atomic's name.
        where: lines of the kernel's source, outermost first.
    """

    who: Who
    operation: str
    where: str

    def __str__(self) -> str:
        return f"{self.operation} by {self.who} at {self.where}"


class Finding(NamedTuple):
    """Two accesses that nothing orders.

    Attributes:
        kind: `RACE`, `UNDRAINED`, `UNSYNCED`, `UNFENCED` or `NARROW`.
        owner: the rank in whose memory it happened.
        region: name of the memory.
        offset: first byte that both touch, counted from the start of the region.
        place: the same in words.
        first: the access that came first in this schedule.
        second: the access that found it unordered.
        times: how often this pair of lines and programs was seen.
    """

    kind: str
    owner: int
    region: str
    offset: int
    place: str
    first: Access
    second: Access
    times: int

    def __str__(self) -> str:
        return (
            f"{self.kind} ({self.times}x) in {self.place}\n  first  {self.first}\n  second {self.second}\n"
            f"  {EXPLANATIONS[self.kind]}"
        )


class Deed(NamedTuple):
    """An access as it is handed to the detector; `trail` is where in the source it comes from."""

    flags: int
    operation: str
    trail: Trail
    scope: int = CTA


class _Log:
    """The last accesses of one region: numbers as columns, the rest beside them."""

    def __init__(self) -> None:
        self.columns: NDArray[np.int64] = np.zeros((_COLUMNS, 64), dtype=np.int64)
        self.rest: list[tuple[Strand, Span, Deed]] = []
        self.written = False
        self._known: dict[tuple[int, int, int, int, int, bytes], int] = {}

    def note(self, strand: Strand, span: Span, deed: Deed, kind: int) -> None:
        key = (strand.first, deed.flags, deed.scope, *span.key)
        at = self._known.setdefault(key, len(self.rest))
        if at == len(self.rest):
            self.rest.append((strand, span, deed))
            if at == self.columns.shape[1]:
                self.columns = np.concatenate((self.columns, np.zeros_like(self.columns)), axis=1)
        else:
            self.rest[at] = (strand, span, deed)
        if deed.flags & WRITE:
            self.written = True
        self.columns[:, at] = (
            span.lo, span.hi, strand.first + kind, strand.epochs[kind], deed.flags, strand.first, strand.fences,
            deed.scope, strand.epochs[ORDERED], strand.who.rank,
        )  # fmt: skip

    def suspects(self, strand: Strand, span: Span, deed: Deed) -> NDArray[np.int64]:
        """Accesses within the same bounds that the strand does not know to be complete."""
        if not (self.written or deed.flags & WRITE):
            return _NONE
        columns = self.columns[:_FIRST, : len(self.rest)]
        near: NDArray[np.int64] = ((columns[_LO] < span.hi) & (columns[_HI] > span.lo)).nonzero()[0]
        if not near.size:
            return near
        view = strand.seen_by_tma if deed.flags & TMA else strand.seen
        unordered = columns[_EPOCH].take(near) > view.take(columns[_KIND].take(near))
        if not deed.flags & WRITE:
            unordered &= (columns[_FLAGS].take(near) & WRITE) != 0
        found: NDArray[np.int64] = near[unordered]
        return found


class Detector:
    """Compares every access with those before it."""

    def __init__(self) -> None:
        self._logs: dict[int, _Log] = {}
        self._found: dict[tuple[str, str, Who, str, Who, str], Finding] = {}

    @property
    def findings(self) -> tuple[Finding, ...]:
        """What was found so far, in order of appearance."""
        return tuple(self._found.values())

    def forget_accesses(self) -> None:
        """Everything so far is ordered before everything that follows."""
        self._logs.clear()

    def access(self, strand: Strand, region: Region, span: Span, deed: Deed) -> None:
        """Check an access against the log, then note it."""
        log = self._logs.get(region.start)
        if log is None:
            log = self._logs[region.start] = _Log()
        for at in log.suspects(strand, span, deed):
            kind = _missing(strand, deed, log.columns[:, at])
            if kind is None:
                continue
            other, other_span, other_deed = log.rest[at]
            address = first_common(span, other_span)
            if address is not None:
                self._report(kind, region, address, (other, other_deed), (strand, deed))
        log.note(strand, span, deed, _class_of(deed))

    def _report(
        self, kind: str, region: Region, address: int, first: tuple[Strand, Deed], second: tuple[Strand, Deed]
    ) -> None:
        one, two = (Access(strand.who, deed.operation, _lines(deed.trail)) for strand, deed in (first, second))
        key = (kind, region.name, one.who, one.where, two.who, two.where)
        known = self._found.get(key)
        self._found[key] = (
            known._replace(times=known.times + 1)
            if known
            else Finding(kind, region.rank, region.name, address - region.start, region.place(address), one, two, 1)
        )


def _lines(trail: Trail) -> str:
    return " > ".join(f"{PurePath(file).name}:{line}" for file, line in lines_of(trail)) or "the host"


def _class_of(deed: Deed) -> int:
    if deed.flags & TMA:
        return BULK if deed.flags & WRITE else ORDERED
    # A scalar is stored by the thread that also executes the atomics; a block by all.
    return ORDERED if deed.flags & (ATOMIC | SCALAR) else SPREAD


def _missing(strand: Strand, deed: Deed, entry: NDArray[np.int64]) -> str | None:
    """What an overlapping access that the strand does not know lacks, or None if it need not be known."""
    flags = int(entry[_FLAGS])
    if entry[_FIRST] == strand.first:
        return _missing_within(strand, deed, entry)
    if flags & deed.flags & ATOMIC:
        narrower = min(int(entry[_SCOPE]), deed.scope)
        same_rank = strand.who.rank == entry[_RANK]
        return None if narrower == SYS or (narrower == GPU and same_rank) else NARROW
    if deed.flags & TMA and entry[_EPOCH] <= strand.seen[entry[_KIND]]:
        return UNFENCED
    if strand.seen[entry[_FIRST]] >= entry[_RELEASES]:
        return UNDRAINED if entry[_KIND] - entry[_FIRST] == BULK else UNSYNCED
    return RACE


def _missing_within(strand: Strand, deed: Deed, entry: NDArray[np.int64]) -> str | None:
    """The same between two accesses of one program: only the TMA unit runs beside its threads."""
    flags = int(entry[_FLAGS])
    if not flags & WRITE or (flags & TMA and deed.flags & TMA and deed.flags & WRITE):
        return None
    if flags & TMA:
        return UNDRAINED
    return UNFENCED if deed.flags & TMA and entry[_FENCES] == strand.fences else None
