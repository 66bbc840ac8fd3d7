# SPDX-License-Identifier: Apache-2.0
"""What a page sees of one job: everything gathered into one frame, and what has changed since the frame before.

Gathering 12,288 ranks takes 20 ms of one core and is done in pieces of a few milliseconds: ``Feed.gather`` is a
generator that yields between them, so that heartbeats are answered meanwhile. Of the first frame, 60 to 110 ms,
it yields the headline as soon as the ranks are counted. All pages that watch a job share one feed, so its cost does not
grow with their number.

Pure: the time is an argument; reads what the loop knows and changes nothing of it.
"""

from collections.abc import Callable, Generator, Mapping
from typing import NamedTuple

import msgspec

from megascale_ops.account import Account
from megascale_ops.controller.cluster.registry import Registry
from megascale_ops.controller.history.step_history import StepHistory
from megascale_ops.controller.job.job import Job
from megascale_ops.controller.live import headline as live_headline
from megascale_ops.controller.live.heatmap import Times
from megascale_ops.controller.live.job_lines import job_lines
from megascale_ops.controller.live.node_lines import node_lines
from megascale_ops.controller.live.ranks import Ranks, Seen
from megascale_ops.controller.live.words import incident_line
from megascale_ops.controller.nodes.book import NodeBook
from megascale_ops.schema import live
from megascale_ops.schema.events import Incident
from megascale_ops.schema.health import SelfCheckView
from megascale_ops.schema.live import LIVE_VERSION, Columns, Frame, Pace
from megascale_ops.schema.ranges import MOST_RANKS

# 50 incidents: more than a person reads; ``megascale-ops incidents`` lists all.
MOST_INCIDENTS = 50
# 200 changes of state: what a strip can show.
MOST_TURNS = 200
# 32 nodes: of more the worst; 16 lines each: what GPUs and links do.
MOST_CHECKS, MOST_FIGURES = 32, 16


class Sources(NamedTuple):
    """What there is to read; all of it belongs to the loop."""

    jobs: Mapping[str, Job]
    registry: Registry
    incidents: Mapping[str, Incident]  # by id, the newest last
    histories: Mapping[str, StepHistory]
    nodes: NodeBook = NodeBook()
    check_of: Callable[[str], SelfCheckView] = lambda node: SelfCheckView(node, "none")  # by node


class Feed:
    """One job's frames. Owned by its stream."""

    def __init__(self, job: str) -> None:
        self.job = job
        self.frame: Frame | None = None  # the newest, whole
        self.change: Frame | None = None  # what of it was not in the one before
        self._times = Times()
        self._ranks = Ranks()

    @property
    def is_behind(self) -> bool:
        """Columns of the heat map are still to be made."""
        return self._times.missing > 0

    def gather(
        self, sources: Sources, *, now_s: float, wall_s: float, lag_s: float, goodput: Account | None = None
    ) -> Generator[Frame | None]:
        """Make the next frame; yields between pieces of work, once with the headline of what is to come.

        Args:
            sources: what the loop knows.
            now_s: the loop's clock.
            wall_s: wall clock seconds.
            lag_s: how late the loop was of late.
            goodput: the job's account; None where there is none.
        """
        job = sources.jobs.get(self.job)
        if job is None:
            jobs = job_lines(sources.jobs, wall_s, self.job)
            text = f"There is no job {self.job!r}." if self.job else "No job has joined this controller yet."
            self._next(Frame(LIVE_VERSION, 0, wall_s, headline=live.Headline("waiting", text), jobs=jobs))
            return
        world_size = min(job.record.world_size, MOST_RANKS)
        seen = yield from self._ranks.go_through(job, sources.registry, world_size, now_s)

        def top() -> Frame:
            seen.judge(job)
            pace = _pace(job, seen, wall_s, goodput, starts=job.is_starting(now_s))
            headline = live_headline.headline(job, sources.registry, self._mine(sources), pace, wall_s)
            jobs = job_lines(sources.jobs, wall_s, self.job)
            return Frame(
                LIVE_VERSION, 0, wall_s, self.job, lag_s=round(lag_s, 3), headline=headline, pace=pace, jobs=jobs
            )

        yield top()
        yield from self._ranks.look_at_layout(job, sources.registry, world_size)
        history = sources.histories.get(self.job)
        yield from self._times.poll_buckets(history.buckets() if history is not None else (), world_size, now_s)
        # Computed again, not kept from above: judgements may have changed since, and headline, map and
        # list must be of one moment.
        self._next(
            msgspec.structs.replace(
                top(),
                layout=self._ranks.layout,
                columns=self._columns(seen),
                times=self._strip(history),
                ledger=_ledger(goodput),
                lives=node_lines(sources.nodes, job),
                checks=_checks(job, sources.check_of),
                incidents=tuple(incident_line(one) for one in reversed(self._mine(sources)[-MOST_INCIDENTS:])),
            )
        )

    def _mine(self, sources: Sources) -> list[Incident]:
        """Return the job's incidents, the newest last."""
        return [incident for incident in sources.incidents.values() if incident.job == self.job]

    def _columns(self, seen: Seen) -> Columns:
        return Columns(
            phases=self._ranks.phases,
            phase=live.packed("phase", seen.phase),
            behind=seen.behind(),
            quiet=live.packed("quiet", seen.quiet),
            judged=live.packed("judged", seen.judged),
            own=self._times.late.own,
            waiting=self._times.late.waiting,
        )

    def _strip(self, history: StepHistory | None) -> live.Times:
        turns = tuple(history.turns[-MOST_TURNS:]) if history is not None else ()
        return live.Times(self._times.row_ranks, self._times.rows, self._times.slots(), turns)

    def _next(self, frame: Frame) -> None:
        before = self.frame
        seq = before.seq + 1 if before is not None else 1
        self.frame = msgspec.structs.replace(frame, seq=seq, whole=True)
        self.change = changed(before, self.frame) if before is not None else self.frame


