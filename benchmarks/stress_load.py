# SPDX-License-Identifier: Apache-2.0
"""What ``stress.py`` puts on a controller: a healthy job of many made-up ranks, and inputs that are none.

The healthy job's nodes join, beat once a second and poll for orders as real ones do, over real connections. It must
never hear an order nor have an incident, whatever happens beside it.
"""

import asyncio
import contextlib
import random
import socket
import threading
import time
from collections import Counter
from typing import NamedTuple
from urllib.parse import urlsplit

from megascale_ops.errors import ControllerUnreachableError, MegascaleError
from megascale_ops.link import Link
from megascale_ops.schema.messages import Heartbeat, JobReport, Join
from megascale_ops.schema.policy import JobPolicy
from megascale_ops.schema.progress import CollectivePosition, ProcessReading, Progress, RankReport, StepWork

JOB = "healthy"
STEP_S = 2.0
_PER_NODE = 8
# 10 s: a controller that takes longer to refuse nonsense is held up by it.
_HUNG_S = 10.0
# 0.2 s: the controller waits for a client with half a request, which then disconnects.
_PARTIAL_S = 0.2


class Held(NamedTuple):
    """What came of the load."""

    sent: int
    refused: int  # by a controller that was there
    away: int  # while it was not
    worst_ms: float
    p99_ms: float
    orders: int


class Load(threading.Thread):
    """The healthy job, in a thread with a loop of its own."""

    def __init__(self, url: str, nodes: int) -> None:
        super().__init__(name="load", daemon=True)
        self._url = url
        self._nodes = nodes
        self._began_s = time.monotonic()
        self._took_ms: list[float] = []
        self._counts: Counter[str] = Counter()
        self._ended = threading.Event()

    def run(self) -> None:
        """Beat until told to end."""
        asyncio.run(self._run())

    def end(self) -> Held:
        """End, and say what came of it."""
        self._ended.set()
        self.join(60)
        took = sorted(self._took_ms) or [0.0]
        counts = self._counts
        p99_ms = took[len(took) * 99 // 100]
        return Held(len(self._took_ms), counts["refused"], counts["away"], took[-1], p99_ms, counts["orders"])

    async def _run(self) -> None:
        async with Link(self._url) as link:
            tasks = [asyncio.create_task(self._node(link, node)) for node in range(self._nodes)]
            await asyncio.to_thread(self._ended.wait)
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)

    async def _node(self, link: Link, node: int) -> None:
        name = f"made-up-{node}"
        join = Join(
            JOB, name, f"runner-{node}", f"join-{node}", _PER_NODE, self._nodes, self._nodes, "127.0.0.1", 29500,
            time.monotonic(), policy=JobPolicy(),
        )  # fmt: skip
        while (await link.join(join, wait_s=20.0)).status != "go":
            pass
        polls = asyncio.create_task(self._poll(link, name, f"runner-{node}"))
        seq, full = 0, True
        await asyncio.sleep(node / self._nodes)
        try:
            while True:
                seq += 1
                began_s = time.monotonic()
                try:
                    full = (await link.heartbeat(self._heartbeat(node, seq, full=full))).send_full
                    self._took_ms.append((time.monotonic() - began_s) * 1e3)
                except ControllerUnreachableError:
                    self._counts["away"] += 1
                    full = True
                except MegascaleError:
                    self._counts["refused"] += 1
                await asyncio.sleep(max(0.0, 1.0 - (time.monotonic() - began_s)))
        finally:
            polls.cancel()

    async def _poll(self, link: Link, node: str, runner: str) -> None:
        while True:
            try:
                self._counts["orders"] += len((await link.orders(JOB, node, runner, 1, "", 20.0)).orders)
            except MegascaleError:
                await asyncio.sleep(0.2)

    def _heartbeat(self, node: int, seq: int, *, full: bool) -> Heartbeat:
        now_s = time.monotonic()
        # All ranks finish a step at the same moment, as those that meet in a collective do.
        step = int((now_s - self._began_s) / STEP_S)
        ranks = tuple(self._rank(node * _PER_NODE + local, local, step, now_s) for local in range(_PER_NODE))
        return Heartbeat(
            f"made-up-{node}", f"agent-{node}", seq, now_s, time.time(), full=full, jobs=(JobReport(JOB, 1, "", ranks),)
        )

    def _rank(self, rank: int, local: int, step: int, now_s: float) -> RankReport:
        moved_s = self._began_s + step * STEP_S
        progress = Progress(
            state="running", step=step, steps_seen=step + 1, phase="backward", phase_since_mono_s=moved_s,
            moved_mono_s=now_s - 0.05, beat_mono_s=now_s - 0.01, step_p50_s=STEP_S, step_p99_s=STEP_S * 1.1,
        )  # fmt: skip
        return RankReport(
            rank, local, 1000 + rank, 1, progress=progress,
            process=ProcessReading(state="R", cpu_s=now_s, cpu_busy=0.98, rss_bytes=8 << 30, threads=64),
            collective=CollectivePosition(step * 20 + 3, step * 20 + 2, "all_reduce"),
            work=(StepWork(step, STEP_S, waiting_s=0.1),),
        )  # fmt: skip


