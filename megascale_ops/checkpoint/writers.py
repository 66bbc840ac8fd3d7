# SPDX-License-Identifier: Apache-2.0
"""Which process may write into a checkpoint folder, when another one's name already stands on it?

A job started twice by mistake would have two writers in one folder, and a restart would load the steps of either. So a
writer puts its name on the folder, and the next one asks here. Three kinds of knowledge, the surest first:

1. The holder has given the folder back, is this very process, or belonged to an earlier round of this same job: the
   controller forms a round only when the one before is over, so that the earlier one has nothing left to write.
2. The holder ran on this machine, in this boot and in this process namespace: the kernel knows whether it lives.
3. Neither: then only time shows it. A living holder renews its lease, so a process that sees it unchanged for
``LEASE_S``
   of its own clock may take the folder, and one that sees it change is refused. No two clocks are ever compared.

Everything here is judgement: the record, what is known of its process, how long it was watched; a value and a reason
out. A wrong answer would cost the order of steps and never a checkpoint: a writer that wakes up after it was replaced
can seal nothing (``storage``).
"""

from datetime import UTC, datetime
from typing import Literal, NamedTuple

import msgspec

from megascale_ops.checkpoint.manifest import plain
from megascale_ops.foreign import UNREADABLE

VERSION = 1
# 60 s: five renewals may be missed (a starved machine, a long call that keeps Python's lock, a server that fails over).
LEASE_S = 60.0
# 100 characters: the longest name of a job or node.
_NAME_LENGTH = 100
# What a record may promise: one of another version may have another lease, one of nonsense must not hold for ever.
_LEAST_LEASE_S, _MOST_LEASE_S = 0.1, 600.0

Life = Literal["alive", "dying", "dead", "unknown"]


class Process(msgspec.Struct, frozen=True):
    """One process of one boot of one machine. Equal ones are the same; a re-used pid has other ``start_ticks``."""

    host: str
    boot_id: str
    pid_namespace: str
    pid: int
    start_ticks: int

    def is_visible_to(self, other: "Process") -> bool:
        """Whether ``other`` can ask its kernel about this one's pid."""
        here = (self.host, self.boot_id, self.pid_namespace)
        return bool(self.boot_id) and here == (other.host, other.boot_id, other.pid_namespace)


class Writer(msgspec.Struct, frozen=True):
    """A name on a folder, as it stands in the lock file."""

    process: Process
    token: str  # new for every time a name is put on a folder
    node: str
    rank: int
    since_wall_s: float  # the holder's wall clock, for display only
    job: str = ""
    job_id: str = ""  # distinguishes jobs of the same name; empty: no controller watches over this one
    round: int = 0
    incarnation: str = ""  # the same for all ranks that save together; empty: this process saves alone
    lease_s: float = LEASE_S
    released: bool = False
    version: int = VERSION

    def who(self) -> str:
        """The holder as a person would name it."""
        since = datetime.fromtimestamp(min(max(self.since_wall_s, 0.0), 4e9), UTC)
        job = f"job {plain(self.job)[:_NAME_LENGTH]}" if self.job else "a process"
        node = plain(self.node)[:_NAME_LENGTH]
        place = f"round {self.round}, rank {self.rank}" if self.round else f"rank {self.rank}"
        return f"{job} ({place}, pid {self.process.pid} on {node}, since {since:%Y-%m-%d %H:%M:%S} UTC)"


class Seen(NamedTuple):
    """What an observer knows of the newest lock file. ``writer`` None: it can't be read."""

    writer: Writer | None
    life: Life = "unknown"
    unchanged_s: float = 0.0  # of the observer's monotonic clock
    changed: bool = False  # the lease was renewed while it was watched


class Answer(NamedTuple):
    """``take`` the folder, ``watch`` on, or ``refuse``; and why.

    Not ``certain``: taken for its silence alone. ``soon``: its process is ending, so that it is known in moments.
    """

    verb: Literal["take", "watch", "refuse"]
    reason: str
    certain: bool = True
    soon: bool = False


def decode(raw: bytes) -> Writer | None:
    """Read a lock file; None for one that is not ours, cut short or damaged."""
    try:
        return msgspec.json.decode(raw, type=Writer)
    except UNREADABLE:
        return None


def judge(seen: Seen, me: Writer) -> Answer:
    """May ``me`` write where this was seen?"""
    writer = seen.writer
    if writer is None:
        if seen.unchanged_s >= LEASE_S:
            return Answer("take", f"its lock can't be read and did not change for {LEASE_S:.0f} s", certain=False)
        return Answer("watch", "its lock can't be read")
    if me.job_id and me.job_id == writer.job_id and me.round < writer.round:
        return Answer("refuse", f"{writer.who()} has replaced round {me.round}, to which this rank belongs")
    why_gone = _why_gone(seen, writer, me)
    return Answer("take", why_gone) if why_gone else _judge_living(seen, writer)


def _why_gone(seen: Seen, writer: Writer, me: Writer) -> str:
    """Why the holder is known to write no more, or to be one of ours; empty: it is not known."""
    if writer.released:
        return "it was given back"
    if writer.process == me.process and writer.process.is_visible_to(me.process):
        return "it is held by this process"
    if me.job_id and writer.job_id == me.job_id and writer.round < me.round:
        return f"{writer.who()} was replaced by round {me.round}"
    if seen.life == "dead":
        return f"{writer.who()} is dead"
    if me.incarnation and writer.incarnation == me.incarnation:
        return f"{writer.who()} saves together with this rank"
    return ""


def _judge_living(seen: Seen, writer: Writer) -> Answer:
    """What to do about one that is not known to be gone."""
    advice = "give this job a folder of its own, or end that one"
    if seen.life == "alive":
        return Answer("refuse", f"{writer.who()} writes there: {advice}")
    if seen.changed:
        return Answer("refuse", f"{writer.who()} writes there and has just renewed its lease: {advice}")
    lease_s = min(max(writer.lease_s, _LEAST_LEASE_S), _MOST_LEASE_S)
    if seen.unchanged_s >= lease_s:
        return Answer("take", f"{writer.who()} did not renew its lease for {lease_s:.0f} s", certain=False)
    is_dying = seen.life == "dying"
    return Answer("watch", f"{writer.who()} may still write there; its lease is {lease_s:.0f} s", soon=is_dying)
