# SPDX-License-Identifier: Apache-2.0
"""What is found and what is judged: findings are facts with a number, a verdict is what they add up to.

And where the nodes of a cluster stand as machines, whatever jobs run on them.

And a node's self-check: what is asked for, and what of its report others want to know. The report itself stays with who
made it: one of 64 cores has 74 KB. Its findings, the figures as medians and ranges, and what could not be measured are
a few hundred bytes a line.
"""

from typing import Annotated, Literal

import msgspec
from msgspec import Meta

from megascale_ops.schema.ranges import Bytes, Count, Line, Pids, Seconds, Share, Text, WallSeconds, Word

# As many lines as a card shows, a message has room for and a page can draw.
MOST_FINDINGS, MOST_FIGURES, MOST_UNMEASURED, MOST_GPUS = 32, 64, 32, 64
# Half a minute and ten minutes are what the checks are meant to take; one that hangs takes its own deadline more.
DEADLINES_S = {"quick": 120.0, "full": 900.0}
STATUSES = ("good", "warn", "bad", "unmeasured")

Status = Literal["good", "warn", "bad", "unmeasured"]
Depth = Literal["quick", "full"]


class HostReading(msgspec.Struct, frozen=True, omit_defaults=True, gc=False):
    """One look at a node's host (fractions of one; bytes)."""

    cpu_busy: Share = 0.0
    load_1m: Share = 0.0
    memory_used: Share = 0.0
    memory_available_bytes: Bytes = 0
    swap_used: Share = 0.0
    shm_free_bytes: Bytes = 0
    disk_free_bytes: Bytes = 0
    cores: Count = 0
    has_shm: bool = True  # the folder of the black boxes could be queried for its space
    has_disk: bool = True  # the same of a run folder; without a job there is none


class Finding(msgspec.Struct, frozen=True, omit_defaults=True):
    """One fact for or against a verdict; ``text`` is a sentence with the number in it."""

    name: str
    text: str
    source: str  # black box, progress board, process, stderr, exit status, heartbeat, stacks, ...
    rank: int = -1
    node: str = ""
    value: float = 0.0
    unit: str = ""


class HardwareFinding(msgspec.Struct, frozen=True, omit_defaults=True):
    """What is wrong with a node's hardware or host now, as its agent sees it.

    ``name`` is a word for programs (xid_79, gpu_lost, throttled_hw_thermal, port_down_mlx5_0_1, oom_kill, ...; where
    the kernel named a device, with that behind it: nvme_lost_nvme4),
    ``text`` a sentence with its number. Ends with its reason; what happened once stays for ten minutes.
    """

    name: Word
    text: Text
    check: Word  # of the check: gpu, kernel_log, fabric, a collector of the agent's table; or the check that hangs
    severity: Word = "warn"  # note (evidence, no worry), warn, fail
    gpu: Word = ""  # UUID
    since_wall_s: WallSeconds = 0.0
    last_wall_s: WallSeconds = 0.0  # of something that happens: when it last did
    count: Count = 1
    is_bad: bool = False  # the GPU is in doubt also after a restart: to be remembered
    pids: Pids = ()  # processes that it is about


class BadHardware(msgspec.Struct, frozen=True, omit_defaults=True):
    """A GPU that failed, remembered by UUID and serial number until an operator marks it as mended or replaced."""

    uuid: str
    reason: str  # name of the finding
    node: str  # where it was when it last failed
    text: str
    since_wall_s: float
    last_wall_s: float
    count: int = 1  # how often, at least a minute apart
    serial: str = ""  # of its board, as on the label; "" where that is not known


class Verdict(msgspec.Struct, frozen=True, omit_defaults=True):
    """The ranks or nodes to blame, for what, how sure we are and why.

    ``confidence`` is in 0..1; where ``sure_of`` is "place" it is of which rank stands still and where, and not that it
    hangs: a silence that contradicts nothing may end by itself. ``otherwise`` is what would have changed the verdict.
    ``cause`` narrows a straggler down (compute, input, host, starved, gc, launch, gpu, throttled) or a slow link (link,
    network); ``excess`` is a slow rank's own work above its equals', as a share of theirs, and ``cost`` the share of
    every step that it costs all ranks, in 0..1.
    """

    fault: str
    reason: str
    confidence: float
    culprits: tuple[int, ...] = ()
    nodes: tuple[str, ...] = ()
    since_wall_s: float = 0.0
    since_step: int = -1
    round: int = 0
    action: str = "none"  # none, ignore, warn, wait, restart, evict (restart without the nodes), stop
    evidence: tuple[Finding, ...] = ()
    otherwise: str = ""
    cause: str = ""
    cost: float = 0.0
    place: str = ""  # of a silence: the script's line and the collective, the same words the next time it happens
    sure_of: str = ""  # "place", or "" for all its fields
    excess: float = 0.0


