# SPDX-License-Identifier: Apache-2.0
"""A recording: everything that a controller took in, in order and with its times, and what it said of it.

A file is lines of JSON, compressed (gzip or xz): a ``Header`` first, then entries, the earliest first. ``t`` is in
seconds of the controller's monotonic clock since the header's ``began_mono_s``. Who replays it hands the entries to a
controller at those times; nothing else is needed, since a controller knows nothing but what it is told.

Entries go in, but for ``order`` and ``incident``: what the controller gave out, to be compared with, and to know which
order an answer belongs to.
"""

from typing import Annotated, TypeAlias

import msgspec
from msgspec import Meta

from megascale_ops.schema.events import Incident
from megascale_ops.schema.health import BadHardware
from megascale_ops.schema.messages import Evidence, Heartbeat, Join, Leave, Order
from megascale_ops.schema.ranges import Count, Line, Round, Seconds, Text, Version, WallSeconds, Word

RECORDING_VERSION = 2
"""The newest version that is read: heartbeats are folded (``replay/folding``). Small files and blocks are plain."""

PLAIN_VERSION = 1
FOLDER = "recording"
"""Beside the journal: blocks of what came in of late, each a recording by itself."""

BLOCK_SUFFIX = ".jsonl.gz"
SUFFIX = ".recording"
"""How an exported one is called by default."""

# 256 MiB: ten minutes of 12,288 ranks. What is longer is no recording of ours, or meant to fill a memory.
MOST_BYTES = 256 * 1024 * 1024
# 64 MiB of a line: the start of 12,288 ranks has 6 MB, that of 100,000 some 50.
MOST_LINE_BYTES = 64 * 1024 * 1024

Number = Annotated[int, Meta(ge=0, le=2**53)]


class Header(msgspec.Struct, frozen=True, omit_defaults=True):
    """The first line. ``recording`` is the version of the format; a file without it is none."""

    recording: Version
    began_mono_s: Seconds  # the controller's clock at t = 0
    began_wall_s: WallSeconds
    process: Word = ""  # drawn by each start of a controller: entries of one process have one clock
    program: Word = ""  # version of the program that wrote it
    job: Word = ""  # the only one that is in it; "": a controller's own block, of all
    is_anonymous: bool = False
    thinned: Word = ""  # how it was made smaller; "": not at all
    goes_on: bool = False  # a block without a start: it goes on where the one before ends


class Known(msgspec.Struct, frozen=True, omit_defaults=True):
    """One agent as it was known at a start: its newest state as a full heartbeat."""

    m: Heartbeat
    only_job: Word = ""


class Polled(msgspec.Struct, frozen=True, omit_defaults=True, tag="poll", tag_field="kind"):
    """A runner waits for orders; see ``OrdersReply``."""

    t: Seconds
    n: Number  # of the request, so that its end can be told
    job: Word
    node: Word
    runner_id: Word
    round: Round = 0
    after: Line = ""
    incidents: Count = 0
    wait_s: Seconds = 0.0


class Joined(msgspec.Struct, frozen=True, omit_defaults=True, tag="join", tag_field="kind"):
    """A runner asks for a place, and waits for it."""

    t: Seconds
    n: Number
    m: Join
    wait_s: Seconds = 0.0


class Start(msgspec.Struct, frozen=True, omit_defaults=True, tag="start", tag_field="kind"):
    """What was known when the recording begins: one can begin at any start. Later ones tell nothing new."""

    t: Seconds
    records: Annotated[dict[Word, msgspec.Raw], Meta(max_length=1024)] = {}  # by job, as the journal has them
    incidents: Annotated[tuple[Incident, ...], Meta(max_length=1024)] = ()  # that are not over, warnings too
    agents: Annotated[tuple[Known, ...], Meta(max_length=65_536)] = ()
    hardware: Annotated[tuple[BadHardware, ...], Meta(max_length=65_536)] = ()
    polls: Annotated[tuple[Polled, ...], Meta(max_length=131_072)] = ()  # requests that wait
    joins: Annotated[tuple[Joined, ...], Meta(max_length=131_072)] = ()


class Beat(msgspec.Struct, frozen=True, omit_defaults=True, tag="heartbeat", tag_field="kind", gc=False):
    """A heartbeat came in; ``only_job``: the one that its agent's token is for."""

    t: Seconds
    m: Heartbeat
    only_job: Word = ""


class Answered(msgspec.Struct, frozen=True, omit_defaults=True, tag="evidence", tag_field="kind"):
    """Evidence came in."""

    t: Seconds
    m: Evidence


class Broken(msgspec.Struct, frozen=True, omit_defaults=True, tag="broken", tag_field="kind"):
    """The connection of a request broke while it waited."""

    t: Seconds
    n: Number


class Left(msgspec.Struct, frozen=True, omit_defaults=True, tag="leave", tag_field="kind"):
    """A runner was done."""

    t: Seconds
    m: Leave


class PolicySet(msgspec.Struct, frozen=True, omit_defaults=True, tag="policy", tag_field="kind"):
    """A person has changed a job's policy."""

    t: Seconds
    job: Word
    settings: Annotated[dict[Word, Line], Meta(max_length=256)]


class StopAsked(msgspec.Struct, frozen=True, omit_defaults=True, tag="stop", tag_field="kind"):
    """A person wants a job to end."""

    t: Seconds
    job: Word
    reason: Text = ""


class Stepped(msgspec.Struct, frozen=True, omit_defaults=True, tag="clock", tag_field="kind"):
    """The wall clock shows something else than the time that has passed since the beginning."""

    t: Seconds
    wall_s: WallSeconds


class Given(msgspec.Struct, frozen=True, omit_defaults=True, tag="order", tag_field="kind"):
    """An order went out, for the first time."""

    t: Seconds
    m: Order


class Said(msgspec.Struct, frozen=True, omit_defaults=True, tag="incident", tag_field="kind"):
    """An incident as the controller had it, whenever that had changed; without events and evidence."""

    t: Seconds
    m: Incident


Entry: TypeAlias = (
    Start | Beat | Answered | Joined | Polled | Broken | Left | PolicySet | StopAsked | Stepped | Given | Said
)
