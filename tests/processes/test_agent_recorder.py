# SPDX-License-Identifier: Apache-2.0
"""The agent beside real ranks: torch on Gloo, instrumented by the real recorder, one of which never arrives."""

import asyncio
import os
import signal
import tempfile
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import pytest

from megascale_ops.schema.messages import EvidenceItem, Order
from tests.fakes.controller import FakeController
from tests.fakes.node import FakeNode
from tests.processes.warmed import env_of_programs, start, start_rank

pytestmark = pytest.mark.processes

# Both ranks meet in five all-reduces; the sixth is entered by rank 0 alone.
HANG = """
import os, sys, time, torch, torch.distributed as dist
def never_arrives():
    time.sleep(600)
rank, world_size = int(sys.argv[2]), int(os.environ["WORLD_SIZE"])
dist.init_process_group("gloo", init_method=f"file://{sys.argv[1]}/../store", rank=rank, world_size=world_size)
tensor = torch.ones(4)
for _ in range(5):
    dist.all_reduce(tensor)
print("ranks have met", file=sys.stderr, flush=True)
if dist.get_rank() == 1:
    never_arrives()
dist.all_reduce(tensor)
"""


@pytest.fixture
def node() -> Iterator[FakeNode]:
    """Two real ranks of which one hangs; in a short path, since sockets allow 107 bytes."""
    with tempfile.TemporaryDirectory(dir="/dev/shm") as folder:
        made = FakeNode(Path(folder), start_rank=start_rank)
        made.start_round(2, script=HANG, recorder=True)
        yield made
        made.kill_all()


@pytest.fixture
async def controller(node: FakeNode) -> AsyncIterator[FakeController]:
    """A controller with an agent that reports to it; both ranks have met."""
    made = FakeController()
    await made.start()
    where = ("--controller", made.url, "--node", node.node, "--box-root", str(node.root))
    with Path(os.devnull).open("wb") as out:  # noqa: ASYNC230  returns at once
        agent = start(("agent", *where, "--metrics-listen", ""), env_of_programs(), out)
    try:
        logs = [node.stderr(rank) for rank in (0, 1)]
        await made.until(lambda: all("ranks have met" in log.read_text() for log in logs), "both ranks have met")
        await made.until(lambda: [entered(made, r) for r in (0, 1)] == [6, 5], "rank 0 is one ahead")
        yield made
    finally:
        agent.terminate()
        await asyncio.to_thread(agent.wait)
        await made.stop()


def entered(controller: FakeController, rank: int) -> int:
    """How many collectives a rank is reported to have entered; -1 while nothing is known."""
    report = controller.last_report(rank)
    return report.collective.enqueued if report and report.collective else -1


async def ask(controller: FakeController, kind: str) -> dict[int, EvidenceItem]:
    """Give an order; what it brought, by rank."""
    controller.orders.append(Order(id=kind, job="job", node="node-a", kind=kind, round=1, incident="job-1"))
    evidence = await controller.until(
        lambda: next((found for found in controller.evidence if found.order == kind), None), kind
    )
    return {item.rank: item for item in evidence.items}


async def test_the_rank_that_did_not_come_is_seen(controller: FakeController, node: FakeNode) -> None:
    """Positions in the process group (see the fixture), stacks, and flight recorders tell the one from the other."""
    stacks = await ask(controller, "dump_stacks")
    recorders = await ask(controller, "dump_flight_recorder")

    assert "in never_arrives" in stacks[1].text
    assert "in all_reduce" in stacks[0].text
    assert "not finished: gloo:all_reduce 6 of group 0" in recorders[0].text
    assert "not finished" not in recorders[1].text
    folder = node.run_dir / "incidents" / "job-1" / "node-a"
    assert {path.name for path in folder.iterdir()} >= {"rank-0.stacks.txt", "rank-1.flight_recorder.json"}


async def test_a_frozen_rank_is_named_and_the_other_still_answers(controller: FakeController, node: FakeNode) -> None:
    """The stopped one gives no answer, which is evidence; no other order waits for it."""
    os.kill(node.children[1].pid, signal.SIGSTOP)

    await controller.until(lambda: (report := controller.last_report(1)) and report.process.state == "T", "T")
    stacks = await ask(controller, "dump_stacks")
    recorders = await ask(controller, "dump_flight_recorder")

    assert stacks[1].text.startswith("no answer: process is stopped")
    assert "in all_reduce" in stacks[0].text
    assert not recorders[1].ok
    assert recorders[0].ok


async def test_an_exception_is_told_with_its_consequences(controller: FakeController, node: FakeNode) -> None:
    """The victim's last words blame a peer; they are marked as a consequence."""
    os.killpg(node.children[1].pid, signal.SIGKILL)

    words = await controller.until(
        lambda: (report := controller.last_report(0)) and report.last_words, "rank 0's last words"
    )
    error = await controller.until(lambda: (report := controller.last_report(0)) and report.error, "rank 0's error")

    assert [(word.pattern, word.fault) for word in words] == [("gloo_peer_closed", "peer_lost")]
    assert "Connection closed by peer" in error.message or "Connection reset by peer" in error.message