# States of a node's life, in the order in which people want to see them, and what each of them means for jobs.
NODE_STATES = {
    "quarantined": "in no round until it was checked, its time is over, or a person releases it",
    "draining": "runs on until the round ends, and is in no later one",
    "under check": "measures itself before it may take part",
    "suspect": "takes part, and is measured before it does so again",
    "back": "takes part after a check that found nothing; one more fault and it is out",
    "healthy": "takes part",
}
OUT = ("draining", "quarantined")
MOST_EVIDENCE = 16


class EngineWord(msgspec.Struct, frozen=True, omit_defaults=True):
    """How the engine that owns a node (Slurm, Kubernetes) has it, as far as we have asked for that."""

    state: str  # of ENGINE_STATES
    wall_s: float  # since when
    text: str = ""  # what was done, or why it was not


# What each means for other jobs, which the engine places.
ENGINE_STATES = {
    "drained": "no other job is put there",
    "not drained": "the engine may put other jobs there",
    "not resumed": "takes part here, and the engine puts no job there",
    "resumed by others": "the engine may put other jobs there, and it is out here until a person says otherwise",
}


class NodeLife(msgspec.Struct, frozen=True, omit_defaults=True):
    """Where one node stands, and until when; wall clock seconds."""

    node: str
    state: str = "healthy"  # of NODE_STATES
    since_wall_s: float = 0.0
    until_wall_s: float = 0.0  # then the state ends by itself, or is told again; 0: never, of a healthy node alone
    reason: str = ""
    by: str = ""  # who brought it here: "controller", or a person
    key: str = ""  # what it was accused of last, a word; the same again within minutes is one accusation
    accused_wall_s: float = 0.0
    strikes: int = 0  # how often evidence has put it out: each time for twice as long; a release by hand forgives all
    cleared_wall_s: float = 0.0  # what happened before then is forgiven: it was checked, or released by a person
    was: str = ""  # under check: the state that it came from
    served_wall_s: float = 0.0  # the same: when the quarantine that it came from would have ended
    is_checked: bool = False  # in this state a check has been asked for already: none is asked for again
    for_s: float = 0.0  # out by hand: for how long
    is_held: bool = False  # quarantined by a person without an end: it is told again each day, and not checked
    is_spared: bool = False  # it would be out, had the limit for moves by themselves not been reached
    engine: EngineWord | None = None  # None: nothing was asked of an engine, or all was taken back


class NodeMove(msgspec.Struct, frozen=True, omit_defaults=True):
    """One move of one node: what happened, on what evidence, and where the node stood before and after it."""

    number: int  # counts over all nodes
    node: str
    event: str  # of the table in controller/nodes/life.py; "": the entry was dropped from the journal
    wall_s: float
    before: NodeLife
    after: NodeLife
    by: str = ""
    reason: str = ""
    key: str = ""
    evidence: tuple[str, ...] = ()
    for_s: float = 0.0  # by hand: for how long; 0: without an end
    undoes: int = 0  # the number of the move that this one takes back
    job: str = ""  # whose round the evidence comes from


class FleetFailures(msgspec.Struct, frozen=True, omit_defaults=True):
    """What the controller has measured of how often nodes fail and how long they are out."""

    moves_out: int  # by evidence, in the time that was watched
    node_days: float  # of nodes that were heard of
    out_s: float = 0.0  # what a node that came back was out for, the median; 0: none has come back yet


class NodeAsk(msgspec.Struct, frozen=True, forbid_unknown_fields=True, omit_defaults=True):
    """Body of ``POST /v1/nodes/NODE``: what a person wants done with a node."""

    do: Annotated[str, Meta(max_length=16)]  # quarantine, release, undo
    reason: Annotated[str, Meta(max_length=500)] = ""
    by: Word = ""
    for_s: Seconds = 0.0  # of a quarantine: for so long; 0: until a person releases it


class NodeCheck(msgspec.Struct, frozen=True, omit_defaults=True):
    """What a runner's self-check of its node has shown; part of a join."""

    outcome: Word  # good, bad, unmeasured
    text: Text = ""  # what is bad, or why nothing was measured
    seconds: Seconds = 0.0
    path: Line = ""  # the report, on the node


