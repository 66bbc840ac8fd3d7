# SPDX-License-Identifier: Apache-2.0
"""Cut what is about one job, or one incident of it, out of the blocks that a controller has kept.

Blocks are of half a minute at most, of all jobs. What is cut out begins with what was known at a time, and
has one job's heartbeats, requests, evidence and orders; nodes that never had a part in it are left out.
"""

from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import NamedTuple

import msgspec

from megascale_ops.errors import UsageError
from megascale_ops.foreign import UNREADABLE
from megascale_ops.replay.files import Recording, incident_lines, parse
from megascale_ops.schema.events import Incident
from megascale_ops.schema.messages import Heartbeat
from megascale_ops.schema.recording.entries import (
    Answered,
    Beat,
    Broken,
    Entry,
    Given,
    Header,
    Joined,
    Known,
    Left,
    PolicySet,
    Polled,
    Said,
    Start,
    Stepped,
    StopAsked,
)
from megascale_ops.suggest import unknown

# Requests of several controllers' lives are counted from 1 each.
_EACH_LIFE = 10**9
# Evidence for a person's questions (logs, profiles, self-checks) is no part of a verdict.
_FOR_PEOPLE = ("log", "profile", "self_check")


class Block(NamedTuple):
    """One block of a controller, not unpacked."""

    name: str
    raw: bytes
    header: Header


class Found(NamedTuple):
    """An incident as the blocks know it: wall clock seconds."""

    incident: Incident
    began_wall_s: float
    ended_wall_s: float  # when it last changed


class Window(NamedTuple):
    """What is wanted, wall clock seconds."""

    from_wall_s: float
    until_wall_s: float


_headers = msgspec.json.Decoder(Header)
_said = msgspec.json.Decoder(Said)


def blocks_of(files: Iterable[tuple[Path, bytes]]) -> tuple[list[Block], dict[str, Found]]:
    """Return the blocks with their headers, and all incidents that they tell of, in order.

    Raises:
        UsageError: one of them is no recording, or damaged.
    """
    blocks: list[Block] = []
    found: dict[str, Found] = {}
    for path, raw in files:
        lines = incident_lines(raw, str(path))
        try:
            header = _headers.decode(next(lines, b""))
            said = [_said.decode(line) for line in lines]
        except UNREADABLE as error:
            raise UsageError(f"{path} is no block of a recording: {error}") from error
        blocks.append(Block(str(path), raw, header))
        for one in said:
            at_s = header.began_wall_s + one.t
            before = found.get(one.m.id)
            began_s = before.began_wall_s if before is not None else min(at_s, one.m.marks.began or at_s)
            found[one.m.id] = Found(one.m, began_s, at_s)
    return blocks, found


def find(found: dict[str, Found], name: str) -> Found:
    """Return an incident by its name.

    Raises:
        UsageError: the blocks know none of this name.
    """
    if name not in found:
        raise UsageError(unknown("recorded incident", name, list(found)))
    return found[name]


def cut(blocks: Sequence[Block], job: str, window: Window | None = None) -> Recording:
    """Return a recording of one job.

    Args:
        blocks: of one folder, the earliest first.
        job: whose.
        window: from the last start before it until its end; None: all that there is.

    Raises:
        UsageError: the blocks tell nothing of such a job.
    """
    begins = [at for at, one in enumerate(blocks) if not one.header.goes_on] or [0]
    first = begins[0]
    if window is not None:
        before = [at for at in begins if blocks[at].header.began_wall_s <= window.from_wall_s]
        first = max(before, default=first)
    wanted = [one for one in blocks[first:] if window is None or one.header.began_wall_s <= window.until_wall_s]
    read = [parse(one.raw, one.name) for one in wanted]
    until_s = window.until_wall_s - read[0].header.began_wall_s if window is not None else float("inf")
    entries: list[Entry] = []
    process, lives = read[0].header.process, 0
    for recording in read:
        if recording.header.process != process:
            process, lives = recording.header.process, lives + 1
        entries += _shifted(recording, read[0].header, lives * _EACH_LIFE)
    entries = [entry for entry in _in_order(entries) if entry.t <= until_s]
    left = _only(entries, job)
    if not any(not isinstance(entry, (Start, Stepped)) for entry in left):
        raise UsageError(f"the recorded blocks tell nothing of job {job}")
    return Recording(msgspec.structs.replace(read[0].header, job=job, goes_on=False), tuple(left))


def _shifted(recording: Recording, first: Header, numbers_from: int) -> list[Entry]:
    """Return the entries of a block with times since the first one's beginning."""
    header = recording.header
    if header.process == first.process:
        by_s = header.began_mono_s - first.began_mono_s
    else:
        by_s = header.began_wall_s - first.began_wall_s
    by_s = max(0.0, by_s)
    moved: list[Entry] = []
    for entry in recording.entries:
        changes: dict[str, object] = {"t": round(entry.t + by_s, 4)}
        if numbers_from and isinstance(entry, (Joined, Polled, Broken)):
            changes["n"] = entry.n + numbers_from
        moved.append(msgspec.structs.replace(entry, **changes))
    wall_s = header.began_wall_s
    if abs(wall_s - first.began_wall_s - by_s) > 0.5:
        moved.insert(0, Stepped(round(by_s, 4), wall_s))
    return moved


