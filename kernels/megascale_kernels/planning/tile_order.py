# SPDX-License-Identifier: Apache-2.0
"""Which tile, which rows, which rank, which flag: integer functions that kernels and Python both call.

TileLink names three mappings: f_S from a tile to its slice of the tensor, f_R from a tile to the rank that owns the
slice, f_C from a tile to the channel (flag) that guards it. For tensor parallelism they are affine; for expert
parallelism they are tables filled at run time. Here they are plain integer arithmetic under `@triton.jit`; Python
calls the same code as `python(function)(...)`, and so do the tests, the emulator and the trace viewer.

Rows are split over ranks in equal shards. A tile never straddles two shards: each shard has its own
`cdiv(rows, block)` row blocks, the last of which may be short.
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


@cache
def scatter_group(blocks_m: int, world_size: int, group_m: int, mixed: bool | None = None) -> int:
    """How many row blocks GEMM + reduce-scatter walks together, when about `group_m` are wanted.

    It walks the peers' shards as one tall matrix, for one is often too flat for L2: with four ranks and M 4096 it has
    eight row blocks, and a wave of tiles then reads a quarter more than a square one would. Our own rows wait for
    partials and come last (`scatter_stretch`). The groups of the peers' rows are of one height but for the last.

    Mixed it walks all of them together: it reads the weight once, and not once for the peers' rows and again for ours;
    but in each column the last tiles, our own, wait for what the peers multiply at the same time. None decides.
    """
    if mixed is None:
        mixed = world_size * blocks_m <= MOST_MIXED
    if mixed:
        return world_size * blocks_m
    remote = (world_size - 1) * blocks_m
    groups = max(1, round(remote / group_m))
    return max(1, -(-remote // groups))


def scatter_height(blocks_m: int, world_size: int, group_m: int, mixed: bool | None = None) -> int:
    """How many row blocks the last tiles of a scatter are walked together: our own rows', unless they are mixed."""
    group = scatter_group(blocks_m, world_size, group_m, mixed)
    return group if group == world_size * blocks_m else min(group, blocks_m)


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
def scatter_stretch(tile, blocks_m, blocks_n, group_m, world_size):
    """Which stretch of GEMM + reduce-scatter a tile belongs to: the peers' rows as one matrix, then our own.

    Groups as high as all rows walk them mixed, in one stretch (`scatter_group`).

    Returns:
        (above, height, inner): the stretch covers row blocks [above, above + height) of the shards on top of each
        other, in the order in which they are sent; `inner` numbers its tiles.
    """
    tall = blocks_m * world_size
    remote = tall - blocks_m
    above = tile * 0
    height = tall
    inner = tile
    if group_m < tall:
        height = remote
        if tile >= remote * blocks_n:
            above = remote
            height = blocks_m
            inner = tile - remote * blocks_n
    return above, height, inner


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
def gather_source(step, rank, world_size):
    """f_R of all-gather + GEMM: own shard first (it is there), then in the order in which the others arrive."""
    return (rank + step) % world_size


@triton.jit
def scatter_owner(step, rank, world_size):
    """f_R of GEMM + reduce-scatter: the next rank's rows first, own rows last, when all peers' partials are there."""
    return (rank + 1 + step) % world_size


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
