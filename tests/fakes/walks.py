# SPDX-License-Identifier: Apache-2.0
"""How a launch of an operator walks over its tiles: the product's own functions, on integers."""

from types import FunctionType, SimpleNamespace
from typing import Any, NamedTuple

from megascale_kernels.ag_gemm import hopper
from megascale_kernels.device import hopper_gemm
from megascale_kernels.gemm_rs import hopper_places
from megascale_kernels.planning import tile_order
from megascale_kernels.planning.stream_k import Cut
from megascale_kernels.planning.tiling import cut_last_wave
from triton.language import constexpr
from triton.runtime.jit import JITFunction

grouped = tile_order.python(tile_order.grouped)
scatter_stretch = tile_order.python(tile_order.scatter_stretch)
gather_source = tile_order.python(tile_order.gather_source)
gather_stretch = tile_order.python(tile_order.gather_stretch)
scatter_owner = tile_order.python(tile_order.scatter_owner)
channel_of_tile = tile_order.python(tile_order.channel_of_tile)
unit_of_row = tile_order.python(tile_order.unit_of_row)
blocks_of_shard = tile_order.python(tile_order.blocks_of_shard)
shards_of_block = tile_order.python(tile_order.shards_of_block)
straddling_scatter = tile_order.python(tile_order.straddling_scatter)
straddling_gather = tile_order.python(tile_order.straddling_gather)

ROWS = 4  # of a tile, where rows are counted


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


