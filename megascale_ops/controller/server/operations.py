# SPDX-License-Identifier: Apache-2.0
"""What each address of the controller takes and gives: the types that its handler decodes by and answers with.

The routes are those that ``Api.application`` adds; this table says of each what can't be seen there, and ``openapi``
makes the published description of both. A route without a row here, and a row without a route, fail a test.
"""

from typing import Annotated, Any, NamedTuple

import msgspec
from msgspec import UNSET, Meta, UnsetType

from megascale_ops.controller.journal.paging import MOST_LISTED
from megascale_ops.schema.collectives import SkewView
from megascale_ops.schema.events import AuditEntries, BadHardwareList, Health, Incident, Incidents, Leadership, Status
from megascale_ops.schema.health import CheckAsk, NodeAsk, NodeMoves, NodesView, SelfCheckView
from megascale_ops.schema.history import HistoryReply
from megascale_ops.schema.kernels import ProfileAsk, ProfileView
from megascale_ops.schema.live import Frame
from megascale_ops.schema.messages import (
    CheckpointView,
    Evidence,
    Heartbeat,
    HeartbeatReply,
    Join,
    JoinReply,
    Leave,
    OrdersReply,
    PolicyChange,
    PolicyView,
    StopAsk,
)
from megascale_ops.schema.ranges import Count, Round, Seconds, Word
from megascale_ops.schema.recording.blocks import RecordedBlock, RecordedBlocks
from megascale_ops.schema.runs import LogPart, LogQuery
from megascale_ops.schema.targets import TargetGroup

DEFAULT_WAIT_S = 20.0

JSON, EVENTS = "application/json", "text/event-stream"
# The users of an operation: the tags of the description.
READ, OPERATE, PROGRAMS = "read", "operate", "programs"
TAGS = {
    READ: "What a person, a script or a dashboard asks.",
    OPERATE: "What changes a job or what is remembered.",
    PROGRAMS: "What agents and runners say; it changes with them, and a neighbour one version apart is understood.",
}

Job = Annotated[Word, Meta(description="name of a job")]
Wait = Annotated[Seconds, Meta(description="answer after so many seconds at the latest; more than 60 counts as 60")]


class Parts(msgspec.Struct, frozen=True):
    """What addresses have in braces, by name."""

    job: Job = ""
    id: Annotated[Word, Meta(description="as an earlier answer names it")] = ""
    uuid: Annotated[Word, Meta(description="UUID of a GPU")] = ""
    node: Annotated[Word, Meta(description="name of a node")] = ""


class JobQuery(msgspec.Struct, frozen=True):
    """Of which job; without it of all that the token is for."""

    job: Job = ""


class StatusQuery(msgspec.Struct, frozen=True):
    """Which job, and how much of it; without ``job`` all that the token is for."""

    job: Job = ""
    brief: Annotated[bool, Meta(description="without nodes and ranks: as cheap for a job of any size")] = False
    while_round: Annotated[
        Round, Meta(description="with `job`: answer once it is over or in another round, `wait_s` at the latest")
    ] = 0
    wait_s: Wait = DEFAULT_WAIT_S


class IncidentsQuery(msgspec.Struct, frozen=True):
    """Which incidents; without ``limit`` and ``before`` those that the controller has at hand."""

    job: Job = ""
    limit: (
        Annotated[int, Meta(ge=1, le=MOST_LISTED, description="the newest so many that the journal has")] | UnsetType
    ) = UNSET
    before: Annotated[Word, Meta(description="only older ones than this incident")] = ""


class AuditQuery(msgspec.Struct, frozen=True):
    """Which entries."""

    job: Job = ""
    limit: Annotated[int, Meta(ge=1, le=1000, description="the newest so many")] = 100
    before: Annotated[Count, Meta(description="only older ones than the entry of this number")] = 0


class LiveQuery(msgspec.Struct, frozen=True):
    """Which job to watch; without it the one that needs a look most."""

    job: Job = ""
    headline: Annotated[str, Meta(description='"first": an event `headline` may come before the frames')] = ""


class WaitQuery(msgspec.Struct, frozen=True):
    """How long to wait."""

    wait_s: Wait = DEFAULT_WAIT_S


