# SPDX-License-Identifier: Apache-2.0
"""The Python API: what a job did and does, as typed objects, for notebooks and scripts.

    from megascale_ops.client import Client, rows

    with Client() as ops:                                 # the newest run of this machine, living or over
        for judged in ops.verdicts():
            print(judged.incident, judged.verdict.fault, judged.verdict.culprits)
        frame = pandas.DataFrame(rows(ops.incidents()))   # flat dictionaries, a row each

It finds a run as the command line does: an address that is given, else the newest run that lives, else the journal that
a run left. Objects are those of `megascale_ops.schema`; times are wall clock seconds since 1970, durations seconds.
Reading only: what changes a job is the command line's.
"""

from collections.abc import Iterable, Iterator
from contextlib import ExitStack
from functools import cache
from typing import TYPE_CHECKING, Any, NamedTuple, Self, get_args, get_type_hints

import msgspec

from megascale_ops.cli.sources.history import MOST_KNOWN, Journal, open_place
from megascale_ops.cli.sources.locate import Wanted, find_place
from megascale_ops.errors import MegascaleError, UsageError
from megascale_ops.schema.events import Incident, JobStatus, RankStatus
from megascale_ops.schema.health import Verdict
from megascale_ops.schema.history import FIELDS, History, decode, history_file

if TYPE_CHECKING:
    from megascale_ops.schema.runs import Run

__all__ = ["Client", "Judged", "rank_rows", "rows", "runs", "step_rows"]


class Judged(msgspec.Struct, frozen=True):
    """A verdict and what it is about; ``state`` is the incident's, ``detected_wall_s`` when it was first noticed."""

    incident: str
    job: str
    round: int
    state: str
    detected_wall_s: float
    verdict: Verdict


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

    def verdicts(self, job: str = "", *, limit: int = MOST_KNOWN) -> tuple[Judged, ...]:
        """Return the verdicts of the newest incidents, oldest first; an incident that is not judged yet has none."""
        return tuple(
            Judged(one.id, one.job, one.round, one.state, one.marks.detected, one.verdict)
            for one in self.incidents(job, limit=limit)
            if one.verdict is not None
        )

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

    A field of an object in a field is named ``outer.inner``, None where there is no such object: all objects of a type
    have the same columns. Of objects in a collection (a job's ranks, an incident's evidence) the row has the number;
    plain values in one (culprits, nodes) stay a tuple.
    """
    return [{column.name: column.value(one) for column in _columns(type(one))} for one in objects]


def rank_rows(jobs: Iterable[JobStatus]) -> list[dict[str, Any]]:
    """Return a row for each rank of some jobs: the job's name, then the columns of ``rows``."""
    return [{"job": one.job} | row for one in jobs for row in rows(one.ranks)]


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


class _Column(NamedTuple):
    """One column of ``rows``: the fields that lead to its value, and whether that is counted."""

    path: tuple[str, ...]
    is_counted: bool = False

    @property
    def name(self) -> str:
        return ".".join(self.path)

    def value(self, one: object) -> object:
        for field in self.path:
            one = getattr(one, field, None)  # None has no fields
        return len(one) if self.is_counted and isinstance(one, (tuple, list, dict)) else one


@cache
def _columns(kind: type[msgspec.Struct]) -> tuple[_Column, ...]:
    return tuple(_columns_below(kind, ()))


def _columns_below(kind: type[msgspec.Struct], path: tuple[str, ...]) -> Iterator[_Column]:
    hints = get_type_hints(kind)
    for field in kind.__struct_fields__:
        hint, here = hints[field], (*path, field)
        struct = next((one for one in (hint, *get_args(hint)) if _is_struct(one)), None)
        if struct is None:
            yield _Column(here)
        elif issubclass(getattr(hint, "__origin__", object), (tuple, list, dict)):
            yield _Column(here, is_counted=True)
        else:
            yield from _columns_below(struct, here)


def _is_struct(hint: object) -> bool:
    return isinstance(hint, type) and issubclass(hint, msgspec.Struct)


def _only(known: list[str]) -> str:
    if len(known) == 1:
        return known[0]
    raise UsageError(f"say which job: {', '.join(known)}" if known else "no job is known yet")
