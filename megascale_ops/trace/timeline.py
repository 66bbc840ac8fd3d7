# SPDX-License-Identifier: Apache-2.0
"""The timeline of a job: what each rank did when, on one clock, as tracks with slices, marks and samples. Pure.

Of a step the black box has the durations of its parts, and not their beginnings. They are drawn inside the step one
after the other, in the usual order, each marked as nominal in place. Collectives have true times. The writer
decides about the file: ``perfetto`` and ``chrome`` take the same events.
"""

import math
from collections.abc import Collection, Iterator, Mapping, Sequence
from functools import cache
from typing import NamedTuple

from megascale_ops.blackbox.records import BoxIdentity
from megascale_ops.schema.folding import listed
from megascale_ops.trace.arrows import ArrowBook
from megascale_ops.trace.clocks import Clocks
from megascale_ops.trace.matching import Key, Meeting, absentees
from megascale_ops.trace.rank_plan import TAIL, Drawn, RankPlan, Step, plan_ranks, windows_of
from megascale_ops.trace.rank_records import LAUNCH, NCCL, NS, RankRecords
from megascale_ops.trace.scene import Args, Event, Group, Mark, Sample, Slice, Track

# The usual order; DDP waits for gradients at the end of its backward pass.
PARTS = ("data", "forward", "backward", "waiting", "optimizer", "checkpoint")
NOMINAL: Args = (("place", "nominal: the black box knows how long a part took, not when it began"),)
COUNTERS = (("step time", "ms"), ("waiting share", "%"), ("loss", "loss"))
# 4: the collectives that ranks hang in, at the end of a trace; there is one for each communicator at most.
MOST_ABSENCES = 4


class Moment(NamedTuple):
    """Something that happened to the job, on the reference node's wall clock."""

    name: str
    wall_s: float


class Scope(NamedTuple):
    """What is to be drawn around the ranks' own data."""

    last: int
    meetings: Mapping[Key, Meeting]
    culprits: Collection[int] = ()
    incident: str = ""
    moments: Sequence[Moment] = ()
    about: Args = ()


