# SPDX-License-Identifier: Apache-2.0
"""Draw arrows from a notification to the waits that it released, where that is known exactly.

A flag is named by operator, launch, the rank that raises it, the rank whose memory it lies in, and a number; what a
trace records is that number, the tile or the unit. What follows from it without a guess:

    gemm_rs   notifications and waits are recorded with the flag: a tile's place in its owner's shard. Exact, also
              where one role notifies and another waits.
    gemm_ar   the same tile number on every rank. Exact.
    ag_gemm   a wait needs a range of units. Exact with the units of that launch; without them only where a rank has
              announced a single unit, number 0.
    moe_dispatch
              a tile needs the copies up to one of a peer's units. Exact with the shape of that launch, which names it.
    moe_combine
              a job that sends is recorded with its number, and so is the wait of the tokens' owner. Exact with the
              shapes of both ranks' launches, which tell the flag of each job (`moe/trace_shapes.py`).

A wait for several flags gets an arrow from each. The notification of a reduction is recorded when the tile is stored
and published while the next one is multiplied, so its arrow begins a little early. A rank's waits for launches of
which nothing is known get no arrow: a missing arrow claims nothing, a wrong one misleads.
"""

from collections.abc import Iterable, Iterator, Mapping
from typing import NamedTuple

from megascale_kernels.tracing.dump import Shape, TraceDump
from megascale_kernels.tracing.slices import Slice


class Arrow(NamedTuple):
    """A notification and a wait that it released.

    Attributes:
        source: the rank that notified.
        notice: by which slice.
        target: the rank that waited.
        wait: its wait.
    """

    source: int
    notice: Slice
    target: int
    wait: Slice


class Flag(NamedTuple):
    """What a notification and a wait have in common; `role` only where it is the same on both sides."""

    operator: str
    launch: int | None
    role: str
    source: int
    target: int
    number: int


def arrows(dumps: Mapping[int, TraceDump], slices: Mapping[int, list[Slice]]) -> list[Arrow]:
    """All arrows between the slices of some ranks.

    Of two notifications of the same flag (rings without their launches' numbers), none is taken.
    """
    notices: dict[Flag, list[tuple[int, Slice]]] = {}
    for rank, found in slices.items():
        for notice in found:
            for flag in _raised(rank, notice, dumps[rank]):
                notices.setdefault(flag, []).append((rank, notice))
    units = {_road(flag): {0} for flag in notices if flag.operator == "ag_gemm"}
    for flag in notices:
        if flag.operator == "ag_gemm":
            units[_road(flag)].add(flag.number)
    return [
        Arrow(*raised[0], rank, wait)
        for rank, found in slices.items()
        for wait in found
        if wait.kind == "wait" and not wait.flaw
        for flag in _awaited(rank, wait, dumps[rank], units)
        if len(raised := notices.get(flag, [])) == 1
    ]


def _raised(rank: int, notice: Slice, dump: TraceDump) -> Iterator[Flag]:
    if (notice.kind, notice.operator) in (("push", "ag_gemm"), ("copy", "ag_gemm"), ("notify", "gemm_rs")):
        yield Flag(notice.operator, notice.launch, "", rank, notice.peer, notice.tile)
    elif (notice.kind, notice.operator) == ("notify", "gemm_ar"):
        for target in _others(rank, dump):
            yield Flag(notice.operator, notice.launch, notice.role, rank, target, notice.tile)
    elif (notice.kind, notice.operator) == ("copy", "moe_dispatch"):
        yield Flag(notice.operator, notice.launch, "", rank, notice.peer, notice.tile)
    elif notice.operator == "moe_combine" and notice.kind in ("push", "notify"):  # the latter beside its products
        for owner, flag in _of_layer(notice, dump):
            yield Flag(notice.operator, notice.launch, "", rank, owner, flag)


def _awaited(
    rank: int, wait: Slice, dump: TraceDump, units: Mapping[tuple[int | None, int, int], set[int]]
) -> Iterator[Flag]:
    if wait.operator == "ag_gemm":
        for unit in _units(rank, wait, dump, units):
            yield Flag(wait.operator, wait.launch, "", wait.peer, rank, unit)
    elif wait.operator in ("gemm_rs", "gemm_ar"):
        role = wait.role if wait.operator == "gemm_ar" else ""
        for source in _others(rank, dump):
            yield Flag(wait.operator, wait.launch, role, source, rank, wait.tile)
    elif wait.operator in ("moe_dispatch", "moe_combine"):
        for owner, flag in _of_layer(wait, dump):
            if wait.operator == "moe_dispatch" and owner != rank:
                yield Flag(wait.operator, wait.launch, "", owner, rank, flag)
            elif wait.operator == "moe_combine" and owner == rank:
                for source in _others(rank, dump):
                    yield Flag(wait.operator, wait.launch, "", source, rank, flag)


def _of_layer(what: Slice, dump: TraceDump) -> Iterable[tuple[int, int]]:
    """The entry of a tile or job of a mixture of experts in its launch's shape; none where that is unknown."""
    table = shape.units if (shape := _shape(what, dump)) else ()
    return table[what.tile : what.tile + 1] if what.tile >= 0 else ()


def _units(
    rank: int, wait: Slice, dump: TraceDump, units: Mapping[tuple[int | None, int, int], set[int]]
) -> Iterable[int]:
    table = shape.units if (shape := _shape(wait, dump)) else ()
    if table:
        first, last = table[wait.tile % len(table)]
        return range(first, last + 1)
    return (0,) if units.get((wait.launch, wait.peer, rank)) == {0} else ()


def _road(flag: Flag) -> tuple[int | None, int, int]:
    return flag.launch, flag.source, flag.target


def _shape(what: Slice, dump: TraceDump) -> Shape | None:
    """The shape of a slice's launch; a ring without its launch's number holds the last one."""
    launch = what.launch if what.launch is not None else max(dump.shapes, default=0)
    shape = dump.shapes.get(launch)
    return shape if shape is not None and shape.operator == what.operator else None


def _others(rank: int, dump: TraceDump) -> Iterable[int]:
    return (other for other in range(min(dump.world_size, 64)) if other != rank)
