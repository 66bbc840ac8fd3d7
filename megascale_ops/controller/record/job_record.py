# SPDX-License-Identifier: Apache-2.0
"""What the journal keeps of a job: everything that must survive a controller's death."""

from collections import Counter
from functools import cached_property

import msgspec

from megascale_ops.controller.policy.decision import Decision, Eviction, Failure, Restart, StateFailure, Tab
from megascale_ops.controller.record.state_machine import State
from megascale_ops.schema.health import Verdict
from megascale_ops.schema.messages import Order
from megascale_ops.schema.policy import JobPolicy

# The exit code of a job whose engine has taken all of its nodes away, or ended a runner: 128 + SIGTERM, as of those.
EVICTED_CODE = 143
# 0.5 us less than State(...), which every heartbeat would pay for several times.
STATES = {state.value: state for state in State}


class Member(msgspec.Struct, frozen=True, omit_defaults=True):
    """One node of a round."""

    node: str
    runner_id: str
    join_id: str
    nproc: int
    addr: str
    store_port: int


class LeftAlone(msgspec.Struct, frozen=True, omit_defaults=True):
    """A hang that is not acted upon: known until a suspect moves, so that it is reported once."""

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
    runners: tuple[str, ...] = ()  # runner ids of this life: one of these must not revive a finished job
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
    aside: str = ""  # the one that the job was on its way back from when what is open now was suspected
    incidents: int = 0  # how many there were
    ended_verdict: Verdict | None = None  # what ended the round before
    ended_incident: str = ""
    orders: tuple[Order, ...] = ()  # given and not known to be executed
    order_number: int = 0
    best_step: int = -1  # furthest before this round
    furthest: int = -1  # furthest in this round, as of the last save
    steps_are_absolute: bool = False
    had_boxes: bool = False
    start_s: float = 0.0  # what its last start took, from its round to the first step of every rank
    step_s: float = 0.0  # typical step, to estimate what lost steps cost
    useful_s: float = 0.0  # covered by steps of earlier rounds that were not lost
    launch_policy: JobPolicy | None = None  # what its runner requested; None: ``policy`` is
    tuned: dict[str, str] = {}  # what a user has changed of it since, over every round of this life
    evictions: tuple[Eviction, ...] = ()
    prices_s: tuple[float, ...] = ()  # what its restarts have cost, the newest last
    tabs: dict[str, Tab] = {}  # what warnings have cost
    decided: Decision | None = None  # what follows this stop, where that was decided before it
    left_alone: LeftAlone | None = None  # a hang that is known and not acted upon
    state_failure: StateFailure | None = None  # how the round before failed, if what it had restored may explain it
    restore_before: int = -1  # no checkpoint of this step or later is restored: it was bad itself; -1: any
    due_wall_s: float = 0.0  # the next round may not begin before: a service is waited for
    habits: dict[str, float] = {}  # by place: the longest silence there that ended by itself, seconds

    @property
    def restarts_in_all(self) -> int:
        """How often it was restarted in this life."""
        return sum(self.restarted.values())

    @cached_property
    def world_size(self) -> int:
        """How many ranks the round has. Asked for with every heartbeat: not added up anew over 12,500 nodes."""
        return sum(member.nproc for member in self.members)


# What a job keeps when it is started again: its names, and numbers used by agents, runners and folders, none of
# which is given twice. The state is the one in which the table lets a job begin. The policy is what the first
# runner's is compared with, which replaces it at once, so that an event can name what changes.
COUNTS_ON = ("job", "job_id", "state", "round", "incidents", "order_number", "policy")


def next_life(over: JobRecord) -> JobRecord:
    """Return the record with which the next life of a job begins: a new one, so that what is not counted on is gone."""
    return JobRecord(life=over.life + 1, **{name: getattr(over, name) for name in COUNTS_ON})


def read_record(name: str, raw: bytes) -> JobRecord:
    """Return a job's record as the journal has it.

    Raises:
        ValueError: it can't be read, or makes no sense; the message gives the reason.
    """
    record = _decode_record.decode(raw)
    if record.job != name:
        raise ValueError(f"it is filed under {name} and tells of {record.job}")
    if record.state not in STATES:
        raise ValueError(f"there is no state {record.state!r}")
    if record.state == State.FINISHED.value and record.exit_code:  # of an older program, which had no state for it
        record = msgspec.structs.replace(record, state=State.STOPPED.value)
    if record.restarts and not record.restarted:  # of an older program, which counted what it kept
        counts = Counter(one.cause or "unknown" for one in record.restarts)
        record = msgspec.structs.replace(record, restarted=dict(counts))
    return record


_decode_record = msgspec.json.Decoder(JobRecord)