# Likewise where the warp-specialised all-gather says what a tile reads; its mappings are Triton's functions there.
_MAPPINGS = {
    "gather_source": gather_source, "gather_stretch": gather_stretch, "grouped": grouped,
    "straddling_gather": straddling_gather, "shards_of_block": shards_of_block,
}  # fmt: skip
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
        m_shard: rows of a shard, in tiles of `ROWS`; 0 where tiles fill the shards. See `ragged`.
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
    m_shard: int = 0

    @property
    def per_shard(self) -> int:
        """Tiles of one shard."""
        return self.blocks_m * self.blocks_n

    @property
    def straddles(self) -> bool:
        """Whether tiles are laid over all rows."""
        return tile_order.straddles(self.m_shard, ROWS, self.ranks)

    @property
    def tall(self) -> int:
        """Row blocks of all shards."""
        return tile_order.all_blocks(self.m_shard or self.blocks_m * ROWS, ROWS, self.ranks)

    @property
    def tiles(self) -> int:
        """Tiles of one rank."""
        return self.tall * self.blocks_n

    def block(self, tile: int) -> tuple[int, int]:
        """Where in its shard a tile lies."""
        place: tuple[int, int] = grouped(tile % self.per_shard, self.blocks_m, self.blocks_n, self.group_m)
        return place

    def gathered(self, tile: int, rank: int) -> tuple[int, int, int]:
        """Whose rows a tile of an all-gather reads, and where in that shard it lies.

        Where tiles straddle shards: the first of those that it reads, and where in the matrix of all rows it lies.
        """
        lead = tile_order.lead_columns(self.blocks_n, self.lead)
        if self.straddles:
            first, above, height, left, width, inner = straddling_gather(
                tile, rank, self.m_shard, ROWS, self.tall, self.blocks_n, lead, self.ranks
            )
            block, block_n = grouped(inner, height, width, self.group_m)
            block = (first + above + block) % self.tall
            return shards_of_block(block, self.m_shard, ROWS, self.ranks)[0], block, left + block_n
        above, height, left, width, inner = gather_stretch(tile, self.blocks_m, self.blocks_n, lead, self.ranks)
        block, block_n = grouped(inner, height, width, self.group_m)
        step, block_m = divmod(above + block, self.blocks_m)
        return gather_source(step, rank, self.ranks), block_m, left + block_n

    def read(self, tile: int, rank: int) -> list[tuple[int, int]]:
        """The (source, unit) that a tile of an all-gather reads, our own rows' too."""
        source, block, _ = self.gathered(tile, rank)
        if not self.straddles:
            return [(source, unit_of_row(block, self.unit_blocks))]
        rows = range(block * ROWS, min((block + 1) * ROWS, self.ranks * self.m_shard))
        unit_rows = self.unit_blocks * ROWS
        return sorted({(row // self.m_shard, unit_of_row(row % self.m_shard, unit_rows)) for row in rows})

    def scattered(self, tile: int, rank: int) -> tuple[int, int, int]:
        """Whose rows a tile of a reduce-scatter holds, and where in that shard it lies.

        Where tiles straddle shards: the first of its owners, and where in the matrix of all rows it lies.
        """
        group_m = tile_order.scatter_group(self.blocks_m, self.tall, self.group_m, self.mixed)
        first, own = blocks_of_shard(rank, self.m_shard, ROWS) if self.straddles else (0, self.blocks_m)
        above, height, inner = scatter_stretch(tile, self.tall, own, self.blocks_n, group_m)
        block, block_n = grouped(inner, height, self.blocks_n, group_m)
        block += above
        if self.straddles:
            block = straddling_scatter(block, first, own, self.tall)
            return shards_of_block(block, self.m_shard, ROWS, self.ranks)[0], block, block_n
        return scatter_owner(block // self.blocks_m, rank, self.ranks), block % self.blocks_m, block_n

    def owners(self, tile: int, rank: int) -> dict[int, int]:
        """Whose rows a tile of a reduce-scatter holds, and its flag among those of each."""
        owner, block, block_n = self.scattered(tile, rank)
        if not self.straddles:
            return {owner: channel_of_tile(block, block_n, self.blocks_n)}
        last = shards_of_block(block, self.m_shard, ROWS, self.ranks)[1]
        return {
            one: channel_of_tile(block - blocks_of_shard(one, self.m_shard, ROWS)[0], block_n, self.blocks_n)
            for one in range(owner, last + 1)
        }

    def cut(self) -> Cut:
        """Whole tiles, parts of each of the others, units of work."""
        whole, split = cut_last_wave(self.tiles, self.ctas, self.blocks_k, self.split)
        if self.whole is not None and self.split:
            whole, split = min(self.whole, self.tiles), min(self.split, self.blocks_k)
        height = min(self.group_m, self.blocks_m)
        if self.scatters:
            height = tile_order.scatter_height(self.blocks_m, self.tall, self.group_m, self.mixed)
        return Cut(self.blocks_m, self.blocks_n, self.blocks_k, self.tiles, whole, split, self.ctas, height)


def ragged(ranks: int, m_shard: int, **more: Any) -> Shape:  # noqa: ANN401 (those of a shape)
    """A launch whose shards have so many rows, in tiles of `ROWS`."""
    return Shape(ranks, -(-m_shard // ROWS), m_shard=m_shard, **more)


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
    """`ag_gemm.hopper.place_of` itself, on integers."""
    blocks_m = shape.tall if shape.straddles else shape.blocks_m
    work = SimpleNamespace(blocks_m=blocks_m, blocks_n=shape.blocks_n, group_m=shape.group_m)
    channel = SimpleNamespace(rank=rank, world_size=shape.ranks)
    lead = tile_order.lead_columns(shape.blocks_n, shape.lead)
    tiling = SimpleNamespace(block_m=ROWS)
    source, _, *block = _place_of(work, channel, lead, tile, shape.m_shard, tiling, tall, shape.straddles)
    return source, block[0], block[1]


def scattered_by_hopper(shape: Shape, tile: int, rank: int) -> tuple[int, bool, dict[int, tuple[int, int]]]:
    """What `gemm_rs.hopper_places` says of a tile of a reduce-scatter.

    Returns:
        the owner as which it is shown, whether it is sent, and for each owner the row of its shard at which it begins
        and its flag.
    """
    work = SimpleNamespace(
        blocks_m=shape.tall if shape.straddles else shape.blocks_m, blocks_n=shape.blocks_n,
        group_m=tile_order.scatter_group(shape.blocks_m, shape.tall, shape.group_m, shape.mixed),
    )  # fmt: skip
    channel = SimpleNamespace(rank=rank, world_size=shape.ranks)
    more = (shape.m_shard, SimpleNamespace(block_m=ROWS), shape.straddles)
    plain = {name: tile_order.python(one) for name, one in vars(tile_order).items() if isinstance(one, JITFunction)}

    def of(name: str) -> FunctionType:
        return FunctionType(getattr(hopper_places, name).fn.__code__, {**plain, "gl": _on(1)}, name)

    _, owner, last_owner, block_m, block_n = of("place_of")(work, channel, tile, *more)
    owners = {
        one: (of("row_at")(block_m, one, *more), of("flag_at")(block_m, block_n, one, work, *more))
        for one in range(owner, last_owner + 1)
    }
    both = (channel, owner, last_owner, shape.straddles)
    return of("us_or_first")(*both), bool(of("is_sent")(*both)), owners
