# SPDX-License-Identifier: Apache-2.0
"""Journal first, act second: the one place where a job's state changes and from which orders leave.

``move`` looks the event up in the recovery table, changes the job's record in memory and notes orders and events.
``save`` hands all of that to the journal as one batch; only when it is safe do the orders reach the outboxes and do
waiting requests look again. An answer to a request waits until ``job.saves`` is 0, so nothing unsaved gets out.
"""

import itertools
import logging
import secrets
from collections import OrderedDict
from collections.abc import Callable, Collection
from typing import Protocol

import msgspec

from megascale_ops.controller.cluster.registry import Registry
from megascale_ops.controller.job.incidents import close, end_course, follow, mark, open_incident
from megascale_ops.controller.job.job import Job
from megascale_ops.controller.job.node_moves import NodeMoves
from megascale_ops.controller.job.round import Round, SilenceCheck
from megascale_ops.controller.job.suspected import SUSPECTING, Suspected
from megascale_ops.controller.job.unsaved import Unsaved
from megascale_ops.controller.journal.parts import split
from megascale_ops.controller.journal.rows import Batch
from megascale_ops.controller.record.state_machine import ACTS_THAT_CHANGE, FINAL, LOOKS, Act, EventKind, State, react
from megascale_ops.schema.courses import course_words
from megascale_ops.schema.events import Event, Incident
from megascale_ops.schema.health import Verdict
from megascale_ops.schema.messages import ORDERS_FOR_RUNNER, Order

log = logging.getLogger(__name__)

# Evidence of a frozen rank is its state, which is known already: stacks may cost it half a second. A silent rank's
# stacks take a second heartbeat to be ordered and 0.1 s to be taken.
FROZEN_EVIDENCE_S = 0.5
EVIDENCE_S = 2.0
# 500 incidents: the newest are kept at hand, the journal has all.
MOST_INCIDENTS = 500

# 100 numbers: more incidents than open between two polls of a runner.
AFTER_LOSS = 100
# A million rounds or incidents more than the journal has: no journal loses so many, so the number is wrong.
MOST_AHEAD = 1_000_000

_URGENT = (State.SUSPECT, State.CONFIRMING, State.STOPPING)
# Agents of urgent jobs report five times a second, so that orders and reports arrive in time.
URGENT_S = 0.2
# Of many nodes for 5 s at a time, as long as evidence takes: a rank that is merely absent is waited for nine minutes,
# and five heartbeats a second of 1,536 nodes are more than a core for all of them. 2,000 a second, of all nodes.
_URGENT_FOR_S, _MOST_URGENT = 5.0, 2000.0


class Journal(Protocol):
    """What moves need of a store."""

    def submit(self, batch: Batch, done: Callable[[], None]) -> None:
        """Write in order; call ``done`` when it is safe."""


