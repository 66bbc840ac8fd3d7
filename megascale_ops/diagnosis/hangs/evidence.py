# SPDX-License-Identifier: Apache-2.0
"""The evidence on one rank, folded piece by piece as it arrives.

A rank is looked at several times while a suspicion lasts. Of each kind of evidence the newest answer counts; of its
stack it is remembered whether the looks agree (a rank that is stuck shows the same frames again, one that evaluates or
compiles does not), and of its collectives and its kernels' tiles whether they went on. "No answer" never wipes out what
an earlier look saw.

Positions are worked out here, when evidence arrives node by node, so that a judgement of 12,288 ranks finds them done.

Pure: a look and an item in, the next look out.
"""

from collections.abc import Iterable
from typing import NamedTuple

import msgspec

from megascale_ops.diagnosis.hangs.gpu_queue import queue_of_facts
from megascale_ops.diagnosis.hangs.work import computes, works
from megascale_ops.schema.collectives import GroupMembers
from megascale_ops.schema.gpu_queue import GpuQueue
from megascale_ops.schema.messages import CollectiveFact, EvidenceItem, StuckConnection
from megascale_ops.schema.tiles import TileFact
from megascale_ops.schema.work import ProcessWork


class Position(NamedTuple):
    """How far a rank is in one process group."""

    group: str
    entered: int  # sequence number of the last collective that it has entered, -1: none
    waits_in: CollectiveFact | None = None  # its oldest unfinished one


class Look(NamedTuple):
    """What is known of one rank."""

    recorded: tuple[CollectiveFact, ...] = ()  # by torch's flight recorder: with sizes and types
    ring: tuple[CollectiveFact, ...] = ()  # from the black box: needs no answer of the rank
    frames: tuple[str, ...] = ()
    worker: str = ""  # of its data loader, which makes the batch that it waits for, as of the newest stack
    seen: int = 0  # how often its stack was seen
    alike: int = 0  # how many of the newest looks in a row saw the same stack
    went_on: bool = False  # its collectives did, between two looks
    tiles: tuple[TileFact, ...] = ()  # where its overlapped kernels are, as of the newest look
    tiles_alike: int = 0  # how many of the newest looks in a row saw the same of them
    tiles_went_on: bool = False  # tiles or launches have ended between two looks
    by_kind: tuple[tuple[tuple[str, bool], frozenset[str]], ...] = ()  # (kind, whether it answered) -> newest marks
    marks: frozenset[str] = frozenset()
    positions: tuple[Position, ...] = ()  # the group in which it waits comes first
    waits_for_peer: bool = False  # an unfinished send or receive
    gpu: GpuQueue | None = None  # as of the newest look that has it
    gpu_by_plugin: bool = False
    gpu_looks: int = 0
    gpu_alike: int = 0  # how many of the newest looks in a row saw the GPU begin and end nothing
    stuck: tuple[StuckConnection, ...] = ()  # as of the newest look
    stuck_looks: int = 0  # how many of the newest looks in a row saw any
    addresses: tuple[str, ...] = ()
    work: ProcessWork | None = None  # as of the newest look
    seen_mono_s: float = 0.0  # when its newest evidence was complete, its agent's clock; 0: not known
    members: tuple[GroupMembers, ...] = ()  # of the groups in which it waits, as torch notes them
    worked_mono_s: float = 0.0  # when it was last seen to get something done, its agent's clock; 0: never

    @property
    def peer_call(self) -> CollectiveFact | None:
        """The send or receive that it is in, or began last and has not ended as far as is known."""
        unfinished = [fact for fact in self.recorded if fact.seq < 0 and not fact.done]
        last = next((fact for fact in reversed(self.ring) if fact.function), None)
        if last is not None and last.seq < 0 and not last.done:
            unfinished.append(last)
        return next((fact for fact in reversed(unfinished) if fact.function != "coalesced"), None)


NOTHING = Look()


def gather(items: Iterable[EvidenceItem]) -> dict[int, Look]:
    """Fold evidence, oldest first, into one look for each rank that it covers."""
    looks: dict[int, Look] = {}
    for item in items:
        if item.rank >= 0:
            looks[item.rank] = see(looks.get(item.rank, NOTHING), item)
    return looks


def see(look: Look, item: EvidenceItem) -> Look:
    """Take in one piece of evidence."""
    if item.marks or look.by_kind:
        look = _mark(look, item)
    if item.frames:
        same = look.seen > 0 and _place(item.frames) == _place(look.frames)
        look = look._replace(frames=item.frames, seen=look.seen + 1, alike=look.alike + 1 if same else 1)
        look = look._replace(worker=item.worker)
    if item.seen_mono_s > look.seen_mono_s:
        look = look._replace(seen_mono_s=item.seen_mono_s)
    if item.kind == "process":
        looks = look.stuck_looks + 1 if item.connections else 0
        look = look._replace(
            stuck=item.connections,
            stuck_looks=looks,
            addresses=item.addresses,
            work=item.work,
            worked_mono_s=_worked(item.work) or look.worked_mono_s,
        )
    if item.collectives:
        look = _follow(look, item)
    if item.kind == "collectives" and item.ok:
        look = _follow_tiles(look, item)
    return _watch_gpu(look, item)


