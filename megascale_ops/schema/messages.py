# SPDX-License-Identifier: Apache-2.0
"""What travels: heartbeats and evidence up, orders down, joining and leaving a job.

Every message that begins a conversation carries ``version``. Sizes are bounded by the receiver
(``MAX_BODY_BYTES``); every tuple here is bounded by the number of ranks of one node.
"""

from typing import Annotated

import msgspec
from msgspec import Meta

from megascale_ops.schema.collectives import MOST_GROUPS, CollectiveSample, GroupMembers
from megascale_ops.schema.gpu_queue import GpuQueue
from megascale_ops.schema.health import CheckAsk, HardwareFinding, HostReading, NodeCheck, SelfCheck, Verdict
from megascale_ops.schema.kernels import RankKernels
from megascale_ops.schema.policy import JobPolicy
from megascale_ops.schema.progress import RankError, RankReport, Trail
from megascale_ops.schema.ranges import (
    MOST_RANKS,
    Bytes,
    Count,
    ExitCode,
    Line,
    Lines,
    Nodes,
    Pid,
    Port,
    Rank,
    RankList,
    RankOrNone,
    Ranks,
    Round,
    Seconds,
    Step,
    Text,
    Version,
    WallSeconds,
    Word,
    Words,
)
from megascale_ops.schema.runs import LogPart, LogQuery
from megascale_ops.schema.tiles import TileFact
from megascale_ops.schema.version import spoken
from megascale_ops.schema.work import ProcessWork

# 256 KiB: 8 ranks take 1.3 KB; 64 ranks with full last words stay below 60 KB.
MAX_BODY_BYTES = 256 * 1024

# 32 findings of 300 bytes: 10 KB. A node with more is as bad as one with so many.
MOST_FINDINGS = 32

# 512: two numbers for each take 6 KB of a message; experts are spread over 8 to 256 ranks.
MOST_PEERS = 512

# For a user who reads what a rank printed: answered by evidence of this kind, for no incident.
LOG, READ_LOG = "log", "read_log"
# A self-check of the node: answered by evidence of this kind.
SELF_CHECK, DIAGNOSE = "self_check", "diagnose"
ORDERS_FOR_AGENT = (
    *("dump_stacks", "dump_flight_recorder", "preserve", "stop", "kill", "profile", "checkpoint"),
    *(READ_LOG, DIAGNOSE),
)
ORDERS_FOR_RUNNER = ("restart", "shutdown")


