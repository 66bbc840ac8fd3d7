# SPDX-License-Identifier: Apache-2.0
"""A small world around the controller's loop: a clock that tests wind, nodes that beat, join and poll."""

import asyncio
import itertools
from collections.abc import Callable
from typing import TYPE_CHECKING

from megascale_ops.controller.job.transitions import Journal
from megascale_ops.controller.journal.parts import join
from megascale_ops.controller.journal.rows import Batch
from megascale_ops.controller.loop import TICK_S, Loop
from megascale_ops.controller.rendezvous.poll import Poll
from megascale_ops.schema.events import Event, Incident
from megascale_ops.schema.messages import Heartbeat, HeartbeatReply, JobReport, Join, JoinReply, OrdersReply, RankExit
from megascale_ops.schema.policy import JobPolicy
from megascale_ops.schema.progress import CollectivePosition, ProcessReading, Progress, RankError, RankReport

if TYPE_CHECKING:
    from megascale_ops.schema.health import BadHardware, HardwareFinding, NodeMove, SelfCheckView


class MemoryJournal:
    """Keeps what it is given; everything is safe at once, unless it is told to hold."""

    def __init__(self) -> None:
        self.cores: dict[str, bytes] = {}
        self.parts: dict[tuple[str, str, str], bytes] = {}
        self.incidents: dict[str, Incident] = {}
        self.events: list[Event] = []
        self.hardware: dict[tuple[str, str], BadHardware] = {}
        self.nodes: dict[int, NodeMove] = {}
        self.checks: dict[str, SelfCheckView] = {}
        self.hold = False
        self._held: list[tuple[Batch, Callable[[], None]]] = []

    @property
    def records(self) -> dict[str, bytes]:
        """Every job's state, whole."""
        return {
            job: join(core, [(kind, key, body) for (of, kind, key), body in self.parts.items() if of == job])
            for job, core in self.cores.items()
        }

    def submit(self, batch: Batch, done: Callable[[], None]) -> None:
        """Write in order; ``done`` when it is safe."""
        self._held.append((batch, done))
        if not self.hold:
            self.release()

    def release(self) -> None:
        """Write what was held back."""
        held, self._held = self._held, []
        for batch, done in held:
            if batch.job:
                self.cores[batch.job] = batch.record
            for part in batch.parts:
                self.parts.pop(part[:3], None)
                if part.body is not None:
                    self.parts[part[:3]] = part.body
            self.incidents.update({incident.id: incident for incident in batch.incidents})
            self.events.extend(batch.events)
            self._take_nodes(batch)
            for one in batch.hardware:
                self.hardware[one.uuid, one.reason] = one
                if not one.count:
                    del self.hardware[one.uuid, one.reason]
            done()

    def _take_nodes(self, batch: Batch) -> None:
        for move in batch.nodes:
            self.nodes[move.number] = move
            if not move.event:
                del self.nodes[move.number]
        for view in batch.checks:
            self.checks[view.node] = view
            if view.check is None:
                del self.checks[view.node]


class FakeRank:
    """What one rank's black box and process would say."""

    def __init__(self, rank: int, local_rank: int, now_s: float) -> None:
        self.rank = rank
        self.local_rank = local_rank
        self.moved_s = now_s
        self.step = -1
        self.steps_seen = 0
        self.phase = "startup"
        self.phase_since_s = now_s
        self.state = "R"
        self.stopped_since_s = 0.0
        self.busy = 0.0
        self.box_state = "running"
        self.collective: CollectivePosition | None = None
        self.has_box = True
        self.gpu = ""
        self.absolute = True
        self.error: RankError | None = None
        self.p50_s = 0.05
        self.p99_s = 0.06

    def report(self, round_: int) -> RankReport:
        """Return what the agent would report."""
        progress = Progress(
            state=self.box_state,
            step=self.step,
            step_is_absolute=self.absolute,
            steps_seen=self.steps_seen,
            phase=self.phase,
            phase_since_mono_s=self.phase_since_s,
            moved_mono_s=self.moved_s,
            step_p50_s=self.p50_s,
            step_p99_s=self.p99_s,
        )
        process = ProcessReading(state=self.state, stopped_since_mono_s=self.stopped_since_s, cpu_busy=self.busy)
        return RankReport(
            rank=self.rank,
            local_rank=self.local_rank,
            pid=1000 + self.rank,
            round=round_,
            progress=progress if self.has_box else None,
            collective=self.collective,
            process=process,
            gpu=self.gpu,
            error=self.error,
        )


