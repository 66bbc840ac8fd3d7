# SPDX-License-Identifier: Apache-2.0
"""What a program does while the controller is away: it asks again ever more seldom, and keeps what it had to send.

``Backoff`` gives the pauses between attempts, ``Spool`` keeps heartbeats until they are delivered.
"""

from collections import deque
from typing import Any

import msgspec

from megascale_ops.errors import RefusedError
from megascale_ops.link.requests import Link
from megascale_ops.schema.messages import Heartbeat, HeartbeatReply


class Backoff:
    """Pauses between attempts: doubled each time up to a bound, back to the first after a success."""

    # 0.05 s: a restarted controller is back within a second; 2 s: fifteen thousand nodes must not storm it.
    def __init__(self, first_s: float = 0.05, most_s: float = 2.0) -> None:
        self._first_s = first_s
        self._most_s = most_s
        self._next_s = first_s

    def next_s(self) -> float:
        """Return how long to pause now; the next pause is twice as long."""
        pause_s = self._next_s
        self._next_s = min(self._most_s, pause_s * 2)
        return pause_s

    def reset(self) -> None:
        """Begin anew: the last attempt succeeded."""
        self._next_s = self._first_s


class Spool:
    """Heartbeats that could not be delivered yet, oldest first and bounded.

    ``limit`` 120: two minutes at one a second, 160 KB at 8 ranks. When more are lost, the sequence gap makes the
    controller ask for everything, so nothing but history is gone.
    """

    def __init__(self, limit: int = 120) -> None:
        self._waiting: deque[Heartbeat] = deque(maxlen=limit)
        self.dropped = 0

    def __len__(self) -> int:
        return len(self._waiting)

    def put(self, heartbeat: Heartbeat) -> None:
        """Keep one more; the oldest gives way when the spool is full."""
        if len(self._waiting) == self._waiting.maxlen:
            self.dropped += 1
        self._waiting.append(heartbeat)

    async def send(self, link: Link, heartbeat: Heartbeat) -> HeartbeatReply:
        """Deliver what waits, then ``heartbeat``; the replies' orders are joined.

        A heartbeat that the controller refuses is not kept: it would be refused again.

        Raises:
            ControllerUnreachableError: everything undelivered is kept for the next call.
            RefusedError: the controller refused ``heartbeat`` or one before it.
        """
        self.put(msgspec.structs.replace(heartbeat, spooled=len(self._waiting)))
        orders: list[Any] = []
        last = HeartbeatReply()
        while self._waiting:
            first = self._waiting[0]
            try:
                last = await link.heartbeat(first)
            except RefusedError:
                self._waiting.popleft()
                raise
            if self._waiting and self._waiting[0] is first:
                self._waiting.popleft()
            orders.extend(last.orders)
        return msgspec.structs.replace(last, orders=tuple(orders))