class OrdersQuery(msgspec.Struct, frozen=True):
    """Who asks for orders, and what it knows."""

    node: Word = ""
    runner_id: Word = ""
    round: Round = 0
    # 160: a job's name, its round and a number; a whole address has to fit into 8 KB.
    after: Annotated[str, Meta(max_length=160, description="the last order that was obeyed")] = ""
    incidents: Annotated[Count, Meta(description="the highest number of an incident that the runner was told")] = 0
    noticed: Annotated[int, Meta(ge=-1, le=1 << 53, description="its newest notice; -1: it wants none")] = -1
    wait_s: Wait = DEFAULT_WAIT_S


class Nothing(msgspec.Struct, frozen=True):
    """Done; there is nothing to say."""


class Operation(NamedTuple):
    """One address and method.

    ``refuses`` lists the statuses, beside those that every address has which wants a token (401, 403) or takes a body
    or a query (400; a body 408 and 413, too). ``media`` are the types of the answer: of JSON ``gives`` is the schema.
    """

    id: str
    tag: str
    text: str
    gives: Any = str
    takes: type[msgspec.Struct] | None = None
    query: type[msgspec.Struct] | None = None
    refuses: tuple[int, ...] = ()
    media: tuple[str, ...] = (JSON,)
    is_open: bool = False  # no token is required


