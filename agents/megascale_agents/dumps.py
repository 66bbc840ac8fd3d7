# SPDX-License-Identifier: Apache-2.0
"""The two dumps of a live rank, each answered with a summary for the controller and a file for people.

A full disk or a missing run folder costs the file, not the summary.
"""

import asyncio
import time

from megascale_agents import flight_recorder, stacks
from megascale_agents.collectors import process
from megascale_agents.incident_folder import IncidentFolder
from megascale_agents.ranks import RankWatch
from megascale_agents.rounds import RoundWatch
from megascale_ops.schema.messages import EvidenceItem, Order

TEXT_CHARACTERS = 4000  # the bound that schema.messages.EvidenceItem promises
_DEADLINE_BOUNDS_S = (0.1, 60.0)  # py-spy's start alone takes 10 ms; a minute is beyond every patience
_KINDS = {"dump_stacks": "stacks", "dump_flight_recorder": "flight_recorder", "preserve": "black_box"}


def bounded(deadline_s: float) -> float:
    """Return an order's deadline, within reason."""
    low, high = _DEADLINE_BOUNDS_S
    return min(high, max(low, deadline_s))


def kind_of(order: Order) -> str:
    """Return the kind of evidence that an order brings."""
    return _KINDS.get(order.kind, "signal")


async def stacks_of(order: Order, watch: RoundWatch, rank: RankWatch) -> EvidenceItem:
    """Get the rank's stacks before the order's deadline."""
    began_s = time.monotonic()
    since_s = rank.process.reading(began_s).stopped_since_mono_s
    target = stacks.Target(
        rank=rank.rank,
        pid=rank.process.pid,
        box_dir=watch.folder,
        state=state_of(rank),
        stopped_s=began_s - since_s if since_s else 0.0,
    )
    found = await stacks.dump(target, bounded(order.deadline_s))
    path, said = "", ""
    if found.ok:
        path, said = await _keep(order, watch, f"rank-{rank.rank}.stacks.txt", found.text.encode())
    return _item(order, rank, began_s, ok=found.ok, text=said + found.text, path=path)


async def flight_recorder_of(order: Order, watch: RoundWatch, rank: RankWatch) -> EvidenceItem:
    """Get the rank's flight recorder before the order's deadline."""
    began_s = time.monotonic()
    state = state_of(rank)
    if state in ("", "T"):
        text = f"no answer: process is {'stopped' if state else 'gone'}"
        return _item(order, rank, began_s, ok=False, text=text)
    socket = flight_recorder.socket_path(watch.folder, rank.rank)
    try:
        dump = await flight_recorder.ask(socket, "fr_trace_json", bounded(order.deadline_s))
        summary = flight_recorder.parse(dump)
    except (flight_recorder.NoAnswerError, ValueError) as error:
        return _item(order, rank, began_s, ok=False, text=str(error))
    path, said = await _keep(order, watch, f"rank-{rank.rank}.flight_recorder.json", dump)
    return _item(order, rank, began_s, ok=True, text=said + summary, path=path)


def state_of(rank: RankWatch) -> str:
    """Look at the process now, aside from the regular looks, which must not miss a change."""
    seen = process.read_once(rank.process.pid)
    return seen.state if seen.start_ticks == rank.process.start_ticks else ""


async def _keep(order: Order, watch: RoundWatch, name: str, data: bytes) -> tuple[str, str]:
    """Write a dump into the incident's folder; return its path, and what to say when that failed."""
    if not order.incident:
        return "", ""
    try:
        folder = IncidentFolder(watch.file.run_dir, order.incident, order.node)
        return str(await asyncio.to_thread(folder.write, name, data)), ""
    except (OSError, ValueError) as error:
        return "", f"(not kept: {error})\n"


def _item(order: Order, rank: RankWatch, began_s: float, *, ok: bool, text: str, path: str = "") -> EvidenceItem:
    took_s = round(time.monotonic() - began_s, 4)
    return EvidenceItem(
        kind=kind_of(order), ok=ok, rank=rank.rank, text=text[:TEXT_CHARACTERS], path=path, took_s=took_s
    )
