# SPDX-License-Identifier: Apache-2.0
"""What travels: heartbeats and evidence up, orders down, joining and leaving a job.

Every message that begins a conversation carries ``version``. Sizes are bounded by the receiver
(``MAX_BODY_BYTES``); every tuple here is bounded by the number of ranks of one node.
"""

import msgspec

from megascale_ops.schema.health import HostReading, Verdict
from megascale_ops.schema.progress import RankError, RankReport
from megascale_ops.schema.version import MESSAGE_VERSION

# 256 KiB: 8 ranks take 1.3 KB; 64 ranks with full last words stay below 60 KB.
MAX_BODY_BYTES = 256 * 1024

ORDERS_FOR_AGENT = ("dump_stacks", "dump_flight_recorder", "preserve", "stop", "kill")
ORDERS_FOR_RUNNER = ("restart", "shutdown")


class Order(msgspec.Struct, frozen=True, omit_defaults=True):
    """What the controller wants done by one node. ``ranks`` empty means all ranks of the job there.

    Tied to a round: an order for a round that is over is void. ``id`` is unique; a repeated order is obeyed once.
    """

    id: str
    job: str
    node: str
    kind: str
    round: int
    ranks: tuple[int, ...] = ()
    incident: str = ""
    reason: str = ""
    deadline_s: float = 5.0


class JobReport(msgspec.Struct, frozen=True, omit_defaults=True, gc=False):
    """The ranks of one job on one node; in a partial heartbeat only those that changed."""

    job: str
    round: int = 0
    run_dir: str = ""
    ranks: tuple[RankReport, ...] = ()


class Heartbeat(msgspec.Struct, frozen=True, omit_defaults=True, gc=False):
    """One a second from every agent, at once when a rank's process state changes.

    ``seq`` counts from 1 for each ``agent_id`` (new at every start of an agent). ``full`` says that all jobs and ranks
    are in it; otherwise only what changed since the heartbeat before.
    """

    node: str
    agent_id: str
    seq: int
    mono_s: float
    wall_s: float
    version: int = MESSAGE_VERSION
    full: bool = False
    host: HostReading | None = None
    jobs: tuple[JobReport, ...] = ()
    done_orders: tuple[str, ...] = ()
    spooled: int = 0  # heartbeats that could not be delivered before this one


class HeartbeatReply(msgspec.Struct, frozen=True, omit_defaults=True):
    """``send_full`` asks for everything in the next heartbeat: the controller is new or missed one.

    ``again_s`` above 0 asks for the next heartbeat after so many seconds instead of one: something is being judged.
    """

    orders: tuple[Order, ...] = ()
    send_full: bool = False
    again_s: float = 0.0


class EvidenceItem(msgspec.Struct, frozen=True, omit_defaults=True):
    """One piece of evidence for an incident; ``ok`` false with ``text`` "no answer" is evidence too."""

    kind: str  # stacks, flight_recorder, black_box, stderr
    ok: bool
    rank: int = -1
    text: str = ""  # at most 4,000 characters: a summary; the whole is in the file
    path: str = ""
    took_s: float = 0.0


class Evidence(msgspec.Struct, frozen=True, omit_defaults=True):
    """What an agent gathered for one order of one incident."""

    node: str
    job: str
    incident: str
    order: str
    version: int = MESSAGE_VERSION
    items: tuple[EvidenceItem, ...] = ()


class RankExit(msgspec.Struct, frozen=True, omit_defaults=True):
    """How one rank of the round before ended.

    ``code`` is the exit status, negative for a signal (as in subprocess); ``seen_mono_s`` on the runner's clock.
    ``by_us`` is true when the runner stopped it after another had failed.
    """

    rank: int
    local_rank: int
    pid: int
    code: int
    seen_mono_s: float
    by_us: bool = False
    step: int = -1
    phase: str = ""
    steps_seen: int = 0
    error: RankError | None = None
    last_words: tuple[str, ...] = ()  # names of the patterns seen at the end of stderr


class JobPolicy(msgspec.Struct, frozen=True, omit_defaults=True, forbid_unknown_fields=True):
    """How patient and how generous to be with one job; sent by its runner, each field settable by the user."""

    max_restarts: int = -1  # in all; -1: only the hourly budgets count
    restarts_per_hour: int = 20
    restarts_per_cause_per_hour: int = 10
    # 1.5 s: a debugger's or a suspend's blip resumes within it; a frozen rank is still back within 5 s.
    frozen_grace_s: float = 1.5
    # 5 s: a hundred 50 ms steps; below it the scheduler of a loaded machine can look like silence.
    silence_floor_s: float = 5.0
    silence_factor: float = 20.0  # times the p99 step
    # A rank that burns CPU outside collectives may be evaluating or compiling: wait six times as long.
    busy_factor: float = 6.0
    busy_floor_s: float = 60.0
    phase_patience_s: float = 1800.0  # declared checkpoint and eval phases
    startup_patience_s: float = 1800.0
    # 15 s: fifteen heartbeats; one lost packet must not cost a node.
    node_lost_s: float = 15.0
    join_timeout_s: float = 600.0  # to gather min_nodes
    # What a round below max_nodes waits for stragglers once min_nodes have joined.
    last_call_s: float = 2.0


class Join(msgspec.Struct, frozen=True, omit_defaults=True):
    """A runner is ready for the next round. Sent again with the same ``join_id`` until answered."""

    job: str
    node: str
    runner_id: str  # new at every start of a runner
    join_id: str  # new for every round it asks for
    nproc: int
    min_nodes: int
    max_nodes: int
    addr: str  # where other nodes reach this one
    store_port: int  # a fresh TCPStore that serves the round if this node becomes node rank 0
    mono_s: float
    version: int = MESSAGE_VERSION
    previous_round: int = 0  # 0: none
    cause: str = "start"  # start, failure, order
    exits: tuple[RankExit, ...] = ()
    policy: JobPolicy = JobPolicy()
    run_dir: str = ""


class JoinReply(msgspec.Struct, frozen=True, omit_defaults=True):
    """``status``: go (the round is formed), wait (ask again), stop (the job is over: ``reason``, ``exit_code``)."""

    status: str
    round: int = 0
    node_rank: int = -1
    nodes: int = 0
    master_addr: str = ""
    master_port: int = 0
    reason: str = ""
    incident: str = ""
    exit_code: int = 0
    verdict: Verdict | None = None  # what ended the round before, for the runner to print


class OrdersReply(msgspec.Struct, frozen=True, omit_defaults=True):
    """Answer to a runner's long poll; ``known`` false: the controller does not know this runner in this round."""

    orders: tuple[Order, ...] = ()
    known: bool = True


class Leave(msgspec.Struct, frozen=True, omit_defaults=True):
    """A runner is done. ``outcome``: succeeded, failed, cancelled."""

    job: str
    node: str
    runner_id: str
    outcome: str
    version: int = MESSAGE_VERSION
    round: int = 0
    exits: tuple[RankExit, ...] = ()
    mono_s: float = 0.0


class ErrorReply(msgspec.Struct, frozen=True):
    """The body of every 4xx and 5xx answer: one sentence."""

    error: str
