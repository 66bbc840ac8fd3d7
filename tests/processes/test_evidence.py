# SPDX-License-Identifier: Apache-2.0
"""What a judge is told of real ranks in trouble: facts, frames and marks, through the real recorder and agent.

Two ranks on Gloo meet in five all-reduces. Then rank 1 suffers a fault and rank 0 waits for it in the sixth.
"""

import asyncio
import os
import re
import signal
import tempfile
import time
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager, suppress
from pathlib import Path
from typing import NamedTuple

import psutil
import pytest

from megascale_ops.schema.messages import MARKS, CollectiveFact, EvidenceItem, Order
from tests.fakes.controller import FakeController
from tests.fakes.node import FakeNode
from tests.processes.warmed import env_of_programs, start, start_rank

pytestmark = pytest.mark.processes

RANKS = """
import ctypes, os, re, signal, sys, time, torch, torch.distributed as dist
from torch.utils.data import DataLoader, Dataset

class Numbers(Dataset):
    def __len__(self):
        return 8
    def __getitem__(self, index):
        if index == 2:
            os.kill(os.getpid(), signal.SIGSTOP)
        return torch.zeros(1)

class Shards(Numbers):
    def __getitem__(self, index):
        return decode(index)
def decode(index):
    if index == 2:
        time.sleep(600)
    return torch.zeros(1)

def skips():
    dist.barrier()
def holds_the_lock():
    ctypes.PyDLL(None).usleep(600_000_000)
def holds_the_lock_and_computes():
    re.match(r"(a+)+$", "a" * 60 + "b")
def sleeps():
    time.sleep(600)
def loops():
    while True:
        pass
def reads():
    for _ in DataLoader(Numbers(), num_workers=1, batch_size=2):
        pass
def starves():
    for _ in DataLoader(Shards(), num_workers=2, batch_size=2):
        pass
def saves():
    path = f"{sys.argv[1]}/../hung.pt"
    os.mkfifo(path)
    reader = os.open(path, os.O_RDONLY | os.O_NONBLOCK)  # nobody reads: the pipe is full after 64 KiB
    with open(path, "wb") as file:
        torch.save(torch.zeros(1 << 20), file)
def waits():
    dist.all_reduce(torch.ones(4), async_op=True).wait()
def waits_in_native_code():
    started = torch.ops._c10d_functional.all_reduce(torch.ones(4), "sum", "0")
    torch.ops._c10d_functional.wait_tensor(started)
def learns():
    model(torch.ones(2, 4)).sum().backward()
def makes_a_group():
    dist.new_group([0, 1])

rank, world_size = int(sys.argv[2]), int(os.environ["WORLD_SIZE"])
dist.init_process_group("gloo", init_method=f"file://{sys.argv[1]}/../store", rank=rank, world_size=world_size)
tensor = torch.ones(4)
if "RANK_0" == "learns":
    model = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(4, 1))
for _ in range(5):
    dist.all_reduce(tensor)
print("ranks have met", file=sys.stderr, flush=True)
if rank == 1:
    RANK_1()
RANK_0()
"""
# The sixth collective, as in the two sources.
IN_RECORDER = CollectiveFact(group="0", seq=6, function="all_reduce", sizes="[[4]]", dtype="Float")
FIVE = [(number, True) for number in range(1, 6)]
IN_BOX = CollectiveFact(group="0", seq=6, function="all_reduce", bytes_moved=16)


class Told(NamedTuple):
    """What the agent told of a round: items by kind and rank."""

    node: FakeNode
    controller: FakeController

    async def ask(self, kind: str, deadline_s: float = 30.0) -> dict[tuple[str, int], EvidenceItem]:
        """Give an order; what it brought."""
        self.controller.orders.append(
            Order(id=kind, job="job", node="node-a", kind=kind, round=1, incident="job-1", deadline_s=deadline_s)
        )
        evidence = await self.controller.until(
            lambda: next((found for found in self.controller.evidence if found.order == kind), None), kind
        )
        assert all(mark in MARKS for item in evidence.items for mark in item.marks)
        return {(item.kind, item.rank): item for item in evidence.items}