def _watch_gpu(look: Look, item: EvidenceItem) -> Look:
    """Take in what its GPU has before it, by NCCL's plugin, or else by a flight recorder that times."""
    by_plugin = item.gpu is not None
    if not by_plugin and (item.kind != "flight_recorder" or look.gpu_by_plugin):
        return look
    queue = item.gpu if by_plugin else queue_of_facts(item.collectives)
    if queue is None:
        return look
    same = look.gpu is not None and look.gpu.state == queue.state
    alike = look.gpu_alike + 1 if same else 1
    return look._replace(gpu=queue, gpu_by_plugin=by_plugin, gpu_looks=look.gpu_looks + 1, gpu_alike=alike)


def _follow_tiles(look: Look, item: EvidenceItem) -> Look:
    """Take in its boards as they are now: one that is gone (a workspace was closed) no longer counts."""
    if not item.tiles and not look.tiles:
        return look
    before = {fact.group: (fact.launch, fact.done) for fact in look.tiles}
    went_on = any(fact.group in before and (fact.launch, fact.done) > before[fact.group] for fact in item.tiles)
    alike = look.tiles_alike + 1 if item.tiles == look.tiles else 1
    return look._replace(tiles=item.tiles, tiles_alike=alike, tiles_went_on=went_on)


def _worked(work: ProcessWork | None) -> float:
    """Return when a look has seen work, 0 where it has not."""
    return work.mono_s if work is not None and (computes(work) or works(work)) else 0.0


def positions_of(facts: Iterable[CollectiveFact]) -> tuple[Position, ...]:
    """Return how far a rank is in each group; the group of its oldest unfinished collective comes first."""
    entered: dict[str, int] = {}
    waits: dict[str, CollectiveFact] = {}
    for fact in facts:
        if fact.seq < 0:
            continue
        if fact.seq > entered.get(fact.group, -1):
            entered[fact.group] = fact.seq
        if not fact.done:
            waits.setdefault(fact.group, fact)
    order = [*waits, *(group for group in entered if group not in waits)]
    return tuple(Position(group, entered[group], waits.get(group)) for group in order)


def _mark(look: Look, item: EvidenceItem) -> Look:
    """Take in its marks: an answer replaces all marks of its kind, a failure those of the failure before."""
    over = {(item.kind, False), (item.kind, item.ok)}
    by_kind = tuple(known for known in look.by_kind if known[0] not in over)
    if item.marks:
        by_kind += (((item.kind, item.ok), frozenset(item.marks)),)
    return look._replace(by_kind=by_kind, marks=frozenset().union(*(marks for _, marks in by_kind)))


def _follow(look: Look, item: EvidenceItem) -> Look:
    """Take in how far its collectives are; the flight recorder's word counts before the black box's."""
    if item.kind == "flight_recorder":
        before, look = look.recorded, look._replace(recorded=item.collectives, members=item.groups)
    else:
        before, look = look.ring, look._replace(ring=item.collectives)
    if look.recorded and item.kind != "flight_recorder":
        return look
    facts = (*look.recorded, *_not_recorded(look)) if look.recorded else _by_last_call(look.ring)
    # Of what was begun in the background a black box never sees the end: there only the last call can be waited in.
    sent = any(fact.seq < 0 and not fact.done for fact in facts) if look.recorded else look.peer_call is not None
    return look._replace(
        positions=positions_of(facts),
        waits_for_peer=sent,
        went_on=bool(before) and before != item.collectives and _count(before) < _count(item.collectives),
    )


def _not_recorded(look: Look) -> list[CollectiveFact]:
    """Return the last call in the black box if it has not ended and the flight recorder knows none so new of its group.

    NCCL forms a communicator inside the first call of a group, and torch records that call only when it is formed.
    """
    called = [fact for fact in look.ring if fact.function]
    if not called or called[-1].done:
        return []
    known = max((fact.seq for fact in look.recorded if fact.group == called[-1].group), default=-1)
    return called[-1:] if called[-1].seq > known else []


def _by_last_call(ring: tuple[CollectiveFact, ...]) -> Iterable[CollectiveFact]:
    """Return a black box's facts: a rank inside its last call does not wait in the calls that it began before."""
    last = next((fact for fact in reversed(ring) if fact.function), None)
    if last is None or last.done or last.seq < 0:
        return ring
    return [fact if fact.done or fact is last else msgspec.structs.replace(fact, done=True) for fact in ring]


def _count(facts: Iterable[CollectiveFact]) -> tuple[int, int]:
    """Return a number that only grows while collectives go on."""
    known = positions_of(facts)
    entered = sum(position.entered for position in known)
    return entered, -sum(1 for position in known if position.waits_in is not None)


def _place(frames: tuple[str, ...]) -> tuple[str, ...]:
    """Return where a stack is, without the line of its innermost frame: a loop of two lines is one place."""
    return (frames[0].rpartition(":")[0], *frames[1:])