class Order(msgspec.Struct, frozen=True, omit_defaults=True):
    """What the controller wants done by one node. ``ranks`` empty means all ranks of the job there.

    Tied to a round: an order for a round that is over is void. ``id`` is unique; a repeated order is executed once.
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
    steps: int = 0  # of a profile: how many; 0: what was sampled last
    log: LogQuery | None = None  # of an order to read a log; ``round`` is 0 then, for it is tied to none
    ask: CheckAsk | None = None  # of an order to check the node; tied to no round either


class JobReport(msgspec.Struct, frozen=True, omit_defaults=True, gc=False):
    """The ranks of one job on one node; in a partial heartbeat only those that changed."""

    job: Word
    round: Round = 0
    run_dir: Text = ""
    ranks: Annotated[tuple[RankReport, ...], Meta(max_length=MOST_RANKS)] = ()
    # Finished since the report before, of the ranks that have any.
    collectives: Annotated[tuple[CollectiveSample, ...], Meta(max_length=MOST_RANKS)] = ()
    cut: Ranks = 0  # of how many ranks something is missing here, because a heartbeat has no room for it


class Heartbeat(msgspec.Struct, frozen=True, omit_defaults=True, gc=False):
    """One in ``every_s`` from every agent, at once when a rank's process state changes.

    ``seq`` counts from 1 for each ``agent_id`` (new at every start of an agent). ``full``: all jobs and ranks
    are in it; otherwise only what changed since the heartbeat before.
    """

    node: Word
    agent_id: Word
    seq: Count
    mono_s: Seconds
    wall_s: WallSeconds
    version: Version = msgspec.field(default_factory=spoken)
    full: bool = False
    host: HostReading | None = None
    jobs: Annotated[tuple[JobReport, ...], Meta(max_length=1024)] = ()
    done_orders: Lines = ()
    spooled: Count = 0  # heartbeats that could not be delivered before this one
    # All that is wrong with the hardware now, at most MOST_FINDINGS; None: as in the heartbeat before.
    findings: Annotated[tuple[HardwareFinding, ...], Meta(max_length=MOST_FINDINGS)] | None = None
    gpus: Words = ()  # UUIDs, in full heartbeats and when they have changed
    serials: Words = ()  # of these, in the same order; "" where one is not known
    metrics: Line = ""  # HOST:PORT where /metrics is, in full heartbeats; "": nowhere
    serves: Word = ""  # user whose black boxes the agent reads: a node may have an agent per user; "": not set
    every_s: Seconds = 1.0  # between two heartbeats of this agent, unless something is urgent


class HeartbeatReply(msgspec.Struct, frozen=True, omit_defaults=True):
    """``send_full`` asks for everything in the next heartbeat: the controller is new or missed one.

    ``again_s`` above 0 asks for the next heartbeat after so many seconds instead of one: something is being judged.
    """

    orders: tuple[Order, ...] = ()
    send_full: bool = False
    again_s: float = 0.0
    epoch: int = 0  # which leader says so, of several controllers; a lower one than before is no leader any more


# The marks that evidence may put on a rank, one word each.
MARKS = {
    "no_answer": "it did not answer in time",
    "gil_held": "native code holds the interpreter's lock",
    "in_collective": "its main thread is inside a collective",
    "in_rendezvous": "its main thread waits for a store or for a process group to form",
    "in_data_loader": "its main thread waits for a batch",
    "in_storage": "its main thread reads or writes a file, or saves a checkpoint",
    "in_syscall": "its main thread sleeps in a system call",
    "in_native": "its main thread is in native code",
    "in_python": "its main thread runs Python code",
    "worker_stopped": "a process that it started (a data loader's worker) is stopped",
    "uninterruptible": "its process is in state D: it waits for a device or a network file system",
    "stopped": "its process is stopped (state T)",
    "gone": "its process is gone",
}


class CollectiveFact(msgspec.Struct, frozen=True, omit_defaults=True):
    """One collective as a rank's flight recorder or black box knows it."""

    group: Line  # name of the process group
    seq: Step  # sequence number within the group; -1 for point-to-point
    function: Word  # all_reduce, broadcast, ... without the backend's name
    sizes: Text = ""  # of the inputs, as "[[4, 4]]"; "" where the source has none
    dtype: Line = ""
    bytes_moved: Bytes = -1  # -1: not known
    done: bool = False
    outputs: Text = ""  # sizes of the outputs where they differ from the inputs'
    output_dtype: Line = ""  # where it differs from the inputs'
    # Elements to and from each member of the group, in its order, of an all_to_all that shows it and has not ended.
    sends: Annotated[tuple[Count, ...], Meta(max_length=MOST_PEERS)] = ()
    receives: Annotated[tuple[Count, ...], Meta(max_length=MOST_PEERS)] = ()
    peer: RankOrNone = -1  # of a send or a receive, where that is known: the rank at its other end
    batch: Step = -1  # of a send or a receive: what the pieces of a batch share, by this rank's own count
    begun: bool | None = None  # whether the GPU has begun it; None: not known


class StuckConnection(msgspec.Struct, frozen=True, omit_defaults=True, gc=False):
    """A TCP connection of a rank in which data does not get on, by its kernel; addresses are HOST:PORT."""

    local: Line
    remote: Line
    queued_bytes: Bytes = 0  # sent by the rank, and not acknowledged by the kernel of the other end
    unread_bytes: Bytes = 0  # arrived, and not read by the rank
    resent: Count = 0  # how often the kernel has sent the oldest of it again since the other end last acknowledged


