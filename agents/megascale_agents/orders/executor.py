# SPDX-License-Identifier: Apache-2.0
"""Obey: what the controller wants done on this node.

    dump_stacks           how each rank's process stands, where its Python code is -> dumps.py
    dump_flight_recorder  which collectives each rank has entered                 -> dumps.py
    preserve              black boxes, stderr, and an index of all of the above   -> preserve.py
    stop, kill            SIGTERM, SIGKILL to the ranks' process groups           -> signals.py
    profile               kernel timings of the next steps                        -> profiles.py
    read_log              what a rank printed                                     -> log_reading.py
    diagnose              whether this node is good                               -> self_checks.py

Orders of a job are executed one after the other, in the order in which they came (evidence must be kept before its
owner is killed); dumps that follow each other run at the same time, and a profile, which takes as long as training
does for its steps, runs beside them all, as does the reading of a log. An order is executed once, however often it is
sent. One for a round that is over is refused, since its ranks are others now; only ``preserve`` also reaches the round
before. Whatever happens, the controller gets an answer, and gets it within the order's deadline and two seconds.
"""

import asyncio
import logging
from collections import OrderedDict
from collections.abc import Callable, Iterable
from typing import Protocol

import msgspec

from megascale_agents.evidence import collective_facts, dumps, frame_classes
from megascale_agents.orders import preserve, profile, signals
from megascale_agents.orders.log_reading import LogReading
from megascale_agents.orders.self_checks import SelfChecks
from megascale_agents.ranks.rank_watch import RankWatch
from megascale_agents.ranks.rounds import Rounds, RoundWatch
from megascale_ops.schema.kernels import MOST_KERNELS
from megascale_ops.schema.messages import (
    DIAGNOSE,
    MAX_BODY_BYTES,
    ORDERS_FOR_AGENT,
    READ_LOG,
    Evidence,
    EvidenceItem,
    Order,
)

log = logging.getLogger(__name__)

_REMEMBERED = 1000  # order ids; an incident has about five for each node
# Texts shrink first, down to 250 characters; 64 ranks at their worst then still have 8 facts and 12 frames each.
_LEAST_CHARACTERS = 250
_MOST_BYTES = MAX_BODY_BYTES - 4096  # the rest is for names and the envelope
_DUMPS = ("dump_stacks", "dump_flight_recorder")
# 2 s beyond the order's own deadline: to write files on a slow disk; then the answer is that there is none. Each rank's
# dump and each writing of files ends half a second before, so that one that hangs doesn't take the others' answers.
_SLACK_S = 2.0
_RANK_SLACK_S = 1.5


class Speaks(Protocol):
    """Takes what an order brought to the controller."""

    async def report_evidence(self, evidence: Evidence) -> None:
        """Hand in evidence."""

    def urge(self, reason: str) -> None:
        """Send a heartbeat at once."""