class Transitions:
    """Changes of state and the orders that follow from them.

    Args:
        journal: where every change goes first.
        registry: which agents are there to be ordered.
        clock: monotonic seconds.
        wall: wall clock seconds.
        post: runs a callback on the loop's thread; the journal calls from its own.
        book: the newest incidents of all jobs, kept up to date here.
    """

    def __init__(
        self,
        journal: Journal,
        registry: Registry,
        *,
        clock: Callable[[], float],
        wall: Callable[[], float],
        post: Callable[[Callable[[], None]], None],
        book: OrderedDict[str, Incident],
    ) -> None:
        self._journal = journal
        self.nodes = NodeMoves(journal.submit, registry, wall)
        self.registry = registry
        self.clock = clock
        self.wall = wall
        self._post = post
        self._book = book
        # New for each start of a controller: after a truncated journal no order reuses an old name.
        self._epoch = secrets.token_hex(4)
        self.agent_orders: dict[str, dict[str, Order]] = {}  # by node and order id
        self.runner_orders: dict[tuple[str, str], list[Order]] = {}  # by job and node, in order
        self.moves_made: dict[tuple[str, str], int] = {}  # by event and state it led to

    def move(self, job: Job, event: EventKind, text: str, **changes: object) -> None:
        """Let ``event`` happen to ``job``; ``changes`` are further changes of its record.

        Raises:
            IllegalMoveError: it cannot happen in the job's state; nothing was changed.
        """
        move = react(job.state, event)
        job.unsaved.must_last = True
        job.change(state=move.state.value, since_wall_s=self.wall(), **changes)
        if move.state is State.RESTARTING or move.state in FINAL:
            job.change(runners=tuple(job.known_runners))
        if move.state is State.RESTARTING:
            self._end_warnings(job, f"round {job.record.round} began")
            job.round = Round(job.record, formed_wall_s=self.wall())
            job.note_homes()
        if move.state in SUSPECTING:
            job.suspected = job.suspected or Suspected()
        elif job.suspected is not None or job.suspicion is not None or job.aside is not None:
            self._take_up(job, move.state)
            job.suspected = None
            job.round.silence = SilenceCheck()  # they move again, or the incident names them
        job.entered_s = self.clock()
        for act in move.acts:
            if not (job.record.policy.dry_run and act in ACTS_THAT_CHANGE):
                self._order(job, act, text)
        key = (event.value, move.state.value)
        self.moves_made[key] = self.moves_made.get(key, 0) + 1
        self.note(job, event.value, text)
        if move.state in FINAL:
            self._end_warnings(job, f"the job is {move.state.value}")

    def _take_up(self, job: Job, state: State) -> None:
        """A suspicion is over that began on the way back from an incident: the job is on that way again, or it ends."""
        aside, job.aside = job.aside, None
        if aside is None:
            return
        goes_on = state is State.CATCHING_UP
        job.change(aside="", **({"incident": aside.id} if goes_on else {}))
        if goes_on:
            job.incident = aside
        else:
            self.put_incident(job, msgspec.structs.replace(aside, state="ended"))

    def _end_warnings(self, job: Job, text: str) -> None:
        for key in list(job.round.warnings):
            self.unwarn(job, key, text)

    def note(self, job: Job, kind: str, text: str, *, node: str = "", rank: int = -1) -> None:
        """Note an event for the journal and the log."""
        record = job.record
        event = Event(
            wall_s=self.wall(),
            job=job.name,
            kind=kind,
            text=text,
            round=record.round,
            node=node,
            rank=rank,
            incident=record.incident,
            data={"state": record.state},
        )
        job.unsaved.events.append(event)
        log.info(
            "%s: %s, now %s: %s",
            job.name,
            kind,
            record.state,
            text,
            extra={"job": job.name, "node": node, "rank": rank, "incident": record.incident},
        )

    def open_incident(self, job: Job, verdict: Verdict, *, detected: float, aside: bool = False) -> Incident:
        """Open the job's next incident; one that is still open is closed, its round ended before it had recovered.

        ``aside``: that stays open beside it, since this one is only suspected.
        """
        if job.incident is not None and aside:
            job.aside = job.incident
            job.change(aside=job.aside.id)
        elif job.incident is not None:
            self.put_incident(job, msgspec.structs.replace(job.incident, state="ended"))
        number = self._number(job)
        incident_id = f"{job.name}-{number}"
        job.change(incidents=number, incident=incident_id)
        incident = open_incident(
            incident_id,
            job=job.name,
            run_dir=job.record.run_dir,
            verdict=verdict,
            detected=detected,
            now=self.wall(),
            step=job.round.step,
        )
        self.put_incident(job, incident)
        return incident

    def witness(self, job: Job, *, round_: int = 0, incidents: int = 0) -> None:
        """Record numbers that are known elsewhere: the journal may have lost what followed its last commit."""
        if round_ - job.record.round < MOST_AHEAD:
            job.heard_round = max(job.heard_round, round_)
        if incidents - job.record.incidents < MOST_AHEAD:
            job.heard_incidents = max(job.heard_incidents, incidents)

    def _number(self, job: Job) -> int:
        """Return the number of the job's next incident, above all that were ever given out.

        Where the journal knows of fewer it has lost some, perhaps also ones that were only shown to people: the next
        hundred is begun.
        """
        job.unsaved.must_last = True
        if job.heard_incidents <= job.record.incidents:
            return job.record.incidents + 1
        return (job.heard_incidents // AFTER_LOSS + 1) * AFTER_LOSS + 1

    def put_incident(self, job: Job, incident: Incident, *, may_wait: bool = False) -> None:
        """Keep a changed incident; it is the job's open one as long as its state is open.

        ``may_wait``: it need not be written at once, as evidence of which nothing follows yet; a job that is over has
        no other time.
        """
        job.unsaved.keep(incident, may_wait=may_wait and job.state not in FINAL)
        self._book[incident.id] = incident
        if len(self._book) > MOST_INCIDENTS:
            self._book.popitem(last=False)
        if job.aside is not None and job.aside.id == incident.id:
            job.aside = incident
        elif incident.state == "open":
            job.incident = incident
        elif job.incident is not None and job.incident.id == incident.id:
            job.incident = None
        first = job.record.members[0].node if job.record.members else ""
        if job.notices.note(incident) and first in job.runners:
            job.runners[first].wake()

    def warn(self, job: Job, key: str, verdict: Verdict) -> Incident:
        """Open a warning, or give the one that holds already its newest verdict; nothing is stopped for it.

        A warning is an incident in state "watching", beside the job's open one; ``key`` distinguishes warnings of a
        job.
        """
        known = job.round.warnings.get(key)
        if known is not None:
            incident = follow(known, verdict, self.wall())
        else:
            number = self._number(job)
            job.change(incidents=number)
            incident = msgspec.structs.replace(
                open_incident(
                    f"{job.name}-{number}",
                    job=job.name,
                    run_dir=job.record.run_dir,
                    verdict=verdict,
                    detected=self.wall(),
                    now=self.wall(),
                    step=job.round.step,
                ),
                state="watching",
            )
            incident = follow(incident, verdict, self.wall())
            self.note(job, "warning", verdict.reason, rank=verdict.culprits[0] if verdict.culprits else -1)
        job.round.warnings[key] = incident
        self.put_incident(job, incident)
        return incident

    def unwarn(self, job: Job, key: str, text: str) -> None:
        """What a warning was about is over."""
        known = job.round.end_warning(key)
        if known is not None:
            over = end_course(known, self.wall())
            assert over.course is not None
            went = course_words(over.course, over.marks.began)
            self.note(job, "warning_over", f"{known.id}: {text}; {went}")
            done = f"nothing was done to the job; {text}; {went}"
            self.put_incident(job, close(msgspec.structs.replace(over, done=""), "over", done))

    def mark(self, job: Job, name: str, wall_s: float | None = None) -> None:
        """Note when the open incident passed a mark; ``wall_s``, by default now."""
        if job.incident is not None:
            marked = mark(job.incident, name, self.wall() if wall_s is None else wall_s)
            if marked is not job.incident:
                self.put_incident(job, marked)

    def save(self, job: Job) -> None:
        """Journal what has changed; then release orders and wake waiting requests."""
        unsaved = job.unsaved
        if not unsaved.is_due:
            return
        if unsaved.has_record:
            job.change(orders=tuple(job.orders.values()))
        record, parts = split(job.record, job.saved) if unsaved.has_record else (b"", ())
        if unsaved.has_record:
            job.saved = job.record
        batch = Batch(
            events=tuple(unsaved.events),
            job=job.name if unsaved.has_record else "",
            record=record,
            parts=parts,
            incidents=tuple(unsaved.incidents.values()),
            binding=unsaved.must_last,
        )
        orders = tuple(unsaved.orders.values())
        job.unsaved = Unsaved()
        job.unsaved.follow(unsaved)
        job.saved_s = self.clock()
        job.saves += 1
        self._journal.submit(batch, lambda: self._post(lambda: self._saved(job, orders)))

    def _saved(self, job: Job, orders: tuple[Order, ...]) -> None:
        job.saves -= 1
        given = {order.id for order in job.record.orders}
        for order in orders:
            if order.id in given:  # it may have been withdrawn since
                self.deliver(job, order)
        job.wake()

    def deliver(self, job: Job, order: Order) -> None:
        """Put an order that is journaled where its receiver finds it."""
        if order.kind not in ORDERS_FOR_RUNNER:
            self.agent_orders.setdefault(order.node, {})[order.id] = order
            return
        self.runner_orders.setdefault((order.job, order.node), []).append(order)
        runner = job.runners.get(order.node)
        if runner is not None:
            runner.wake()

    def withdraw(self, job: Job, ids: Collection[str]) -> None:
        """Forget orders that are executed or void."""
        gone = [order for order_id in ids if (order := job.orders.pop(order_id, None)) is not None]
        if not gone:
            return
        job.unsaved.may_wait = True
        for order in gone:
            job.unsaved.orders.pop(order.id, None)
            held = self.agent_orders.get(order.node)
            if held is not None:
                held.pop(order.id, None)
                if not held:
                    del self.agent_orders[order.node]
            queue = self.runner_orders.get((order.job, order.node), [])
            queue[:] = [other for other in queue if other.id != order.id]
            if not queue:
                self.runner_orders.pop((order.job, order.node), None)

    def _order(self, job: Job, act: Act, reason: str) -> None:
        """Address an act to nodes."""
        record = job.record
        frozen = record.verdict is not None and record.verdict.fault == "frozen"
        deadline_s = FROZEN_EVIDENCE_S if frozen else EVIDENCE_S
        numbers = itertools.count(record.order_number + 1)
        orders = [
            Order(
                id=f"{job.name}:{record.round}:{next(numbers)}.{self._epoch}",
                job=job.name,
                node=node,
                kind=act.value,
                round=record.round,
                ranks=ranks,
                incident=record.incident,
                reason=reason,
                deadline_s=deadline_s if act in LOOKS else 5.0,
            )
            for node, ranks in self._receivers(job, act)
        ]
        job.orders.update({order.id: order for order in orders})
        for order in orders:
            job.note_asked(order)
        job.change(order_number=record.order_number + len(orders))
        job.unsaved.orders.update({order.id: order for order in orders})

    def _receivers(self, job: Job, act: Act) -> list[tuple[str, tuple[int, ...]]]:
        """Return nodes and ranks (none: all) that an act is for."""
        if act in (Act.RESTART, Act.SHUTDOWN):
            nodes = job.nodes if act is Act.RESTART else job.runners
            return [(node, ()) for node in nodes if node not in job.waiting and node not in job.round.left]
        now_s = self.clock()
        with_agent = [node for node in job.nodes if self.registry.agent_is_fresh(job.name, node, now_s)]
        if act in LOOKS and job.suspected is not None and (asks := job.suspected.asks) is not None:
            return [(node, ()) for node in with_agent if node in asks]
        if act is not Act.KILL_CULPRITS:
            return [(node, ()) for node in with_agent]
        verdict = job.record.verdict
        if verdict is None:
            return []
        receivers = []
        places = {rank: place for place, rank in enumerate(verdict.culprits)}
        for node in with_agent:
            share = self.registry.share(node, job.name, job.record.round)
            ranks = tuple(share.named(places)) if share is not None else ()
            if ranks:
                receivers.append((node, ranks))
        return receivers


def again_in_s(state: State, since_s: float, nodes: int) -> float:
    """Return how soon the agents of a job should report again, 0: as usual.

    Args:
        state: of the job.
        since_s: for how long it has been in that state.
        nodes: how many are known.
    """
    if state not in _URGENT:
        return 0.0
    return URGENT_S if since_s < _URGENT_FOR_S else max(URGENT_S, nodes / _MOST_URGENT)
