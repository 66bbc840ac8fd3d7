# SPDX-License-Identifier: Apache-2.0
"""How much of a heartbeat each job may fill, so that no job silences another one.

A controller refuses a body beyond 256 KiB, whole: what one job's ranks made it too large with would be the silence of
all jobs of the node. A rank can be made to fill 25 KB (64 kinds of last words), and a user has as many ranks and jobs
as round files were written for. So the room is divided: evenly among the users, what one leaves is the others',
and evenly among the jobs of each in the same way. A job that fills more than its part is cut, what it can best spare
first: samples of collectives, steps, texts, and at last whole ranks; the report has the number of ranks of which
    something is missing.

Pure: reports in, reports out.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import TypeVar

import msgspec

from megascale_ops.schema.messages import MAX_BODY_BYTES, JobReport
from megascale_ops.schema.progress import RankReport

K = TypeVar("K")

# A quarter of the body is for what is the node's own: 32 findings, the host, done orders, GPUs.
JOBS_BYTES = MAX_BODY_BYTES * 3 // 4
# 120: enough to recognise the error. 4: the first kinds of last words are the first causes.
_SHORT = 120
_FEW_WORDS = 4
_FEW_RIVALS = 4

_encode = msgspec.json.Encoder().encode
_replace = msgspec.structs.replace


def fitted(
    reports: Mapping[str, JobReport], owners: Mapping[str, int], most_bytes: int = JOBS_BYTES
) -> list[JobReport]:
    """Return the reports of all jobs, cut where they would not fit together.

    Args:
        reports: by job.
        owners: whose a job is, by job.
        most_bytes: what all of them may fill.
    """
    sizes = {job: len(_encode(report)) + 1 for job, report in reports.items()}
    if sum(sizes.values()) <= most_bytes:
        return list(reports.values())
    of_users: dict[int, dict[str, int]] = {}
    for job, size in sizes.items():
        of_users.setdefault(owners[job], {})[job] = size
    parts = even_parts({user: sum(of_jobs.values()) for user, of_jobs in of_users.items()}, most_bytes)
    room = {job: part for user, of_jobs in of_users.items() for job, part in even_parts(of_jobs, parts[user]).items()}
    cut = (_cut(report, room[job]) if sizes[job] > room[job] else report for job, report in reports.items())
    return [report for report in cut if report is not None]


def even_parts(wanted: Mapping[K, int], room: int) -> dict[K, int]:
    """Divide ``room`` evenly; what one does not want is divided among the others."""
    parts = {}
    left = len(wanted)
    for who in sorted(wanted, key=wanted.__getitem__):
        parts[who] = min(wanted[who], room // left)
        room -= parts[who]
        left -= 1
    return parts


def _cut(report: JobReport, most_bytes: int) -> JobReport | None:
    """Return what fits of a job; None where not even its name does."""
    for spare in _SPARED:
        report = _replace(report, collectives=(), ranks=tuple(spare(rank) for rank in report.ranks))
        told = _replace(report, cut=len(report.ranks))
        if len(_encode(told)) < most_bytes:
            return told
    return _fewer_ranks(report, most_bytes)


def _fewer_ranks(report: JobReport, most_bytes: int) -> JobReport | None:
    bare = _replace(report, ranks=(), cut=len(report.ranks))
    left = most_bytes - len(_encode(bare)) - len(',"ranks":[]')
    if left < 0:
        return None
    return _replace(bare, ranks=tuple(_first_that_fit(report.ranks, left)))


def _first_that_fit(ranks: Sequence[RankReport], most_bytes: int) -> Iterator[RankReport]:
    for rank in ranks:
        most_bytes -= len(_encode(rank)) + 1
        if most_bytes < 0:
            return
        yield rank


def _whole(rank: RankReport) -> RankReport:
    return rank


def _last_step_only(rank: RankReport) -> RankReport:
    return _replace(rank, work=rank.work[-1:]) if rank.work else rank


def _short_texts(rank: RankReport) -> RankReport:
    error = rank.error
    if error is not None:
        error = _replace(
            error,
            type=error.type[:_SHORT],
            message=error.message[:_SHORT],
            where=error.where[:_SHORT],
            thread=error.thread[:_SHORT],
        )
    words = tuple(_replace(one, line=one.line[:_SHORT]) for one in rank.last_words[:_FEW_WORDS])
    findings = tuple(_replace(one, text=one.text[:_SHORT]) for one in rank.findings)
    return _replace(rank, work=(), error=error, last_words=words, rivals=rank.rivals[:_FEW_RIVALS], findings=findings)


def _no_texts(rank: RankReport) -> RankReport:
    return _replace(rank, error=None, last_words=(), rivals=(), sending_to="", findings=())


# Reductions of a job, one after the other; each gets the result of the one before.
_SPARED: tuple[Callable[[RankReport], RankReport], ...] = (_whole, _last_step_only, _short_texts, _no_texts)