OPERATIONS: dict[str, Operation] = {
    "GET /v1/status": Operation(
        "status", READ, "Jobs with their nodes and ranks, as of now.", Status, query=StatusQuery, refuses=(404,)
    ),
    "GET /v1/incidents": Operation(
        "incidents", READ, "Incidents, newest last, without events and texts of evidence.",
        Incidents, query=IncidentsQuery, refuses=(404,),
    ),
    "GET /v1/incidents/{id}": Operation(
        "incident", READ, "One incident with its evidence and events.", Incident, query=JobQuery, refuses=(404,)
    ),
    "GET /v1/jobs/{job}/policy": Operation(
        "policy", READ, "The policy that a job lives under.", PolicyView, refuses=(404,)
    ),
    "GET /v1/jobs/{job}/history": Operation(
        "history", READ, "Step times of every rank, packed; `megascale_ops.client` unpacks them.",
        HistoryReply, refuses=(404,),
    ),
    "GET /v1/jobs/{job}/logs": Operation(
        "logs", READ, "What a rank printed, read by the agent of its node, or by a run's own controller.",
        LogPart, query=LogQuery, refuses=(404, 409),
    ),
    "GET /v1/jobs/{job}/skew": Operation(
        "skew", READ, "Which ranks wait for which in collectives.", SkewView, refuses=(404,)
    ),
    "GET /v1/jobs/{job}/profile/{id}": Operation(
        "profiled", READ, "What is known of a profile.", ProfileView, refuses=(404,)
    ),
    "GET /v1/nodes/{node}/check": Operation(
        "checked_node", READ, "The newest self-check of a node.", SelfCheckView
    ),
    "POST /v1/nodes/{node}/check": Operation(
        "check_node", OPERATE, "Have a node's agent measure the node; the result is read by GET.",
        SelfCheckView, takes=CheckAsk, refuses=(404, 409),
    ),
    "GET /v1/hardware": Operation("hardware", READ, "GPUs that are remembered as bad.", BadHardwareList),
    "GET /v1/nodes": Operation("nodes", READ, "Nodes that are not simply healthy, and the day's limit.", NodesView),
    "GET /v1/nodes/{node}": Operation("node_moves", READ, "A node's moves, oldest first.", NodeMoves, refuses=(404,)),
    "GET /v1/live": Operation(
        "live", READ, "Frames of a job as server-sent events; the data of each is a `Frame` as JSON.",
        query=LiveQuery, refuses=(404, 503), media=(EVENTS,),
    ),
    "GET /v1/live/snapshot": Operation(
        "live_snapshot", READ, "One whole frame of a job.", Frame, query=JobQuery, refuses=(404,)
    ),
    "GET /v1/sd/agents": Operation(
        "targets", READ, "Addresses of the agents' metrics, for Prometheus' `http_sd_configs`.",
        tuple[TargetGroup, ...],
    ),
    "GET /v1/audit": Operation(
        "audit", READ, "Who ordered what, from where, and what came of it.", AuditEntries, query=AuditQuery
    ),
    "GET /v1/recordings": Operation(
        "recordings", READ, "Blocks of what the controller took in of late; who asks is journaled.",
        RecordedBlocks, refuses=(404,),
    ),
    "GET /v1/recordings/{id}": Operation(
        "recorded_block", READ, "One block, packed; `megascale-ops recording export` makes a file of them.",
        RecordedBlock, refuses=(404,),
    ),
    "GET /metrics": Operation(
        "metrics", READ, "The controller's metrics for Prometheus.",
        media=("text/plain", "application/openmetrics-text"),
    ),
    "GET /healthz": Operation("healthz", READ, "Whether controller and journal are well.", Health, is_open=True),
    "GET /leader": Operation(
        "leader", READ, "Whether this controller leads; 503 where it does not: for a proxy before two of them.",
        Leadership, refuses=(503,), is_open=True,
    ),
    "GET /openapi.json": Operation("openapi", READ, "This description.", dict[str, Any], is_open=True),
    "POST /v1/jobs/{job}/policy": Operation(
        "set_policy", OPERATE, "Change the policy of a job that lives.", PolicyView, takes=PolicyChange, refuses=(404,)
    ),
    "POST /v1/jobs/{job}/stop": Operation(
        "stop", OPERATE, "End a job in order: every runner stops its ranks and leaves.",
        Nothing, takes=StopAsk, refuses=(404, 409),
    ),
    "POST /v1/jobs/{job}/checkpoint": Operation(
        "ask_checkpoint", OPERATE, "Send SIGUSR1 to the ranks whose script takes it, so that they save now.",
        CheckpointView, refuses=(404, 409),
    ),
    "GET /v1/jobs/{job}/checkpoint": Operation(
        "checkpoint", READ, "What came of the newest request for a checkpoint.", CheckpointView, refuses=(404,)
    ),
    "POST /v1/jobs/{job}/profile": Operation(
        "profile", OPERATE, "Ask ranks for kernel timings; the answer names the profile.",
        ProfileView, takes=ProfileAsk, refuses=(404, 409),
    ),
    "POST /v1/nodes/{node}": Operation(
        "ask_node", OPERATE, "Take a node out by hand, release it, or take its last move back.",
        NodeMoves, takes=NodeAsk, refuses=(404, 409),
    ),
    "DELETE /v1/hardware/{uuid}": Operation(
        "mend_hardware", OPERATE, "Forget what was remembered of a GPU: it was mended or replaced.",
        Nothing, refuses=(404,),
    ),
    "POST /v1/heartbeat": Operation(
        "heartbeat", PROGRAMS, "An agent's report, once a second.", HeartbeatReply, takes=Heartbeat, refuses=(409,)
    ),
    "POST /v1/evidence": Operation(
        "evidence", PROGRAMS, "What an agent gathered for one order.", Nothing, takes=Evidence, refuses=(404, 409)
    ),
    "POST /v1/jobs/{job}/join": Operation(
        "join", PROGRAMS, "A runner asks for the next round.",
        JoinReply, takes=Join, query=WaitQuery, refuses=(409,),
    ),
    "GET /v1/jobs/{job}/orders": Operation(
        "orders", PROGRAMS, "A runner waits for orders.", OrdersReply, query=OrdersQuery
    ),
    "POST /v1/jobs/{job}/leave": Operation(
        "leave", PROGRAMS, "A runner leaves, and says how its ranks ended.",
        Nothing, takes=Leave, refuses=(404, 409),
    ),
}  # fmt: skip

# Served, and no part of what is described: by method and address, the reason.
NOT_PUBLIC = {
    "GET /": "the live page: a page for people, which changes with every release",
    "GET /static/{name}": "files of the live page",
    "GET /runbooks/": "pages of alerts, for people",
    "GET /runbooks/{name}": "pages of alerts, for people",
    "* /{anything}": "the answer to every other address: 404",
}
