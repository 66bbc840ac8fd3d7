# SPDX-License-Identifier: Apache-2.0
"""The two dumps of a rank: for people a summary and a file, for a judge facts, frames and marks.

    dump_stacks           process (its state, from /proc), stacks
    dump_flight_recorder  collectives (from the black box, and the tiles of progress boards), flight_recorder

The first of each pair needs no answer of the rank and is always there. A full disk, a missing run folder or one that
hangs costs the file, not the summary.
"""

import asyncio
import time

import msgspec

from megascale_agents.collectors import process, unsent
from megascale_agents.evidence import collective_facts, flight_recorder, gpu_view, process_state, stacks
from megascale_agents.evidence.incident_folder import IncidentFolder
from megascale_agents.evidence.process_state import ProcessLook
from megascale_agents.ownership import processes
from megascale_agents.ownership.processes import GoneError, Held, NotOfJobError
from megascale_agents.ranks import work_meter
from megascale_agents.ranks.rank_watch import RankWatch
from megascale_agents.ranks.rounds import RoundWatch
from megascale_ops.blackbox import nccl_words
from megascale_ops.blackbox.calls import of_ring
from megascale_ops.schema.messages import EvidenceItem, Order
from megascale_ops.schema.tiles import describe
from megascale_ops.schema.work import ProcessWork

TEXT_CHARACTERS = 4000  # the bound of schema.messages.EvidenceItem
_DEADLINE_BOUNDS_S = (0.1, 60.0)  # py-spy's start alone takes 10 ms; a minute exceeds every deadline
_KINDS = {
    "dump_stacks": "stacks",
    "dump_flight_recorder": "flight_recorder",
    "preserve": "black_box",
    "profile": "profile",
}
# 1 s: a dump of 1 MB takes 2 ms on a healthy disk; a run folder on a disk that hangs must not cost the answer.
_KEEP_S = 1.0


def bounded(deadline_s: float) -> float:
    """Return an order's deadline, within reason."""
    low, high = _DEADLINE_BOUNDS_S
    return min(high, max(low, deadline_s))


def kind_of(order: Order) -> str:
    """Return the kind of evidence that an order brings."""
    return _KINDS.get(order.kind, "signal")


def no_answer(order: Order, rank: int, after_s: float) -> EvidenceItem:
    """Return the evidence that a rank did not answer in ``after_s`` seconds."""
    text = f"no answer: {order.kind} was not done in {after_s:.1f} s"
    return EvidenceItem(kind=kind_of(order), ok=False, rank=rank, text=text, marks=("no_answer",))


def broken(order: Order, rank: int, error: Exception) -> EvidenceItem:
    """Return the evidence that reading a rank failed by our own fault."""
    return EvidenceItem(kind=kind_of(order), ok=False, rank=rank, text=f"{order.kind}: {error!r}")


async def stacks_of(order: Order, watch: RoundWatch, rank: RankWatch) -> list[EvidenceItem]:
    """Return the state of the rank's process and its stacks, before the order's deadline."""
    began_s = time.monotonic()
    process_is = EvidenceItem(kind="process", ok=True, rank=rank.rank, text="process is gone", marks=("gone",))
    try:
        with processes.held(rank.process.pid, rank.process.start_ticks, rank.bounds) as held:
            return await _stacks_of(order, watch, rank, held)
    except GoneError:
        first = msgspec.structs.replace(process_is, seen_mono_s=began_s)
        stacks_are = _item(order, rank, began_s, ok=False, text="no answer: process is gone")
        return [first, msgspec.structs.replace(stacks_are, marks=("gone",))]
    except NotOfJobError as error:
        first = msgspec.structs.replace(process_is, ok=False, text=f"not looked at: {error}", marks=())
        return [first, _item(order, rank, began_s, ok=False, text=f"not looked at: {error}")]


async def _stacks_of(order: Order, watch: RoundWatch, rank: RankWatch, held: Held) -> list[EvidenceItem]:
    """Look at a process that is held."""
    began_s = time.monotonic()
    reading = rank.process.reading(began_s)
    work, stands, took_s = await _work_of(rank, reading.cpu_busy, bounded(order.deadline_s) / 3)
    stuck, addresses = unsent.parse(*await asyncio.to_thread(unsent.read, rank.process.pid))
    if not held.is_same and "gone" not in stands.marks:  # what was read may be another process's by now
        work, stuck, addresses = None, (), ()
    first = EvidenceItem(
        kind="process",
        ok=True,
        rank=rank.rank,
        text="\n".join([stands.text, *unsent.describe(stuck), *_told(work)])[:TEXT_CHARACTERS],
        took_s=took_s,
        marks=stands.marks,
        connections=stuck,
        addresses=addresses,
        work=work,
        seen_mono_s=began_s + took_s,
    )
    since_s = reading.stopped_since_mono_s
    position = rank.box.collective() if rank.box is not None else None
    target = stacks.Target(
        rank=rank.rank,
        pid=rank.process.pid,
        box_dir=watch.folder,
        process=held,
        owner=rank.bounds.owner,
        state=state_of(rank),
        stopped_s=began_s - since_s if since_s else 0.0,
        standing=stands,
        waits=position is not None and position.enqueued > position.completed,
    )
    found = await stacks.dump(target, bounded(order.deadline_s) - took_s)
    path, said = "", ""
    if found.ok:
        path, said = await _keep(order, watch, f"rank-{rank.rank}.stacks.txt", found.text.encode())
    item = _item(order, rank, began_s, ok=found.ok, text=said + found.text, path=path)
    return [first, msgspec.structs.replace(item, frames=found.frames, marks=found.marks, worker=found.worker)]


