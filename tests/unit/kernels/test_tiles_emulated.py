# SPDX-License-Identifier: Apache-2.0
# ruff: noqa: ANN001, ANN201, N803
# (kernels: their types are Triton's to infer, compile-time arguments are capitals)
"""The tile primitives that no operator of ours uses in this way: pull, tables filled at run time, tiles of one rank."""

import pytest

torch = pytest.importorskip("torch")
triton = pytest.importorskip("triton", minversion="3.6")

import triton.language as tl  # noqa: E402
from megascale_kernels.device.layout import (  # noqa: E402
    COMMUNICATE,
    COMPUTE,
    EPOCH,
    EXPIRED,
    FAULT_FIELDS,
    OPERATORS,
    PUSHES,
    layout,
    signature,
)  # fmt: skip
from megascale_kernels.device.primitives import (  # noqa: E402
    consumer_tile_wait,
    peer_tile_notify,
    peer_tile_wait,
    producer_tile_notify,
    rank_notify,
    rank_wait,
    tile_push_data,
)
from megascale_kernels.device.signals import Channel, finish_launch, line_of, make_stamp, now_ns, publish_launch  # noqa: E402
from megascale_kernels.emulate import RACE, Call, Launch, World, copy  # noqa: E402

RANKS, TILES, SIZE = 3, 4, 20
OPERATOR = OPERATORS.index("all_gather")


@triton.jit
def channel_of(control, peers, status, board, flags, channels, slot, rank, world_size, signature, deadline_us,
               COUNTER: tl.constexpr):  # fmt: skip
    """The channel of the running program; its launch number is one of the two counters."""
    stamp = make_stamp(tl.load(control + COUNTER) + 1, signature)
    line = line_of(board, tl.program_id(0))
    return Channel(control, peers, status, line, flags, channels, slot, rank, world_size, stamp, 2, deadline_us)


@triton.jit
def tile_of(channel, rank, tile, data_bytes, out_ptr, SIZE: tl.constexpr):
    """Where on a rank a tile lies."""
    return (tl.load(channel.peers + rank) + data_bytes).to(tl.pointer_type(out_ptr.dtype.element_ty)) + tile * SIZE


@triton.jit
def pull_tile(target_ptr, peer_ptr, SIZE: tl.constexpr, ELEMENTS: tl.constexpr):
    """Copy a tile from a peer's memory by ordinary loads."""
    for at in range(0, SIZE, ELEMENTS):
        here = at + tl.arange(0, ELEMENTS)
        tl.store(target_ptr + here, tl.load(peer_ptr + here, mask=here < SIZE), mask=here < SIZE)


@triton.jit
def pull_routed(common, x_ptr, ranks_of, tiles_of, out_ptr, data_bytes, TILES: tl.constexpr, SIZE: tl.constexpr,
                WAIT: tl.constexpr):  # fmt: skip
    """Offer our tiles to everybody; pull those that the tables name, each when its owner has announced it."""
    channel = channel_of(*common, EPOCH)
    publish_launch(channel, SIZE, 0, 0, 0)
    for tile in range(TILES):
        mine = tile_of(channel, channel.rank, tile, data_bytes, out_ptr, SIZE)
        tile_push_data(mine, x_ptr + tile * SIZE, 0, SIZE, 8)
        producer_tile_notify(channel, tile)
        for step in range(1, channel.world_size):
            peer_tile_notify(channel, tile, (channel.rank + step) % channel.world_size)
    code = 0
    for index in range(TILES):
        source = tl.load(ranks_of + index)
        tile = tl.load(tiles_of + index)
        if WAIT:
            if source == channel.rank:
                code = consumer_tile_wait(channel, tile, source, COMPUTE, index)
            else:
                code = peer_tile_wait(channel, tile, source, COMPUTE, index)
        if code == 0:
            theirs = tile_of(channel, source, tile, data_bytes, out_ptr, SIZE)
            pull_tile(out_ptr + index * SIZE, theirs, SIZE, 8)
    finish_launch(channel, 1, 0)


@triton.jit
def notify_all(common):
    """Follows copies on their stream, and says so to every peer."""
    channel = channel_of(*common, PUSHES)
    for step in range(1, channel.world_size):
        rank_notify(channel, (channel.rank + step) % channel.world_size)


@triton.jit
def wait_for_all(common, out_ptr, data_bytes, SIZE: tl.constexpr):
    """Take a row from every peer, once its copy has arrived; `notify_all` counts the launch."""
    channel = channel_of(*common, EPOCH)
    code = 0
    for step in range(1, channel.world_size):
        source = (channel.rank + step) % channel.world_size
        code = rank_wait(channel, source, COMMUNICATE)
        if code == 0:
            mine = tile_of(channel, channel.rank, source, data_bytes, out_ptr, SIZE)
            pull_tile(out_ptr + source * SIZE, mine, SIZE, 32)
    finish_launch(channel, 1, 1)


