# SPDX-License-Identifier: Apache-2.0
"""One job: what the journal keeps of it (``JobRecord``), and what only lives as long as the controller (``Job``).

Everything that must survive a controller's death is in the record. The rest comes back by itself: runners repeat their
joins and polls, agents send full heartbeats.
"""

import asyncio
from collections.abc import Iterable
from typing import TYPE_CHECKING, NamedTuple

import msgspec

from megascale_ops.controller.job.evidence_orders import EvidenceOrders
from megascale_ops.controller.job.homes import Homes
from megascale_ops.controller.job.node_checks import NodeChecks
from megascale_ops.controller.job.notices import Notices
from megascale_ops.controller.job.round import Round
from megascale_ops.controller.job.suspected import SUSPECTING, Suspected
from megascale_ops.controller.job.unsaved import Unsaved
from megascale_ops.controller.record.job_record import STATES, JobRecord, Member
from megascale_ops.controller.record.state_machine import FINAL, STARTING, TRAINING, State
from megascale_ops.schema.messages import ORDERS_FOR_AGENT, Join, Order

if TYPE_CHECKING:
    from megascale_ops.controller.job.owed_checks import OwedCheck
    from megascale_ops.diagnosis.hangs.suspicion import Suspicion
    from megascale_ops.schema.events import Incident

# A runner with no open request polls again at once, or is stopping its ranks: 5 s. One whose connection broke is
# most likely dead: 1 s to come back.
QUIET_S = 5.0
BROKEN_S = 1.0
# 60 s: a slow machine takes so long to import torch, and until then no black box separates a training script from any
# other program.
UNSEEN_S = 60.0
# 2: a slow disk may still answer for the incident before; 12,500 nodes get five orders an incident, 10 MB here.
_INCIDENTS_ASKED = 2


class Runner:
    """What is known of one node's runner from its requests. Owned by its job."""

    __slots__ = ("broken", "nudges", "open_requests", "requests", "round", "runner_id", "seen_s", "waiters", "watchers")

    def __init__(self, runner_id: str, now_s: float) -> None:
        self.runner_id = runner_id
        self.requests = 0  # how many it has made
        self.seen_s = now_s  # began or ended a request
        self.open_requests = 0
        self.broken = False  # its last request ended by a broken connection
        self.round = 0  # the round it polled for
        self.nudges = 0
        self.waiters: set[asyncio.Future[None]] = set()  # its own requests
        self.watchers: set[asyncio.Future[None]] = set()  # requests that wait for its next one

    def begin(self, now_s: float) -> None:
        """Note that a request begins."""
        self.seen_s = now_s
        self.requests += 1
        self.open_requests += 1
        self.broken = False
        _wake(self.watchers)

    def end(self, now_s: float, *, broken: bool) -> None:
        """Note that a request ended; ``broken``: the other side went away."""
        self.open_requests -= 1
        self.seen_s = now_s
        self.broken = broken and self.open_requests == 0

    def is_alive(self, now_s: float) -> bool:
        """Return whether it is there, by its connections."""
        return self.open_requests > 0 or now_s - self.seen_s <= (BROKEN_S if self.broken else QUIET_S)

    def nudge(self) -> None:
        """Answer its waiting requests with nothing: a living runner asks again at once, and so proves that it lives."""
        self.nudges += 1
        self.wake()

    def wake(self) -> None:
        """Let its waiting requests look again."""
        _wake(self.waiters)


class Waiting(msgspec.Struct):
    """A runner that wants to be in the next round."""

    join: Join
    since_s: float
    told: bool = False  # why it waits


class Unstepped(NamedTuple):
    """Whether a rank starts of which no step is known: one with a black box, one without."""

    with_box: bool
    without_box: bool


