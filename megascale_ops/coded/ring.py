# SPDX-License-Identifier: Apache-2.0
"""A ring of agents: a token of numbers goes from each to the next one, over one connection each way."""

import socket
import time

from megascale_ops.coded.messages import TASK, CodedError, Frame, Inbox, Vector, meeting_name, packed, parse_address
from megascale_ops.coded.worker import PATIENCE_S, connected
from megascale_ops.errors import UsageError

_MEETING_S = 120.0


class Ring:
    """One agent's place in the ring.

    Args:
        agent: which this is, 0 to ``agents`` - 1; it sends to the next one, the last one to the first.
        agents: how many there are.
        size: numbers of the token.
        addresses: where each agent listens; by default at names of this host that the launcher's environment gives.
        deadline_s: to meet both neighbours.
        patience_s: how long to wait for the token.

    Raises:
        CodedError: a neighbour is not there by then.
    """

    def __init__(
        self,
        agent: int,
        agents: int,
        size: int,
        *,
        addresses: tuple[str, ...] = (),
        deadline_s: float = _MEETING_S,
        patience_s: float = PATIENCE_S,
    ) -> None:
        if addresses and len(addresses) != agents:
            raise UsageError(f"{len(addresses)} addresses do not suffice for a ring of {agents} agents: give each one")
        names = addresses or tuple(f"local:{meeting_name(part=f'ring-{one}')}" for one in range(agents))
        self.agent = agent
        self._inbox = Inbox(size)
        self._before: socket.socket | None = None
        self._next: socket.socket | None = None
        if agents == 1:
            return
        family, where = parse_address(names[agent])
        with socket.socket(family) as door:
            door.bind(where)
            door.listen(1)
            self._next = connected(names[(agent + 1) % agents], deadline_s)
            door.settimeout(deadline_s)
            try:
                self._before, _ = door.accept()
            except TimeoutError:
                before = (agent - 1) % agents
                raise CodedError(f"agent {before} has not connected to agent {agent} in {deadline_s:g} s") from None
        self._before.settimeout(patience_s)
        self._next.settimeout(patience_s)

    def send(self, turn: int, token: Vector) -> None:
        """Hand the token to the next agent; alone in the ring, an agent keeps it."""
        if self._next is not None:
            try:
                self._next.sendall(packed(Frame(TASK, self.agent, turn, 0, token)))
            except OSError as error:
                raise CodedError(f"agent {self.agent} can't hand the token on: {error}") from error

    def receive(self) -> tuple[int, Vector]:
        """Return the turn and the token, once the agent before has handed it on.

        Raises:
            CodedError: it does not come, or that agent has gone.
        """
        assert self._before is not None
        began_s = time.monotonic()
        while True:
            try:
                data = self._before.recv(1 << 20)
            except OSError as error:
                waited_s = time.monotonic() - began_s
                raise CodedError(
                    f"agent {self.agent} has waited {waited_s:.0f} s for the token in vain: {error}"
                ) from error
            if not data:
                raise CodedError(f"agent {self.agent} has lost the agent before it: the connection was closed")
            frames = self._inbox.take(data)
            if frames:
                return frames[0].step, frames[0].vector

    def close(self) -> None:
        """Let both connections go."""
        for connection in (self._before, self._next):
            if connection is not None:
                connection.close()
