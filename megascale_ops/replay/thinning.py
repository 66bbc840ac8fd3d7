# SPDX-License-Identifier: Apache-2.0
"""Make a recording smaller by what tells nothing new. Whether the verdicts stay the same is for a replay to say.

Each way takes more away than the one after it; ``export`` takes the first that changes no verdict:

- ``few``, for large jobs: as ``ends``, and more of the heartbeats around other events are told together.
- ``ends``: what ranks did and how long it took them is left out, their positions and states stay.
- ``steps``: the times of steps stay, with three digits; single collectives are left out.
- ``quiet``: all stays, with three digits.

In all of them numbers that no judge reads go (memory, threads, CPU time, load of the host), and where only steps are
made and nothing is asked, one heartbeat in four seconds tells what four have told: the schema lets agents speak so, and
a node is looked at more closely only after five.
"""

from bisect import bisect_left
from collections.abc import Mapping, Sequence
from typing import NamedTuple

import msgspec

from megascale_ops.replay.files import Recording
from megascale_ops.schema.messages import Heartbeat, JobReport
from megascale_ops.schema.progress import MOST_WORK, ProcessReading, Progress, RankReport, StepWork
from megascale_ops.schema.recording.entries import Beat, Entry, Joined, Known, Polled, Said, Start, Stepped

QUIET_S = 4.0
# 10 s before and after anything but a heartbeat each one stays: how soon it came may matter.
AROUND_S = 10.0
# States of a process that is as it should be.
_PLAIN = ("R", "S")
_replace = msgspec.structs.replace


class Way(NamedTuple):
    """How a recording is made smaller."""

    name: str
    has_work: bool
    has_collectives: bool
    digits: int
    around_s: float = AROUND_S


# 1 s: an event is told as soon as it was; of nodes that only go on it takes the fourth part.
FEW = Way("few", has_work=False, has_collectives=False, digits=3, around_s=1.0)
WAYS = (
    Way("ends", has_work=False, has_collectives=False, digits=3),
    Way("steps", has_work=True, has_collectives=False, digits=3),
    Way("quiet", has_work=True, has_collectives=True, digits=3),
)


def thin(recording: Recording, way: Way) -> Recording:
    """Return a recording with less in it."""
    moments = _moments(recording.entries)
    entries = [_plain(entry, way) for entry in recording.entries]
    merged = _merge(entries, moments, way.around_s)
    return Recording(_replace(recording.header, thinned=way.name), tuple(merged))


def _moments(entries: Sequence[Entry]) -> list[float]:
    """Return when anything happened but heartbeats, requests that were repeated, and numbers of a warning."""
    moments: list[float] = []
    known: set[str] = set()
    for entry in entries:
        if isinstance(entry, (Beat, Polled, Stepped)):
            continue
        if isinstance(entry, (Joined, Said)):
            name = entry.m.join_id if isinstance(entry, Joined) else f"{entry.m.id} {entry.m.state}"
            if name in known:
                continue
            known.add(name)
        moments.append(entry.t)
    return moments


def _plain(entry: Entry, way: Way) -> Entry:
    if isinstance(entry, Beat):
        return _replace(entry, t=round(entry.t, 2), m=_heartbeat(entry.m, way))
    if isinstance(entry, Start):
        agents = tuple(Known(_heartbeat(one.m, way), one.only_job) for one in entry.agents)
        return _replace(entry, agents=agents)
    return _replace(entry, t=round(entry.t, 2))


def _heartbeat(heartbeat: Heartbeat, way: Way) -> Heartbeat:
    return _replace(
        heartbeat,
        mono_s=round(heartbeat.mono_s, 2),
        wall_s=round(heartbeat.wall_s, 2),
        host=None,
        metrics="",
        spooled=0,
        jobs=tuple(_report(report, way) for report in heartbeat.jobs),
    )


def _report(report: JobReport, way: Way) -> JobReport:
    return _replace(
        report,
        ranks=tuple(_rank(rank, way) for rank in report.ranks),
        collectives=report.collectives if way.has_collectives else (),
    )


def _rank(rank: RankReport, way: Way) -> RankReport:
    process = rank.process
    return _replace(
        rank,
        process=ProcessReading(
            state=process.state,
            stopped_since_mono_s=round(process.stopped_since_mono_s, 2),
            cpu_busy=round(process.cpu_busy, 1),
            starved=round(process.starved, 1),
        ),
        progress=_progress(rank.progress, way) if rank.progress is not None else None,
        work=tuple(_work(work, way) for work in rank.work) if way.has_work else (),
    )