class Timeline:
    """Groups and tracks first, then the events of one window after the other; on each track in the order of time."""

    def __init__(self, all_records: Sequence[RankRecords], clocks: Clocks, scope: Scope) -> None:
        self.clocks, self.scope = clocks, scope
        self.plans = plan_ranks(all_records, clocks.offsets(), scope.last)
        self.begin_ns = min((ns for plan in self.plans for ns in _beginnings(plan)), default=0)
        if self.begin_ns < 0:  # a node's wall clock is behind by more than the reference node is up
            self.clocks = clocks.begun_before(-self.begin_ns)
            self.plans, self.begin_ns = plan_ranks(all_records, self.clocks.offsets(), scope.last), 0
        self.windows = windows_of(self.plans)
        self.arrows = ArrowBook(self.plans, scope.meetings, clocks.residual_p99_ns)
        self._absent = self._absences()
        first_number = max((plan.rank for plan in self.plans), default=0) + 2
        self.job_group = Group(first_number, f"job {all_records[0].identity.job or '?'}" if all_records else "job")
        self.groups = [self.job_group, *(Group(plan.rank + 1, self._name(plan), _about(plan)) for plan in self.plans)]
        self.tracks: list[Track] = []
        self._numbers: dict[tuple[int, str, int], int] = {}
        self._lay_tracks(first_number + 1)

    def events(self, window: int) -> Iterator[Event]:
        """Yield what happened in one of ``windows``, rank after rank."""
        if window == self.windows[0]:
            yield from self._job_events()
        for plan in self.plans:
            step = plan.steps.get(window)
            if step is not None:
                yield from self._step(plan, step)
            for drawn in plan.collectives.get(window, ()):
                yield self._collective(plan, drawn)
            if window == TAIL:
                yield from self._tail(plan)

    def _absences(self) -> dict[Key, list[int]]:
        """Return, by collective in which others waited already, the ranks that had not come when their box was read.

        Boxes of running ranks are read one after the other: one that was read before the others came proves nothing.
        """
        last_ns = {plan.rank: plan.records.last_ns - plan.offset_ns for plan in self.plans}
        found = {}
        for key, away in absentees(self.scope.meetings, {plan.rank: plan.drawn for plan in self.plans}).items():
            came_ns = min(plan.drawn[key].started_ns - plan.offset_ns for plan in self.plans if key in plan.drawn)
            late = [rank for rank in away if last_ns[rank] > came_ns]
            if late:
                found[key] = late
        return found

    def _name(self, plan: RankPlan) -> str:
        return rank_name(plan.records.identity) + (", culprit" if plan.rank in self.scope.culprits else "")

    def _lay_tracks(self, number: int) -> None:
        """Number all tracks in the order in which they are shown."""
        layout = [(self.job_group.number, "about this trace", "", 0)]
        if self.scope.moments:
            layout.append((self.job_group.number, f"incident {self.scope.incident}", "", 0))
        for plan in self.plans:
            group = plan.rank + 1
            layout += [(group, "steps", "", 0), (group, "parts of the step", "", 0)]
            for (source, communicator), lanes in sorted(plan.lanes.items()):
                name = _communicator_name(source, communicator, plan.records.names.get(communicator, ""))
                layout += [(group, name, "", lane) for lane in range(lanes)]
            layout += [(group, name, unit, 0) for name, unit in COUNTERS if name != "loss" or _has_loss(plan)]
        for place, (group, name, unit, lane) in enumerate(layout, number):
            self._numbers[group, name, lane] = place
            self.tracks.append(Track(place, group, f"{name} ({lane + 1})" if lane else name, unit))

    def _job_events(self) -> Iterator[Event]:
        group = self.job_group.number
        yield Mark(self._numbers[group, "about this trace", 0], "about this trace", self.begin_ns, self.scope.about)
        for moment in sorted(self.scope.moments, key=lambda one: one.wall_s):
            at_ns = round(moment.wall_s * NS) - self.clocks.wall_minus_mono_ns
            track = self._numbers[group, f"incident {self.scope.incident}", 0]
            yield Mark(track, moment.name, at_ns, (("clock", "the controller's wall clock"),))

    def _step(self, plan: RankPlan, whole: Step) -> Iterator[Event]:
        group, step = plan.rank + 1, whole.record
        begin_ns, end_ns = whole.begin_ns - plan.offset_ns, whole.end_ns - plan.offset_ns
        gc_ms, cpu_ms = round(step.gc_s * 1000, 3), round(step.cpu_s * 1000, 3)
        args: Args = (("garbage collection, ms", gc_ms), ("CPU time, ms", cpu_ms))
        yield Slice(self._numbers[group, "steps", 0], f"step {step.step}", begin_ns, end_ns, args)
        track, at_ns = self._numbers[group, "parts of the step", 0], begin_ns
        for part in PARTS:
            until_ns = min(end_ns, at_ns + max(0, round(getattr(step, f"{part}_s") * NS)))
            if until_ns > at_ns:
                yield Slice(track, part, at_ns, until_ns, NOMINAL)
            at_ns = until_ns
        share = 100.0 * step.waiting_s / step.wall_s if step.wall_s > 0.0 else 0.0
        values = {"step time": step.wall_s * 1000.0, "waiting share": share, "loss": step.loss}
        for name, value in values.items():
            if value is not None and math.isfinite(value):
                yield Sample(self._numbers[group, name, 0], begin_ns, value)

    def _collective(self, plan: RankPlan, drawn: Drawn) -> Slice | Mark:
        span, key = drawn.span, drawn.key
        name = _communicator_name(span.source, span.communicator, plan.records.names.get(span.communicator, ""))
        track = self._numbers[plan.rank + 1, name, drawn.lane]
        begin_ns, end_ns = span.started_ns - plan.offset_ns, drawn.end_ns - plan.offset_ns
        args: Args = (("communicator", span.communicator), ("bytes", span.bytes_moved))
        if not span.ended_ns and not drawn.is_open:
            return Mark(track, span.function, begin_ns, (*args, ("seq", span.seq), ("end", "not seen")))
        if drawn.is_open:
            return Slice(track, span.function, begin_ns, end_ns, (*args, *self._open_args(key)), span.seq)
        meeting = self.scope.meetings.get(key) if key else None
        if meeting is None or meeting.ended < 2 or key is None:
            return Slice(track, span.function, begin_ns, end_ns, (*args, ("seen on ranks", 1 if key else 0)), span.seq)
        args = (*args, ("last arrival", f"rank {meeting.last_rank}"), ("seen on ranks", meeting.ended))
        arrows = self.arrows.of(key)
        split_ns = max(begin_ns, end_ns - meeting.moving_ns)
        arrow = arrows.to.get(plan.rank, 0)
        if arrow:  # by as much as the slack of an arrow: what moves cannot move before the last rank is there
            split_ns = min(end_ns, max(split_ns, arrows.arrived_ns))
        inner: list[Slice | Mark] = []
        if plan.rank == meeting.last_rank:
            inner.append(Mark(track, "last to arrive", begin_ns, (), tuple(arrows.to.values())))
        if split_ns > begin_ns:
            inner.append(Slice(track, "waiting", begin_ns, split_ns))
        inner.append(Slice(track, "moving", split_ns, end_ns, (), -1, (), 0, arrow))
        return Slice(track, span.function, begin_ns, end_ns, args, span.seq, tuple(inner), arrows.kin)

    def _open_args(self, key: Key | None) -> Args:
        away = self._absent.get(key, ()) if key else ()
        names = listed([f"rank {rank}" for rank in away])
        return (("end", "not seen before the black box's last moment"), *((("had not come", names),) if away else ()))

    def _tail(self, plan: RankPlan) -> Iterator[Event]:
        """Yield what the rank was at when its box was read: the step under way, absences."""
        records, group = plan.records, plan.rank + 1
        last_ns = records.last_ns - plan.offset_ns
        ended = max((step.end_ns for step in plan.steps.values()), default=0)
        since_ns = ended or records.phase_since_ns
        if since_ns and since_ns < records.last_ns and records.phase:
            under_way = max(plan.steps, default=-1) + 1
            name = f"step {under_way} (under way)" if plan.steps else "before the first step shown"
            yield Slice(
                self._numbers[group, "steps", 0],
                name,
                since_ns - plan.offset_ns,
                last_ns,
                (("phase", records.phase),),
            )
        if records.phase and since_ns <= records.phase_since_ns < records.last_ns:
            track = self._numbers[group, "parts of the step", 0]
            yield Slice(track, f"{records.phase} (under way)", records.phase_since_ns - plan.offset_ns, last_ns)
        missed = [key for key, away in self._absent.items() if plan.rank in away]
        for _, communicator, function, seq in sorted(missed)[:MOST_ABSENCES]:
            name = f"had not come to {function} #{seq} of group {communicator}"
            yield Mark(self._numbers[group, "steps", 0], name, last_ns)


