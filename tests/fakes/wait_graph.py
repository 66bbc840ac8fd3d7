# SPDX-License-Identifier: Apache-2.0
"""Who waits for what in the operators, as a graph: an event per step of every role, an edge per thing it needs.

A role (a CTA, a warp that fetches, a warpgroup that multiplies, a copy stream) does its events one after another, and
some events need events of others: a flag raised, a slot of the ring filled or emptied. If the graph has no cycle and
nothing is needed that never happens, every wait ends, whatever the schedule: all programs of a launch are resident.

The orders of tiles, owners, flags and cuts are the product's own functions. What the roles do between is written down
here a second time, in the order of `ag_gemm.py`, `gemm_rs.py`, `gemm_ar.py`, `hopper_ag.py` and `hopper_rs.py`.
"""

from collections.abc import Iterator
from graphlib import CycleError, TopologicalSorter
from types import FunctionType, SimpleNamespace
from typing import Any, NamedTuple

from megascale_kernels.ag_gemm import hopper
from megascale_kernels.device import hopper_gemm
from megascale_kernels.planning import tile_order
from megascale_kernels.planning.stream_k import Cut, pairs_quarters
from megascale_kernels.planning.tiling import PARTIAL_PIECES, cut_last_wave
from triton.language import constexpr
from triton.runtime.jit import JITFunction

Event = tuple[Any, ...]

grouped = tile_order.python(tile_order.grouped)
scatter_stretch = tile_order.python(tile_order.scatter_stretch)
gather_source = tile_order.python(tile_order.gather_source)
gather_stretch = tile_order.python(tile_order.gather_stretch)
scatter_owner = tile_order.python(tile_order.scatter_owner)
channel_of_tile = tile_order.python(tile_order.channel_of_tile)
unit_of_row = tile_order.python(tile_order.unit_of_row)

CONSUMERS = 2


# Units of work come from device functions. Their code is plain arithmetic but for a few names of Triton's language:
# here these stand for what Python has in their place.
def _on(programs: int, program: int = 0) -> SimpleNamespace:
    """`gluon.language` for a program of so many."""
    return SimpleNamespace(
        maximum=max,
        where=lambda condition, yes, no: yes if condition else no,
        num_programs=lambda _: programs,
        program_id=lambda _: program,
    )


def _device(function: JITFunction[Any], language: SimpleNamespace) -> FunctionType:
    """A device function of `hopper` on integers."""
    plain = {name: tile_order.python(getattr(tile_order, name)) for name in ("share_of", "turns_of_share")}
    return FunctionType(function.fn.__code__, {**function.fn.__globals__, **plain, "gl": language})


# Likewise where the warp-specialised all-gather computes what a tile reads; its mappings are Triton's functions there.
_MAPPINGS = {"gather_source": gather_source, "gather_stretch": gather_stretch, "grouped": grouped}
_place_of = FunctionType(hopper.place_of.fn.__code__, _MAPPINGS, "place_of")


class Unit(NamedTuple):
    """A unit of work: its tile, its K blocks, where it stores its partial, and how many places before hold others'."""

    tile: int
    first: int
    last: int
    place: int
    before: int


