# SPDX-License-Identifier: Apache-2.0
"""Nodes as the controller sees them from a launch to its end: their requests, and nothing behind them.

A node is a runner and an agent. The requests are those of `runner.preflight`, `runner.membership`, `runner.summary` and
the agent, in their order; each of the three that wait at the same time has a connection of its own, as there. What
would be done between them (ranks, stores) is left out, so that one process can be 1,536 nodes.
"""

import asyncio
import socket
import time
from typing import TYPE_CHECKING

import msgspec

from megascale_ops.schema.events import OVER, Status
from megascale_ops.schema.messages import (
    Heartbeat,
    HeartbeatReply,
    JobReport,
    Join,
    JoinReply,
    Leave,
    OrdersReply,
    RankExit,
)
from megascale_ops.schema.policy import JobPolicy
from megascale_ops.schema.progress import CollectivePosition, ProcessReading, Progress, RankReport

if TYPE_CHECKING:
    from collections.abc import Sequence

JOB = "bench"
_MOST_WAIT_S = 300.0
_OTHERS_POLL_S = 0.5  # as `runner.membership`


class Line(asyncio.Protocol):
    """One kept-open connection, with as little HTTP as will do, so that the client's core is not the limit."""

    def __init__(self, port: int) -> None:
        self.received_bytes = 0
        self.requests = 0
        self._port = port
        self._transport: asyncio.Transport | None = None
        self._parts: list[bytes] = []
        self._missing = -1  # bytes of the body; -1 before its head is whole
        self._answer: asyncio.Future[bytes] | None = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Keep the transport."""
        assert isinstance(transport, asyncio.Transport)
        self._transport = transport

    def connection_lost(self, error: Exception | None) -> None:
        """Fail what waits for an answer."""
        self._transport = None
        if self._answer is not None and not self._answer.done():
            self._answer.set_exception(error or ConnectionError("the controller hung up"))

    def data_received(self, data: bytes) -> None:
        """Collect one answer."""
        self.received_bytes += len(data)
        self._parts.append(data)
        if self._missing < 0:
            head, separator, body = b"".join(self._parts).partition(b"\r\n\r\n")
            if not separator:
                return
            assert head.startswith((b"HTTP/1.1 200", b"HTTP/1.1 404")), head + body
            self._missing = int(head.lower().partition(b"content-length:")[2].split(b"\r\n", 1)[0]) - len(body)
            self._parts = [body]
        else:
            self._missing -= len(data)
        if self._missing == 0 and self._answer is not None:
            self._missing, parts, self._parts = -1, self._parts, []
            self._answer.set_result(b"".join(parts))

    async def ask(self, method: str, path: str, body: object = None) -> bytes:
        """Send one request, and return the body of its answer."""
        if self._transport is None:
            sock = socket.create_connection(("127.0.0.1", self._port))
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            sock.settimeout(0)
            await asyncio.get_running_loop().create_connection(lambda: self, sock=sock)
        assert self._transport is not None
        self._answer = asyncio.get_running_loop().create_future()
        self.requests += 1
        data = b"" if body is None else msgspec.json.encode(body)
        head = f"{method} {path} HTTP/1.1\r\nHost: 127.0.0.1\r\nContent-Type: application/json\r\n"
        self._transport.write(f"{head}Content-Length: {len(data)}\r\n\r\n".encode() + data)
        async with asyncio.timeout(_MOST_WAIT_S):
            return await self._answer

    def hang_up(self) -> None:
        """Close the connection."""
        if self._transport is not None:
            self._transport.close()


class Node:
    """One node of the job."""

    def __init__(self, place: int, nodes: int, nproc: int, port: int) -> None:
        self.name = f"node-{place}"
        self._nodes, self._nproc = nodes, nproc
        self._main, self._orders, self._agent = Line(port), Line(port), Line(port)
        self.lines: Sequence[Line] = (self._main, self._orders, self._agent)
        self._polling: asyncio.Task[OrdersReply] | None = None
        self._round, self._rank, self._seq, self._tries, self._last_order = 0, 0, 0, 0, ""

    async def greet(self) -> None:
        """Look whether the controller is there and lets this node in, as a run does before it starts anything."""
        await self._main.ask("GET", "/v1/status?brief=true")

    async def join(self, exits: tuple[RankExit, ...] = (), cause: str = "start") -> None:
        """Join until a round is formed."""
        self._tries += 1
        join = Join(
            job=JOB,
            node=self.name,
            runner_id=f"r-{self.name}",
            join_id=f"j-{self.name}-{self._tries}",
            nproc=self._nproc,
            min_nodes=self._nodes,
            max_nodes=self._nodes,
            addr="127.0.0.1",
            store_port=29500,
            mono_s=time.monotonic(),
            previous_round=self._round,
            cause=cause,
            exits=exits,
            # What is judged is the launch; one that is slow on a busy machine is no loss.
            policy=JobPolicy(node_lost_s=3600.0, join_timeout_s=600.0),
        )
        while True:
            found = await self._main.ask("POST", f"/v1/jobs/{JOB}/join?wait_s=20", join)
            reply = msgspec.json.decode(found, type=JoinReply)
            if reply.status != "wait":
                break
        assert reply.status == "go", reply
        self._round, self._rank = reply.round, reply.node_rank

    def poll(self) -> None:
        """Wait for orders from now on, until there is one; it is what shows that the runner lives."""
        self._polling = asyncio.create_task(self._poll())

    async def _poll(self) -> OrdersReply:
        while True:
            asked = f"node={self.name}&runner_id=r-{self.name}&round={self._round}&after={self._last_order}"
            found = await self._orders.ask("GET", f"/v1/jobs/{JOB}/orders?{asked}&wait_s=20&incidents=0")
            reply = msgspec.json.decode(found, type=OrdersReply)
            if reply.orders:
                self._last_order = reply.orders[-1].id.replace("#", "%23")
                return reply

    async def ordered(self) -> OrdersReply:
        """Return what it was ordered."""
        assert self._polling is not None
        return await self._polling

    async def beat(self, step: int) -> None:
        """Let the agent say that all ranks have finished ``step``; -1: they have started."""
        self._seq += 1
        now_s = time.monotonic()
        first = self._rank * self._nproc
        ranks = tuple(_report(first + one, one, self._round, step, now_s) for one in range(self._nproc))
        jobs = (JobReport(JOB, self._round, "/run", ranks),)
        beat = Heartbeat(
            self.name, f"a-{self.name}", seq=self._seq, mono_s=now_s, wall_s=time.time(), full=self._seq == 1, jobs=jobs
        )
        reply = msgspec.json.decode(await self._agent.ask("POST", "/v1/heartbeat", beat), type=HeartbeatReply)
        if reply.send_full and not beat.full:
            await self._agent.ask("POST", "/v1/heartbeat", msgspec.structs.replace(beat, full=True, seq=self._seq + 1))
            self._seq += 1

    async def fail(self) -> None:
        """Ask for the next round, since rank 0 of this node has been killed."""
        rank = self._rank * self._nproc
        await self.join((RankExit(rank, 0, 1000, -9, time.monotonic()),), "failure")

    async def obey(self) -> None:
        """Wait for the order to start again, and join the next round."""
        reply = await self.ordered()
        assert reply.orders[-1].kind == "restart", reply
        await self.join(cause="order")

    async def end(self) -> None:
        """Leave, wait for the others, and ask for what the last line of a run tells."""
        leave = Leave(JOB, self.name, f"r-{self.name}", "succeeded", round=self._round, mono_s=time.monotonic())
        await self._main.ask("POST", f"/v1/jobs/{JOB}/leave", leave)
        if self._polling is not None:
            self._polling.cancel()
            self._orders.hang_up()
        asked = f"job={JOB}&brief=true"
        waiting = f"/v1/status?{asked}&while_round={self._round}&wait_s=20"
        while not _is_over(await self._main.ask("GET", waiting)):  # noqa: ASYNC110  it happens in another process
            await asyncio.sleep(_OTHERS_POLL_S)
        await self._main.ask("GET", f"/v1/status?{asked}")

    def hang_up(self) -> None:
        """Close all connections."""
        for line in self.lines:
            line.hang_up()


def _is_over(answer: bytes) -> bool:
    (job,) = msgspec.json.decode(answer, type=Status).jobs
    return job.state in OVER


def _report(rank: int, local: int, round_: int, step: int, now_s: float) -> RankReport:
    progress = Progress(
        state="running",
        step=step,
        steps_seen=step + 1,
        phase="forward",
        phase_since_mono_s=now_s - 0.1,
        moved_mono_s=now_s - 0.05,
        beat_mono_s=now_s - 0.01,
    )
    process = ProcessReading(state="R", cpu_s=now_s, cpu_busy=0.98, rss_bytes=8 << 30, threads=64)
    position = CollectivePosition(enqueued=1, completed=1, name="barrier")
    return RankReport(
        rank=rank, local_rank=local, pid=1000 + local, round=round_, progress=progress, process=process,
        collective=position,
    )  # fmt: skip
