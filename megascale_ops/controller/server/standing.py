# SPDX-License-Identifier: Apache-2.0
"""How a controller stands among those that share its journal, as its clients see it."""

import time
from typing import TypeVar

import msgspec
from aiohttp import web

from megascale_ops.controller.leadership.candidate import Candidate
from megascale_ops.schema.events import Leadership
from megascale_ops.schema.messages import ErrorReply, HeartbeatReply, JoinReply, OrdersReply

LEADER_HEADER = "X-Megascale-Leader"
_UNSURE = (
    "this controller led, and can't ask the database whether it still does: it orders nothing until it can; training "
    "goes on"
)

Reply = TypeVar("Reply", HeartbeatReply, JoinReply, OrdersReply)


class Standing:
    """One controller's. ``candidate``: None where its journal is no server's, so that it leads alone."""

    def __init__(self, candidate: Candidate | None) -> None:
        self._candidate = candidate
        # Of this leadership; the next one of the same process has another.
        self._fence = candidate.fence if candidate is not None else None
        self.epoch = self._fence.epoch if self._fence is not None else 0

    @property
    def is_suspended(self) -> bool:
        """Whether another controller leads, or may lead."""
        one = self._candidate
        return one is not None and (one.fence is not self._fence or one.is_suspended)

    def heard(self, request: web.Request, node: str) -> None:
        """Take note that a node's agent or runner was answered here."""
        if self._candidate is not None:
            self._candidate.heard(node, is_own_machine=_is_own_machine(request))

    def refused(self, request: web.Request, node: str) -> None:
        """Take note that a node's agent asks this standby, and is refused."""
        if self._candidate is not None:
            self._candidate.refused.note(node, time.monotonic(), is_own_machine=_is_own_machine(request))

    def figures(self) -> dict[str, float]:
        """Return metrics of who is heard here, by name; none of a controller that leads alone."""
        one = self._candidate
        if one is None:
            return {}
        refused = 0 if one.is_leading else len(one.refused.nodes(time.monotonic()))
        return {
            "megascale_controller_unheard_seconds": one.unheard_s,
            "megascale_controller_refused_nodes": float(refused),
            "megascale_controller_gave_way_total": float(one.gave_way),
        }

    def signed(self, reply: Reply) -> Reply:
        """Return a reply with the number of the leader that gives it."""
        return msgspec.structs.replace(reply, epoch=self.epoch) if self.epoch else reply

    def view(self) -> Leadership:
        """Return how it stands."""
        one = self._candidate
        if one is None:
            return Leadership("leader", "", 0, "ok")
        database = one.away or "ok"
        if one.is_leading and one.fence is not None:
            role = "unsure" if self.is_suspended else "leader"
            return Leadership(role, one.me.url, one.fence.epoch, database)
        seen = one.seen
        known = seen.leader if seen is not None else None
        url = known.url if known is not None and not known.resigned else ""
        return Leadership("standby", url, seen.epoch if seen is not None else 0, database)

    def sentence(self) -> str:
        """Return why requests are not answered here, and what to do."""
        view = self.view()
        if view.role == "unsure":
            return _UNSURE
        if view.leader:
            return f"not the leader: this controller is a standby, the leader is at {view.leader}"
        if view.database != "ok":
            return f"no leader: this controller is a standby, and the database does not answer ({view.database})"
        return "no leader yet: this controller is a standby, and takes over within seconds"

    def refusal(self) -> web.Response:
        """Return the answer to what only a leader answers."""
        leader = self.view().leader
        body = msgspec.json.encode(ErrorReply(self.sentence(), leader))
        headers = {LEADER_HEADER: leader} if leader else {}
        return web.Response(status=503, body=body, content_type="application/json", headers=headers)

    async def show(self, _request: web.Request) -> web.Response:
        """Answer whether it leads: 200, else 503."""
        view = self.view()
        status = 200 if view.role == "leader" else 503
        return web.Response(status=status, body=msgspec.json.encode(view), content_type="application/json")


def _is_own_machine(request: web.Request) -> bool:
    """Return whether a request has crossed no network: it comes from the very address at which it was taken."""
    transport = request.transport
    if transport is None:
        return False
    here, there = transport.get_extra_info("sockname"), transport.get_extra_info("peername")
    return bool(here and there and here[0] == there[0])


ALONE = Standing(None)
