# SPDX-License-Identifier: Apache-2.0
"""Find the black boxes of one job and read them; each unreadable one is a sentence, the rest goes on."""

from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import NamedTuple

from megascale_ops.blackbox import BoxError
from megascale_ops.blackbox.reader import BoxReader
from megascale_ops.blackbox.records import BoxIdentity
from megascale_ops.errors import MegascaleError, UsageError
from megascale_ops.schema.folding import named
from megascale_ops.trace.rank_records import RankRecords, read_rank_records

# 256 ranks: their records take about 60 MB; those of larger jobs are read again whenever they are needed.
MOST_KEPT = 256
# A damaged header may claim any rank and any world size; ten times the largest job on record is not counted further.
MOST_RANKS = 1 << 17


class _Found(NamedTuple):
    path: Path
    identity: BoxIdentity


class Boxes:
    """The black boxes of one job, one for each rank; all of the same round.

    ``unreadable`` has a sentence for each file that could not be read, ``notes`` has further remarks.
    """

    def __init__(self, found: Iterable[_Found], unreadable: list[str], notes: list[str]) -> None:
        self._found = {one.identity.rank: one for one in found}
        self._kept: dict[int, RankRecords] = {}
        self.unreadable = unreadable
        self.notes = notes

    @property
    def ranks(self) -> list[int]:
        """Return whose boxes there are, in order."""
        return sorted(self._found)

    @property
    def job(self) -> str:
        """Return the job's name."""
        return next(iter(self._found.values())).identity.job

    def records_of(self, ranks: Iterable[int]) -> Iterator[RankRecords]:
        """Read the boxes of some ranks, one after the other; one that has become unreadable is noted and left out."""
        for rank in ranks:
            records = self._kept.get(rank) or self._read(rank)
            if records is not None:
                if len(self._kept) < MOST_KEPT:
                    self._kept[rank] = records
                yield records

    def _read(self, rank: int) -> RankRecords | None:
        try:
            with BoxReader(self._found[rank].path) as box:
                records = read_rank_records(box)
        except BoxError as error:
            if str(error) not in self.unreadable:
                self.unreadable.append(str(error))
            return None
        if records.impossible:
            left_out = "1 record" if records.impossible == 1 else f"{records.impossible} records"
            self.notes.append(f"rank {rank}: {left_out} with impossible times or numbers left out")
        return records


def live_boxes(folder: Path) -> list[Path]:
    """Return the boxes of the round that runs on this machine, of one job."""
    return [path for path in folder.glob("*.box") if path.stem.isdecimal()]


def kept_boxes(folder: Path) -> list[Path]:
    """Return the boxes below a folder, to any depth; those of the round before (``.box.old``) are left out."""
    return [path for path in folder.rglob("*.box") if not path.name.startswith(".")]


def open_boxes(paths: Iterable[Path], job: str = "") -> Boxes:
    """Look at the header of each box and keep those of one job and of its newest round.

    Args:
        paths: Black boxes, in any order.
        job: Whose boxes are wanted; "" takes the one job that they are of.

    Raises:
        UsageError: the boxes are of several jobs, and none was named; or of other jobs than the one that was.
        MegascaleError: not one of them can be read.
    """
    found, unreadable = [], []
    for path in sorted(paths):
        try:
            with BoxReader(path) as box:
                identity = box.identity()
        except BoxError as error:
            unreadable.append(str(error))
            continue
        if 0 <= identity.rank < MOST_RANKS:
            found.append(_Found(path, identity))
        else:
            unreadable.append(f"{path} is a damaged black box: it says that it is of rank {identity.rank}")
    if not found:
        raise MegascaleError(f"none of these black boxes can be read: {'; '.join(unreadable[:3])}")
    jobs = sorted({one.identity.job for one in found})
    if job and job not in jobs:
        raise UsageError(f"these black boxes are not of job {job!r} but of {', '.join(jobs)}")
    if not job and len(jobs) > 1:
        raise UsageError(f"these black boxes are of several jobs ({', '.join(jobs)}): name one of them")
    kept, notes = _newest_round([one for one in found if one.identity.job == (job or jobs[0])])
    return Boxes(kept, unreadable, notes)


def _newest_round(found: list[_Found]) -> tuple[list[_Found], list[str]]:
    """Return one box for each rank of the newest round, and what should be known of the others."""
    notes = []
    newest = max(one.identity.round for one in found)
    stale = sorted(one.identity.rank for one in found if one.identity.round != newest)
    if stale:
        notes.append(f"boxes of rounds before {newest} are left out: {named(stale)}")
    by_rank: dict[int, _Found] = {}
    for one in found:
        if one.identity.round == newest:
            other = by_rank.setdefault(one.identity.rank, one)
            if one.identity.started_wall_s > other.identity.started_wall_s:
                by_rank[one.identity.rank] = one
    world_size = max(one.identity.world_size for one in by_rank.values())
    missing = [rank for rank in range(min(world_size, MOST_RANKS)) if rank not in by_rank]
    if missing:
        notes.append(f"no black box of {named(missing)} here; --boxes takes a folder with those of all nodes")
    return list(by_rank.values()), notes