class World:
    """One controller, one job, some nodes."""

    def __init__(
        self,
        journal: Journal | None = None,
        *,
        nproc: int = 2,
        min_nodes: int = 1,
        max_nodes: int = 1,
        policy: JobPolicy | None = None,
        allows_faults: bool = False,
    ) -> None:
        self.now_s = 1000.0
        self.allows_faults = allows_faults  # of ours: otherwise one that was contained fails the test
        self.nproc = nproc
        self.min_nodes = min_nodes
        self.max_nodes = max_nodes
        self.policy = policy or JobPolicy()
        self.memory = MemoryJournal()
        self.journal: Journal = journal or self.memory
        self.post: Callable[[Callable[[], None]], None] = lambda callback: callback()
        self.loop = self.new_loop()
        self.ranks: dict[str, list[FakeRank]] = {}
        self.seq: dict[str, int] = {}
        self.rounds: dict[str, int] = {}
        self.findings: dict[str, tuple[HardwareFinding, ...]] = {}  # what a node's agent finds wrong
        self.gpus: dict[str, tuple[str, ...]] = {}
        self.tasks: list[asyncio.Task[object]] = []
        self._ids = itertools.count(1)

    def new_loop(self) -> Loop:
        """Return a controller that knows nothing yet."""
        return Loop(self.journal, clock=lambda: self.now_s, wall=lambda: self.now_s + 1e6, post=self.post)

    def restart_controller(self) -> None:
        """Kill the controller and start another on the same journal."""
        for task in self.tasks:
            task.cancel()
        self.tasks = []
        self.loop = self.new_loop()
        self.loop.restore(self.memory.records, list(self.memory.incidents.values()))
        self.loop.hardware.restore(self.memory.hardware.values())
        self.loop.nodes.restore(self.memory.nodes.values(), self.memory.checks.values())

    @property
    def state(self) -> str:
        """The job's state."""
        return self.loop.jobs["job"].record.state

    @property
    def round(self) -> int:
        """The job's round."""
        return self.loop.jobs["job"].record.round

    def incident(self, number: int) -> Incident:
        """Return an incident as the journal has it."""
        return self.memory.incidents[f"job-{number}"]

    def new_join(
        self,
        node: str = "a",
        *,
        cause: str = "start",
        exits: tuple[RankExit, ...] = (),
        previous_round: int = 0,
        runner_id: str = "",
        unmet: tuple[int, ...] = (),
    ) -> Join:
        """Return a join as a runner would send it."""
        return Join(
            job="job",
            node=node,
            runner_id=runner_id or f"runner-{node}",
            join_id=f"join-{next(self._ids)}",
            nproc=self.nproc,
            min_nodes=self.min_nodes,
            max_nodes=self.max_nodes,
            addr=f"host-{node}",
            store_port=4000,
            mono_s=self.now_s,
            previous_round=previous_round,
            cause=cause,
            exits=exits,
            unmet=unmet,
            policy=self.policy,
            run_dir="/run/job",
        )

    def ask(self, join: Join, wait_s: float = 20.0) -> "asyncio.Task[JoinReply]":
        """Send a join; the task ends with its answer."""
        task = asyncio.ensure_future(self.loop.joining.join(join, wait_s))
        self.tasks.append(task)  # type: ignore[arg-type]  # only cancelled
        return task

    def poll(
        self, node: str = "a", *, after: str = "", runner_id: str = "", noticed: int = -1
    ) -> "asyncio.Task[OrdersReply]":
        """Wait for orders to a runner."""
        poll = Poll("job", node, runner_id or f"runner-{node}", self.round, after, noticed=noticed)
        task = asyncio.ensure_future(self.loop.orders(poll, 20.0))
        self.tasks.append(task)  # type: ignore[arg-type]  # only cancelled
        return task

    def spawn(self, *nodes: str) -> None:
        """Start the ranks of the job's round on these nodes."""
        for node in nodes:
            place = [member.node for member in self.loop.jobs["job"].record.members].index(node)
            first = place * self.nproc
            self.ranks[node] = [FakeRank(first + i, i, self.now_s) for i in range(self.nproc)]
            self.rounds[node] = self.round

    def rank(self, number: int) -> FakeRank:
        """Return one rank."""
        return next(rank for ranks in self.ranks.values() for rank in ranks if rank.rank == number)

    def train(self, step: int) -> None:
        """Let all ranks that are not stopped finish this step now."""
        for ranks in self.ranks.values():
            for rank in ranks:
                if rank.state == "R":
                    rank.steps_seen += max(1, step - rank.step)
                    rank.step, rank.moved_s, rank.phase = step, self.now_s, "forward"

    def beat(self, node: str, *, done: tuple[str, ...] = (), agent: str = "agent") -> HeartbeatReply:
        """Send a full heartbeat of a node."""
        self.seq[node] = self.seq.get(node, 0) + 1
        reports = tuple(rank.report(self.rounds[node]) for rank in self.ranks.get(node, []))
        jobs = (JobReport("job", self.rounds[node], "/run/job", reports),) if reports else ()
        heartbeat = Heartbeat(
            node=node,
            agent_id=f"{agent}-{node}",
            seq=self.seq[node],
            mono_s=self.now_s,
            wall_s=self.now_s,
            full=True,
            jobs=jobs,
            done_orders=done,
            findings=self.findings.get(node, ()),
            gpus=self.gpus.get(node, ()),
        )
        return self.loop.heartbeat(heartbeat)

    def beat_all(self) -> None:
        """Send a heartbeat of every node that has ranks."""
        for node in self.ranks:
            self.beat(node)

    async def settle(self) -> None:
        """Let everything that can run, run; a turn of the event loop with nothing else to run is the last."""
        waiting = vars(asyncio.get_running_loop()).get("_ready", (None,))  # a loop that does not tell gets all turns
        for _ in range(10):
            await asyncio.sleep(0)
            if not waiting:
                return

    async def wait(self, seconds: float, *, beating: bool = True, tick_s: float = TICK_S) -> None:
        """Let time pass, in ticks of the loop; agents report in every second one.

        A story of minutes with a tick of half a second has agents that report once a second, as they do in large jobs.
        """
        for count in range(round(seconds / tick_s)):
            self.now_s += tick_s
            if beating and count % 2 == 0:
                self.beat_all()
            self.loop.tick()
            await self.settle()
        assert self.allows_faults or not self.loop.faults.total, self.loop.faults.now()

    async def up(self, *nodes: str, step: int = 20) -> None:
        """Bring the job up on these nodes and train to ``step``."""
        replies = [self.ask(self.new_join(node)) for node in nodes]
        await self.settle()
        if len(nodes) < self.max_nodes:
            await self.wait(self.policy.last_call_s + 0.2, beating=False)
        assert all(reply.result().status == "go" for reply in replies)
        await self.run_round(step)

    async def run_round(self, step: int) -> None:
        """Start the ranks of a formed round and let them train to ``step``."""
        self.spawn(*(member.node for member in self.loop.jobs["job"].record.members))
        self.beat_all()
        await self.wait(0.2)
        self.train(step)
        await self.wait(0.4)

    def exit(self, rank: int, code: int, *, by_us: bool = False, ago_s: float = 0.0, **more: object) -> RankExit:
        """Return how a rank ended."""
        seen_s = self.now_s - ago_s
        return RankExit(rank, rank % self.nproc, 1000 + rank, code, seen_s, by_us=by_us, **more)  # type: ignore[arg-type]  # fields
