# SPDX-License-Identifier: Apache-2.0
"""The fence of the journal: a number that grows with each leader, held against the database's in each transaction.

A leader that was paused, cut off or replaced finds a higher number, and what it meant to write is not written: so an
order, which leaves only when its batch is safe, can't leave either. The check is an UPDATE of the row to its own value,
so that a transaction of the old leader and the next one's election wait for each other instead of passing.
"""

from collections.abc import Callable

import msgspec
import sqlalchemy as sa

from megascale_ops.controller.journal.tables import META
from megascale_ops.errors import MegascaleError
from megascale_ops.foreign import UNREADABLE

EPOCH = "leader_epoch"
LEADER = "leader"
GIVEN_WAY = "leaders_given_way"
# 16: more than may give way within an hour.
_MOST_GIVEN_WAY = 16


class DeposedError(MegascaleError):
    """Another controller leads: what this one meant to write was not written."""


class Leader(msgspec.Struct, frozen=True):
    """Who leads, as the journal has it.

    ``resigned``: it ended in order, so a standby need not wait for it. ``heir``: the standby that is to follow it, and
    ``why`` it gave way to that one; "" where it did not.
    """

    id: str  # of one process
    url: str  # where it serves
    since_wall_s: float = 0.0
    resigned: bool = False
    heir: str = ""
    why: str = ""


def _may_always(_failing_since_s: float) -> bool:
    return True


class Fence:
    """What one leader may write.

    Args:
        epoch: its number.
        may_act_unwritten: whether orders may leave that are not in the journal, which can't be written since then
            (monotonic seconds): its database is away, or full.
        deposed: called with one sentence, from the writer's thread, when another leader is found.
    """

    def __init__(
        self,
        epoch: int,
        may_act_unwritten: Callable[[float], bool] = _may_always,
        deposed: Callable[[str], None] = lambda _why: None,
    ) -> None:
        self.epoch = epoch
        self.may_act_unwritten = may_act_unwritten
        self.deposed = deposed

    def hold(self, connection: sa.Connection) -> None:
        """Begin a transaction of this leader: no other one is elected before it has ended.

        Raises:
            DeposedError: there is another leader already.
        """
        mine = sa.and_(META.c.key == EPOCH, META.c.value == str(self.epoch))
        if not connection.execute(sa.update(META).where(mine).values(value=str(self.epoch))).rowcount:
            found = read_epoch(connection)
            raise DeposedError(f"the journal has leader number {found}, and this controller is number {self.epoch}")


def take_epoch(connection: sa.Connection, leader: Leader, highest: int) -> int:
    """Write ``leader`` and its number, higher than all before, and return that; the caller commits.

    Args:
        connection: in a transaction.
        leader: who leads from now on.
        highest: the highest number that was ever seen: a database that fails over may have lost one.
    """
    row = META.c.key == EPOCH
    # A row lock first, also where the row is new: of two that are elected at once the second waits.
    connection.execute(sa.update(META).where(row).values(value=META.c.value))
    found = read_epoch(connection)
    epoch = max(found, highest) + 1
    _put(connection, EPOCH, str(epoch))
    _put(connection, LEADER, msgspec.json.encode(leader).decode())
    return epoch


def resign(connection: sa.Connection, fence: Fence, leader: Leader, *, now_wall_s: float = 0.0) -> None:
    """Write that ``leader`` has ended in order, or gives way to the heir that it names; the caller commits.

    Args:
        connection: in a transaction.
        fence: of this leader.
        leader: who it is.
        now_wall_s: by the database's clock, when it gives way.

    Raises:
        DeposedError: it leads no more.
    """
    fence.hold(connection)
    _put(connection, LEADER, msgspec.json.encode(msgspec.structs.replace(leader, resigned=True)).decode())
    if leader.heir:
        given_way = [*read_given_way(connection), now_wall_s]
        _put(connection, GIVEN_WAY, msgspec.json.encode(given_way[-_MOST_GIVEN_WAY:]).decode())


def read_given_way(connection: sa.Connection) -> list[float]:
    """Return when leaders gave way of late, by the database's clock, oldest first."""
    value = connection.scalar(sa.select(META.c.value).where(META.c.key == GIVEN_WAY)) or "[]"
    try:
        return msgspec.json.decode(value, type=list[float])
    except UNREADABLE:
        return []


def read_epoch(connection: sa.Connection) -> int:
    """Return the newest leader's number, 0 where there was none."""
    value = connection.scalar(sa.select(META.c.value).where(META.c.key == EPOCH)) or ""
    return int(value) if value.isascii() and value.isdigit() else 0


def read_leader(value: str) -> Leader | None:
    """Return the leader of a row's value; None where it can't be read."""
    try:
        return msgspec.json.decode(value, type=Leader)
    except UNREADABLE:
        return None


def _put(connection: sa.Connection, key: str, value: str) -> None:
    if not connection.execute(sa.update(META).where(META.c.key == key).values(value=value)).rowcount:
        connection.execute(sa.insert(META), {"key": key, "value": value})
