# SPDX-License-Identifier: Apache-2.0
"""One job: what the journal keeps of it (``JobRecord``), and what only lives as long as the controller (``Job``).

Everything that must survive a controller's death is in the record. The rest comes back by itself: runners repeat their
joins and polls, agents send full heartbeats.
"""

import asyncio
from collections import Counter
from collections.abc import Iterable
from functools import cached_property
from typing import TYPE_CHECKING

import msgspec

from megascale_ops.controller.job.state_machine import FINAL, State
from megascale_ops.controller.policy.decision import Decision, Eviction, Failure, Restart, Tab
from megascale_ops.schema.health import Verdict
from megascale_ops.schema.messages import ORDERS_FOR_AGENT, Join, Leave, Order, RankExit
from megascale_ops.schema.policy import JobPolicy

if TYPE_CHECKING:
    from megascale_ops.controller.job.round_progress import Pace
    from megascale_ops.diagnosis.hangs.evidence import Look
    from megascale_ops.diagnosis.hangs.lost_nodes import Together
    from megascale_ops.diagnosis.hangs.suspicion import Suspicion
    from megascale_ops.diagnosis.hangs.verdict import Judgement
    from megascale_ops.schema.events import Event, Incident

# A runner with no open request asks again at once, or is stopping its ranks: 5 s. One whose connection broke is
# most likely dead: 1 s to come back.
QUIET_S = 5.0
BROKEN_S = 1.0
# 2: a slow disk may still answer for the incident before; 12,500 nodes get five orders an incident, 10 MB here.
_INCIDENTS_ASKED = 2
# 0.5 us less than State(...), which every heartbeat would pay for several times.
_STATES = {state.value: state for state in State}


class Member(msgspec.Struct, frozen=True, omit_defaults=True):
    """One node of a round."""

    node: str
    runner_id: str
    join_id: str
    nproc: int
    addr: str
    store_port: int


class LeftAlone(msgspec.Struct, frozen=True, omit_defaults=True):
    """A hang that is not acted upon: known until somebody moves, so that it is told once."""

    incident: str
    wall_s: float
    again_s: float  # look again after so long; 0: never
    place: str = ""  # as in its verdict
    silent_s: float = 0.0  # how long it had lasted when it was left alone


class JobRecord(msgspec.Struct, frozen=True, omit_defaults=True, dict=True):
    """What the journal keeps of a job. ``life`` counts how often its name was started after it had been over."""

    job: str
    job_id: str = ""  # drawn once; ranks prove by it that an earlier round of theirs was replaced
    state: str = State.REPLACING.value
    round: int = 0
    life: int = 1
    min_nodes: int = 1
    max_nodes: int = 1
    policy: JobPolicy = JobPolicy()
    run_dir: str = ""
    members: tuple[Member, ...] = ()
    runners: tuple[str, ...] = ()  # runner ids of this life: a finished life must not be revived by one of them
    started_wall_s: float = 0.0
    since_wall_s: float = 0.0  # when it entered its state
    reason: str = ""
    exit_code: int = 0
    before: str = ""  # the state before the suspicion
    restarts: tuple[Restart, ...] = ()  # the newest; a row each in the journal, as are runners, tabs and habits
    restarted: dict[str, int] = {}  # how often for each cause, over all of this life
    failure: Failure | None = None
    verdict: Verdict | None = None  # what ends this round, once that is known
    incident: str = ""  # the incident that is open
    incidents: int = 0  # how many there were
    ended_verdict: Verdict | None = None  # what ended the round before
    ended_incident: str = ""
    orders: tuple[Order, ...] = ()  # given and not known to be obeyed
    order_number: int = 0
    best_step: int = -1  # furthest before this round
    furthest: int = -1  # furthest in this round, as of the last save
    steps_are_absolute: bool = False
    had_boxes: bool = False
    step_s: float = 0.0  # typical step, to estimate what lost steps cost
    useful_s: float = 0.0  # covered by steps of earlier rounds that were not lost
    launch_policy: JobPolicy | None = None  # what its runner asked for; None: ``policy`` is
    tuned: dict[str, str] = {}  # what a person has changed of it since, over every round of this life
    evictions: tuple[Eviction, ...] = ()
    prices_s: tuple[float, ...] = ()  # what its restarts have cost, the newest last
    tabs: dict[str, Tab] = {}  # what warnings have cost
    decided: Decision | None = None  # what follows this stop, where that was decided before it
    left_alone: LeftAlone | None = None  # a hang that is known and not acted upon
    habits: dict[str, float] = {}  # by place: the longest silence there that ended by itself, seconds

    @property
    def restarts_in_all(self) -> int:
        """How often it was restarted in this life."""
        return sum(self.restarted.values())

    @cached_property
    def world_size(self) -> int:
        """How many ranks the round has. Asked for with every heartbeat: not added up anew over 12,500 nodes."""
        return sum(member.nproc for member in self.members)


# What a job keeps when it is started again: its names, and numbers that agents, runners and folders know of, none of
# which is given twice. The state is the one from which the table lets a life begin. The policy is what the first
# runner's is held against, which replaces it at once, so that an event can name what changes.
COUNTS_ON = ("job", "job_id", "state", "round", "incidents", "order_number", "policy")


def next_life(over: JobRecord) -> JobRecord:
    """Return the record with which the next life of a job begins: a new one, so that what is not counted on is gone."""
    return JobRecord(life=over.life + 1, **{name: getattr(over, name) for name in COUNTS_ON})