async def _work_of(rank: RankWatch, busy: float, deadline_s: float) -> tuple[ProcessWork | None, ProcessLook, float]:
    """Look at the process for as long as the deadline allows: what it did, how it stands, how long the looks took."""
    began_s = time.monotonic()
    moved_s = rank.progress.moved_mono_s if rank.progress is not None else 0.0
    await asyncio.to_thread(rank.work.begin, rank.process.pid, began_s, moved_s)
    stands = await process_state.read_state(rank.process.pid, rank.process.start_ticks, busy, deadline_s)
    work = None
    if "gone" not in stands.marks:
        work = await asyncio.to_thread(rank.work.end, time.monotonic(), moved_s, is_running=stands.runs)
    return work, stands, round(time.monotonic() - began_s, 4)


def _told(work: ProcessWork | None) -> list[str]:
    return [work_meter.describe(work)] if work is not None else []


async def flight_recorder_of(order: Order, watch: RoundWatch, rank: RankWatch) -> list[EvidenceItem]:
    """Read the rank's collectives from its black box, and get its flight recorder before the order's deadline."""
    first = collectives_of(watch, rank)
    began_s = time.monotonic()
    state = state_of(rank)
    if state in ("", "T"):
        word, marks = ("stopped", ("no_answer", "stopped")) if state else ("gone", ("gone",))
        item = _item(order, rank, began_s, ok=False, text=f"no answer: process is {word}")
        return [first, msgspec.structs.replace(item, marks=marks)]
    socket = flight_recorder.socket_path(watch.folder, rank.rank)
    try:
        dump, summary = await flight_recorder.fetch_dump(socket, bounded(order.deadline_s), rank.bounds.owner)
    except (flight_recorder.NoAnswerError, ValueError) as error:
        item = _item(order, rank, began_s, ok=False, text=str(error))
        late = isinstance(error, flight_recorder.TooLateError)
        return [first, msgspec.structs.replace(item, marks=("no_answer",) if late else ())]
    path, said = await _keep(order, watch, f"rank-{rank.rank}.flight_recorder.json", dump)
    item = _item(order, rank, began_s, ok=True, text=said + summary.text, path=path)
    return [first, msgspec.structs.replace(item, collectives=summary.collectives, groups=summary.groups)]


def collectives_of(watch: RoundWatch, rank: RankWatch) -> EvidenceItem:
    """Read the ring of collectives in a rank's black box, and its boards; needs no answer of the rank."""
    if rank.box is None:
        return EvidenceItem(kind="collectives", ok=False, rank=rank.rank, text="the rank has no black box")
    began_s = time.monotonic()
    records, position = rank.box.collectives(), rank.box.collective()
    now_ns = time.monotonic_ns()
    names = nccl_words.names_of(rank.box.communicators())
    nccl = nccl_words.told(rank.box.nccl(), now_ns, names, rank.box.profiler())
    tiles = rank.tiles()
    text = "\n".join([*map(describe, tiles), *nccl, collective_facts.describe_ring(records, position, now_ns)])
    return EvidenceItem(
        kind="collectives",
        ok=True,
        rank=rank.rank,
        text=text[:TEXT_CHARACTERS],
        took_s=round(time.monotonic() - began_s, 4),
        seen_mono_s=began_s,
        collectives=collective_facts.choose(of_ring(records, position)),
        tiles=tiles,
        gpu=gpu_view.of_rank(watch, rank, now_ns),
    )


def state_of(rank: RankWatch) -> str:
    """Look at the process now, aside from the regular looks, which must not miss a change."""
    seen = process.read_once(rank.process.pid)
    return seen.state if seen.start_ticks == rank.process.start_ticks else ""


async def _keep(order: Order, watch: RoundWatch, name: str, data: bytes) -> tuple[str, str]:
    """Write a dump into the incident's folder; return its path, and a note when that failed."""
    if not order.incident:
        return "", ""
    try:
        folder = IncidentFolder(watch.file.run_dir, watch.bounds.owner, order.incident, order.node)
        return str(await asyncio.wait_for(asyncio.to_thread(folder.write, name, data), _KEEP_S)), ""
    except TimeoutError:
        return "", f"(not kept: {watch.file.run_dir} did not take {name} in {_KEEP_S:g} s)\n"
    except (OSError, ValueError) as error:
        return "", f"(not kept: {error})\n"


def _item(order: Order, rank: RankWatch, began_s: float, *, ok: bool, text: str, path: str = "") -> EvidenceItem:
    took_s = round(time.monotonic() - began_s, 4)
    return EvidenceItem(
        kind=kind_of(order),
        ok=ok,
        rank=rank.rank,
        text=text[:TEXT_CHARACTERS],
        path=path,
        took_s=took_s,
        seen_mono_s=began_s + took_s,
    )
