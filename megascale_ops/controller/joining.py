# SPDX-License-Identifier: Apache-2.0
"""Where runners report: they join rounds, wait for orders, and leave.

Every request may come twice (a lost answer, a restarted controller), so each is looked up before it is taken in: a
join by its ``join_id``, a runner by its ``runner_id``. One node of a job has one runner. Of two, the first is asked
whether it still lives (its waiting request is answered with nothing; a living runner asks again at once), and only a
dead one gives way.
"""

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager

import msgspec

from megascale_ops.controller.adopting import RESUME, Adopting
from megascale_ops.controller.driver import Driver
from megascale_ops.controller.job import Exit, Job, JobRecord, Runner, Waiting, wait_in
from megascale_ops.controller.losses import Losses
from megascale_ops.controller.moves import Moves
from megascale_ops.controller.recovery import ACTIVE, FINAL, EventKind, State
from megascale_ops.errors import RefusedError, UsageError
from megascale_ops.schema.health import Verdict
from megascale_ops.schema.identity import check_name
from megascale_ops.schema.messages import Join, JoinReply, Leave, Order, OrdersReply, RankExit
from megascale_ops.schema.version import MESSAGE_VERSION, check_version

# 2.5 s: a living runner asks again within milliseconds; a machine under load may take two seconds.
RIVAL_S = 2.5
# 5 s: without an agent the runner's polls are the node's only sign of life.
NO_AGENT_POLL_S = 5.0
MOST_WAIT_S = 60.0
MOST_NODES = 65_536
_OUTCOMES = ("succeeded", "failed", "cancelled")


