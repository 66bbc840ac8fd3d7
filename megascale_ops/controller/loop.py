# SPDX-License-Identifier: Apache-2.0
"""Gather, decide, act: what comes in from agents and runners meets the judges here, and time passes here.

Everything runs on one asyncio loop, so nothing needs a lock. What a heartbeat costs does not grow with the cluster:
it is folded into its node's view, its own few ranks get a cheap look, and only an odd one asks for a full judgement.
Ten times a second ``tick`` drives what happens by time passing, and measures how late it is: a controller that was
away itself begins all patience anew instead of accusing others.
"""

import asyncio
import logging
from collections import Counter, OrderedDict
from collections.abc import Callable, Mapping, Sequence

from megascale_ops.account import Account
from megascale_ops.controller import status as controller_status
from megascale_ops.controller.cluster.node_clocks import NodeClocks
from megascale_ops.controller.cluster.node_view import NodeView, Share
from megascale_ops.controller.cluster.registry import Registry, check_may_take_over, view_rank
from megascale_ops.controller.detectors.hardware import HardwareWatch
from megascale_ops.controller.detectors.profiling import Profiling
from megascale_ops.controller.detectors.self_checks import SelfChecks
from megascale_ops.controller.detectors.slowness import Slowness
from megascale_ops.controller.history.goodput import Accounts
from megascale_ops.controller.history.histories import Histories
from megascale_ops.controller.job import incidents
from megascale_ops.controller.job.job import Job, Runner, wait_in
from megascale_ops.controller.job.own_faults import OwnFaults
from megascale_ops.controller.job.suspected import SUSPECTING, Suspected
from megascale_ops.controller.job.transitions import MOST_INCIDENTS, URGENT_S, Journal, Transitions, again_in_s
from megascale_ops.controller.job.wall_clock import WallClock, shift, shift_marks
from megascale_ops.controller.record.job_record import read_record
from megascale_ops.controller.record.state_machine import ACTIVE, ENDING, FINAL, State
from megascale_ops.controller.recovery import checks, decide, failures, restored, starting
from megascale_ops.controller.recovery.by_hand import ByHand
from megascale_ops.controller.recovery.driver import advance
from megascale_ops.controller.rendezvous import leave, poll
from megascale_ops.controller.rendezvous.join import Joining
from megascale_ops.diagnosis.statistics.cooperative import Pieces, run_through
from megascale_ops.diagnosis.watchdog import ODD_STATES, looks_odd
from megascale_ops.distribution import Distribution
from megascale_ops.errors import NotFoundError, UsageError
from megascale_ops.schema.events import Incident, Status
from megascale_ops.schema.identity import check_name
from megascale_ops.schema.messages import (
    Evidence,
    Heartbeat,
    HeartbeatReply,
    JobReport,
    Leave,
    Order,
    OrdersReply,
    PolicyView,
)
from megascale_ops.schema.metrics import METRICS
from megascale_ops.schema.version import MESSAGE_VERSION, check_version

log = logging.getLogger(__name__)

TICK_S = 0.1
# 2 s: twenty ticks; a controller away for so long has missed heartbeats that were sent.
STALL_S = 2.0
# 5 s: what a restarted controller may lack of the furthest step.
SNAPSHOT_S = 5.0
# A record of 12,500 nodes has 3 MB: written once a minute, not every five seconds.
SNAPSHOT_EACH_NODE_S = 0.005
FORGET_NODE_S = 3600.0
MOST_NODES = 131_072  # a million GPUs in nodes of eight; a node takes 80 KB (benchmarks/results/load.txt)
# 64 of one node: each user's runs there may bring one. The one that reports a job is looked for among them.
MOST_AGENTS = 64
# Small jobs are judged the moment that a heartbeat looks odd, large ones at the next tick.
SMALL_JOB = 64


