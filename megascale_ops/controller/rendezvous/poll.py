# SPDX-License-Identifier: Apache-2.0
"""Where runners wait for orders; a waiting request is also their heartbeat.

An order is given until the runner reports that it has executed it, so a lost answer costs nothing. A runner whose round
went on without it, or whose place another one has taken, gets that as its answer.
"""

import asyncio
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import asynccontextmanager

from megascale_ops.controller.job.job import Job, Runner, wait_in
from megascale_ops.controller.job.transitions import Transitions
from megascale_ops.controller.record.state_machine import FINAL
from megascale_ops.schema.messages import Order, OrdersReply

# 5 s: without an agent the runner's polls are the node's only heartbeat.
NO_AGENT_POLL_S = 5.0
MOST_WAIT_S = 60.0


class Poll:
    """One long poll for orders: which runner asks, for which round, and the last order it has executed."""

    __slots__ = ("after", "incidents", "job", "node", "noticed", "round", "runner_id")

    def __init__(
        self, job: str, node: str, runner_id: str, round_: int, after: str = "", incidents: int = 0, noticed: int = -1
    ) -> None:
        self.job = job
        self.node = node
        self.runner_id = runner_id
        self.round = round_
        self.after = after
        self.incidents = incidents  # the highest number of one that it has received
        self.noticed = noticed  # the number of the newest notice that it has; -1: it wants none


async def orders(jobs: Mapping[str, Job], transitions: Transitions, poll: Poll, wait_s: float) -> OrdersReply:
    """Return orders for a runner as soon as there are any, or nothing after ``wait_s``."""
    clock = transitions.clock
    job = jobs.get(poll.job)
    runner = job.runners.get(poll.node) if job is not None else None
    if job is None or runner is None:
        return OrdersReply(known=False)
    if runner.runner_id != poll.runner_id:
        return _to_superseded(job, poll)
    if not transitions.registry.agent_is_fresh(job.name, poll.node, clock()):
        wait_s = min(wait_s, NO_AGENT_POLL_S)
    deadline_s = clock() + min(wait_s, MOST_WAIT_S)
    runner.round = poll.round
    transitions.witness(job, round_=poll.round, incidents=poll.incidents)
    _obeyed(transitions, job, poll)
    async with open_request(job, runner, clock):
        nudges = runner.nudges
        while True:
            queue = transitions.runner_orders.get((poll.job, poll.node), [])
            orders = tuple(order for order in queue if order.round >= poll.round) or _to_outdated(job, poll)
            notices = job.notices.since(poll.noticed) if poll.noticed >= 0 else ()
            if orders or notices:
                noticed = job.notices.number
                return OrdersReply(orders=orders, incidents=job.record.incidents, notices=notices, noticed=noticed)
            if not _is_expected(job, poll):
                return OrdersReply(known=False, incidents=job.record.incidents)
            left_s = deadline_s - clock()
            if left_s <= 0 or runner.nudges != nudges:
                return OrdersReply(incidents=job.record.incidents, noticed=job.notices.number)
            await wait_in(runner.waiters, left_s)


async def round_ends(
    jobs: Mapping[str, Job], clock: Callable[[], float], name: str, round_: int, wait_s: float
) -> None:
    """Wait until a job is over, in another round than this one, or gone; at most ``wait_s``.

    All nodes that are done wait so for those that are not: they are woken by that alone.
    """
    deadline_s = clock() + min(wait_s, MOST_WAIT_S)
    while (job := jobs.get(name)) is not None and (left_s := deadline_s - clock()) > 0:
        if job.is_over or job.record.round != round_:
            return
        await wait_in(job.round_watchers.setdefault(round_, set()), left_s)


def _to_outdated(job: Job, poll: Poll) -> tuple[Order, ...]:
    """Return the order for a runner whose round went on without it: its ranks wait for peers that are gone.

    It was cut off when that was decided, so the order of then never reached it.
    """
    order_id = f"{job.name}:{poll.round}:outdated"
    is_behind = 0 < poll.round < job.record.round and job.state not in FINAL
    if not is_behind or poll.node in job.waiting or poll.after == order_id:
        return ()
    text = f"round {job.record.round} began without {poll.node}, whose ranks belong to round {poll.round}"
    return (Order(id=order_id, job=job.name, node=poll.node, kind="restart", round=poll.round, reason=text),)


def _to_superseded(job: Job, poll: Poll) -> OrdersReply:
    """Answer a runner whose node is served by another one: its ranks must not write the same checkpoints."""
    if poll.runner_id not in job.superseded and poll.runner_id not in job.known_runners:
        return OrdersReply(known=False)
    order_id = f"{job.name}:{poll.round}:superseded"
    if poll.after == order_id:
        return OrdersReply(known=False)
    text = f"node {poll.node} of job {job.name} is served by another runner now: this one stops its ranks"
    order = Order(id=order_id, job=job.name, node=poll.node, kind="shutdown", round=poll.round, reason=text)
    return OrdersReply(orders=(order,), known=False)


def _is_expected(job: Job, poll: Poll) -> bool:
    """Return whether this runner has a place in the round it polls for, or waits for the next one."""
    runner = job.runners.get(poll.node)
    if runner is None or runner.runner_id != poll.runner_id:
        return False
    if poll.node in job.waiting:
        return True
    return poll.round == job.record.round and job.member(poll.node) is not None


def _obeyed(transitions: Transitions, job: Job, poll: Poll) -> None:
    """Forget the orders up to the last one that the runner has reported as executed."""
    queue = transitions.runner_orders.get((poll.job, poll.node), [])
    ids = [order.id for order in queue]
    if poll.after in ids:
        transitions.withdraw(job, ids[: ids.index(poll.after) + 1])


@asynccontextmanager
async def open_request(job: Job, runner: Runner, clock: Callable[[], float]) -> AsyncIterator[None]:
    """Count an open request of a runner, and see whether its connection breaks."""
    runner.begin(clock())
    broken = False
    try:
        yield
    except asyncio.CancelledError:
        broken = True
        raise
    finally:
        runner.end(clock(), broken=broken)
        if not runner.open_requests:
            job.joining.discard(runner)