class Job:
    """One job while the controller lives. Owned by the loop."""

    def __init__(self, record: JobRecord, now_s: float, saved: JobRecord | None = None) -> None:
        self.record = record
        self.round = Round(record)
        self.homes = Homes()
        self.note_homes()
        self.suspected: Suspected | None = None  # in the states that have one
        self.unsaved = Unsaved()
        self.saved = saved  # as the journal has it; None: it has nothing of it
        self.known_runners = set(record.runners)  # of this life
        self.orders = {order.id: order for order in record.orders}  # given and not known to be executed
        self.pause_ends_s = 0.0  # until when a service is waited for, on this controller's clock
        self.entered_s = self.saved_s = now_s  # when it entered its state, and was saved, this controller's clock
        self.runners: dict[str, Runner] = {}
        self.waiting: dict[str, Waiting] = {}
        self.checks = NodeChecks({}, set())
        self.superseded: set[str] = set()  # runner ids that another one has replaced
        self.harmless_s = 0.0  # the longest such silence that ended by itself
        self.asked: dict[str, EvidenceOrders] = {}  # by incident: of this one and the one before
        self.note_asked(*record.orders)
        self.incident: Incident | None = None
        self.aside: Incident | None = None  # open as well: the job was on its way back from it
        self.notices = Notices()
        self.owed_checks: dict[str, OwedCheck] = {}  # by incident: of GPUs that a verdict speaks of
        self.checks_noted: set[str] = set()  # incidents whose verdict has been looked at for that
        # The latest round and the highest incident that is known anywhere: the journal may have lost its end.
        self.heard_round = self.heard_incidents = 0
        self.saves = 0
        self.waiters: set[asyncio.Future[None]] = set()  # until everything is journaled
        self.joining: set[Runner] = set()  # runners with a pending join
        self.round_watchers: dict[int, set[asyncio.Future[None]]] = {}  # by round: requests that wait for its end

    @property
    def name(self) -> str:
        """The job's name."""
        return self.record.job

    @property
    def state(self) -> State:
        """Where it stands."""
        return STATES[self.record.state]

    def note_homes(self) -> None:
        """Note where the ranks of the round are."""
        self.homes.note(self.record.round, ((member.node, member.nproc) for member in self.record.members))

    def note_asked(self, *orders: Order) -> None:
        """Note which nodes were ordered to give evidence for an incident."""
        for order in orders:
            if order.kind in ORDERS_FOR_AGENT:
                self.asked.setdefault(order.incident, EvidenceOrders()).nodes[order.id] = order.node
        while len(self.asked) > _INCIDENTS_ASKED:
            del self.asked[next(iter(self.asked))]

    def member(self, node: str) -> Member | None:
        """Return the round's member of that node."""
        place = self.round.places.get(node)
        return self.record.members[place] if place is not None else None

    @property
    def suspicion(self) -> "Suspicion | None":
        """The ranks that stand still, as of the last judgement; None for none."""
        return self.round.silence.suspicion

    @property
    def told_suspicion(self) -> "Suspicion | None":
        """The same once it is to be told: its grace is over, or an incident is open for it; a blink is no news."""
        suspicion = self.suspicion
        if suspicion is None or self.is_over or not (suspicion.is_told or self.incident is not None):
            return None
        return suspicion

    @property
    def told_state(self) -> State:
        """Where it is told to stand: before a suspicion's grace is over it is where it was before that."""
        is_blink = self.state in SUSPECTING and self.incident is None and self.told_suspicion is None
        return STATES.get(self.record.before, State.RUNNING) if is_blink else self.state

    @property
    def suspects(self) -> Suspected:
        """What is known of the suspects, in states that have some."""
        assert self.suspected is not None, self.record.state
        return self.suspected

    @property
    def is_over(self) -> bool:
        """Nothing more happens to it."""
        return self.state in FINAL

    @property
    def furthest_step(self) -> int:
        """The furthest step that any rank is known to have finished, in any round; -1 before the first."""
        return max(self.round.reached_step, self.record.best_step, self.record.furthest)

    @property
    def is_before_steps(self) -> bool:
        """It goes on, and no rank is known to have made a step ever: a script that begins, or one that makes none."""
        return self.state in TRAINING and max(self.round.step, self.record.best_step) < 0

    def is_starting(self, now_s: float) -> bool:
        """Say whether its round is formed and not every rank has made a step in it; ``now_s`` on the loop's clock."""
        if self.state in STARTING:
            return not self.round.has_started
        return self.is_before_steps and now_s - self.entered_s < UNSEEN_S

    def unstepped(self, now_s: float) -> Unstepped:
        """Return what a rank without a step is: one without a black box may be no torch script's."""
        return Unstepped(not self.is_over, self.is_starting(now_s))

    @property
    def nodes(self) -> Iterable[str]:
        """The nodes of its round, in order."""
        return self.round.places.keys()

    def change(self, **changes: object) -> None:
        """Change the record; journaled with the next save."""
        self.record = msgspec.structs.replace(self.record, **changes)
        self.unsaved.has_record = True

    def wake(self) -> None:
        """Let all waiting joins look again."""
        _wake(self.waiters)
        for ended in [round_ for round_ in self.round_watchers if self.is_over or round_ != self.record.round]:
            _wake(self.round_watchers.pop(ended))
        for runner in self.joining:
            runner.wake()


def _wake(waiters: set[asyncio.Future[None]]) -> None:
    for waiter in waiters:
        if not waiter.done():
            waiter.set_result(None)
    waiters.clear()


async def wait_in(waiters: set[asyncio.Future[None]], timeout_s: float) -> None:
    """Wait among ``waiters`` until woken, at most ``timeout_s``."""
    waiter: asyncio.Future[None] = asyncio.get_running_loop().create_future()
    waiters.add(waiter)
    try:
        async with asyncio.timeout(timeout_s):
            await waiter
    except TimeoutError:
        return
    finally:
        waiters.discard(waiter)