class Nonsense(threading.Thread):
    """Sends what is no request of ours to the controller's port, ten a second."""

    def __init__(self, url: str, seed: int) -> None:
        super().__init__(name="nonsense", daemon=True)
        self._address = (urlsplit(url).hostname, urlsplit(url).port)
        self._dice = random.Random(seed)
        self._ended = threading.Event()
        self.answers: Counter[str] = Counter()

    def run(self) -> None:
        """Send until told to end."""
        while not self._ended.wait(0.1):
            self.answers[self._send(*self._draw())] += 1

    def end(self) -> Counter[str]:
        """End; how often which kind of answer came."""
        self._ended.set()
        self.join(2 * _HUNG_S)
        return self.answers

    def _draw(self) -> tuple[bytes, bool]:
        """Something that is no request of ours, and whether it is a whole one, which must be answered."""
        dice = self._dice
        paths = (
            "/v1/heartbeat",
            "/v1/evidence",
            f"/v1/jobs/{JOB}/join",
            f"/v1/jobs/{JOB}/policy",
            "/v1/jobs/../x",
            "/%00",
        )
        bodies = (
            *(
                b"",
                b"null",
                b"{",
                b"[" * 20_000,
                b'{"node": "\xff"}',
                b'{"node": 3}',
                b"9" * 5000,
                dice.randbytes(2000),
            ),
            b'{"node":"made-up-0","agent_id":"x","seq":1,"mono_s":1e999,"wall_s":0}',
            b'{"node":"stranger","agent_id":"x","seq":1,"mono_s":0,"wall_s":0,"jobs":[{"job":"healthy","round":1}]}',
        )
        body = dice.choice(bodies)
        head = f"{dice.choice(('POST', 'GET', 'PUT', 'BREW'))} {dice.choice(paths)} HTTP/1.1\r\nHost: x\r\n"
        length = dice.choice((len(body), len(body), len(body), len(body) + 50, 10**12, -1))
        whole = f"{head}Content-Type: application/json\r\nContent-Length: {length}\r\n\r\n".encode() + body
        if dice.random() < 0.5:
            return whole, length == len(body)
        return dice.choice((dice.randbytes(300), whole[: dice.randrange(len(whole))], b"GET /" + b"a" * 100_000)), False

    def _send(self, data: bytes, is_whole: bool) -> str:
        """One request that is none; what came back: a status by its hundreds, closed, unanswered or away."""
        try:
            with socket.create_connection(self._address, timeout=_HUNG_S) as wire:
                with contextlib.suppress(OSError):
                    wire.sendall(data)
                wire.settimeout(_HUNG_S if is_whole else _PARTIAL_S)
                answer = wire.recv(64)
        except TimeoutError:
            return "hung" if is_whole else "incomplete"
        except ConnectionRefusedError:
            return "away"
        except OSError:
            return "closed"
        return f"{answer[9:10].decode(errors='replace')}xx" if answer.startswith(b"HTTP/1.") else "closed"