def _in_order(entries: list[Entry]) -> list[Entry]:
    last_s = 0.0
    for at, entry in enumerate(entries):
        if entry.t < last_s:
            entries[at] = msgspec.structs.replace(entry, t=last_s)
        last_s = max(last_s, entry.t)
    return entries


class _Only:
    """Takes what is about one job out of entries, in order."""

    def __init__(self, job: str, nodes: set[str]) -> None:
        self._job, self._nodes = job, nodes
        self._requests: set[int] = set()
        self._orders: set[str] = set()
        self._has_begun = False

    def take(self, entry: Entry) -> Entry | None:
        """Return what of an entry is about the job; None: nothing. Of several starts only the first tells anything."""
        if isinstance(entry, Start):
            return self._start(entry)
        if isinstance(entry, Beat):
            return _beat_of(entry, self._job, self._nodes, self._orders)
        if isinstance(entry, (Joined, Polled, Broken)):
            return entry if self._is_request(entry) else None
        if isinstance(entry, Given):
            return self._order(entry)
        return entry if isinstance(entry, Stepped) else _word_of(entry, self._job)

    def _is_request(self, entry: Joined | Polled | Broken) -> bool:
        if not isinstance(entry, Broken) and (entry.m.job if isinstance(entry, Joined) else entry.job) == self._job:
            self._requests.add(entry.n)
        return entry.n in self._requests

    def _start(self, start: Start) -> Start | None:
        if self._has_begun:
            return None
        self._has_begun = True
        kept = _start_of(start, self._job, self._nodes)
        self._requests |= {one.n for one in kept.polls} | {one.n for one in kept.joins}
        return kept

    def _order(self, entry: Given) -> Given | None:
        order = entry.m
        if order.job != self._job or order.log is not None or order.ask is not None or order.kind == "profile":
            return None
        self._orders.add(order.id)
        return entry


def _only(entries: Sequence[Entry], job: str) -> list[Entry]:
    """Return what is about one job."""
    only = _Only(job, _nodes_of(entries, job))
    return [kept for entry in entries if (kept := only.take(entry)) is not None]


def _word_of(entry: Answered | Left | PolicySet | StopAsked | Said, job: str) -> Entry | None:
    if isinstance(entry, (PolicySet, StopAsked)):
        return entry if entry.job == job else None
    if isinstance(entry, Answered) and any(item.kind in _FOR_PEOPLE for item in entry.m.items):
        return None
    return entry if entry.m.job == job else None


def _nodes_of(entries: Sequence[Entry], job: str) -> set[str]:
    """Return the nodes that have or want a part in a job."""
    nodes: set[str] = set()
    for entry in entries:
        if isinstance(entry, Joined) and entry.m.job == job:
            nodes.add(entry.m.node)
        elif isinstance(entry, Polled) and entry.job == job:
            nodes.add(entry.node)
        elif isinstance(entry, Beat) and any(report.job == job for report in entry.m.jobs):
            nodes.add(entry.m.node)
        elif isinstance(entry, Start):
            nodes |= {agent.m.node for agent in entry.agents if any(one.job == job for one in agent.m.jobs)}
            nodes |= {one.node for one in entry.polls if one.job == job}
            nodes |= {one.m.node for one in entry.joins if one.m.job == job}
    return nodes


def _start_of(start: Start, job: str, nodes: set[str]) -> Start:
    agents = (
        Known(_heartbeat_of(one.m, job, None), one.only_job)
        for one in start.agents
        if one.m.node in nodes and one.only_job in ("", job)
    )
    return msgspec.structs.replace(
        start,
        records={name: raw for name, raw in start.records.items() if name == job},
        incidents=tuple(one for one in start.incidents if one.job == job),
        agents=tuple(agents),
        hardware=tuple(one for one in start.hardware if one.node in nodes),
        polls=tuple(one for one in start.polls if one.job == job),
        joins=tuple(one for one in start.joins if one.m.job == job),
    )


def _beat_of(entry: Beat, job: str, nodes: set[str], orders: set[str]) -> Beat | None:
    if entry.m.node not in nodes or entry.only_job not in ("", job):
        return None
    return msgspec.structs.replace(entry, m=_heartbeat_of(entry.m, job, orders))


def _heartbeat_of(heartbeat: Heartbeat, job: str, orders: set[str] | None) -> Heartbeat:
    jobs = tuple(report for report in heartbeat.jobs if report.job == job)
    done = tuple(
        name for name in heartbeat.done_orders if name.startswith(f"{job}:") or (orders is not None and name in orders)
    )
    if len(jobs) == len(heartbeat.jobs) and len(done) == len(heartbeat.done_orders):
        return heartbeat
    return msgspec.structs.replace(heartbeat, jobs=jobs, done_orders=done)