class OrderExecutor:
    """Executes orders and hands the evidence on.

    Args:
        node: This node's name.
        rounds: What runs here.
        speaker: Takes the evidence to the controller, and reports at once that an order is done.
        count: Called with the kind and the outcome (obeyed, failed, refused) of each order.
        kernel_log: Searched for kills of ranks that are gone; "": not at all.
    """

    def __init__(
        self,
        node: str,
        rounds: Rounds,
        speaker: Speaks,
        count: Callable[[str, str], None],
        kernel_log: str = "",
    ) -> None:
        self._node = node
        self._rounds = rounds
        self._speaker = speaker
        self._count = count
        self._kernel_log = kernel_log
        self._known: OrderedDict[str, bool] = OrderedDict()  # id -> done
        self._unreported: OrderedDict[str, None] = OrderedDict()
        self._waiting: dict[str, list[Order]] = {}
        self._tasks: dict[str, asyncio.Task[None]] = {}
        self._profiling: set[asyncio.Task[None]] = set()
        self._log_reading = LogReading(node, rounds, speaker, count)
        self._self_checks = SelfChecks(node, speaker, count)
        self._gathered: OrderedDict[str, list[EvidenceItem]] = OrderedDict()  # incident -> items so far

    @property
    def is_busy(self) -> bool:
        """Whether an order is being executed."""
        return bool(self._tasks)

    def done(self) -> tuple[str, ...]:
        """Ids of orders that are done and not yet reported."""
        return tuple(self._unreported)

    def reported(self, ids: Iterable[str]) -> None:
        """The controller has heard that these are done."""
        for order_id in ids:
            self._unreported.pop(order_id, None)

    def ingest_orders(self, orders: Iterable[Order]) -> None:
        """Take the orders of a reply; those known already are not executed again."""
        for order in orders:
            if order.kind == READ_LOG:
                self._log_reading.ingest_order(order)
                continue
            if order.kind == DIAGNOSE:
                self._self_checks.ingest_order(order)
                self._unreported[order.id] = None  # it is taken: it need not be given again
                continue
            if order.id in self._known:
                if self._known[order.id]:
                    self._unreported[order.id] = None
                continue
            self._known[order.id] = False
            while len(self._known) > _REMEMBERED:
                self._known.popitem(last=False)
            log.info("order %s: %s (round %d) %s", order.id, order.kind, order.round, order.reason,
                     extra={"job": order.job, "node": self._node, "incident": order.incident})  # fmt: skip
            if order.kind == profile.KIND:
                task = asyncio.create_task(self._obey(order), name=f"order {order.id}")
                self._profiling.add(task)
                task.add_done_callback(self._profiling.discard)
                continue
            self._waiting.setdefault(order.job, []).append(order)
            if order.job not in self._tasks:
                self._tasks[order.job] = asyncio.create_task(self._work(order.job), name=f"orders of {order.job}")

    async def close(self) -> None:
        """Leave what is not done; the controller will see that it is not."""
        tasks = [*self._tasks.values(), *self._profiling]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        await self._log_reading.close()
        await self._self_checks.close()

    async def _work(self, job: str) -> None:
        try:
            while orders := self._waiting.pop(job, []):
                while orders:
                    leading = next((n for n, order in enumerate(orders) if order.kind not in _DUMPS), len(orders))
                    batch = orders[: max(1, leading)]
                    del orders[: len(batch)]
                    await asyncio.gather(*(self._obey(order) for order in batch))
        finally:
            self._tasks.pop(job, None)

    async def _obey(self, order: Order) -> None:
        """Obey one order and answer for it."""
        limit_s = (profile if order.kind == profile.KIND else dumps).bounded(order.deadline_s) + _SLACK_S
        try:
            async with asyncio.timeout(limit_s):
                outcome, items = await self._act(order)
        except TimeoutError:
            outcome, items = "failed", [dumps.no_answer(order, rank, limit_s) for rank in self._named(order)]
        except Exception as error:  # one order that fails must not stop the next; it is reported and logged
            log.exception("order %s: %s failed", order.id, order.kind, extra={"job": order.job, "node": self._node})
            outcome, items = "failed", [dumps.broken(order, rank, error) for rank in self._named(order)]
        self._count(order.kind if order.kind in ORDERS_FOR_AGENT else "unknown", outcome)
        if order.kind in _DUMPS:
            self._gathered.setdefault(order.incident, []).extend(items)
        while len(self._gathered) > 16:  # incidents at a time, of all jobs of a node
            self._gathered.popitem(last=False)
        await self._speaker.report_evidence(
            Evidence(node=self._node, job=order.job, incident=order.incident, order=order.id, items=_fit(items))
        )
        self._known[order.id] = True
        self._unreported[order.id] = None
        self._speaker.urge(f"order {order.id} is done")

    async def _act(self, order: Order) -> tuple[str, list[EvidenceItem]]:
        """Execute an order; return its outcome and its evidence."""
        reason = self._refusal(order)
        watch = self._rounds.find(order.job, order.round)
        if reason or watch is None:
            return "refused", [EvidenceItem(kind=dumps.kind_of(order), ok=False, text=f"refused: {reason}")]
        if order.kind == "preserve":
            earlier = tuple(self._gathered.get(order.incident, ()))
            kept = preserve.preserve_round(watch, order, earlier)
            limit_s = dumps.bounded(order.deadline_s) + _RANK_SLACK_S
            try:
                writing = asyncio.to_thread(self._keep, kept, watch)
                items = await asyncio.wait_for(writing, limit_s)
            except TimeoutError:
                items = preserve.unwritten(kept, f"{watch.file.run_dir} took nothing in {limit_s:.1f} s")
            return _outcome(items), items
        wanted = [watch.ranks[rank] for rank in sorted(watch.ranks) if not order.ranks or rank in order.ranks]
        missing = sorted(set(order.ranks) - set(watch.ranks))
        kind, text = dumps.kind_of(order), "the rank is not on this node"
        items = [EvidenceItem(kind=kind, ok=False, rank=rank, text=text) for rank in missing]
        if order.kind in signals.SIGNALS:
            items += [signals.send(order.kind, rank.rank, rank.started, watch.bounds) for rank in wanted]
        elif order.kind == profile.KIND:
            items += await asyncio.gather(*(profile.of_rank(order, watch, rank) for rank in wanted))
        else:
            of_ranks = await asyncio.gather(*(self._dump(order, watch, rank) for rank in wanted))
            items += [item for of_rank in of_ranks for item in of_rank]
        return _outcome(items), items

    def _keep(self, kept: preserve.Kept, watch: RoundWatch) -> list[EvidenceItem]:
        """Write what was kept, with what the kernel says of ranks that are gone; in a thread."""
        traced = kept._replace(pieces=[*kept.pieces, *preserve.traces_of(watch, self._kernel_log)])
        return preserve.write(traced, watch.file.run_dir, watch.bounds.owner)

    async def _dump(self, order: Order, watch: RoundWatch, rank: RankWatch) -> list[EvidenceItem]:
        """Return one rank's dump; one that is late or fails is evidence itself and costs the others nothing."""
        dump = dumps.stacks_of if order.kind == "dump_stacks" else dumps.flight_recorder_of
        limit_s = dumps.bounded(order.deadline_s) + _RANK_SLACK_S
        try:
            async with asyncio.timeout(limit_s):
                return await dump(order, watch, rank)
        except TimeoutError:
            return [dumps.no_answer(order, rank.rank, limit_s)]
        except Exception as error:  # one rank's dump that fails must not cost the others'; reported as above
            log.exception("order %s: %s of rank %d failed", order.id, order.kind, rank.rank,
                          extra={"job": order.job, "node": self._node})  # fmt: skip
            return [dumps.broken(order, rank.rank, error)]

    def _named(self, order: Order) -> list[int]:
        """Return the ranks that an order is for; -1 when nothing is known of them."""
        watch = self._rounds.find(order.job, order.round)
        return sorted(order.ranks or (watch.ranks if watch is not None else ())) or [-1]

    def _refusal(self, order: Order) -> str:
        """Return why an order must be refused, "" when it must not."""
        if order.kind not in ORDERS_FOR_AGENT:
            return f"{order.kind!r} is no order for an agent"
        if order.node != self._node:
            return f"this is node {self._node}, the order is for {order.node}"
        here = self._rounds.current.get(order.job)
        if here is not None and here.round == order.round:
            return ""
        if order.kind == "preserve" and self._rounds.find(order.job, order.round) is not None:
            return ""
        now = f"is in round {here.round}" if here is not None else "does not run here"
        return f"the order is for round {order.round}; job {order.job} {now}"