class Shape(NamedTuple):
    """A launch, in blocks.

    Attributes:
        ranks: how many.
        blocks_m: row blocks of a shard.
        blocks_n: column blocks.
        ctas: programs of each rank.
        blocks_k: K blocks of a tile ("hopper" only).
        split: parts of each tile of the last, partial wave, or `EVEN` ("hopper" only).
        group_m: row blocks walked together.
        slots: of the ring ("hopper" only).
        unit_blocks: row blocks that one flag announces (all-gather only).
        lead: column blocks walked shard by shard (all-gather only); None: all.
        whole: tiles in one piece, when more than the last wave is cut into `split` parts ("hopper" all-gather only).
        mixed: our own rows are walked among the peers' (reduce-scatter only).
        scatters: it is a reduce-scatter, which says how its last tiles are walked.
    """

    ranks: int
    blocks_m: int = 1
    blocks_n: int = 1
    ctas: int = 1
    blocks_k: int = 3
    split: int | None = 1
    group_m: int = 2
    slots: int = 3
    unit_blocks: int = 1
    lead: int | None = None
    whole: int | None = None
    mixed: bool | None = None
    scatters: bool = False

    @property
    def per_shard(self) -> int:
        """Tiles of one shard."""
        return self.blocks_m * self.blocks_n

    @property
    def tiles(self) -> int:
        """Tiles of one rank."""
        return self.per_shard * self.ranks

    def block(self, tile: int) -> tuple[int, int]:
        """Where in its shard a tile lies."""
        place: tuple[int, int] = grouped(tile % self.per_shard, self.blocks_m, self.blocks_n, self.group_m)
        return place

    def gathered(self, tile: int, rank: int) -> tuple[int, int, int]:
        """Whose rows a tile of an all-gather reads, and where in that shard it lies."""
        lead = tile_order.lead_columns(self.blocks_n, self.lead)
        above, height, left, width, inner = gather_stretch(tile, self.blocks_m, self.blocks_n, lead, self.ranks)
        block, block_n = grouped(inner, height, width, self.group_m)
        step, block_m = divmod(above + block, self.blocks_m)
        return gather_source(step, rank, self.ranks), block_m, left + block_n

    def scattered(self, tile: int, rank: int) -> tuple[int, int, int]:
        """Whose rows a tile of a reduce-scatter holds, and where in that shard it lies."""
        group_m = tile_order.scatter_group(self.blocks_m, self.ranks, self.group_m, self.mixed)
        above, height, inner = scatter_stretch(tile, self.blocks_m, self.blocks_n, group_m, self.ranks)
        block, block_n = grouped(inner, height, self.blocks_n, group_m)
        block += above
        return scatter_owner(block // self.blocks_m, rank, self.ranks), block % self.blocks_m, block_n

    def cut(self) -> Cut:
        """Whole tiles, parts of each of the others, units of work."""
        whole, split = cut_last_wave(self.tiles, self.ctas, self.blocks_k, self.split)
        if self.whole is not None and self.split:
            whole, split = min(self.whole, self.tiles), min(self.split, self.blocks_k)
        height = min(self.group_m, self.blocks_m)
        if self.scatters:
            height = tile_order.scatter_height(self.blocks_m, self.ranks, self.group_m, self.mixed)
        return Cut(self.blocks_m, self.blocks_n, self.blocks_k, self.tiles, whole, split, self.ctas, height)


def units_of(shape: Shape, cta: int) -> range:
    """The units of work of a program, by `hopper.end_of_units` itself."""
    cut = shape.cut()
    end = _device(hopper_gemm.end_of_units, _on(shape.ctas, cta))(_work(cut), constexpr(cut.way))
    return range(cta, end, shape.ctas)


def unit_of_work(shape: Shape, unit: int) -> Unit:
    """`hopper.unit_of_work` itself, on integers."""
    cut = shape.cut()
    return Unit(*_device(hopper_gemm.unit_of_work, _on(shape.ctas))(_work(cut), unit, constexpr(cut.way)))


def _work(cut: Cut) -> SimpleNamespace:
    return SimpleNamespace(whole_tiles=cut.whole_tiles, split=cut.parts, blocks_k=cut.blocks_k, units=cut.units)


def place_of(shape: Shape, tile: int, rank: int, *, tall: bool) -> tuple[int, int, int]:
    """`hopper_ag.place_of` itself, on integers."""
    work = SimpleNamespace(blocks_m=shape.blocks_m, blocks_n=shape.blocks_n, group_m=shape.group_m)
    channel = SimpleNamespace(rank=rank, world_size=shape.ranks)
    lead = tile_order.lead_columns(shape.blocks_n, shape.lead)
    place: tuple[int, int, int] = _place_of(work, channel, lead, tile, tall)
    return place


class Graph:
    """Events and what each needs; launches follow each other on the stream of their rank."""

    def __init__(self, ranks: int) -> None:
        self.needs: dict[Event, set[Event]] = {}
        self.ranks = ranks
        self.launch = 0
        self.roles = 0
        self._last: dict[int, list[Event]] = {rank: [] for rank in range(ranks)}

    def begin(self) -> None:
        """The next launch: nothing of it begins on a rank before the launch before has ended there."""
        for rank in range(self.ranks):
            self.needs["end", self.launch, rank] = set(self._last[rank])
        self.launch += 1
        for rank in range(self.ranks):
            self.needs["begin", self.launch, rank] = {("end", self.launch - 1, rank)}
            self._last[rank] = [("begin", self.launch, rank)]

    def role(self, rank: int) -> "Role":
        """Somebody on a rank who does one thing after another."""
        return Role(self, rank)

    def happens(self, event: Event, needed: set[Event]) -> None:
        """Add an event."""
        assert event not in self.needs, event
        self.needs[event] = needed

    def ended(self, rank: int, event: Event) -> None:
        """A role of the running launch has come to its last event."""
        self._last[rank].append(event)

    def never(self) -> set[Event]:
        """What is waited for but never happens."""
        return {event for needed in self.needs.values() for event in needed} - set(self.needs)

    def circle(self) -> list[Event]:
        """Events that wait for each other in a circle; empty when every wait ends."""
        try:
            TopologicalSorter(self.needs).prepare()
        except CycleError as error:
            return list(error.args[1])
        return []

    def before(self, event: Event) -> set[Event]:
        """Everything that has happened whenever this event has."""
        found: set[Event] = set()
        todo = [event]
        while todo:
            for needed in self.needs[todo.pop()] - found:
                found.add(needed)
                todo.append(needed)
        return found


class Role:
    """One after another."""

    def __init__(self, graph: Graph, rank: int) -> None:
        self._graph, self._rank = graph, rank
        self._previous: Event = ("begin", graph.launch, rank)
        self._number, self._steps = graph.roles, 0
        graph.roles += 1

    def do(self, event: Event, *needed: Event) -> None:
        """Do something that others need, once what it needs itself has happened."""
        self._graph.happens(
            (*event, self._graph.launch), {self._previous, *((*one, self._graph.launch) for one in needed)}
        )
        self._previous = (*event, self._graph.launch)

    def wait(self, *needed: Event) -> None:
        """Do nothing until others have done something."""
        self._steps += 1
        self.do(("step", self._number, self._steps), *needed)

    def end(self) -> None:
        """There is nothing more to do in this launch."""
        self._graph.ended(self._rank, self._previous)


def flag(target: int, source: int, index: int) -> Event:
    """The event that a flag of `source` is raised on `target`."""
    return ("flag", target, source, index)


def push(graph: Graph, shape: Shape) -> None:
    """Every rank's copies, unit by unit, nearest reader first: by a stream or a CTA, which never wait."""
    units = -(-shape.blocks_m // shape.unit_blocks)
    for rank in range(shape.ranks):
        role = graph.role(rank)
        for step in range(1, shape.ranks):
            for unit in range(units):
                role.do(flag((rank - step) % shape.ranks, rank, unit))
        role.end()


def rows_of(shape: Shape, rank: int, tile: int) -> list[Event]:
    """What a tile of all-gather + GEMM waits for."""
    source, block_m, _ = shape.gathered(tile, rank)
    if source == rank:
        return []
    return [flag(rank, source, unit_of_row(block_m, shape.unit_blocks))]


def partials_of(shape: Shape, rank: int, index: int) -> list[Event]:
    """Every peer's flag for one of our own tiles, or parts of tiles."""
    return [flag(rank, peer, index) for peer in range(shape.ranks) if peer != rank]


def ag_gemm(graph: Graph, shape: Shape) -> None:
    """One launch of the plain all-gather + GEMM."""
    graph.begin()
    push(graph, shape)
    for rank, cta in _programs(shape):
        role = graph.role(rank)
        for tile in range(cta, shape.tiles, shape.ctas):
            role.wait(*rows_of(shape, rank, tile))
        role.end()


def gemm_rs(graph: Graph, shape: Shape, *, waits_before_announcing: bool = False) -> None:
    """One launch of the plain GEMM + reduce-scatter; the fault: it waits while it owes an announcement."""
    graph.begin()
    for rank, cta in _programs(shape):
        role = graph.role(rank)
        pending_notify: Event | None = None
        for tile in range(cta, shape.tiles, shape.ctas):
            owner, *block = shape.scattered(tile, rank)
            index = channel_of_tile(*block, shape.blocks_n)
            if owned := owner == rank and waits_before_announcing:
                role.wait(*partials_of(shape, rank, index))
            if pending_notify is not None:
                role.do(pending_notify)
                pending_notify = None
            if owner != rank:
                pending_notify = flag(owner, rank, index)
            elif not owned:
                role.wait(*partials_of(shape, rank, index))
        if pending_notify is not None:
            role.do(pending_notify)
        role.end()


def gemm_ar(graph: Graph, shape: Shape) -> None:
    """One launch of GEMM + all-reduce: every tile is sent to all, then every tile is added up."""
    graph.begin()
    for rank, cta in _programs(shape):
        role = graph.role(rank)
        indices = [
            channel_of_tile(*shape.block(tile), shape.blocks_n) for tile in range(cta, shape.per_shard, shape.ctas)
        ]
        for index in indices:
            for step in range(1, shape.ranks):
                role.do(flag((rank + step) % shape.ranks, rank, index))
        for index in indices:
            role.wait(*partials_of(shape, rank, index))
        role.end()


class _Ring:
    """The ring of one program: use number `i` of it is filled when use `i - slots` was emptied by all consumers."""

    def __init__(self, role: Role, name: tuple[Any, ...], slots: int) -> None:
        self._role, self._name, self._slots = role, name, slots
        self.uses = 0

    def fill(self) -> None:
        """The producer fills the next slot."""
        old = self.uses - self._slots
        emptied = [("empty", *self._name, me, old) for me in range(CONSUMERS)] if old >= 0 else []
        self._role.do(("full", *self._name, self.uses), *emptied)
        self.uses += 1

    def multiply(self, me: int, blocks: int) -> None:
        """A consumer takes some slots, and hands back each when it has begun with the next."""
        for block in range(blocks):
            self._role.wait(("full", *self._name, self.uses))
            if block:
                self._role.do(("empty", *self._name, me, self.uses - 1))
            self.uses += 1
        self._role.do(("empty", *self._name, me, self.uses - 1))

    def take(self, me: int) -> None:
        """A consumer takes a slot and hands it back."""
        self._role.wait(("full", *self._name, self.uses))
        self._role.do(("empty", *self._name, me, self.uses))
        self.uses += 1


def _fetch_lent(producer: Role, ring: "_Ring", shape: Shape, rank: int, unit: Unit) -> None:
    """The last part of a cut tile: wait for the others' partials, and send it through the ring."""
    if unit.last < shape.blocks_k:
        return
    for other in range(unit.place - unit.before, unit.place):
        producer.wait(*(("partial", rank, other, me) for me in range(CONSUMERS)))
        for _ in range(PARTIAL_PIECES):
            ring.fill()


def _lend_or_add(role: Role, ring: "_Ring", shape: Shape, rank: int, me: int, unit: Unit) -> bool:
    """A cut tile: store this partial, or add the others; whether the whole tile is there now."""
    if unit.last < shape.blocks_k:
        role.do(("partial", rank, unit.place, me))
        return False
    for _ in range(unit.before * PARTIAL_PIECES):
        ring.take(me)
    return True


def hopper_ag(graph: Graph, shape: Shape) -> None:
    """One launch of the warp-specialised all-gather + GEMM."""
    graph.begin()
    push(graph, shape)
    for rank, cta in _programs(shape):
        producer = graph.role(rank)
        ring = _Ring(producer, (rank, cta), shape.slots)
        units = [unit_of_work(shape, unit) for unit in units_of(shape, cta)]
        for unit in units:
            producer.wait(*rows_of(shape, rank, unit.tile))
            for _ in range(unit.first, unit.last):
                ring.fill()
            _fetch_lent(producer, ring, shape, rank, unit)
        producer.end()
        for me in range(CONSUMERS):
            role = graph.role(rank)
            ring = _Ring(role, (rank, cta), shape.slots)
            for unit in units:
                ring.multiply(me, unit.last - unit.first)
                _lend_or_add(role, ring, shape, rank, me, unit)
            role.end()


def hopper_rs(graph: Graph, shape: Shape, *, waits_early: bool = False, announces_late: bool = False) -> None:
    """One launch of the warp-specialised GEMM + reduce-scatter.

    Args:
        graph: where to.
        shape: of the launch.
        waits_early: a fault: the producer waits for the peers before it fetches the last K block of a tile.
        announces_late: a fault in company: the sender announces a tile when the next one has been multiplied.
    """
    graph.begin()
    shape = shape._replace(scatters=True)
    for rank, cta in _programs(shape):
        _produce(graph, shape, rank, cta, waits_early=waits_early)
        _send(graph, shape, rank, cta, announces_late=announces_late)
        for me in range(CONSUMERS):
            _consume(graph, shape, rank, cta, me)


def _produce(graph: Graph, shape: Shape, rank: int, cta: int, *, waits_early: bool) -> None:
    producer = graph.role(rank)
    ring = _Ring(producer, (rank, cta), shape.slots)
    for unit in (unit_of_work(shape, unit) for unit in units_of(shape, cta)):
        owner, *block = shape.scattered(unit.tile, rank)
        adds = owner == rank and unit.last == shape.blocks_k
        flags = partials_of(shape, rank, channel_of_tile(*block, shape.blocks_n))
        for k in range(unit.first, unit.last):
            if adds and waits_early and k == unit.last - 1:
                producer.wait(*flags)
            ring.fill()
        _fetch_lent(producer, ring, shape, rank, unit)
        if adds:
            producer.wait(*flags)
            for _ in range(_partial_uses(shape)):
                ring.fill()
    producer.end()


def _send(graph: Graph, shape: Shape, rank: int, cta: int, *, announces_late: bool) -> None:
    sender = graph.role(rank)
    units = units_of(shape, cta)
    for unit in units:
        tile, _, last, _, _ = unit_of_work(shape, unit)
        owner, *block = shape.scattered(tile, rank)
        if owner == rank or last < shape.blocks_k:
            continue
        sender.wait(*(("kept", rank, cta, me, unit) for me in range(CONSUMERS)))
        sender.do(("sent", rank, cta, unit))
        if announces_late and unit + shape.ctas in units:
            sender.wait(*(("multiplied", rank, cta, me, unit + shape.ctas) for me in range(CONSUMERS)))
        sender.do(flag(owner, rank, channel_of_tile(*block, shape.blocks_n)))
    sender.end()


def _consume(graph: Graph, shape: Shape, rank: int, cta: int, me: int) -> None:
    role = graph.role(rank)
    ring = _Ring(role, (rank, cta), shape.slots)
    at_sender: int | None = None
    for unit in units_of(shape, cta):
        work = unit_of_work(shape, unit)
        ring.multiply(me, work.last - work.first)
        role.do(("multiplied", rank, cta, me, unit))
        if not _lend_or_add(role, ring, shape, rank, me, work):
            continue
        if at_sender is not None:
            role.wait(("sent", rank, cta, at_sender))
            at_sender = None
        if shape.scattered(work.tile, rank)[0] != rank:
            role.do(("kept", rank, cta, me, unit))
            at_sender = unit
            continue
        for _ in range(_partial_uses(shape)):
            ring.take(me)
    role.end()


def _partial_uses(shape: Shape) -> int:
    """Slots through which the partials of one tile come: four quarters, three peers in each slot, or two in pairs."""
    return 2 if pairs_quarters(shape.ranks) else 4 * -(-(shape.ranks - 1) // 3)


def _programs(shape: Shape) -> Iterator[tuple[int, int]]:
    for rank in range(shape.ranks):
        for cta in range(shape.ctas):
            yield rank, cta