@pytest.fixture
def node() -> Iterator[FakeNode]:
    """A node in a short path, since sockets allow 107 bytes."""
    with tempfile.TemporaryDirectory(dir="/dev/shm") as folder:
        made = FakeNode(Path(folder), start_rank=start_rank)
        yield made
        made.kill_all()


@asynccontextmanager
async def trouble(node: FakeNode, rank_1: str, rank_0: str = "dist.all_reduce") -> AsyncIterator[Told]:
    """Two ranks in trouble and an agent beside them; both have met, and rank 1 is where it will stay."""
    argument = "tensor" if rank_0 == "dist.all_reduce" else ""
    script = RANKS.replace("RANK_1", rank_1).replace("RANK_0()", f"{rank_0}({argument})").replace("RANK_0", rank_0)
    controller = FakeController()
    await controller.start()
    node.start_round(2, script=script, recorder=True)
    where = ("--controller", controller.url, "--node", "node-a", "--box-root", str(node.root))
    with Path(os.devnull).open("wb") as out:  # noqa: ASYNC230  returns at once
        agent = start(("agent", *where, "--metrics-listen", ""), env_of_programs(), out)
    try:
        logs = [node.stderr(rank) for rank in (0, 1)]
        await controller.until(lambda: all("have met" in log.read_text() for log in logs), "the ranks to meet")
        # Rank 0 enters, rank 1 falls into its fault.
        await controller.until(settled(*(child.pid for child in node.children.values())), "the ranks to stay there")
        yield Told(node, controller)
    finally:
        agent.terminate()
        await asyncio.to_thread(agent.wait)
        await controller.stop()


def settled(*ranks: int) -> Callable[[], bool]:
    """Return what says whether main threads of ranks, and of what they have started, are where they will stay.

    That is: asleep for a second with next to no CPU time, or computing for as long. Who waits for a core does neither.
    """
    first: dict[int, int] = {}
    calm: dict[int, tuple[int, float]] = {}

    def stays(pid: int) -> bool:
        fields = Path(f"/proc/{pid}/task/{pid}/stat").read_text().rpartition(")")[2].split()
        state, ticks, now_s = fields[0], int(fields[11]) + int(fields[12]), time.monotonic()
        if state == "R":
            return ticks - first.setdefault(pid, ticks) >= os.sysconf("SC_CLK_TCK")
        before, since_s = calm.setdefault(pid, (ticks, now_s))
        if ticks > before + 2:  # a store that is a file is looked at again and again
            calm[pid] = ticks, now_s
            return False
        return now_s - since_s >= 1.0

    def are_settled() -> bool:
        with suppress(OSError, psutil.Error):
            below = [one.pid for rank in ranks for one in psutil.Process(rank).children(recursive=True)]
            found = [stays(pid) for pid in (*ranks, *below)]  # each is looked at, whatever the others do
            return all(found)
        return False

    return are_settled


