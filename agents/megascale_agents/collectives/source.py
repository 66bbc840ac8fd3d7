# SPDX-License-Identifier: Apache-2.0
"""Where a rank's finished collectives are read: its black box.

NCCL's own records where the profiler plugin times them (by the GPU), else those that go through Python: NCCL up to 2.25
reports what is enqueued, and never its end. Each is handed out once, when it has ended. One that still runs is
looked at again next time: just the long waits must not be lost.
"""

from collections.abc import Sequence
from typing import NamedTuple, Protocol

from megascale_ops.blackbox.nccl_codes import FLAG_DOUBTFUL, FLAG_UNTIMED
from megascale_ops.blackbox.reader import BoxReader
from megascale_ops.blackbox.records import CollectiveRecord

# An unfinished collective further back than that was given up (an asynchronous one shows no end).
_MOST_OPEN = 256
# The name that torch gives to the group of all ranks.
_DEFAULT_GROUP = "0"


class Ended(NamedTuple):
    """A collective that has ended; times on one clock of its rank's. ``ranks`` take part, 0: not known."""

    communicator: str
    function: str
    seq: int
    bytes_moved: int
    started_ns: int
    ended_ns: int
    ranks: int = 0


class Source(Protocol):
    """Where a rank's collectives are read; each is handed out once.

    Attributes:
        host_timed: whether those that were handed out last are timed by the host, and only those that Python sees.
    """

    @property
    def host_timed(self) -> bool:
        """See above."""

    def drain_ended(self) -> tuple[list[Ended], int]:
        """Return those that have ended since the last call, and how many were lost."""


class BoxSource:
    """A black box: the records of NCCL's profiler plugin once one is timed, until then those that Python wrote."""

    def __init__(self, box: BoxReader) -> None:
        self._box = box
        self._tail = box.nccl_tail()
        self._named: dict[int, tuple[str, int]] = {}
        self._world_size = box.identity().world_size
        self._has_nccl = False
        self._next = 0
        self._done: set[tuple[int, int, str]] = set()  # of what will be read again, because something older still runs

    @property
    def host_timed(self) -> bool:
        """See ``Source``."""
        return not self._has_nccl

    def drain_ended(self) -> tuple[list[Ended], int]:
        """See ``Source.drain_ended``."""
        found, lost = self._nccl()
        return (found, lost) if self._has_nccl else self._python()

    def _nccl(self) -> tuple[list[Ended], int]:
        records, lost = self._tail.drain_records()
        self._has_nccl = self._has_nccl or any(not each.flags & FLAG_UNTIMED for each in records)
        found = []
        for each in records:
            if each.gpu_started_mono_ns and each.gpu_ended_mono_ns and not each.flags & FLAG_DOUBTFUL:
                name, ranks = self._communicator(each.communicator)
                times = each.gpu_started_mono_ns, each.gpu_ended_mono_ns
                found.append(Ended(name, each.function, each.seq, each.bytes_moved, *times, ranks))
        return found, lost

    def _communicator(self, number: int) -> tuple[str, int]:
        """Return a communicator's name for people, made unique by its id, and how many ranks it has."""
        if number not in self._named:
            known = {each.id: (each.name, each.nranks) for each in self._box.communicators()}
            name, ranks = known.get(number, ("", 0))
            self._named[number] = f"{name}/{number & 0xFFFF_FFFF_FFFF_FFFF:x}".lstrip("/"), ranks
        return self._named[number]

    def _python(self) -> tuple[list[Ended], int]:
        run = self._box.collectives_since(self._next)
        if not self._done and all(each.ended_mono_ns for each in run.records):  # the usual case
            self._next = run.next_number
            return self._ended(run.records), run.lost
        first = run.next_number - len(run.records)
        # An unfinished one further back than that was given up: an asynchronous one shows no end.
        running = [
            first + place
            for place, record in enumerate(run.records[-_MOST_OPEN:], max(0, len(run.records) - _MOST_OPEN))
            if not record.ended_mono_ns
        ]
        ended = {
            (each.enqueued_mono_ns, each.seq, each.communicator): each for each in run.records if each.ended_mono_ns
        }
        fresh = self._ended([each for name, each in ended.items() if name not in self._done])
        self._next = min(running, default=run.next_number)
        self._done = set(ended) if running else set()
        return fresh, run.lost

    def _ended(self, records: Sequence[CollectiveRecord]) -> list[Ended]:
        world_size = self._world_size
        return [
            Ended(
                one.communicator, one.function, one.seq, one.bytes_moved, one.started_mono_ns, one.ended_mono_ns,
                world_size if one.communicator == _DEFAULT_GROUP else 0,
            )
            for one in records
        ]  # fmt: skip