def _progress(progress: Progress, way: Way) -> Progress:
    return _replace(
        progress,
        phase_since_mono_s=round(progress.phase_since_mono_s, 2),
        moved_mono_s=round(progress.moved_mono_s, 2),
        # The monitor thread's last sign is judged by its age in seconds.
        beat_mono_s=round(progress.beat_mono_s, 1),
        step_p50_s=_digits(progress.step_p50_s, way.digits),
        step_p99_s=_digits(progress.step_p99_s, way.digits),
        wandered_mono_s=round(progress.wandered_mono_s, 1),
    )


_TIMES = tuple(name for name in StepWork.__struct_fields__ if name.endswith("_s"))


def _work(work: StepWork, way: Way) -> StepWork:
    changes = {name: _digits(getattr(work, name), way.digits) for name in _TIMES}
    if work.loss is not None:
        changes["loss"] = _digits(work.loss, way.digits)
    return _replace(work, **changes)


def _digits(value: float, digits: int) -> float:
    """Return a number with so many digits that count; of seconds none finer than 0.1 ms."""
    return float(f"{round(value, 4):.{digits}g}")


class _Held(NamedTuple):
    """The heartbeat that stands for several of one agent."""

    at: int  # where it stands
    since_s: float  # when the first of them came


def _merge(entries: Sequence[Entry], moments: Sequence[float], around_s: float) -> list[Entry]:
    """Let one heartbeat tell what several of the same agent have told, where nothing else happens."""
    left: list[Entry | None] = []
    held: dict[tuple[str, str], _Held] = {}
    gone: dict[tuple[str, str], list[int]] = {}
    near = 0
    for entry in entries:
        if not isinstance(entry, Beat):
            left.append(entry)
            continue
        while near < len(moments) and moments[near] < entry.t - around_s:
            near += 1
        is_loud = near < len(moments) and moments[near] <= entry.t + around_s
        key = (entry.m.node, entry.m.agent_id)
        before = held.pop(key, None)
        if is_loud or not _is_quiet(entry.m):
            left.append(entry)
            continue
        earlier = left[before.at] if before is not None and entry.t - before.since_s < QUIET_S else None
        both = _together(earlier, entry) if isinstance(earlier, Beat) else None
        if both is None or before is None or not isinstance(earlier, Beat):
            held[key] = _Held(len(left), entry.t)
            left.append(entry)
            continue
        left[before.at] = None
        gone.setdefault(key, []).append(earlier.m.seq)
        held[key] = _Held(len(left), before.since_s)
        left.append(both)
    return [_renumbered(entry, gone) for entry in left if entry is not None]


def _renumbered(entry: Entry, gone: Mapping[tuple[str, str], Sequence[int]]) -> Entry:
    """Count an agent's heartbeats without those that went, so that none is missed; one that was missed still is."""
    if not isinstance(entry, Beat):
        return entry
    before = bisect_left(gone.get((entry.m.node, entry.m.agent_id), ()), entry.m.seq)
    return _replace(entry, m=_replace(entry.m, seq=entry.m.seq - before)) if before else entry


def _is_quiet(heartbeat: Heartbeat) -> bool:
    """Return whether a heartbeat tells only that ranks go on."""
    if heartbeat.full or heartbeat.done_orders or heartbeat.findings:
        return False
    return all(
        rank.process.state in _PLAIN and rank.error is None and not (rank.last_words or rank.rivals or rank.findings)
        for report in heartbeat.jobs
        for rank in report.ranks
    )


def _together(first: Beat, second: Beat) -> Beat | None:
    """Return one heartbeat for two; None where they can't be one."""
    if first.only_job != second.only_job or second.m.seq <= first.m.seq:
        return None
    first_of = {report.job: report for report in first.m.jobs}
    reports = dict(first_of)
    for report in second.m.jobs:
        before = first_of.get(report.job)
        both = report if before is None else _one_report(before, report)
        if both is None:
            return None
        reports[report.job] = both
    return _replace(second, m=_replace(second.m, jobs=tuple(reports.values())))


def _one_report(first: JobReport, second: JobReport) -> JobReport | None:
    if first.round != second.round:
        return None
    ranks = {rank.rank: rank for rank in first.ranks}
    for rank in second.ranks:
        before = ranks.get(rank.rank)
        work = (before.work if before is not None else ()) + rank.work
        if len(work) > MOST_WORK:
            return None
        ranks[rank.rank] = _replace(rank, work=work)
    if {one.rank for one in first.collectives} & {one.rank for one in second.collectives}:
        return None
    return _replace(second, ranks=tuple(ranks.values()), collectives=first.collectives + second.collectives)
