# SPDX-License-Identifier: Apache-2.0
"""An agent that does nothing but read logs: it speaks to a real controller, and its files are real."""

import asyncio
import contextlib
import os
import time
from collections.abc import AsyncIterator
from pathlib import Path

import msgspec

from megascale_ops.link import Link
from megascale_ops.log_parts import nothing_of, read_part
from megascale_ops.schema.messages import LOG, Evidence, EvidenceItem, Heartbeat, Order
from megascale_ops.schema.runs import LogPart

_EVERY_S = 0.05


@contextlib.asynccontextmanager
async def reading_agent(url: str, node: str, folder: Path) -> AsyncIterator[None]:
    """Be the agent of a node until the block ends; ``folder`` has the rounds."""
    task = asyncio.create_task(_beat(url, node, folder))
    try:
        yield
    finally:
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)


async def _beat(url: str, node: str, folder: Path) -> None:
    async with Link(url) as link:
        seq = 0
        while True:
            seq += 1
            reply = await link.heartbeat(Heartbeat(node, "reads", seq, time.monotonic(), time.time(), full=True))
            for order in reply.orders:
                items = (_read(order, folder),)
                await link.evidence(Evidence(node, order.job, "", order.id, items=items))
            await asyncio.sleep(_EVERY_S)


def _read(order: Order, folder: Path) -> EvidenceItem:
    query = order.log
    assert query is not None, order
    handle = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        found = read_part(handle, query, os.geteuid())
    finally:
        os.close(handle)
    if found is None:
        return EvidenceItem(LOG, ok=False, text=nothing_of(query), log=LogPart(query.rank, 0, query.stream))
    return EvidenceItem(LOG, ok=True, rank=query.rank, log=msgspec.structs.replace(found, node=order.node))