class EvidenceItem(msgspec.Struct, frozen=True, omit_defaults=True):
    """One piece of evidence for an incident; ``ok`` false with ``text`` "no answer" is evidence too."""

    # stacks, flight_recorder, collectives (of the black box), process, black_box, tiles, stderr, kernel, signal,
    # profile, log, self_check
    kind: Word
    ok: bool
    rank: RankOrNone = -1
    text: Text = ""  # at most 4,000 characters: a summary; the whole is in the file
    path: Text = ""
    took_s: Seconds = 0.0
    # What a judge reads; the text is the same for people.
    # Unfinished ones and the last finished, oldest first, at most 16.
    collectives: Annotated[tuple[CollectiveFact, ...], Meta(max_length=256)] = ()
    # Main thread, innermost first, "function (file:line)", at most 24.
    frames: Annotated[tuple[Text, ...], Meta(max_length=256)] = ()
    marks: Words = ()  # words of MARKS
    kernels: RankKernels | None = None  # of a profile
    connections: Annotated[tuple[StuckConnection, ...], Meta(max_length=256)] = ()  # at most 8, most often resent first
    addresses: Lines = ()  # by which other nodes reach this process, as its connections show; at most 8
    gpu: GpuQueue | None = None  # of the black box: NCCL's operations on the GPU, by NCCL's profiler plugin
    work: ProcessWork | None = None  # what the process and its children did since the look before
    seen_mono_s: Seconds = 0.0  # when it was complete, the agent's monotonic clock; 0: not known
    tiles: Annotated[tuple[TileFact, ...], Meta(max_length=64)] = ()  # one for each workspace of overlapped kernels
    log: LogPart | None = None  # of an order to read a log
    check: SelfCheck | None = None  # of an order to check the node
    groups: Annotated[tuple[GroupMembers, ...], Meta(max_length=MOST_GROUPS)] = ()  # in which the rank waits
    # Of stacks of a rank that waits for its data loader: the worker that makes the batch, "process 9 in read (a.py:1)".
    worker: Text = ""


class Evidence(msgspec.Struct, frozen=True, omit_defaults=True):
    """What an agent gathered for one order of one incident."""

    node: Word
    job: Word
    incident: Word
    order: Line
    version: Version = msgspec.field(default_factory=spoken)
    items: Annotated[tuple[EvidenceItem, ...], Meta(max_length=4096)] = ()


class RankExit(msgspec.Struct, frozen=True, omit_defaults=True):
    """How one rank of the round before ended.

    ``code`` is the exit status, negative for a signal (as in subprocess); ``seen_mono_s`` on the runner's clock.
    ``by_us`` is true when the runner, or the launcher that it wraps, stopped it after another had failed.
    """

    rank: Rank
    local_rank: Rank
    pid: Pid
    code: ExitCode
    seen_mono_s: Seconds
    by_us: bool = False
    step: Step = -1
    phase: Word = ""
    steps_seen: Count = 0
    error: RankError | None = None
    last_words: Words = ()  # names of the patterns seen at the end of stderr
    stderr_tail: Text = ""  # at most 4,000 characters, of a rank that died by itself
    # Its last collectives, oldest first, at most 8, by its black box.
    calls: Annotated[tuple[CollectiveFact, ...], Meta(max_length=256)] = ()
    trail: Trail | None = None  # of a rank that failed or was stopped, by its black box
    vanished: bool = False  # another launcher's rank whose exit status is unknown, and that did not end in order
    # Where its overlapped kernels were, of a rank that failed or was stopped.
    tiles: Annotated[tuple[TileFact, ...], Meta(max_length=64)] = ()


class Join(msgspec.Struct, frozen=True, omit_defaults=True):
    """A runner is ready for the next round. Sent again with the same ``join_id`` until answered."""

    job: Word
    node: Word
    runner_id: Word  # new at every start of a runner
    join_id: Word  # new for every round it requests
    nproc: Ranks
    min_nodes: Nodes
    max_nodes: Nodes
    addr: Line  # where other nodes reach this one
    store_port: Port  # a fresh TCPStore that serves the round if this node becomes node rank 0
    mono_s: Seconds
    version: Version = msgspec.field(default_factory=spoken)
    previous_round: Round = 0  # 0: none
    cause: Word = "start"  # start, failure, order; resume: no request, this is the round that runs here
    node_rank: RankOrNone = -1  # with resume: this node's place among its ``nodes``; else the one it requests
    nodes: Nodes = 0
    exits: Annotated[tuple[RankExit, ...], Meta(max_length=MOST_RANKS)] = ()
    incidents: Count = 0  # the highest number of an incident of this job that this runner has received
    unmet: RankList = ()  # node ranks of the round before that this node could not reach, so that it never began
    policy: JobPolicy = JobPolicy()
    run_dir: Text = ""
    job_id: Line = ""  # as the controller sent it with the round before; it may have lost its journal since
    can_check: bool = False  # this runner can measure its node when it is asked to
    check: NodeCheck | None = None  # what that has shown, with every request that follows


