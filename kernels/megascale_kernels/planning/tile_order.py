# SPDX-License-Identifier: Apache-2.0
"""Which tile, which rows, which rank, which flag: integer functions that kernels and Python both call.

TileLink names three mappings: f_S from a tile to its slice of the tensor, f_R from a tile to the rank that owns the
slice, f_C from a tile to the channel (flag) that guards it. For tensor parallelism they are affine; for expert
parallelism they are tables filled at run time. Here they are plain integer arithmetic under `@triton.jit`; Python
calls the same code as `python(function)(...)`, and so do the tests, the emulator and the trace viewer.

Rows are split over ranks in equal shards. Where tiles fill the shards, each shard has `cdiv(rows, block)` row blocks of
its own. Where they do not, every shard would end with a tile that is partly empty: tiles are then laid over the matrix
of all rows, and some *straddle* two shards (`straddles`). They have at most two owners, for a shard has a tile's rows
or more.
"""

from collections.abc import Callable
from functools import cache
from typing import Any

import triton


def python(function: Callable[..., Any]) -> Callable[..., Any]:
    """The same mapping as a Python function of integers."""
    plain: Callable[..., Any] = getattr(function, "fn", function)
    return plain


# So few row blocks in all are mixed: between two ranks at M 512 the launch is then up to 1.2 times as fast where the
# weight is large (405B on 2 x H100: 0.611 ms instead of 0.736, and serial takes 0.644), and at worst 1 % slower (12
# shapes). Twice as many (M 1024) were 1 % faster to 46 % slower: programs that have waited for peers are no longer at
# the same K blocks as their neighbours, and each then reads the weight by itself.
MOST_MIXED = 4