def state_of(pid: int) -> str:
    """Return the state of a process; "" when it is gone."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(") ")[2][:1]
    except OSError:
        return ""


async def test_a_skipped_collective_is_told_by_number_and_name(node: FakeNode) -> None:
    """At the same number of the same group one rank is in an all-reduce, the other in a barrier."""
    async with trouble(node, "skips") as told:
        recorders = await told.ask("dump_flight_recorder")

    by_rank = [recorders["flight_recorder", rank].collectives for rank in (0, 1)]
    assert [fact.seq for fact in by_rank[0]] == [fact.seq for fact in by_rank[1]] == [1, 2, 3, 4, 5, 6]
    assert by_rank[0][5] == IN_RECORDER
    assert by_rank[1][5] == CollectiveFact(group="0", seq=6, function="barrier", sizes="[]")
    assert [fact.done for fact in by_rank[0]] == [True] * 5 + [False]
    boxes = [recorders["collectives", rank].collectives for rank in (0, 1)]
    assert boxes[0][5] == IN_BOX
    assert (boxes[1][5].function, boxes[1][5].seq, boxes[1][5].done) == ("barrier", 6, False)


# Computing differs by nothing that is asked here, and costs a core for as long.
@pytest.mark.parametrize(
    "fault", ["holds_the_lock", pytest.param("holds_the_lock_and_computes", marks=pytest.mark.matrix)]
)
async def test_a_held_lock_is_told_from_silence(node: FakeNode, fault: str) -> None:
    """The flight recorder answers, the stacks come from outside, and the lock is named; asleep or busy alike."""
    async with trouble(node, fault) as told:
        stacks = await told.ask("dump_stacks")
        recorders = await told.ask("dump_flight_recorder")

    culprit = stacks["stacks", 1]
    assert culprit.ok
    assert culprit.marks == ("gil_held", "in_native")
    assert any(frame.startswith(f"{fault} (") for frame in culprit.frames)
    assert ".so" in culprit.frames[0]
    assert recorders["flight_recorder", 1].ok
    assert all(fact.done for fact in recorders["flight_recorder", 1].collectives)
    assert "gil_held" not in stacks["stacks", 0].marks


async def test_a_rank_that_sleeps_is_told_from_the_one_that_waits_for_it(node: FakeNode) -> None:
    """Both sleep in the kernel; only one does so inside a collective."""
    async with trouble(node, "sleeps") as told:
        stacks = await told.ask("dump_stacks")
        recorders = await told.ask("dump_flight_recorder")

    assert stacks["stacks", 0].marks == ("in_collective",)
    assert stacks["stacks", 0].frames[0].startswith("all_reduce (torch/distributed/distributed_c10d.py:")
    assert stacks["stacks", 1].marks == ("in_syscall",)
    assert stacks["stacks", 1].frames[0].startswith("sleeps (<string>:")
    assert "in clock_nanosleep" in stacks["process", 1].text
    assert stacks["process", 1].marks == ("in_syscall",)
    assert recorders["collectives", 0].collectives[-1] == IN_BOX
    assert [(fact.seq, fact.done) for fact in recorders["collectives", 1].collectives] == FIVE


async def test_a_rank_that_loops_is_in_python_and_holds_nothing(node: FakeNode) -> None:
    """It lets the lock go every 5 ms, so the worker server answers: no word of a held lock, none of sleep."""
    async with trouble(node, "loops") as told:
        stacks = await told.ask("dump_stacks")

    assert stacks["stacks", 1].marks == ("in_python",)
    assert stacks["process", 1].marks == ()
    assert stacks["process", 1].text.startswith("state R (running)")


async def test_a_stopped_worker_of_the_data_loader_is_named(node: FakeNode) -> None:
    """The rank waits for a batch; the process that should bring it is stopped."""
    async with trouble(node, "reads") as told:
        stacks = await told.ask("dump_stacks")

    assert stacks["stacks", 1].marks == ("in_data_loader",)
    process = stacks["process", 1]
    assert process.marks == ("in_syscall", "worker_stopped")
    (stopped,) = [line for line in process.text.splitlines() if line.endswith("state T")]
    worker = int(stopped.split()[1])
    assert worker != node.children[1].pid
    assert "worker_stopped" not in stacks["process", 0].marks
    assert stacks["stacks", 1].worker.startswith(f"process {worker} in ")
    assert stacks["stacks", 0].worker == ""


async def test_the_worker_that_makes_the_batch_is_named_with_its_line(node: FakeNode) -> None:
    """Of two workers one waits for work (the negative control); the other sleeps in the script's own decoder."""
    async with trouble(node, "starves") as told:
        stacks = await told.ask("dump_stacks")

    waits = stacks["stacks", 1]
    assert waits.marks == ("in_data_loader",)
    found = re.match(r"process (\d+) in decode \(\S+:\d+\)", waits.worker)
    assert found is not None, waits.worker
    assert int(found[1]) != node.children[1].pid
    assert f"process {found[1]}, a child of the rank:" in waits.text or waits.path
    assert stacks["stacks", 0].worker == ""


