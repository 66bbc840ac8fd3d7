# SPDX-License-Identifier: Apache-2.0
"""What a rank printed, asked of the agent of its node.

An agent may be behind an address translation, so nothing is sent to it: the order goes with the answer to its next
heartbeat, and what it has read comes as evidence of no incident. The request of the person who asked waits for that, no
longer than ``PATIENCE_S``. Nothing of this is journaled: a controller that is started again has forgotten it.

The order has a job, a rank, a round and what to search, and no path: which files these are the agent knows from the
job's runner.
"""

import asyncio
import secrets
from collections import Counter

import msgspec

from megascale_ops.controller.job.job import Job
from megascale_ops.controller.loop import Loop
from megascale_ops.errors import NotFoundError, RefusedError
from megascale_ops.schema.folding import no_rank
from megascale_ops.schema.messages import LOG, READ_LOG, Evidence, EvidenceItem, Order
from megascale_ops.schema.runs import MOST_ROUNDS, LogPart, LogQuery

# 3 s: what an agent may take to read; a disk that needs longer is away.
READ_S = 3.0
# 6 s: a heartbeat takes the order to the agent within 1, and its answer is on its way at once.
PATIENCE_S = 6.0
# 8 of a node, 64 in all: a few pages that follow ranks of one node, and a search through many.
MOST_OF_NODE = 8
MOST_AT_ONCE = 64
_PREFIX = f"{LOG}-"


class AgentLogs:
    """Requests that wait for an agent's answer, of all jobs.

    Args:
        loop: the jobs, what is known of their nodes, and the orders that agents are given.
    """

    def __init__(self, loop: Loop) -> None:
        self._loop = loop
        self._waiting: dict[str, tuple[Order, asyncio.Future[EvidenceItem]]] = {}  # by order
        self._of_node: Counter[str] = Counter()

    async def read(self, job: Job, query: LogQuery) -> LogPart:
        """Return a part of what a rank printed.

        Raises:
            NotFoundError: there is no such rank, or it has left no such file.
            RefusedError: its agent is not heard, does not answer, can't, or is busy with others.
        """
        node = self._node_of(job, query)
        at_hand = f"`megascale-ops logs {job.name} --rank {query.rank}` on node {node} reads the files themselves"
        if not self._loop.registry.agent_is_fresh(job.name, node, self._loop.clock()):
            raise RefusedError(f"the agent of node {node}, where rank {query.rank} ran, is not heard: {at_hand}")
        if self._of_node[node] >= MOST_OF_NODE:
            raise RefusedError(f"{MOST_OF_NODE} logs of node {node} are being read: ask again in a few seconds")
        if len(self._waiting) >= MOST_AT_ONCE:
            raise RefusedError(f"{MOST_AT_ONCE} logs are being read: ask again in a few seconds")
        item = await self._ask(job.name, node, query)
        if item is None:
            raise RefusedError(f"the agent of node {node} has not answered within {PATIENCE_S:.0f} s: {at_hand}")
        if item.kind != LOG or (item.ok and item.log is None):  # to an older one the order is unknown
            raise RefusedError(f"the agent of node {node} is too old to read logs: update it, or {at_hand}")
        if item.log is not None and item.ok:
            rounds = {*item.log.rounds, *job.homes.rounds_elsewhere(query.rank, node, job.record.round)}
            return msgspec.structs.replace(item.log, rounds=tuple(sorted(rounds, reverse=True)[:MOST_ROUNDS]))
        raise (NotFoundError if item.log is not None else RefusedError)(f"node {node}: {item.text}")

    def ingest_evidence(self, evidence: Evidence) -> bool:
        """Take an agent's answer; say whether it is one to such a request, also of one that waits no more."""
        if evidence.incident or not evidence.order.startswith(_PREFIX):
            return False
        order, answer = self._waiting.get(evidence.order, (None, None))
        if order is None or answer is None or (order.job, order.node) != (evidence.job, evidence.node):
            return True
        if evidence.items and not answer.done():
            answer.set_result(evidence.items[0])
        return True

    async def _ask(self, job: str, node: str, query: LogQuery) -> EvidenceItem | None:
        """Order a node's agent to read, and wait; None: no answer in time."""
        order = Order(
            id=f"{_PREFIX}{secrets.token_hex(8)}",
            job=job,
            node=node,
            kind=READ_LOG,
            round=0,
            ranks=(query.rank,),
            reason="a person wants to see what the rank printed",
            deadline_s=READ_S,
            log=query,
        )
        answer: asyncio.Future[EvidenceItem] = asyncio.get_running_loop().create_future()
        self._waiting[order.id] = order, answer
        self._of_node[node] += 1
        orders = self._loop.transitions.agent_orders
        orders.setdefault(node, {})[order.id] = order
        try:
            async with asyncio.timeout(PATIENCE_S):
                return await answer
        except TimeoutError:
            return None
        finally:
            del self._waiting[order.id]
            self._of_node[node] -= 1
            self._of_node += Counter()  # nodes without requests are dropped
            held = orders.get(node, {})
            held.pop(order.id, None)
            if not held:
                orders.pop(node, None)

    def _node_of(self, job: Job, query: LogQuery) -> str:
        """Return the node on which a rank ran in a round; of a round that is forgotten, where it ran last.

        Raises:
            NotFoundError: the job has no such rank.
        """
        newest = job.record.round
        if query.round in (-1, newest):
            registry = self._loop.registry
            for node in job.nodes:  # the ranks of another launcher are known by their black boxes alone
                share = registry.share(node, job.name, newest)
                if share is not None and query.rank in share.ranks:
                    return node
        node = job.homes.node_of(query.rank, query.round) or job.homes.node_of(query.rank, -1)
        if not node:
            size = job.record.world_size
            raise NotFoundError(no_rank(job.name, size, [query.rank]) if size else f"job {job.name} has no ranks yet")
        return node
