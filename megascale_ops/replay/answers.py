# SPDX-License-Identifier: Apache-2.0
"""Which order of the replay an answer of the recording belongs to.

Orders of two controllers have other names, and may be given at other moments. They are the same where they are of one
kind, to one node, in one order: the first dump of stacks by a node answers the first that was ordered there.
"""

from collections import deque
from collections.abc import Sequence
from typing import Protocol

import msgspec

from megascale_ops.schema.messages import Evidence

# 120 s: with more patience than was recorded an order comes later, and what was seen then is the best that is known.
HELD_S = 120.0


class Ordered(Protocol):
    """What is needed of an order."""

    @property
    def id(self) -> str:
        """Its name."""

    @property
    def node(self) -> str:
        """Who is to obey."""

    @property
    def kind(self) -> str:
        """What is to be done."""

    @property
    def incident(self) -> str:
        """The incident that it is for."""


class Answers:
    """Orders of the recording and of the replay, matched. Pure: told the time."""

    def __init__(self) -> None:
        self._recorded: dict[str, tuple[str, str]] = {}  # by name in the recording: node and kind
        self._open: dict[tuple[str, str], deque[Ordered]] = {}  # of the replay, by node and kind, not matched yet
        self._seen: set[str] = set()
        self._match: dict[str, Ordered] = {}  # by name in the recording
        self._evidence: list[tuple[float, Evidence]] = []
        self._done: dict[str, list[tuple[float, str]]] = {}  # by node: names of the recording that wait

    def note(self, name: str, node: str, kind: str) -> None:
        """Note an order of the recording."""
        self._recorded[name] = (node, kind)

    def give(self, orders: Sequence[Ordered]) -> bool:
        """Note orders of the replay; return whether any is new."""
        is_new = False
        for order in orders:
            if order.id not in self._seen:
                self._seen.add(order.id)
                self._open.setdefault((order.node, order.kind), deque()).append(order)
                is_new = True
        return is_new

    def keep(self, evidence: Evidence, now_s: float) -> None:
        """Keep evidence of the recording until its order is given."""
        self._evidence.append((now_s, evidence))

    def due(self, now_s: float) -> list[Evidence]:
        """Return the evidence whose order has been given, as an answer to that order."""
        found, waiting = [], []
        for came_s, evidence in self._evidence:
            order = self._matched(evidence.order)
            if order is not None:
                found.append(msgspec.structs.replace(evidence, order=order.id, incident=order.incident))
            elif now_s - came_s < HELD_S:
                waiting.append((came_s, evidence))
        self._evidence = waiting
        return found

    def done(self, node: str, names: Sequence[str], now_s: float) -> tuple[str, ...]:
        """Return which orders of the replay a node has executed, with those that it had executed before."""
        if not names and node not in self._done:
            return ()
        waiting = [*self._done.pop(node, []), *((now_s, name) for name in names)]
        found, left = [], []
        for came_s, name in waiting:
            order = self._matched(name)
            if order is not None:
                found.append(order.id)
            elif now_s - came_s < HELD_S:
                left.append((came_s, name))
        if left:
            self._done[node] = left
        return tuple(found)

    def name_now(self, name: str) -> str:
        """Return the name that an order of the recording has in the replay; one that the controller makes up stays."""
        if name not in self._recorded:
            return name
        order = self._matched(name)
        return order.id if order is not None else ""

    def _matched(self, name: str) -> Ordered | None:
        if name in self._match:
            return self._match[name]
        queue = self._open.get(self._recorded.get(name, ("", "")))
        if not queue:
            return None
        order = self._match[name] = queue.popleft()
        return order
