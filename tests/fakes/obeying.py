# SPDX-License-Identifier: Apache-2.0
"""An agent's obedience over a real node, and what a test of it needs: a speaker that keeps, a rank's worker server."""

import asyncio
import os
from collections import Counter
from pathlib import Path

from aiohttp import web
from megascale_agents.orders.executor import OrderExecutor
from megascale_agents.ranks.rounds import Rounds

from megascale_ops.schema.environment import BEAT_THREAD
from megascale_ops.schema.messages import Evidence, EvidenceItem, Order
from tests.fakes.node import FakeNode

# What a recorder prepares: faulthandler on SIGUSR1, writing into <box dir>/<rank>.stacks, and a thread that takes it.
REGISTERED = f"""
import faulthandler, signal, sys, threading, time
def beats():
    with open(f"/proc/self/task/{{threading.get_native_id()}}/comm", "w") as name:
        name.write("{BEAT_THREAD}")
    named.set()
    time.sleep(600)
named = threading.Event()
threading.Thread(target=beats, daemon=True).start()
named.wait(10)
faulthandler.register(signal.SIGUSR1, file=open(f"{{sys.argv[1]}}/{{sys.argv[2]}}.stacks", "a"), all_threads=True)
print("ready", file=sys.stderr, flush=True)
def train():
    time.sleep(600)
train()
"""


def of(items: list[EvidenceItem], kind: str, rank: int = 0) -> EvidenceItem:
    """Return the one item of a kind and a rank."""
    (found,) = (item for item in items if (item.kind, item.rank) == (kind, rank))
    return found


class FakeSpeaker:
    """Keeps evidence and what was urgent."""

    def __init__(self) -> None:
        self.evidence: list[Evidence] = []
        self.urged: list[str] = []

    async def report_evidence(self, evidence: Evidence) -> None:
        """Keep evidence."""
        self.evidence.append(evidence)

    def urge(self, reason: str) -> None:
        """Keep a reason."""
        self.urged.append(reason)


class Obeying:
    """Obedience over a real node."""

    def __init__(self, folder: Path) -> None:
        self.node = FakeNode(folder)
        self.rounds = Rounds(str(self.node.root), self.node.node, lambda _: None)
        self.speaker = FakeSpeaker()
        self.counted: Counter[tuple[str, str]] = Counter()
        self.obedience = OrderExecutor(
            self.node.node, self.rounds, self.speaker, lambda kind, outcome: self.counted.update([(kind, outcome)])
        )

    def start(self, ranks: int = 1, **more: object) -> None:
        """Start a round and look."""
        self.node.start_round(ranks, **more)  # type: ignore[arg-type]  passed on as given
        self.rounds.refresh(float(self.node.round))

    def order(self, kind: str, **more: object) -> Order:
        """Build an order for the round that runs."""
        fields: dict[str, object] = {
            "id": f"{kind}-{len(self.speaker.evidence)}",
            "job": "job",
            "node": "node-a",
            "round": self.node.round,
            "incident": "job-1",
            "deadline_s": 5.0,
            **more,
        }
        return Order(kind=kind, **fields)  # type: ignore[arg-type]  a test's shorthand

    async def obey(self, *orders: Order) -> list[EvidenceItem]:
        """Have orders obeyed; what they brought."""
        self.obedience.ingest_orders(orders)
        async with asyncio.timeout(90):
            while self.obedience.is_busy:  # noqa: ASYNC110  as the speaker looks at it
                await asyncio.sleep(0.005)
        return [item for evidence in self.speaker.evidence for item in evidence.items]

    def close(self) -> None:
        """Leave nothing behind."""
        self.rounds.close()
        self.node.kill_all()


def group_lives(group: int) -> bool:
    """Tell whether a process group still has a member."""
    try:
        os.killpg(group, 0)
    except ProcessLookupError:
        return False
    return True


async def until_text(path: Path, text: str) -> None:
    """Wait until a file has some text in it."""
    async with asyncio.timeout(90):
        while text not in path.read_text():  # noqa: ASYNC110, ASYNC240  a small file of another process
            await asyncio.sleep(0.01)


class serving:  # noqa: N801  reads as a verb where it is used
    """A worker server on a unix socket."""

    def __init__(self, path: Path, handler: object) -> None:
        app = web.Application()
        app.router.add_post("/handler/{name}", handler)  # type: ignore[arg-type]  aiohttp's handlers are loosely typed
        self._path = path
        self._runner = web.AppRunner(app, shutdown_timeout=0.1)

    async def __aenter__(self) -> None:
        await self._runner.setup()
        await web.UnixSite(self._runner, str(self._path)).start()

    async def __aexit__(self, *_: object) -> None:
        await self._runner.cleanup()
