# SPDX-License-Identifier: Apache-2.0
"""A controller that judges nothing: it remembers what agents say and hands out the orders it is given.

It speaks real HTTP on a real port, may be stopped and started again at the same port, and can answer slowly, or no.
"""

import asyncio
import ssl
import time
from collections.abc import Callable
from typing import TypeVar

import msgspec
from aiohttp import web

from megascale_ops.schema.messages import Evidence, Heartbeat, HeartbeatReply, Order
from megascale_ops.schema.progress import RankReport

T = TypeVar("T")


class FakeController:
    """Remembers heartbeats and evidence in the order in which they came."""

    def __init__(self, tls: ssl.SSLContext | None = None) -> None:
        self.tls = tls
        self.heartbeats: list[Heartbeat] = []
        self.evidence: list[Evidence] = []
        self.orders: list[Order] = []
        self.send_full = False
        self.again_s = 0.0
        self.refuse_with = 0
        self.port = 0
        self.tokens: list[str] = []
        self._runner: web.AppRunner | None = None

    @property
    def url(self) -> str:
        """Where it listens."""
        return f"{'http' if self.tls is None else 'https'}://127.0.0.1:{self.port}"

    async def start(self) -> None:
        """Listen; the second time at the same port as the first."""
        app = web.Application()
        app.router.add_post("/v1/heartbeat", self._take_heartbeat)
        app.router.add_post("/v1/evidence", self._take_evidence)
        self._runner = web.AppRunner(app, access_log=None, handle_signals=False, shutdown_timeout=0.1)
        await self._runner.setup()
        await web.TCPSite(self._runner, "127.0.0.1", self.port, ssl_context=self.tls).start()
        self.port = self._runner.addresses[0][1]

    async def stop(self) -> None:
        """Be away: the port is closed, what was said is still remembered."""
        if self._runner is not None:
            await self._runner.cleanup()
            self._runner = None

    async def until(self, look: Callable[[], T | None], what: str, deadline_s: float = 90.0) -> T:
        """Return the first true answer of ``look``; fail the test when none comes."""
        end_s = time.monotonic() + deadline_s
        while not (answer := look()):
            assert time.monotonic() < end_s, f"waited {deadline_s} s in vain: {what}"
            await asyncio.sleep(0.01)
        return answer

    def last_report(self, rank: int) -> RankReport | None:
        """What was last said of a rank."""
        for heartbeat in reversed(self.heartbeats):
            for job in heartbeat.jobs:
                for report in job.ranks:
                    if report.rank == rank:
                        return report
        return None

    async def _take_heartbeat(self, request: web.Request) -> web.Response:
        self.tokens.append(request.headers.get("Authorization", ""))
        if self.refuse_with:
            return web.json_response({"error": "no"}, status=self.refuse_with)
        self.heartbeats.append(msgspec.json.decode(await request.read(), type=Heartbeat))
        orders, self.orders = tuple(self.orders), []
        send_full, self.send_full = self.send_full, False
        reply = HeartbeatReply(orders=orders, send_full=send_full, again_s=self.again_s)
        return web.Response(body=msgspec.json.encode(reply))

    async def _take_evidence(self, request: web.Request) -> web.Response:
        self.evidence.append(msgspec.json.decode(await request.read(), type=Evidence))
        return web.json_response({})