def straddles(m_shard: int, block_m: int, world_size: int) -> bool:
    """Whether tiles are laid over the matrix of all rows and not over each shard: where that takes fewer row blocks.

    Shards of less rows than a tile have tiles of their own: one over three of them would have three owners.
    """
    by_shard = world_size * -(-m_shard // block_m)
    return m_shard >= block_m and -(-world_size * m_shard // block_m) < by_shard


def all_blocks(m_shard: int, block_m: int, world_size: int) -> int:
    """The row blocks of all shards together."""
    if straddles(m_shard, block_m, world_size):
        return -(-world_size * m_shard // block_m)
    return world_size * -(-m_shard // block_m)


def most_blocks(m_shard: int, block_m: int, world_size: int) -> int:
    """The most row blocks that a shard has rows in: those that straddle its two ends are one more than its own were."""
    return -(-m_shard // block_m) + straddles(m_shard, block_m, world_size)


@cache
def scatter_group(blocks_m: int, tall: int, group_m: int, mixed: bool | None = None) -> int:
    """How many row blocks GEMM + reduce-scatter walks together, when about `group_m` are wanted.

    It walks the peers' shards as one tall matrix, for one is often too flat for L2: with four ranks and M 4096 it has
    eight row blocks, and a wave of tiles then reads a quarter more than a square one would. Our own rows wait for
    partials and come last (`scatter_stretch`). The groups of the peers' rows are of one height but for the last.

    Mixed it walks all of them together: it reads the weight once, and not once for the peers' rows and again for ours;
    but in each column the last tiles, our own, wait for what the peers multiply at the same time. None decides.

    Args:
        blocks_m: row blocks of a shard.
        tall: row blocks of all shards (`all_blocks`).
        group_m: what is wanted.
        mixed: as in `Config`.
    """
    if mixed is None:
        mixed = tall <= MOST_MIXED
    if mixed:
        return tall
    remote = tall - blocks_m
    groups = max(1, round(remote / group_m))
    return max(1, -(-remote // groups))


def scatter_height(blocks_m: int, tall: int, group_m: int, mixed: bool | None = None) -> int:
    """How many row blocks the last tiles of a scatter are walked together: our own rows', unless they are mixed."""
    group = scatter_group(blocks_m, tall, group_m, mixed)
    return group if group == tall else min(group, blocks_m)


def lead_columns(blocks_n: int, lead: int | None) -> int:
    """The column blocks that all-gather + GEMM walks shard by shard: `lead` of them, or all."""
    return blocks_n if lead is None else max(1, min(lead, blocks_n))


@triton.jit
def blocks(size, block):
    """How many blocks cover `size`."""
    return (size + block - 1) // block


@triton.jit
def grouped(inner, blocks_m, blocks_n, group_m):
    """Order of the tiles of a matrix: `group_m` row blocks at a time, down the columns, so that L2 keeps both inputs.

    Returns:
        (block_m, block_n) within the matrix; a bijection of range(blocks_m * blocks_n).
    """
    span = group_m * blocks_n
    first_m = (inner // span) * group_m
    height = min(blocks_m - first_m, group_m)
    block_m = first_m + (inner % span) % height
    block_n = (inner % span) // height
    return block_m, block_n


@triton.jit
def scatter_stretch(tile, tall, own, blocks_n, group_m):
    """Which stretch of GEMM + reduce-scatter a tile belongs to: the peers' rows as one matrix, then our own.

    Of `tall` row blocks in the order in which they are walked, the last `own` are ours. Groups as high as all rows walk
    them mixed, in one stretch (`scatter_group`).

    Returns:
        (above, height, inner): the stretch covers row blocks [above, above + height) in the order in which they are
        walked; `inner` numbers its tiles.
    """
    remote = tall - own
    above = tile * 0
    height = tall
    inner = tile
    if group_m < tall:
        height = remote
        if tile >= remote * blocks_n:
            above = remote
            height = own
            inner = tile - remote * blocks_n
    return above, height, inner


@triton.jit
def blocks_of_shard(shard, m_shard, block_m):
    """Where tiles are laid over all rows, those with rows of a shard: the first row block, and how many."""
    first = shard * m_shard // block_m
    return first, ((shard + 1) * m_shard - 1) // block_m - first + 1


@triton.jit
def shards_of_block(block, m_shard, block_m, world_size):
    """Where tiles are laid over all rows, the first and the last shard of which a row block has rows."""
    last_row = min((block + 1) * block_m, world_size * m_shard) - 1
    return block * block_m // m_shard, last_row // m_shard


@triton.jit
def straddling_scatter(position, first, own, tall):
    """Where tiles are laid over all rows, the row block at a position of the scatter; `own` from `first` on are ours.

    The others first, in a circle that begins behind ours. Of ours the last comes first, then the first: these two may
    straddle, and then two ranks wait for each other's part of a tile. Both have it at the same time, when they have
    sent all else; in the order of rows one would have it among the first of its tiles, and the other as its last.
    """
    remote = tall - own
    block = (first + own + position) % tall
    if position >= remote:
        block = first + (position - remote + own - 1) % own
    return block


@triton.jit
def share_of(program, turn, programs, teams, tiles, blocks_k):
    """A program's part under stream-K, which deals the K blocks of all tiles out evenly: a tile a turn, last first.

    Programs work in teams. Those of a team have the same K blocks of neighbouring tiles, so that L2 fetches once what
    they share; `teams` divides `programs`, and the size of a team divides `tiles`. Team t has K blocks
    [t work / teams, (t + 1) work / teams) of `work = tiles blocks_k / size`, tile after tile; work is at least `teams`.
    The last of its tiles is the one of which it may have but a partial: what others wait for is done first, and by
    programs that wait for no other.

    Returns:
        (tile, first, last, before): K blocks [first, last) of a tile, and how many programs have the K blocks below:
        those right before this one.
    """
    size = programs // teams
    work = tiles // size * blocks_k
    team = program % teams
    begin = team * work // teams
    end = (team + 1) * work // teams
    tile = (end - 1) // blocks_k - turn
    first = max(begin - tile * blocks_k, 0)
    last = min(end - tile * blocks_k, blocks_k)
    before = team - ((tile * blocks_k + 1) * teams - 1) // work
    return tile * size + program // teams, first, last, before


@triton.jit
def turns_of_share(program, programs, teams, tiles, blocks_k):
    """How many tiles a program has a part of; at least one."""
    work = tiles * teams // programs * blocks_k
    team = program % teams
    return ((team + 1) * work // teams - 1) // blocks_k - team * work // teams // blocks_k + 1


@triton.jit
def gather_stretch(tile, blocks_m, blocks_n, lead, world_size):
    """Which stretch of all-gather + GEMM a tile belongs to: `world_size` of `lead` columns, then one of the rest.

    The first `lead` column blocks are walked shard by shard, in the order of arrival. Meanwhile all rows come in, and
    the other columns are walked with all shards as one tall matrix, each column of the weight read once: a shard of few
    row blocks alone reads the weight as often as there are shards.

    Returns:
        (above, height, left, width, inner): the stretch covers row blocks [above, above + height) of the shards on top
        of each other, our own first, and column blocks [left, left + width); `inner` numbers its tiles.
    """
    early = blocks_m * lead
    above = (tile // early) * blocks_m
    height = blocks_m
    left = lead * 0
    width = lead
    inner = tile % early
    if tile >= early * world_size:
        above = above * 0
        height = blocks_m * world_size
        left = lead
        width = blocks_n - lead
        inner = tile - early * world_size
    return above, height, left, width, inner


@triton.jit
def straddling_gather(tile, rank, m_shard, block_m, tall, blocks_n, lead, world_size):
    """`gather_stretch` where tiles are laid over all rows: a stretch ends with what a shard's arrival makes whole.

    Row blocks are walked in a circle from the first that lies in our rows; those wholly in our rows come first, and a
    block that straddles comes with the later of its shards.

    Returns:
        (first, above, height, left, width, inner): the circle begins at row block `first`; the stretch covers its
        positions [above, above + height) and column blocks [left, left + width); `inner` numbers its tiles.
    """
    first = (rank * m_shard + block_m - 1) // block_m
    early = tall * lead
    above = tile * 0
    height = tall + above
    left = lead + above
    width = blocks_n - lead
    inner = tile - early
    if tile < early:
        left = above
        width = lead + above
        end = above + 0  # Triton 3.6 takes two names of one value that enter a loop for one of them
        for step in range(world_size):
            begin = end
            shard = (rank + step) % world_size
            end = (shard + 1) * m_shard // block_m - first
            if shard == world_size - 1:
                end = tall - first
            if shard < rank:
                end += tall
            if step == world_size - 1:
                end = tall + tile * 0
            if tile >= begin * lead:
                above = begin
                height = end - begin
        inner = tile - above * lead
    return first, above, height, left, width, inner


@triton.jit
def gather_source(step, rank, world_size):
    """f_R of all-gather + GEMM: own shard first (it is there), then in the order in which the others arrive."""
    return (rank + step) % world_size


@triton.jit
def scatter_owner(step, rank, world_size):
    """f_R of GEMM + reduce-scatter: the next rank's rows first, own rows last, when all peers' partials are there."""
    return (rank + 1 + step) % world_size


@triton.jit
def scatter_step(owner, rank, world_size):
    """In which step of the scatter a peer's rows are: the inverse of `scatter_owner`."""
    return (owner - rank - 1 + world_size) % world_size


@triton.jit
def staging_slot(source, owner, world_size):
    """Which of the owner's `world_size - 1` staging slots a source writes: never its own, no two the same."""
    return (source - owner - 1 + world_size) % world_size


@triton.jit
def unit_of_row(row, unit_rows):
    """f_C of all-gather + GEMM: the channel that announces a row of a shard."""
    return row // unit_rows


@triton.jit
def channel_of_tile(block_m, block_n, blocks_n):
    """f_C of GEMM + reduce-scatter: every tile of the owner's rows has a channel of its own."""
    return block_m * blocks_n + block_n