def changed(before: Frame, now: Frame) -> Frame:
    """Return what a page that has ``before`` must get; the whole of ``now`` where a change would not do."""
    if before.job != now.job or not _grew(before.times, now.times):
        return now
    parts = ("headline", "pace", "layout", "incidents", "jobs", "ledger", "lives", "checks")
    told = {name: getattr(now, name) for name in parts if getattr(now, name) != getattr(before, name)}
    if now.columns is not None and before.columns is not None and now.columns != before.columns:
        names = Columns.__struct_fields__
        fields = {name: one for name in names if (one := getattr(now.columns, name)) != getattr(before.columns, name)}
        told["columns"] = Columns(**fields)
    if now.times is not None and before.times is not None and now.times != before.times:
        known = set(before.times.slots)
        new = tuple(slot for slot in now.times.slots if slot not in known)
        told["times"] = msgspec.structs.replace(now.times, slots=new)
    return Frame(now.version, now.seq, now.wall_s, now.job, lag_s=now.lag_s, **told)


def _grew(before: live.Times | None, now: live.Times | None) -> bool:
    """Return whether the slots of ``now`` laid over those of ``before`` are the slots of ``now``."""
    if before is None or now is None:
        return before is now
    if (before.row_ranks, before.rows) != (now.row_ranks, now.rows):
        return False
    if not before.slots:
        return True
    # The job was started anew, or the wall clock stepped: earlier values no longer belong to it.
    return bool(now.slots) and now.slots[0].start_s <= before.slots[0].start_s


def _pace(job: Job, seen: Seen, wall_s: float, goodput: Account | None, *, starts: bool) -> Pace:
    record = job.record
    until_s = record.since_wall_s if job.is_over else wall_s
    steps_s = sorted(seen.step_s)
    # Between two rounds no rank reports a step: the furthest one reached is shown.
    step = seen.furthest if seen.furthest >= 0 and not job.is_over else job.furthest_step
    return Pace(
        state=job.told_state.value,
        round=record.round,
        world_size=record.world_size,
        nodes=len(record.members),
        step=step,
        step_s=round(steps_s[len(steps_s) // 2], 4) if steps_s else 0.0,
        stepped_age_s=_age(until_s, job.round.last_step_wall_s),
        state_age_s=_age(wall_s, record.since_wall_s),
        alive_s=_age(until_s, record.started_wall_s),
        goodput=goodput.ratio if goodput is not None else -1.0,
        goodput_hour=goodput.ratio_hour if goodput is not None else -1.0,
        goodput_now=goodput.ratio_now if goodput is not None else -1.0,
        restarts=record.restarts_in_all,
        counts=seen.counts(),
        stepped=seen.stepped if starts else -1,
        start_s=round(record.start_s, 1),
        start_age_s=_age(until_s, job.round.formed_wall_s) if starts else -1.0,
    )


def _ledger(account: Account | None) -> live.Ledger | None:
    """Return where the job's time went, None where nothing is known; tenths of a second are all that a page shows."""
    if account is None:
        return None

    def told(rows: Mapping[str, float]) -> dict[str, float]:
        return {name: short for name, seconds in rows.items() if (short := round(seconds, 1)) > 0}

    return live.Ledger(round(account.wall_s, 1), told(account.rows), round(account.hour_s, 1), told(account.hour))


def _checks(job: Job, check_of: Callable[[str], SelfCheckView]) -> tuple[live.CheckLine, ...]:
    """Return the newest self-checks of a job's nodes, the worst first; of those that had none nothing is told."""
    lines = []
    for node in job.nodes:
        view = check_of(node)
        if view.state == "none":
            continue
        found = view.check
        if found is None:
            lines.append(live.CheckLine(node, "waiting", view.asked_wall_s, reason=view.reason))
            continue
        figures = tuple(one.text for one in found.figures[:MOST_FIGURES])
        lines.append(live.CheckLine(node, found.status, view.asked_wall_s, found.worst, figures, view.reason))
    order = {"bad": 0, "waiting": 1, "warn": 2, "unmeasured": 3, "good": 4}
    return tuple(sorted(lines, key=lambda line: (order[line.status], line.node))[:MOST_CHECKS])


def _age(until_s: float, since_s: float) -> float:
    """Return an age to the tenth of a second, -1 where its beginning is not known."""
    return round(max(0.0, until_s - since_s), 1) if since_s else -1.0
