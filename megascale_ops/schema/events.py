# SPDX-License-Identifier: Apache-2.0
"""What happened: journal events, incidents, and the views that the command line prints."""

import msgspec

from megascale_ops.schema.courses import Course
from megascale_ops.schema.health import BadHardware, HostReading, Verdict
from megascale_ops.schema.messages import EvidenceItem
from megascale_ops.schema.progress import RankReport

# States of a job that is over; "stopped": by hand, or since its engine has taken all nodes away; the reason tells.
OVER = ("failed", "finished", "stopped")


class Event(msgspec.Struct, frozen=True, omit_defaults=True):
    """One line of the journal. ``kind`` is a word, ``text`` a sentence."""

    wall_s: float
    job: str
    kind: str
    text: str = ""
    round: int = 0
    node: str = ""
    rank: int = -1
    incident: str = ""
    data: dict[str, float | int | str] = {}


class Marks(msgspec.Struct, frozen=True, omit_defaults=True):
    """When an incident passed each mark, wall clock seconds; 0 where it has not (yet)."""

    began: float = 0.0  # the fault itself, as far as the evidence reaches back
    detected: float = 0.0
    named: float = 0.0
    ordered: float = 0.0
    stopped: float = 0.0
    formed: float = 0.0
    stepped: float = 0.0  # first new step of every rank
    caught_up: float = 0.0
    # Between ``stopped`` and ``formed``, where nodes are in doubt.
    checking: float = 0.0  # the first node was asked to measure itself before the next round
    checked: float = 0.0  # the last result of these checks


class Incident(msgspec.Struct, frozen=True, omit_defaults=True):
    """Something that was noticed, what it was judged to be, and what was done about it."""

    id: str  # <job>-<number>
    job: str
    round: int
    state: str = "open"  # open, recovered, ended, harmless; watching (a warning that holds), over (it no longer does)
    marks: Marks = Marks()
    verdict: Verdict | None = None
    done: str = ""  # what was done, one sentence
    step_before: int = -1
    step_after: int = -1  # where training resumed
    evidence: tuple[EvidenceItem, ...] = ()
    folder: str = ""
    events: tuple[Event, ...] = ()
    course: Course | None = None  # of a warning: how it went


class NodeStatus(msgspec.Struct, frozen=True, omit_defaults=True):
    """A node as the controller sees it; ages in seconds."""

    node: str
    agent_age_s: float = -1.0  # -1: no heartbeat yet
    runner_age_s: float = -1.0
    host: HostReading | None = None


class RankStatus(msgspec.Struct, frozen=True, omit_defaults=True):
    """A rank as the controller sees it; ages in seconds, -1 where not known."""

    node: str
    report: RankReport
    silent_s: float = -1.0
    judged: str = "ok"  # ok, slow, suspect, lost; starting (no step in this round yet)
    cause: str = ""  # of a slow one: compute, input, host, starved, gc, launch, gpu, throttled
    cost: float = 0.0  # of a slow one: the share of every step that all lose by it


class JobStatus(msgspec.Struct, frozen=True, omit_defaults=True):
    """One job: its recovery state, its round, its nodes and ranks."""

    job: str
    state: str
    round: int
    world_size: int
    step: int
    step_p50_s: float
    restarts: int
    since_wall_s: float
    nodes: tuple[NodeStatus, ...] = ()
    ranks: tuple[RankStatus, ...] = ()
    incidents: int = 0
    useful_ratio: float = -1.0  # share of wall time spent in steps not lost later; -1: not known
    goodput: float = -1.0  # share of wall time that was training, as the ledger has it; -1: not known
    goodput_hour: float = -1.0  # the same of the last hour
    goodput_now: float = -1.0  # the same of the last five minutes, while the job lives
    reason: str = ""
    stepped: int = -1  # ranks that have made a step in this round, while it starts; -1: it does not start
    start_s: float = 0.0  # what the last start took, from its round to the first step of every rank; 0: not known
    start_age_s: float = -1.0  # since this round was formed
    is_numbered: bool = True  # steps have the script's own numbers; else they are counted from 0 in each round


class Status(msgspec.Struct, frozen=True, omit_defaults=True):
    """Answer to ``GET /v1/status``."""

    version: int
    wall_s: float
    controller_lag_s: float
    jobs: tuple[JobStatus, ...] = ()


class BadHardwareList(msgspec.Struct, frozen=True, omit_defaults=True):
    """Answer to ``GET /v1/hardware``, the newest last."""

    entries: tuple[BadHardware, ...] = ()


class Incidents(msgspec.Struct, frozen=True, omit_defaults=True):
    """Answer to ``GET /v1/incidents``, newest last, without their events and evidence texts."""

    incidents: tuple[Incident, ...] = ()
    older: bool = False  # there are older ones than these


class Health(msgspec.Struct, frozen=True):
    """Answer to ``GET /healthz``: ``status`` ok or degraded, and of journal and judgement ok or what is wrong."""

    status: str
    journal: str
    journal_kept: int  # batches that wait in memory for a journal that can't be written
    lag_s: float
    judgement: str


class AuditEntry(msgspec.Struct, frozen=True, omit_defaults=True):
    """One request by which a person changed something, or was refused to: what ``text`` says as a sentence in parts."""

    number: int
    wall_s: float
    text: str
    who: str = ""  # name and mark of the token, name of the certificate
    place: str = ""  # address that it came from
    what: str = ""  # method and address
    asked: str = ""  # its body, cut
    status: int = 0  # of the answer
    job: str = ""
    node: str = ""


class AuditEntries(msgspec.Struct, frozen=True, omit_defaults=True):
    """Answer to ``GET /v1/audit``, newest last."""

    entries: tuple[AuditEntry, ...] = ()
    older: bool = False  # there are older ones than these


class Leadership(msgspec.Struct, frozen=True):
    """Answer to ``GET /leader``, with 200 from the controller that leads and 503 from any other.

    ``role``: leader, standby, or unsure (it led, and can't ask the database whether it still does).
    """

    role: str
    leader: str  # address of the one that leads as far as is known; "" where that is unknown
    epoch: int  # number of that leader; 0: its journal is no PostgreSQL, so it leads alone
    database: str  # ok, or why it does not answer