class Loop:
    """All jobs of one controller.

    Args:
        journal: where every change goes first.
        clock: monotonic seconds.
        wall: wall clock seconds.
        post: runs a callback on the loop's thread.
        is_paused: whether nothing may be judged now, since another controller may lead.
    """

    def __init__(
        self,
        journal: Journal,
        *,
        clock: Callable[[], float],
        wall: Callable[[], float],
        post: Callable[[Callable[[], None]], None],
        is_paused: Callable[[], bool] = lambda: False,
    ) -> None:
        self.clock, self.is_paused = clock, is_paused
        self.wall = wall = WallClock(wall, clock)
        self.jobs: dict[str, Job] = {}
        self.registry = Registry()
        self.incidents: OrderedDict[str, Incident] = OrderedDict()
        self.transitions = Transitions(journal, self.registry, clock=clock, wall=wall, post=post, book=self.incidents)
        self.nodes = self.transitions.nodes.over(self.jobs)
        self.faults = OwnFaults(clock, self._tell_fault)
        self.slowness = Slowness(self.transitions)
        self.hardware = HardwareWatch(journal, self.transitions, self.jobs)
        self.histories = Histories(self.wall, self.slowness.take_rows)
        self.profiling = Profiling(self.transitions, self.registry, clock, self.wall)
        self.joining = Joining(self.jobs, self.transitions, self.faults)
        self.by_hand = ByHand(self.transitions, self.registry)
        self.self_checks = SelfChecks(self.transitions, self.jobs, self.incidents, checks.measures_itself)
        self.lag_s, self.heartbeats = 0.0, 0
        self.rejected: Counter[str] = Counter()  # heartbeats that were not taken, by reason
        self.exported: Counter[str] = Counter()  # spans and logs, by what became of them
        self.accounts, self.node_clocks = Accounts(), NodeClocks()
        self.tick_times = Distribution(METRICS["megascale_controller_tick_seconds"].buckets)
        self._due_s, self._part, self._away_s = clock(), 0, 0.0  # away: the longest turn since the last tick began

    def restore(
        self, records: Mapping[str, bytes], known: Sequence[Incident], highest: Mapping[str, int] | None = None
    ) -> None:
        """Go on from every job's state in the journal; all patience begins anew.

        Args:
            records: every job's, whole.
            known: the newest incidents.
            highest: the highest number that an incident is known to have, by job; also of jobs without a record.
        """
        self.joining.highest = dict(highest or {})
        now_s = self.clock()
        for incident in known[-MOST_INCIDENTS:]:
            self.incidents[incident.id] = incident
        for name, raw in records.items():
            try:
                record = read_record(name, raw)
            except ValueError as error:
                log.error("what the journal says of job %s can't be read (%s): it begins anew", name, error)  # noqa: TRY400  the message is complete
                continue
            job = self.jobs[name] = Job(record, now_s, saved=record)
            self.transitions.witness(job, incidents=self.joining.highest.get(name, 0))
            for member in job.record.members:
                job.runners[member.node] = Runner(member.runner_id, now_s)
            job.incident = self.incidents.get(job.record.incident)
            job.aside = self.incidents.get(job.record.aside)
            if job.state in SUSPECTING:
                wanted = [order.id for order in job.orders.values() if order.kind.startswith("dump_")]
                job.suspected = Suspected(wanted, job.incident.evidence if job.incident is not None else ())
            for order in job.orders.values():
                self.transitions.deliver(job, order)
            self._end_warnings(job)
            if job.state not in FINAL:
                self.transitions.note(job, "controller_started", f"going on with a job that is {job.record.state}")
                self.transitions.save(job)

    def _end_warnings(self, job: Job) -> None:
        """Close the warnings of the controller before: what they were measured by is gone; what holds returns."""
        text = "the controller was started again: if it still holds, it is told anew"
        for incident in [each for each in self.incidents.values() if each.job == job.name and each.state == "watching"]:
            self.transitions.put_incident(job, incidents.close(incident, "over", text))

    def heartbeat(self, heartbeat: Heartbeat, only_job: str = "") -> HeartbeatReply:
        """Take a heartbeat in and answer with the node's orders.

        Args:
            heartbeat: what an agent sees.
            only_job: the job that the agent's token is for; "": it may report all, and gets orders of all.

        Raises:
            UsageError: it can't be taken as it is.
            RefusedError: the agent of one job would replace another one that reports more than that.
            VersionError: it is of another version.
        """
        now_s = self.clock()
        known = self.registry.agent(heartbeat, only_job)
        if known is None or known.agent_id != heartbeat.agent_id:
            self._check_new_agent(heartbeat, only_job, is_new=known is None)
            if known is not None and only_job:
                check_may_take_over(known, only_job, now_s)
        folded = self.registry.fold(heartbeat, now_s, only_job)
        if not folded.accepted:
            self.rejected["stale"] += 1
            return HeartbeatReply()
        self.heartbeats += 1
        if self.registry.node(heartbeat.node) is folded.node:  # of several one is enough, and their clock is the same
            self.node_clocks.note(heartbeat.node, heartbeat.wall_s - self.wall(), now_s)
        self.hardware.ingest_heartbeat(heartbeat, only_job)
        view = folded.node
        again_s = self._take_reports(heartbeat, view)
        if heartbeat.done_orders:
            self._done(heartbeat, view)
        held = self.transitions.agent_orders.get(heartbeat.node)
        orders = tuple(order for order in held.values() if self._may_have(view, order)) if held else ()
        return HeartbeatReply(orders=orders, send_full=folded.send_full, again_s=URGENT_S if orders else again_s)

    def _take_reports(self, heartbeat: Heartbeat, view: NodeView) -> float:
        """Hand on an agent's report of each job; return how soon the next one is wanted, 0 where that is no matter."""
        again_s, nodes = 0.0, len(self.registry)
        sent_wall_s = self.histories.sent_wall_s(heartbeat, self.wall())
        for report in heartbeat.jobs:
            job = self.jobs.get(report.job)
            if job is not None and report.round > job.record.round:
                self.transitions.witness(job, round_=report.round)
            if job is None or report.round != job.record.round or job.state not in (*ACTIVE, *ENDING):
                continue
            if not self.registry.speaks(view, job.name):
                continue  # another agent of this node sees the job, too
            if report.cut:
                self._tell_cut(job, report, view.node)
            if not self.faults.is_paused(job.name):
                try:
                    self._judge(job, report, view, sent_wall_s)
                except Exception as error:  # noqa: BLE001  this job's fault is not the node's other jobs'
                    self.faults.note(job.name, f"taking in a heartbeat of node {view.node}", error)
            wanted_s = again_in_s(job.state, self.clock() - job.entered_s, nodes)
            again_s = min(again_s or wanted_s, wanted_s) if wanted_s else again_s
        return again_s

    def _tell_cut(self, job: Job, report: JobReport, node: str) -> None:
        """Journal once for each round and node that its report of a job was cut."""
        if node in job.round.cut:
            return
        job.round.cut.add(node)
        text = (
            f"node {node} tells not all of this job: its ranks there fill more than their part of a heartbeat, and "
            f"values of {report.cut} of them are cut (collectives, steps and texts first)"
        )
        self.transitions.note(job, "values_cut", text, node=node)
        self.transitions.save(job)

    def _judge(self, job: Job, report: JobReport, view: NodeView, sent_wall_s: float) -> None:
        """Hand a node's report of one job to all that judge it; the last steps of a round are for reports only."""
        if job.state in ENDING:
            self.histories.ingest_report(job, view.node, report, sent_wall_s, is_over=True)
            return
        self.look_at_ranks(job, view.shares[report.job], view, self.clock())
        are_put_by = self.histories.ingest_report(job, view.node, report, sent_wall_s)
        self.slowness.ingest_report(job, view.node, report, steps=not are_put_by)
        if report.collectives:
            self.slowness.take_collectives(job, view.node, report)
        if job.record.world_size <= SMALL_JOB:
            self.slowness.poll_job(job)

    def _tell_fault(self, name: str, text: str) -> None:
        job = self.jobs.get(name)
        if job is not None:
            self.transitions.note(job, "own_fault", text)
            self.transitions.save(job)

    def look_at_ranks(self, job: Job, share: Share, view: NodeView, now_s: float) -> None:
        """Take a cheap look at the ranks of one node."""
        if job.state in (State.RESTARTING, State.CATCHING_UP):
            ranks = [view_rank(view, report, now_s) for report in share.ranks.values()]
            starting.look_at_pace(job, view.node, ranks, self.wall())
        policy = job.record.policy
        # Below half the floor no rank is suspected, so most ranks are not even looked at.
        quiet_mono_s = view.sent_mono_s - policy.silence_floor_s / 2
        step, furthest, moved_mono_s = job.round.step, None, 0.0
        for report in share.ranks.values():
            progress = report.progress
            is_worth_a_look = report.process.state in ODD_STATES or bool(report.rivals)
            if progress is not None:
                is_worth_a_look = is_worth_a_look or progress.moved_mono_s < quiet_mono_s
                if progress.step >= step and progress.steps_seen:
                    step, furthest = progress.step, progress
                    moved_mono_s = max(moved_mono_s, progress.moved_mono_s)
            if is_worth_a_look and not job.round.silence.odd and looks_odd(view_rank(view, report, now_s), policy):
                job.round.silence.odd = True
        if furthest is not None:
            job.round.note_step(furthest, self.wall() - max(0.0, view.sent_mono_s - moved_mono_s))
        if job.round.silence.odd and job.record.world_size <= SMALL_JOB:
            advance(self.transitions, self.faults, job)

    def _check_new_agent(self, heartbeat: Heartbeat, only_job: str, *, is_new: bool) -> None:
        check_version(f"the heartbeat of node {heartbeat.node}", heartbeat.version, MESSAGE_VERSION)
        check_name("node", heartbeat.node)
        # Half of the places are for agents of nodes: a job's user may invent names, and must not keep those out.
        most = MOST_NODES // 2 if only_job else MOST_NODES
        if is_new and len(self.registry) >= most:
            raise UsageError(f"{most} nodes are known already: node {heartbeat.node} is one too many")
        most = MOST_AGENTS // 2 if only_job else MOST_AGENTS
        if is_new and self.registry.agents(heartbeat.node) >= most:
            raise UsageError(f"node {heartbeat.node} has {most} agents already: this one is one too many")

    def _may_have(self, view: NodeView, order: Order) -> bool:
        """Return whether an order is for this agent, of those that the node may have."""
        return view.only_job in ("", order.job) and self.registry.speaks(view, order.job)

    def _done(self, heartbeat: Heartbeat, view: NodeView) -> None:
        """Forget orders that the node's agent has executed."""
        held = self.transitions.agent_orders.get(heartbeat.node, {})
        done = [one for one in heartbeat.done_orders if one in held and self._may_have(view, held[one])]
        self.profiling.forget(heartbeat.node, done)
        self.by_hand.forget(heartbeat.node, done)
        self.self_checks.forget(heartbeat.node, done)
        by_job: dict[str, set[str]] = {}
        for order_id in done:
            if order_id in held:  # those of profiles and users are dropped by now
                by_job.setdefault(held[order_id].job, set()).add(order_id)
        for name, ids in by_job.items():
            job = self.jobs.get(name)
            if job is not None:
                self._obeyed(job, ids)

    def _obeyed(self, job: Job, ids: set[str]) -> None:
        """Forget orders; when they were the last whose evidence is waited for, go on at once."""
        self.transitions.withdraw(job, ids)
        if job.suspected is not None and job.suspected.end_waiting(ids):
            advance(self.transitions, self.faults, job)

    async def orders(self, asked: poll.Poll, wait_s: float) -> OrdersReply:
        """Return orders for a runner as soon as there are any, or nothing after ``wait_s``."""
        return await poll.orders(self.jobs, self.transitions, asked, wait_s)

    def leave(self, word: Leave) -> None:
        """Take note that a runner is done.

        Raises:
            UsageError: it can't be taken as it is.
            RefusedError: another runner serves this node.
        """
        leave.leave(self.jobs, self.transitions, self.faults, word)

    def evidence(self, evidence: Evidence) -> None:
        """Take evidence in for an incident, also when it comes late.

        Raises:
            NotFoundError: there is no such incident.
            UsageError: that node was not ordered to give evidence for it.
            VersionError: it is of another version.
        """
        check_version(f"the evidence of node {evidence.node}", evidence.version, MESSAGE_VERSION)
        takers = (self.profiling, self.by_hand, self.self_checks)
        if any(taker.ingest_evidence(evidence) for taker in takers):
            return
        job = self.jobs.get(evidence.job)
        incident = self.incidents.get(evidence.incident)
        if job is None or incident is None or incident.job != evidence.job:
            raise NotFoundError(f"there is no incident {evidence.incident!r} of job {evidence.job!r}")
        asked = job.asked.get(evidence.incident)
        if asked is None or not asked.was_given(evidence.order, evidence.node):
            raise UsageError(
                f"no order {evidence.order!r} for evidence of incident {evidence.incident} was given to node "
                f"{evidence.node!r}, so its evidence is not taken"
            )
        if evidence.order in asked.answered:
            return  # sent again, since the answer to it was lost: one look must not count as two
        asked.answered.add(evidence.order)
        self.transitions.put_incident(job, asked.add(incident, evidence.items), may_wait=True)
        if evidence.incident == job.record.incident and job.suspected is not None:
            job.suspected.ingest_evidence(evidence.items)
        self.transitions.save(job)
        self._obeyed(job, {evidence.order})

    async def round_ends(self, name: str, round_: int, wait_s: float) -> None:
        """Wait until a job is over or in another round, at most ``wait_s``."""
        await poll.round_ends(self.jobs, self.clock, name, round_, wait_s)

    def status(self, name: str | None = None, *, is_brief: bool = False) -> Status | None:
        """Return all jobs, or one, without nodes and ranks where that is enough; None when there is none of that name.

        A brief answer costs the same for a job of any size: each of a job's nodes asks for one at its begin and end.
        """
        if name is not None and name not in self.jobs:
            return None
        wanted = [self.jobs[name]] if name is not None else list(self.jobs.values())
        now_s, wall_s = self.clock(), self.wall()
        shown = []
        for job in wanted:
            with self.faults.contain(job.name, "describing it", is_shown=True):
                goodput = self.goodput(job.name)
                registry = None if is_brief else self.registry
                shown.append(controller_status.job_status(job, registry, now_s=now_s, wall_s=wall_s, goodput=goodput))
        return Status(version=MESSAGE_VERSION, wall_s=wall_s, controller_lag_s=self.lag_s, jobs=tuple(shown))

    def goodput(self, name: str) -> Account | None:
        """Return where a job's time went, as of a moment ago; None when there is no such job or nothing is known."""
        job = self.jobs.get(name)
        if job is None:
            return None
        with self.faults.contain(name, "reckoning its goodput", is_shown=True):
            if job.is_over:  # its last state may have come after the last tick, and what is reckoned now is kept
                self.histories.poll_job(job)
            history = self.histories.by_job.get(name)
            return self.accounts.of(job, history, self.incidents, self.clock(), self.wall())
        return None

    def tick(self) -> None:
        """Let time pass; see ``pieces``."""
        run_through(self.pieces())

    def pieces(self) -> Pieces[None]:
        """Measure our own lag, look for lost nodes, drive what waits; anything may come in between two pieces."""
        now_s = self.clock()
        late_s = max(0.0, now_s - self._due_s, self._away_s)
        self._due_s = now_s + TICK_S
        self._away_s = 0.0
        # 0.9 a tick: a hiccup counts for about three seconds.
        self.lag_s = max(late_s, self.lag_s * 0.9)
        if late_s > STALL_S:
            log.warning("the controller was away for %.1f s: all patience begins anew", late_s)
            self._restart_clocks(now_s)
        self._follow_wall_clock()
        self._part = (self._part + 1) % failures.NODE_PARTS
        if self._part == 0:
            self.registry.forget(now_s - FORGET_NODE_S)
            self.faults.forget(self.jobs.__contains__)
            with self.faults.contain("", "letting time pass for nodes"):
                self.nodes.poll()
        self.profiling.poll_profiles()
        with self.faults.contain("", "letting time pass for self-checks"):
            self.self_checks.poll()
        for job in list(self.jobs.values()):
            if self.faults.is_paused(job.name):
                continue
            with self.faults.contain(job.name, "judging it"):
                yield from self._job_pieces(job)

    def _job_pieces(self, job: Job) -> Pieces[None]:
        """Let time pass for one job."""
        self.histories.reckon(job)
        yield from self.slowness.pieces(job)
        yield from self.histories.pieces(job)
        now_s = self.clock()
        self.goodput(job.name)
        if job.state in FINAL:
            return
        failures.check_nodes(self.transitions, job, now_s, self.lag_s, self._part)
        restored.note_saved(job, self.wall(), self.saved_wall_s(job.name))
        snapshot_s = max(SNAPSHOT_S, len(job.record.members) * SNAPSHOT_EACH_NODE_S)
        if job.round.step > job.record.best_step and now_s - job.saved_s > snapshot_s and job.state in ACTIVE:
            job.change(furthest=job.round.step)
        job.unsaved.end_wait()
        advance(self.transitions, self.faults, job)

    def _follow_wall_clock(self) -> None:
        step_s = self.wall.follow()
        if step_s:
            log.warning("the wall clock was stepped by %+.0f s: no age and no budget changes by that", step_s)
            for job in self.jobs.values():
                shift(job, step_s)
                # Those that stopped the job still count when they are over: the ledger is painted by their marks.
                for incident in [one for one in self.incidents.values() if one.job == job.name]:
                    if incident.marks.ordered or incident is job.incident:
                        self.transitions.put_incident(job, shift_marks(incident, step_s))
            self.histories.shift(step_s)
            self.accounts.forget_time()
            self.node_clocks.clear()

    def _restart_clocks(self, now_s: float) -> None:
        self.registry.restart_clocks(now_s)
        for job in self.jobs.values():
            for runner in job.runners.values():
                runner.seen_s = now_s

    def saved_wall_s(self, name: str) -> float:
        """Return when the last step of a job with a checkpoint in it ended, 0 where none is known."""
        history = self.histories.by_job.get(name)
        return history.costs.checkpoint_wall_s if history is not None else 0.0

    def policy(self, name: str, settings: Mapping[str, str] | None = None) -> PolicyView | None:
        """Return the policy of a job, changed by ``settings`` first; None when there is no job of that name.

        Raises:
            UsageError: an unknown setting or a value that can't be; nothing was changed.
        """
        job = self.jobs.get(name)
        if job is None:
            return None
        if settings is None:
            return decide.show_policy(job, self.wall())
        return decide.set_policy(self.transitions, job, settings)

    async def settle(self, name: str, timeout_s: float) -> None:
        """Wait until all that is known of a job is journaled, at most ``timeout_s``."""
        job = self.jobs[name]
        deadline_s = self.clock() + timeout_s
        while job.saves and (left_s := deadline_s - self.clock()) > 0:
            await wait_in(job.waiters, left_s)

    async def run(self) -> None:
        """Tick until cancelled."""
        self._due_s = self.clock()
        while True:
            while self.is_paused():  # noqa: ASYNC110  a thread says so; afterwards all patience begins anew
                await asyncio.sleep(TICK_S)
            spent_s = 0.0
            pieces = self.pieces()
            while True:
                began_s = self.clock()
                is_over = True
                with self.faults.contain("", "letting time pass"):
                    is_over = bool(next(pieces, True))
                spent_s += self.clock() - began_s
                if is_over:
                    break
                await asyncio.sleep(0)  # heartbeats are answered in between
                # So a long tick is no absence; a piece, or what is done between two of them, may be one.
                self._away_s = max(self._away_s, self.clock() - began_s)
            self._due_s = max(self._due_s, self.clock())
            self.tick_times.observe(spent_s)
            await asyncio.sleep(max(0.0, self._due_s - self.clock()))