async def test_storage_that_hangs_is_told_with_its_file(node: FakeNode) -> None:
    """A full pipe stands for a disk that takes nothing more."""
    async with trouble(node, "saves") as told:
        stacks = await told.ask("dump_stacks")

    assert stacks["stacks", 1].marks == ("in_storage",)
    assert any("torch/serialization.py" in frame for frame in stacks["stacks", 1].frames)
    assert stacks["process", 1].marks == ("in_syscall", "in_storage")
    assert "in write on " in stacks["process", 1].text
    assert "hung.pt" in stacks["process", 1].text
    assert "in_storage" not in stacks["process", 0].marks


@pytest.mark.parametrize(
    "way", [*(pytest.param(way, marks=pytest.mark.matrix) for way in ("waits", "waits_in_native_code")), "learns"]
)
async def test_a_wait_in_native_code_is_in_a_collective(node: FakeNode, way: str) -> None:
    """``Work.wait()``, what a compiled graph calls, and the end of DDP's backward pass: no Python frame of c10d's."""
    async with trouble(node, "sleeps", rank_0=way) as told:
        stacks = await told.ask("dump_stacks")
        recorders = await told.ask("dump_flight_recorder")

    waiting = stacks["stacks", 0]
    assert waiting.marks == ("in_collective",)
    assert any(frame.startswith(f"{way} (<string>:") for frame in waiting.frames)
    assert not any("distributed_c10d" in frame for frame in waiting.frames)
    assert not recorders["flight_recorder", 0].collectives[-1].done
    assert not recorders["collectives", 0].collectives[-1].done


async def test_a_group_that_one_rank_never_makes_is_a_rendezvous(node: FakeNode) -> None:
    """No rank is in a collective, and the flight recorder has none that is unfinished."""
    async with trouble(node, "sleeps", rank_0="makes_a_group") as told:
        stacks = await told.ask("dump_stacks")
        recorders = await told.ask("dump_flight_recorder")

    assert stacks["stacks", 0].marks == ("in_rendezvous",)
    assert all(fact.done for fact in recorders["flight_recorder", 0].collectives)


# Of a killed rank test_recovery has the black box, and tests/unit/agents what an agent says of a process that is gone.
@pytest.mark.parametrize("number", [signal.SIGSTOP, pytest.param(signal.SIGKILL, marks=pytest.mark.matrix)])
async def test_the_black_box_speaks_for_a_rank_that_cannot(node: FakeNode, number: signal.Signals) -> None:
    """Stopped or killed: its own dumps are missing, and how far it came is still known."""
    async with trouble(node, "sleeps") as told:
        os.kill(node.children[1].pid, number)
        state = "T" if number == signal.SIGSTOP else "Z"
        await told.controller.until(lambda: state_of(node.children[1].pid) in (state, ""), "the signal")
        stacks = await told.ask("dump_stacks")
        recorders = await told.ask("dump_flight_recorder")

    word = "stopped" if number == signal.SIGSTOP else "gone"
    assert word in stacks["process", 1].marks
    assert word in stacks["stacks", 1].marks
    assert not recorders["flight_recorder", 1].ok
    assert ("no_answer" in recorders["flight_recorder", 1].marks) == (number == signal.SIGSTOP)
    assert recorders["collectives", 1].ok
    assert [(fact.seq, fact.done) for fact in recorders["collectives", 1].collectives] == FIVE
    assert recorders["collectives", 0].collectives[5].function == "all_reduce"