class CheckAsk(msgspec.Struct, frozen=True, forbid_unknown_fields=True, omit_defaults=True):
    """Body of ``POST /v1/nodes/NODE/check``, and what an agent is told: which checks; none named: all of them.

    ``preempt``: also where a job trains on the node: its steps are slower meanwhile, and figures are of a shared node.
    """

    depth: Depth = "quick"
    checks: Annotated[tuple[Word, ...], Meta(max_length=32)] = ()
    preempt: bool = False


class CheckedFigure(msgspec.Struct, frozen=True, omit_defaults=True):
    """One kind of figure over its equals, in base units (bytes, seconds, operations): the median and the range."""

    name: Word  # of a row of diagnostics/figures.py
    of: Line  # "GPU 3", or how many: "8 of them"
    value: float
    least: float
    most: float
    text: Text = ""  # the same as people read it


class CheckedFinding(msgspec.Struct, frozen=True, omit_defaults=True):
    """What one check has found; see ``diagnostics/report.py``."""

    severity: Literal["bad", "warn", "note"]
    of: Line
    text: Text
    next: Text = ""
    check: Word = ""


class SelfCheck(msgspec.Struct, frozen=True, omit_defaults=True):
    """What a self-check of a node has shown, the worst first.

    Attributes:
        status: The worst of its findings; bad also where it was killed at its deadline; unmeasured: there is none.
        made: How many checks were made.
        gpus: UUID by label (``GPU 3``), so that a finding is told of a GPU that is known otherwise.
        trouble: Why there is no report, where there is none.
    """

    node: Word
    depth: Depth
    status: Status
    began_wall_s: WallSeconds = 0.0
    seconds: Seconds = 0.0
    made: Count = 0
    findings: Annotated[tuple[CheckedFinding, ...], Meta(max_length=MOST_FINDINGS)] = ()
    figures: Annotated[tuple[CheckedFigure, ...], Meta(max_length=MOST_FIGURES)] = ()
    unmeasured: Annotated[tuple[Text, ...], Meta(max_length=MOST_UNMEASURED)] = ()
    gpus: Annotated[dict[Word, Word], Meta(max_length=MOST_GPUS)] = {}
    trouble: Text = ""

    @property
    def worst(self) -> str:
        """Return its worst finding, a sentence; "" where nothing is wrong."""
        if self.trouble:
            return self.trouble
        return next((one.text for one in self.findings if one.severity != "note"), "")


class SelfCheckView(msgspec.Struct, frozen=True, omit_defaults=True):
    """Answer to ``POST`` and ``GET /v1/nodes/NODE/check``: the newest one of a node.

    ``state``: waiting (asked for and not answered), done, none (there was none in the last 30 days).
    """

    node: str
    state: str
    id: str = ""
    asked_wall_s: float = 0.0
    reason: str = ""  # why it was asked for
    check: SelfCheck | None = None


class CheckedNode(msgspec.Struct, frozen=True, omit_defaults=True):
    """The newest self-check of a node in a line; the whole of it is at ``/v1/nodes/NODE/check``."""

    node: str
    status: Status
    wall_s: float  # when it was asked for
    worst: str = ""  # its worst finding, or why there is no result


class NodesView(msgspec.Struct, frozen=True, omit_defaults=True):
    """Answer to ``GET /v1/nodes``: the nodes that are not simply healthy, and how much of a day's limit is used."""

    nodes: tuple[NodeLife, ...] = ()
    known: int = 0  # nodes that are heard of
    moved_out: int = 0  # by themselves, in the last day
    most_out: int = 0  # at most so many a day
    spared: tuple[str, ...] = ()  # would be out, had the limit not been reached: a person decides
    failures: FleetFailures | None = None
    engine: str = ""  # "Slurm", "Kubernetes": drains what is out; "": only rounds of this controller leave it out
    checks: tuple[CheckedNode, ...] = ()  # of these nodes, and of those whose newest self-check is bad


class NodeMoves(msgspec.Struct, frozen=True, omit_defaults=True):
    """Answer to ``GET /v1/nodes/NODE``: its moves, oldest first."""

    node: NodeLife
    moves: tuple[NodeMove, ...] = ()
    check: SelfCheckView | None = None  # the newest that is known
    is_unheard: bool = False  # no agent and no runner tells of it now