class Joining:
    """The runners' side of all jobs."""

    def __init__(self, jobs: dict[str, Job], moves: Moves, driver: Driver, losses: Losses) -> None:
        self._jobs = jobs
        self._moves = moves
        self._driver = driver
        self._losses = losses
        self._adopting = Adopting(jobs, moves)
        self._clock: Callable[[], float] = moves.clock

    async def join(self, join: Join, wait_s: float) -> JoinReply:
        """Take a join in and wait for its answer, at most ``wait_s``.

        Raises:
            UsageError: it can't be taken as it is.
            RefusedError: another runner serves this node.
        """
        _check_join(join)
        if join.cause == RESUME:
            return self._adopting.resume(join)
        job = self._jobs.get(join.job)
        if job is None:
            job = self._jobs[join.job] = Job(JobRecord(job=join.job), self._clock())
        await self._give_way(job, join)
        job = self._register(job, join)
        runner = job.runners[join.node]
        deadline_s = self._clock() + min(wait_s, MOST_WAIT_S)
        async with self._open(job, runner):
            nudges = runner.nudges
            job.joining.add(runner)
            self._driver.advance(job)
            while True:
                if job.saves == 0 and (reply := self._answer(job, join)) is not None:
                    return reply
                left_s = deadline_s - self._clock()
                if left_s <= 0 or runner.nudges != nudges or self._must_be_told(job, join):
                    return JoinReply(status="wait", reason=self._driver.deciding.why_out(job, join.node))
                await wait_in(runner.waiters, left_s)

    async def orders(self, poll: "Poll", wait_s: float) -> OrdersReply:
        """Return orders for a runner as soon as there are any, or nothing after ``wait_s``."""
        job = self._jobs.get(poll.job)
        runner = job.runners.get(poll.node) if job is not None else None
        if job is None or runner is None:
            return OrdersReply(known=False)
        if runner.runner_id != poll.runner_id:
            return self._to_superseded(job, poll)
        if not self._moves.agent_is_fresh(poll.node, self._clock()):
            wait_s = min(wait_s, NO_AGENT_POLL_S)
        deadline_s = self._clock() + min(wait_s, MOST_WAIT_S)
        runner.round = poll.round
        self._obeyed(job, poll)
        async with self._open(job, runner):
            nudges = runner.nudges
            while True:
                queue = self._moves.runner_orders.get((poll.job, poll.node), [])
                orders = tuple(order for order in queue if order.round >= poll.round) or self._to_outdated(job, poll)
                if orders:
                    return OrdersReply(orders=orders)
                if not self._is_expected(job, poll):
                    return OrdersReply(known=False)
                left_s = deadline_s - self._clock()
                if left_s <= 0 or runner.nudges != nudges:
                    return OrdersReply()
                await wait_in(runner.waiters, left_s)

    def leave(self, leave: Leave) -> None:
        """Take note that a runner is done.

        Raises:
            UsageError: it can't be taken as it is.
            RefusedError: another runner serves this node.
        """
        check_version(f"the leave of node {leave.node}", leave.version, MESSAGE_VERSION)
        if leave.outcome not in _OUTCOMES:
            raise UsageError(f"outcome {leave.outcome!r} is none of {', '.join(_OUTCOMES)}")
        job = self._jobs.get(leave.job)
        runner = job.runners.get(leave.node) if job is not None else None
        if job is None or runner is None or runner.runner_id != leave.runner_id:
            raise RefusedError(f"no runner {leave.runner_id} of node {leave.node} is known for job {leave.job}")
        job.waiting.pop(leave.node, None)
        if job.state in FINAL:
            return
        self._moves.note(job, "left", f"{leave.node} left: {leave.outcome}", node=leave.node)
        self._take_exits(job, leave.node, leave.exits, leave.mono_s)
        is_member = job.member(leave.node) is not None
        if is_member or job.state is State.REPLACING:
            self._end_by(job, leave, is_member=is_member)
        self._driver.advance(job)
        job.wake()

    def _end_by(self, job: Job, leave: Leave, *, is_member: bool) -> None:
        job.left[leave.node] = leave
        if leave.outcome == "cancelled":
            self._driver.end(job, EventKind.CANCELLED, f"stopped by hand on {leave.node}", 130)
        elif leave.outcome == "failed" and is_member:
            self._driver.end(job, EventKind.GAVE_UP, f"the runner on {leave.node} gave up", 1)
        elif is_member and job.state is not State.DIAGNOSING and self._all_succeeded(job):
            self._driver.end(job, EventKind.RANKS_FINISHED, "every rank ended normally", 0)

    def _all_succeeded(self, job: Job) -> bool:
        members = job.record.members
        return bool(members) and all(
            (left := job.left.get(member.node)) is not None and left.outcome == "succeeded" for member in members
        )

    async def _give_way(self, job: Job, join: Join) -> None:
        """Make sure that no other living runner serves the node."""
        if join.runner_id in job.superseded:
            raise RefusedError(f"node {join.node} of job {job.name} is served by another runner now")
        rival = job.runners.get(join.node)
        if rival is None or rival.runner_id == join.runner_id or job.state in FINAL or join.node in job.left:
            return
        if rival.is_alive(self._clock()) and await self._answers(rival):
            raise RefusedError(
                f"job {job.name} already has a living runner on node {join.node}: stop it first, or give this one "
                "another --job or --node name"
            )
        if job.runners.get(join.node) is not rival:
            await self._give_way(job, join)

    async def _answers(self, runner: Runner) -> bool:
        """Ask a runner whether it lives, and wait for its next request."""
        before = runner.requests
        runner.nudge()
        deadline_s = self._clock() + RIVAL_S
        while runner.requests == before and (left_s := deadline_s - self._clock()) > 0:
            await wait_in(runner.watchers, left_s)
        return runner.requests != before

    def _register(self, job: Job, join: Join) -> Job:
        """Take the join in and return the life of the job it belongs to; what follows from it is the driver's."""
        now_s = self._clock()
        if job.state in FINAL:
            if join.runner_id in job.known_runners:
                self._keep_runner(job, join, now_s)
                return job
            job = self._start_again(job)
        if not job.record.members and not job.waiting:
            if join.previous_round > job.record.round:
                # The journal was lost: go on counting, since agents and folders know the numbers that were used.
                job.change(round=join.previous_round, incidents=max(job.record.incidents, join.previous_round))
            job.change(
                min_nodes=join.min_nodes,
                max_nodes=join.max_nodes,
                policy=join.policy,
                run_dir=join.run_dir,
                started_wall_s=job.record.started_wall_s or self._moves.wall(),
                since_wall_s=self._moves.wall(),
            )
            job.entered_s = now_s
        elif (join.min_nodes, join.max_nodes) != (job.record.min_nodes, job.record.max_nodes):
            raise RefusedError(
                f"node {join.node} wants {join.min_nodes}:{join.max_nodes} nodes, but job {job.name} was started with "
                f"{job.record.min_nodes}:{job.record.max_nodes}: give every node the same --nnodes"
            )
        member = job.member(join.node)
        replaced = member is not None and member.runner_id != join.runner_id
        self._keep_runner(job, join, now_s)
        if member is not None and member.join_id == join.join_id:
            return job  # its answer was lost
        waiting = job.waiting.get(join.node)
        if waiting is not None and waiting.join.join_id == join.join_id:
            return job
        job.waiting[join.node] = Waiting(join, now_s)
        if member is not None and job.state in ACTIVE:
            self._end_round(job, join, replaced=replaced)
        elif member is not None and join.previous_round == job.record.round:
            self._take_exits(job, join.node, join.exits, join.mono_s)
        return job

    def _end_round(self, job: Job, join: Join, *, replaced: bool) -> None:
        """A node of the running round asks for the next one: its ranks are gone."""
        if not replaced:
            self._take_exits(job, join.node, join.exits, join.mono_s)
            self._losses.fail(job, join.node)
            return
        verdict = Verdict(
            fault="runner_lost",
            reason=f"{join.node}: its runner was started again, the one before is gone and its ranks with it",
            confidence=0.95,
            nodes=(join.node,),
            since_wall_s=self._moves.wall(),
            round=job.record.round,
            otherwise="a request of the runner before",
        )
        self._losses.lose_nodes(job, verdict)

    def _keep_runner(self, job: Job, join: Join, now_s: float) -> None:
        runner = job.runners.get(join.node)
        if runner is None or runner.runner_id != join.runner_id:
            if runner is not None:
                job.superseded.add(runner.runner_id)
                runner.wake()
            job.runners[join.node] = Runner(join.runner_id, now_s)
        job.known_runners.add(join.runner_id)

    def _start_again(self, over: Job) -> Job:
        """A job that was over begins a new life: rounds and incidents count on, what happened before is forgiven.

        Runners of the life that is over keep the old object and are told how it ended.
        """
        self._moves.withdraw(over, set(over.orders))
        job = self._jobs[over.name] = Job(msgspec.structs.replace(over.record, orders=(), runners=()), self._clock())
        self._moves.move(
            job,
            EventKind.STARTED_AGAIN,
            f"life {job.record.life + 1} begins",
            life=job.record.life + 1,
            members=(),
            restarts=(),
            failure=None,
            reason="",
            exit_code=0,
            run_dir="",
            best_step=-1,
            useful_s=0.0,
            had_boxes=False,
            steps_are_absolute=False,
            ended_verdict=None,
            ended_incident="",
            verdict=None,
            started_wall_s=self._moves.wall(),
            launch_policy=None,
            tuned={},
            evictions=(),
            prices_s=(),
            tabs={},
            decided=None,
            left_alone=None,
        )
        return job

    def _take_exits(self, job: Job, node: str, exits: tuple[RankExit, ...], mono_s: float) -> None:
        now_s = self._clock()
        for exit_ in exits:
            ago_s = max(0.0, mono_s - exit_.seen_mono_s) if mono_s else 0.0
            job.exits[exit_.rank] = Exit(node, exit_, now_s - ago_s)

    def _answer(self, job: Job, join: Join) -> JoinReply | None:
        """Return what can be told to a join now."""
        record = job.record
        if job.state in FINAL:
            return JoinReply(
                status="stop",
                round=record.round,
                reason=record.reason,
                exit_code=record.exit_code,
                incident=record.ended_incident,
                verdict=record.ended_verdict,
            )
        member = job.member(join.node)
        if member is not None and member.join_id == join.join_id:
            master = record.members[0]
            return JoinReply(
                status="go",
                round=record.round,
                node_rank=job.places[join.node],
                nodes=len(record.members),
                master_addr=master.addr,
                master_port=master.store_port,
                incident=record.ended_incident,
                verdict=record.ended_verdict,
            )
        if job.runners[join.node].runner_id != join.runner_id:
            raise RefusedError(f"node {join.node} of job {job.name} is served by another runner now")
        return None

    def _must_be_told(self, job: Job, join: Join) -> bool:
        """Say whether a runner waits outside of a round and does not know it yet; once for each join."""
        waiting = job.waiting.get(join.node)
        if waiting is None or waiting.told or not self._driver.deciding.why_out(job, join.node):
            return False
        waiting.told = True
        return True

    def _to_outdated(self, job: Job, poll: "Poll") -> tuple[Order, ...]:
        """Return the order for a runner whose round went on without it: its ranks wait for peers that are gone.

        It was cut off when that was decided, so the order of then never reached it.
        """
        order_id = f"{job.name}:{poll.round}:outdated"
        is_behind = 0 < poll.round < job.record.round and job.state not in FINAL
        if not is_behind or poll.node in job.waiting or poll.after == order_id:
            return ()
        text = f"round {job.record.round} began without {poll.node}, whose ranks belong to round {poll.round}"
        return (Order(id=order_id, job=job.name, node=poll.node, kind="restart", round=poll.round, reason=text),)

    def _to_superseded(self, job: Job, poll: "Poll") -> OrdersReply:
        """Answer a runner whose node is served by another one: its ranks must not write the same checkpoints."""
        if poll.runner_id not in job.superseded and poll.runner_id not in job.known_runners:
            return OrdersReply(known=False)
        order_id = f"{job.name}:{poll.round}:superseded"
        if poll.after == order_id:
            return OrdersReply(known=False)
        text = f"node {poll.node} of job {job.name} is served by another runner now: this one stops its ranks"
        order = Order(id=order_id, job=job.name, node=poll.node, kind="shutdown", round=poll.round, reason=text)
        return OrdersReply(orders=(order,), known=False)

    def _is_expected(self, job: Job, poll: "Poll") -> bool:
        """Say whether this runner has a place in the round it polls for, or waits for the next one."""
        runner = job.runners.get(poll.node)
        if runner is None or runner.runner_id != poll.runner_id:
            return False
        if poll.node in job.waiting:
            return True
        return poll.round == job.record.round and job.member(poll.node) is not None

    def _obeyed(self, job: Job, poll: "Poll") -> None:
        """Forget the orders up to the last one that the runner says it has obeyed."""
        queue = self._moves.runner_orders.get((poll.job, poll.node), [])
        ids = [order.id for order in queue]
        if poll.after in ids:
            self._moves.withdraw(job, ids[: ids.index(poll.after) + 1])

    @asynccontextmanager
    async def _open(self, job: Job, runner: Runner) -> AsyncIterator[None]:
        """Count an open request of a runner, and see whether its connection breaks."""
        runner.begin(self._clock())
        broken = False
        try:
            yield
        except asyncio.CancelledError:
            broken = True
            raise
        finally:
            runner.end(self._clock(), broken=broken)
            if not runner.open_requests:
                job.joining.discard(runner)


class Poll:
    """One long poll for orders: who asks, for which round, and the last order it has obeyed."""

    __slots__ = ("after", "job", "node", "round", "runner_id")

    def __init__(self, job: str, node: str, runner_id: str, round_: int, after: str = "") -> None:
        self.job = job
        self.node = node
        self.runner_id = runner_id
        self.round = round_
        self.after = after


def _check_join(join: Join) -> None:
    check_version(f"the join of node {join.node}", join.version, MESSAGE_VERSION)
    check_name("job", join.job)
    check_name("node", join.node)
    if not join.runner_id or not join.join_id:
        raise UsageError("a join needs a runner_id and a join_id")
    if join.nproc < 1:
        raise UsageError(f"node {join.node} offers {join.nproc} ranks: at least 1 is needed")
    if not 1 <= join.min_nodes <= join.max_nodes <= MOST_NODES:
        raise UsageError(f"nodes {join.min_nodes}:{join.max_nodes} can't be: 1 <= MIN <= MAX <= {MOST_NODES}")
    if not 1 <= join.store_port <= 65535:
        raise UsageError(f"store port {join.store_port} can't be: 1 to 65535")