@triton.jit
def lend_and_take(common, late_ns):
    """CTA 1 owes CTA 0 a part of a tile, and begins late to wait for the peer whose rows it needs for that."""
    channel = channel_of(*common, EPOCH)
    publish_launch(channel, 0, 0, 0, 0)
    if tl.program_id(0) == 0:
        consumer_tile_wait(channel, 0, channel.rank, COMPUTE, 7)
    else:
        begun_ns = now_ns()
        while now_ns() - begun_ns < late_ns:
            pass
        if peer_tile_wait(channel, 0, (channel.rank + 1) % channel.world_size, COMMUNICATE, 3) == 0:
            producer_tile_notify(channel, 0)
    finish_launch(channel, 2, 0)


def make_world(seed: int) -> World:
    """Ranks with room for their tiles."""
    return World(layout(RANKS, channels=8, data_bytes=4 * TILES * SIZE), seed=seed)


def common(world: World, rank: int) -> tuple[object, ...]:
    """What every kernel here begins with."""
    return (
        world.words[rank], world.peers[rank], world.status[rank], world.board(rank), world.layout.flags(1),
        world.layout.channels, 1, rank, RANKS, signature(OPERATOR, SIZE, 0, 0, 0), world.deadline_us,
    )  # fmt: skip


def pull(world: World, *, wait: bool) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """Every rank pulls tiles that random tables name: per rank what it got and what it should have."""
    generator = torch.Generator().manual_seed(1)
    xs = [torch.randn(TILES, SIZE, generator=generator) for _ in range(RANKS)]
    ranks_of, tiles_of = (
        torch.randint(0, most, (RANKS, TILES), dtype=torch.int32, generator=generator) for most in (RANKS, TILES)
    )
    outs = [torch.zeros(TILES, SIZE) for _ in range(RANKS)]
    world.launch(
        [
            Launch(
                rank, pull_routed, 1,
                (common(world, rank), xs[rank], ranks_of[rank], tiles_of[rank], outs[rank], world.layout.data(1)),
                {"TILES": TILES, "SIZE": SIZE, "WAIT": wait},
            )
            for rank in range(RANKS)
        ]
    )  # fmt: skip
    expected = [
        torch.stack([xs[r][t] for r, t in zip(*pair, strict=True)]) for pair in zip(ranks_of, tiles_of, strict=True)
    ]
    return list(zip(outs, expected, strict=True))


@pytest.mark.parametrize("seed", range(3))
def test_tiles_are_pulled_by_tables_that_were_filled_at_run_time(seed: int) -> None:
    """Our own tiles and those of peers, in pieces that do not divide a tile, each after its announcement."""
    world = make_world(seed)

    got = pull(world, wait=True)

    assert all(torch.equal(out, expected) for out, expected in got)
    assert world.findings == ()


def test_pulling_without_waiting_is_found() -> None:
    """The control: whoever pulls at once may be too early."""
    world = make_world(0)

    pull(world, wait=False)

    assert RACE in {finding.kind for finding in world.findings}


@pytest.mark.parametrize("seed", range(3))
def test_a_rank_that_was_notified_sees_what_the_copy_engine_brought(seed: int) -> None:
    """Copies, then rank_notify behind them on the stream; rank_wait, then the rows."""
    world = make_world(seed)
    xs = [torch.full((1, SIZE), float(rank)) for rank in range(RANKS)]
    outs = [torch.full((RANKS, SIZE), -1.0) for _ in range(RANKS)]

    operations: list[Call | Launch] = []
    for rank in range(RANKS):
        rows = [world.data(peer, 1, (1, SIZE), torch.float32, rank * SIZE) for peer in range(RANKS)]
        operations += [copy(rank, row, xs[rank]) for row in rows]
        operations.append(Launch(rank, notify_all, 1, (common(world, rank),), stream="copy"))
        args = (common(world, rank), outs[rank], world.layout.data(1))
        operations.append(Launch(rank, wait_for_all, 1, args, {"SIZE": SIZE}))
    world.launch(operations)

    expected = torch.arange(RANKS).float()[:, None].expand(RANKS, SIZE)
    for rank in range(RANKS):
        others = torch.arange(RANKS) != rank
        assert torch.equal(outs[rank][others], expected[others])
    assert world.findings == ()


@pytest.mark.parametrize("seed", range(3))
def test_who_waits_for_a_part_from_its_own_rank_names_the_peer_behind_it(seed: int) -> None:
    """It began to wait first, and its deadline passes first: that says nothing of whose rows are missing."""
    world = make_world(seed)
    deadline_ns = world.deadline_us * 1000

    world.launch([Launch(0, lend_and_take, 2, (common(world, 0), deadline_ns // 10), {})])

    fault = dict(zip(FAULT_FIELDS, world.status[0].tolist(), strict=False))
    assert (fault["code"], fault["cta"], fault["tile"], fault["peer"]) == (EXPIRED.value, 1, 3, 1)
    assert max(event.at_ns for event in world.events) < 2 * deadline_ns
