# SPDX-License-Identifier: Apache-2.0
"""The order to read a log: what a rank printed, for a person who asks the controller.

Read-only, and bounded: at most 4 MiB are looked at, and as many lines sent as fit into a message. An order has a job, a
rank and a round, never a path: the folder is the one that the job's runner has listed, opened with the rights of the
job's owner, and only ordinary files of that user are read, no link followed.

Orders to read stand beside all others: they are tied to no round, and an incident's evidence waits for none of them.
"""

import asyncio
import contextlib
import logging
from collections.abc import Callable
from functools import partial
from typing import Protocol

import msgspec

from megascale_agents import threads
from megascale_agents.orders.background import Background
from megascale_agents.ownership import files
from megascale_agents.ranks.log_folders import LogFolder, folder_of
from megascale_agents.ranks.rounds import Rounds
from megascale_ops.log_parts import nothing_of, read_part, shortened
from megascale_ops.schema.messages import LOG, MAX_BODY_BYTES, READ_LOG, Evidence, EvidenceItem, Order
from megascale_ops.schema.runs import LogPart, LogQuery

log = logging.getLogger(__name__)

# Three quarters of a message: lines as JSON; the rest is for names, and for rounds by their number.
_MOST_BYTES = MAX_BODY_BYTES * 3 // 4
# 4 at a time: a search takes 10 ms of a core, and a disk that is away keeps no more threads than these.
_MOST_AT_ONCE = 4
# 0.1 to 10 s: a user waits for it.
_LEAST_S, _MOST_S = 0.1, 10.0
# 256 orders: a controller has eight of a node at a time, and gives each again until it is answered.
_REMEMBERED = 256


class Reports(Protocol):
    """Takes what was read to the controller."""

    async def report_evidence(self, evidence: Evidence) -> None:
        """Hand in evidence."""


class LogReading:
    """Reads logs and hands them on.

    Args:
        node: this node's name.
        rounds: what runs here, and where what ran here has printed.
        speaker: takes the answer to the controller.
        count: called with the kind and the outcome (obeyed, failed, refused) of each order.
    """

    def __init__(self, node: str, rounds: Rounds, speaker: Reports, count: Callable[[str, str], None]) -> None:
        self._node = node
        self._rounds = rounds
        self._speaker = speaker
        self._count = count
        self._background = Background(_REMEMBERED)
        self._turns = asyncio.Semaphore(_MOST_AT_ONCE)

    def ingest_order(self, order: Order) -> None:
        """Take an order; one that is known already is not executed again."""
        if self._background.begin(order, self._obey):
            log.debug("order %s: %s of ranks %s", order.id, order.kind, order.ranks, extra={"job": order.job})

    async def close(self) -> None:
        """Leave what is not read; the controller says that no answer came."""
        await self._background.close()

    async def _obey(self, order: Order) -> None:
        """Read, and answer in any case."""
        limit_s = min(_MOST_S, max(_LEAST_S, order.deadline_s))
        try:
            async with asyncio.timeout(limit_s):
                outcome, item = await self._read(order)
        except TimeoutError:
            outcome, item = "failed", _told(f"the disk did not answer within {limit_s:g} s")
        except OSError as error:
            outcome, item = "failed", _told(f"{error.filename or 'the log'} can't be read: {error.strerror or error}")
        except Exception as error:  # an order that fails must not stop the agent; it is reported and logged
            log.exception("order %s: %s failed", order.id, order.kind, extra={"job": order.job, "node": self._node})
            outcome, item = "failed", _told(f"reading failed by a fault of the agent's: {error!r}")
        self._count(READ_LOG, outcome)
        await self._speaker.report_evidence(
            Evidence(node=self._node, job=order.job, incident="", order=order.id, items=(item,))
        )

    async def _read(self, order: Order) -> tuple[str, EvidenceItem]:
        """Return outcome and answer.

        Raises:
            OSError: the folder is there and can't be read.
        """
        query, folder = order.log, self._folder_of(order.job)
        if order.node != self._node:
            return "refused", _told(f"this is node {self._node}, and the order is for {order.node}")
        if query is None:
            return "refused", _told("the order does not say what to read")
        if folder is None:
            return "refused", _told(
                f"job {order.job} does not run here, and has not since this agent began: `megascale-ops logs "
                f"{order.job}` on this node reads what is left"
            )
        await self._turns.acquire()
        end_turn = partial(asyncio.get_running_loop().call_soon_threadsafe, self._turns.release)
        found = await threads.run(lambda: _part(folder, query, end_turn), "read log")
        if found is None:
            nothing = LogPart(query.rank, max(0, query.round), query.stream, node=self._node)
            return "failed", msgspec.structs.replace(_told(nothing_of(query)), rank=query.rank, log=nothing)
        part = shortened(msgspec.structs.replace(found, node=self._node), _MOST_BYTES)
        return "obeyed", EvidenceItem(kind=LOG, ok=True, rank=query.rank, log=part)

    def _folder_of(self, job: str) -> LogFolder | None:
        """Return where a job prints, or has printed."""
        watch = self._rounds.current.get(job)
        return (
            LogFolder(folder_of(watch.file), watch.bounds.owner) if watch is not None else self._rounds.logs.find(job)
        )


def _part(folder: LogFolder, query: LogQuery, end_turn: Callable[[], object]) -> LogPart | None:
    """Read as the owner of the job would; in a thread, whose turn ends when the disk has answered, however late."""
    try:
        with files.folder(folder.path, folder.owner) as handle:
            return read_part(handle, query, folder.owner.uid)
    finally:
        with contextlib.suppress(RuntimeError):  # the agent has ended since
            end_turn()


def _told(text: str) -> EvidenceItem:
    return EvidenceItem(kind=LOG, ok=False, text=text)