def read_record(name: str, raw: bytes) -> JobRecord:
    """Return a job's record as the journal has it.

    Raises:
        ValueError: it can't be read, or makes no sense; the text says why.
    """
    record = _decode_record.decode(raw)
    if record.job != name:
        raise ValueError(f"it is filed under {name} and tells of {record.job}")
    if record.state not in _STATES:
        raise ValueError(f"there is no state {record.state!r}")
    if record.restarts and not record.restarted:  # of an older program, which counted what it kept
        counts = Counter(one.cause or "unknown" for one in record.restarts)
        record = msgspec.structs.replace(record, restarted=dict(counts))
    return record


_decode_record = msgspec.json.Decoder(JobRecord)


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
        self.watchers: set[asyncio.Future[None]] = set()  # those who want to know whether it asks again

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
        """Say whether it is there as far as its connections tell."""
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


class Exit(msgspec.Struct, frozen=True):
    """How a rank ended; ``ended_s`` on the controller's clock."""

    node: str
    exit: RankExit
    ended_s: float


class Job:
    """One job while the controller lives. Owned by the loop."""

    def __init__(self, record: JobRecord, now_s: float, saved: JobRecord | None = None) -> None:
        self.record = record
        self.saved = saved  # as the journal has it; None: it has nothing of it
        self.places: dict[str, int] = {}  # node to its place among the members
        self.known_runners = set(record.runners)  # of this life
        self.orders = {order.id: order for order in record.orders}  # given and not known to be obeyed
        self.index_members()
        self.entered_s = self.saved_s = now_s  # when it entered its state, and was saved, this controller's clock
        self.runners: dict[str, Runner] = {}
        self.waiting: dict[str, Waiting] = {}
        self.left: dict[str, Leave] = {}
        self.superseded: set[str] = set()  # runner ids that another one has replaced
        self.exits: dict[int, Exit] = {}  # of this round, by rank
        self.unmet: dict[str, tuple[str, ...]] = {}  # of this round, by node: whom it could not reach
        self.gone: dict[int, tuple[int, float]] = {}  # rank -> round in which its process was seen gone, and when first
        self.suspicion: Suspicion | None = None
        self.suspect_wall_s = 0.0
        self.suspicion_s = 0.0  # how long the suspects had been silent when they were last judged
        self.harmless_s = 0.0  # the longest such silence that ended by itself
        self.looks: dict[int, Look] = {}  # what evidence tells of the ranks while they are suspected
        self.looks_taken = 0
        self.planned_wall_s = 0.0  # when the suspects are acted upon, as was last told; 0: not told
        self.judgement: Judgement | None = None  # of the suspicion, with what evidence there was
        self.judgement_s = 0.0
        self.odd = False  # a heartbeat asks for a full judgement
        self.judged_s = self.scanned_s = 0.0
        self.paces: dict[str, Pace] = {}  # of this round, by node; kept until the job has caught up
        self.evidence_wanted: set[str] = set()  # order ids
        self.evidence_taken: set[str] = set()  # order ids of this incident
        # Incident -> order id -> its node, of this incident and the one before: whose evidence is taken, late or not.
        self.asked: dict[str, dict[str, str]] = {}
        self.note_asked(*record.orders)
        self.together: Together | None = None  # how far the others are while nodes are silent
        self.unheard_s = 0.0  # when the whole job was last unheard; 0 for never
        self.incident: Incident | None = None
        self.warnings: dict[str, Incident] = {}  # what is wrong and not worth a stop, by the key of who warns
        self.weighed_s = 0.0  # when the warnings were last weighed
        self.told: dict[str, tuple[str, str, bool]] = {}  # by tab: the action and rule that was told last
        self.told_s: dict[str, float] = {}  # by tab: when its numbers were last told
        # The latest round and the highest incident that anybody tells of: the journal may have lost its end.
        self.heard_round = self.heard_incidents = 0
        self.step = -1  # furthest of this round
        self.formed_wall_s = 0.0
        self.steps_began_wall_s = 0.0  # of this round, as far as reports tell; 0 before the first step
        self.last_step_wall_s = 0.0
        self.changed = self.must_last = False  # ``must_last``: orders or names follow from what is saved next
        self.changed_a_little = False  # worth saving, but not at once
        self.events: list[Event] = []  # to be journaled with the next save
        self.touched: dict[str, Incident] = {}  # incidents to be journaled with the next save
        self.unsent: list[Order] = []  # to be sent after the next save
        self.saves = 0
        self.waiters: set[asyncio.Future[None]] = set()  # until everything is journaled
        self.joining: set[Runner] = set()  # whose join waits for an answer

    @property
    def name(self) -> str:
        """The job's name."""
        return self.record.job

    @property
    def state(self) -> State:
        """Where it stands."""
        return _STATES[self.record.state]

    def note_asked(self, *orders: Order) -> None:
        """Note which nodes were ordered to give evidence for an incident."""
        for order in orders:
            if order.kind in ORDERS_FOR_AGENT:
                self.asked.setdefault(order.incident, {})[order.id] = order.node
        while len(self.asked) > _INCIDENTS_ASKED:
            del self.asked[next(iter(self.asked))]

    def index_members(self) -> None:
        """Note each member's place; to be called when the members have changed."""
        self.places = {member.node: place for place, member in enumerate(self.record.members)}

    def member(self, node: str) -> Member | None:
        """Return the round's member of that node."""
        place = self.places.get(node)
        return self.record.members[place] if place is not None else None

    @property
    def is_over(self) -> bool:
        """Nothing more happens to it."""
        return self.state in FINAL

    @property
    def nodes(self) -> Iterable[str]:
        """The nodes of its round, in order."""
        return self.places.keys()

    def change(self, **changes: object) -> None:
        """Change the record; journaled with the next save."""
        self.record = msgspec.structs.replace(self.record, **changes)
        self.changed = True

    def wake(self) -> None:
        """Let all waiting joins look again."""
        _wake(self.waiters)
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