class JoinReply(msgspec.Struct, frozen=True, omit_defaults=True):
    """``status``: go, wait (ask again), check (measure the node, then ask again with the result), stop.

    With go the round is formed, with stop the job is over (``reason``, ``exit_code``).
    """

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
    job_id: str = ""  # the same for all rounds and lives of this job, and for no other of its name
    incidents: int = 0  # the highest number of an incident so far, to be sent again
    restore_before: int = -1  # of checkpoints: none of this step or a later one is restored; -1: any
    epoch: int = 0  # as in ``HeartbeatReply``
    checks: tuple[str, ...] = ()  # with check: which ones, by name; none: all of a quick self-check


class Notice(msgspec.Struct, frozen=True, omit_defaults=True):
    """An incident for which nothing is stopped yet, for the terminal of a run.

    ``state``: open (who is suspected; ``done`` says when that is acted upon), watching (a warning holds), harmless (the
    suspects move again), over (the warning does not hold any more).
    """

    incident: str
    state: str
    fault: str
    culprits: tuple[int, ...] = ()
    reason: str = ""
    done: str = ""


class OrdersReply(msgspec.Struct, frozen=True, omit_defaults=True):
    """Answer to a runner's long poll; ``known`` false: the controller does not know this runner in this round."""

    orders: tuple[Order, ...] = ()
    known: bool = True
    incidents: int = 0  # the highest number of an incident so far, to be sent again
    epoch: int = 0  # as in ``HeartbeatReply``
    notices: tuple[Notice, ...] = ()
    noticed: int = 0  # the number of the newest, to be sent again


# How a runner may leave. Controllers of before "evicted" know the first three and refuse any other, with the sentence
# of `unknown_outcome`.
OUTCOMES = ("succeeded", "failed", "cancelled", "evicted")


def unknown_outcome(outcome: str) -> str:
    """Return how a controller names an outcome that it does not know."""
    return f"outcome {outcome!r} is none of "


class Leave(msgspec.Struct, frozen=True, omit_defaults=True):
    """A runner is done. ``outcome``: of `OUTCOMES`; evicted: its engine takes the node away."""

    job: Word
    node: Word
    runner_id: Word
    outcome: Word
    version: Version = msgspec.field(default_factory=spoken)
    round: Round = 0
    exits: Annotated[tuple[RankExit, ...], Meta(max_length=MOST_RANKS)] = ()
    mono_s: Seconds = 0.0
    reason: Text = ""


class PolicyChange(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """What a person wants changed in the policy of a job that lives; "default" takes a change back."""

    settings: Annotated[dict[Word, Line], Meta(max_length=256)]


class PolicyView(msgspec.Struct, frozen=True):
    """The policy that a job lives under, and what its decisions rest on."""

    job: str
    policy: JobPolicy
    changed: dict[str, str]  # by hand since the job was started
    evicted: dict[str, float]  # node -> seconds until it may come back
    prices_s: tuple[float, ...]  # what this job's restarts have cost


class ErrorReply(msgspec.Struct, frozen=True, omit_defaults=True):
    """The body of every 4xx and 5xx answer: one sentence. ``leader``: of a controller that does not lead, who does."""

    error: str
    leader: str = ""


class StopAsk(msgspec.Struct, frozen=True, forbid_unknown_fields=True, omit_defaults=True):
    """Body of ``POST /v1/jobs/JOB/stop``."""

    reason: Annotated[str, msgspec.Meta(max_length=500)] = ""


class CheckpointView(msgspec.Struct, frozen=True, omit_defaults=True):
    """Answer to ``POST`` and ``GET /v1/jobs/JOB/checkpoint``: who was asked for a checkpoint, and whether one came.

    ``told``: ranks whose process got SIGUSR1. ``refused``: why others did not, by rank. ``waiting``: nodes whose agent
    has not answered. Times are wall clock seconds; 0: not asked, or none is known.
    """

    job: str
    asked_wall_s: float = 0.0
    saved_wall_s: float = 0.0  # when the last step with a checkpoint in it ended
    told: tuple[int, ...] = ()
    refused: dict[str, str] = {}
    waiting: tuple[str, ...] = ()