def _fit(items: list[EvidenceItem]) -> tuple[EvidenceItem, ...]:
    """Shorten texts, then frames and facts, until all fit into one message; the files hold the whole."""
    characters, frames, collectives = dumps.TEXT_CHARACTERS, frame_classes.MOST_FRAMES, collective_facts.MOST_FACTS
    kernels = MOST_KERNELS
    fitted = tuple(items)
    while len(msgspec.json.encode(fitted)) > _MOST_BYTES and characters:
        characters, kernels = characters // 2, max(1, kernels // 2)
        if characters < _LEAST_CHARACTERS:
            frames, collectives = frames // 2, collectives // 2
        fitted = tuple(_cut(item, characters, frames, collectives, kernels) for item in items)
    return fitted


def _cut(item: EvidenceItem, characters: int, frames: int, collectives: int, kernels: int) -> EvidenceItem:
    """Shorten one item."""
    found = item.kernels
    if found is not None and len(found.kernels) > kernels:
        left = found.kernels[kernels:]
        found = msgspec.structs.replace(
            found,
            kernels=found.kernels[:kernels],
            left_out=found.left_out + len(left),
            left_out_us=found.left_out_us + sum(row.total_us for row in left),
        )
    calls = collective_facts.choose(item.collectives, collectives)
    gpu = item.gpu
    if (
        collectives < collective_facts.MOST_FACTS
    ):  # lists by peer, and what queues behind the oldest operations, are the longest
        calls = tuple(msgspec.structs.replace(call, sends=(), receives=()) for call in calls)
        if gpu is not None:
            gpu = msgspec.structs.replace(gpu, operations=gpu.operations[:collectives])
    return msgspec.structs.replace(
        item,
        text=item.text[:characters],
        frames=item.frames[:frames],
        worker=item.worker[:characters],
        collectives=calls,
        kernels=found,
        gpu=gpu,
        groups=item.groups if collectives else (),
    )


def _outcome(items: list[EvidenceItem]) -> str:
    """An order that brought nothing at all has failed; a rank that does not answer is an answer."""
    return "obeyed" if not items or any(item.ok for item in items) else "failed"