def rank_name(identity: BoxIdentity) -> str:
    """Return what a rank's group is called: ``rank 3 (node a, local rank 1, dp 1 tp 1)``."""
    mesh = identity.mesh
    places = [f"{axis} {place}" for axis in ("dp", "pp", "tp", "ep") if (place := getattr(mesh, axis)) >= 0]
    parts = [
        f"node {identity.node or '?'}",
        f"local rank {identity.local_rank}",
        *([" ".join(places)] if places else []),
    ]
    return f"rank {identity.rank} ({', '.join(parts)})"


def _about(plan: RankPlan) -> str:
    identity = plan.records.identity
    return f"pid {identity.pid}, round {identity.round}, clock moved by {-plan.offset_ns / NS:.6f} s"


@cache
def _communicator_name(source: str, communicator: str, name: str) -> str:
    """Return the name of a communicator's track; NCCL's numbers are long, and eight digits distinguish them."""
    if source == NCCL:
        return f"NCCL {name or 'communicator'} {communicator[-8:]}"
    return f"group {communicator} ({'launches' if source == LAUNCH else 'host calls'})"


def _has_loss(plan: RankPlan) -> bool:
    losses = (step.record.loss for step in plan.steps.values())
    return any(loss is not None and math.isfinite(loss) for loss in losses)


def _beginnings(plan: RankPlan) -> Iterator[int]:
    """Yield where a rank's part of the picture may begin, on the reference clock."""
    yield from (step.begin_ns - plan.offset_ns for step in list(plan.steps.values())[:1])
    firsts = [drawn[0].span.started_ns for drawn in plan.collectives.values() if drawn]
    yield from (first - plan.offset_ns for first in sorted(firsts)[:1])
