# SPDX-License-Identifier: Apache-2.0
"""The Python API: what a job did and does, as typed objects, for notebooks and scripts.

    from megascale_ops.client import Client, rows

    with Client() as ops:                                 # the newest run of this machine, living or over
        for incident in ops.incidents():
            print(incident.id, incident.verdict.fault, incident.verdict.culprits)
        frame = pandas.DataFrame(rows(ops.incidents()))   # flat dictionaries, a row each

It finds a run as the command line does: an address that is given, else the newest run that lives, else the journal that
a run left. Objects are those of `megascale_ops.schema`; times are wall clock seconds since 1970, durations seconds.
Reading only: what changes a job is the command line's.
"""

from collections.abc import Iterable
from contextlib import ExitStack
from typing import TYPE_CHECKING, Any, Self

import msgspec

from megascale_ops.cli.sources.history import MOST_KNOWN, Journal, open_place
from megascale_ops.cli.sources.locate import Wanted, find_place
from megascale_ops.errors import MegascaleError, UsageError
from megascale_ops.schema.events import Incident, JobStatus, RankStatus
from megascale_ops.schema.history import FIELDS, History, decode, history_file

if TYPE_CHECKING:
    from megascale_ops.schema.runs import Run

__all__ = ["Client", "rows", "runs", "step_rows"]


class Client:
    """What is known of the jobs of one controller, or of one run that is over; close it, or use it in ``with``.

    Args:
        controller: address of a controller, e.g. ``http://node-0:7070``; "" finds the newest run of this machine.
        job: only the run of this job.
        run_dir: only the run in this folder.
        token_file: file with the controller's token; a run's own is found.

    Raises:
        ControllerUnreachableError: there is neither a controller nor a journal; the message names where was looked.
    """

    def __init__(self, controller: str = "", *, job: str = "", run_dir: str = "", token_file: str = "") -> None:
        self._job = job
        self._place = find_place(Wanted(controller, job, run_dir), journal_too=True)
        self._stack = ExitStack()
        self._source = self._stack.enter_context(open_place(self._place, token_file or None))

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_exc: object) -> None:
        self.close()

    @property
    def is_live(self) -> bool:
        """Whether a controller answers; else all is as a journal has it."""
        return not isinstance(self._source, Journal)

    def close(self) -> None:
        """Close connections and files."""
        self._stack.close()

    def jobs(self) -> tuple[JobStatus, ...]:
        """Return every job that the controller knows, with its nodes and ranks as of now.

        Raises:
            MegascaleError: no controller answers; ``runs()`` lists runs that are over.
        """
        if isinstance(self._source, Journal):
            raise MegascaleError(f"the run in {self._place.journal} is over: its ranks are known while it lives only")
        return self._source.status(self._job or None).jobs

    def ranks(self, job: str = "") -> tuple[RankStatus, ...]:
        """Return the ranks of a job, of all jobs when none is named, as of now; see ``jobs``."""
        return tuple(rank for one in self.jobs() if not job or one.job == job for rank in one.ranks)

    def incidents(self, job: str = "", *, limit: int = MOST_KNOWN) -> tuple[Incident, ...]:
        """Return the newest incidents, oldest first, without the texts of their evidence (``incident`` has them)."""
        return self._source.incidents(job or self._job or None, limit).incidents

    def incident(self, incident_id: str) -> Incident:
        """Return one incident with its evidence and events.

        Raises:
            RefusedError: there is none of this name.
        """
        return self._source.incident(incident_id)

    def steps(self, job: str = "") -> History:
        """Return the history of a job's steps: buckets of time with what each rank's steps took (see ``step_rows``).

        Raises:
            UsageError: no job is named where there are several.
            MegascaleError: there is no history, or it can't be read.
        """
        if not isinstance(self._source, Journal):
            name = job or self._job or _only([one.job for one in self._source.status().jobs])
            return decode(self._source.history(name), f"the history of {name} from {self._source.url}")
        assert self._place.journal is not None
        file = history_file(self._place.journal.parent, job or self._job or _only(list(self._source.jobs())))
        try:
            return decode(file.read_bytes(), str(file))
        except OSError as error:
            raise MegascaleError(f"{file} can't be read: {error.strerror}") from error


def runs() -> "list[Run]":
    """Return the runs that left a folder on this machine, living and past, the newest first."""
    from megascale_ops.cli.sources.runs import list_runs

    return list_runs()


def rows(objects: Iterable[msgspec.Struct]) -> list[dict[str, Any]]:
    """Return objects as flat dictionaries, one each, for ``pandas.DataFrame`` or a CSV writer.

    A field of an object in a field is named ``outer.inner``; what there may be several of (culprits, evidence) stays a
    tuple.
    """
    return [_flat("", one) for one in objects]


def step_rows(history: History) -> list[dict[str, Any]]:
    """Return a history's steps, a row for each rank and bucket in which it ended one.

    Columns: ``start_s`` and ``length_s`` of the bucket, ``rank``, ``step`` (the furthest of any rank); of this rank's
    steps that ended there ``steps`` (how many), ``wall_s``, ``waiting_s``, ``checkpoint_s`` (sums), ``longest_s`` and
    ``longest_own_s``.
    """
    found = []
    for bucket in history.buckets:
        for rank, values in enumerate(zip(*bucket.cells, strict=False)):
            if values[0]:
                place = {"start_s": bucket.start_s, "length_s": bucket.length_s, "rank": rank, "step": bucket.step}
                found.append(place | dict(zip(FIELDS, values, strict=True)))
    return found


def _flat(name: str, value: msgspec.Struct) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for field in value.__struct_fields__:
        inner, key = getattr(value, field), f"{name}{field}"
        if isinstance(inner, msgspec.Struct):
            found |= _flat(f"{key}.", inner)
        else:
            found[key] = inner
    return found


def _only(known: list[str]) -> str:
    if len(known) == 1:
        return known[0]
    raise UsageError(f"say which job: {', '.join(known)}" if known else "no job is known yet")
