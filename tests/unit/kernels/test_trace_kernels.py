# SPDX-License-Identifier: Apache-2.0
# ruff: noqa: ANN001, ANN201, N803
# (kernels: their types are Triton's to infer, compile-time arguments are capitals)
"""What `device/progress.py` stores is what the readers read, in the emulator; and clocks are measured there."""

import pytest

torch = pytest.importorskip("torch")
triton = pytest.importorskip("triton", minversion="3.6")

import triton.language as tl  # noqa: E402
from megascale_kernels.device.layout import COMPUTE, layout  # noqa: E402
from megascale_kernels.device.progress import (  # noqa: E402
    TILE_BEGIN,
    TILE_END,
    close_ring,
    head_board,
    mark,
    open_ring,
    ring_of,
    show_done,
    show_tile,
)
from megascale_kernels.device.signals import Channel, line_of, make_stamp  # noqa: E402
from megascale_kernels.emulate import Launch, World  # noqa: E402
from megascale_kernels.progress import read_board  # noqa: E402
from megascale_kernels.progress.board_format import MAX_CTAS, RING_WORDS  # noqa: E402
from megascale_kernels.tracing import Exchange, decode_rings, offset_of  # noqa: E402
from megascale_kernels.tracing.clock_ping import exchange_kernel  # noqa: E402
from megascale_kernels.tracing.slices import slices_of  # noqa: E402


@triton.jit
def recording_kernel(board, trace, epoch, tiles, ENDS: tl.constexpr):
    """Two CTAs take tiles in turn and record them."""
    cta = tl.program_id(0)
    channel = Channel(board, board, board, line_of(board, cta), 0, 0, 1, 3, 4, make_stamp(epoch, 5), 4, 10)
    head_board(channel, board, 2, tiles, 64, 128, 256, PROGRESS=True)
    ring = ring_of(trace, cta, COMPUTE)
    cursor = open_ring(channel, ring, TRACE=True)
    tile = cta
    while tile < tiles:
        show_tile(channel, COMPUTE, tile, PROGRESS=True)
        cursor = mark(ring, cursor, TILE_BEGIN, tile, 1, TRACE=True)
        cursor = mark(ring, cursor, TILE_END, tile, 1, TRACE=True)
        tile += 2
    if ENDS:
        show_done(channel, COMPUTE, PROGRESS=True)
        close_ring(ring, cursor, COMPUTE, 4, TRACE=True)


def test_readers_read_what_kernels_write() -> None:
    """Two launches, the second of which is killed: one board, one ring of both."""
    world = World(layout(1, channels=8, data_bytes=4096), seed=1)
    words = torch.zeros(MAX_CTAS * 2 * RING_WORDS, dtype=torch.int32)

    for epoch, ends in ((6, True), (7, False)):
        args = world.board(0), words, epoch, 5
        world.launch([Launch(0, recording_kernel, 2, args, {"ENDS": ends})])
        world.synchronize()
    view = read_board(world.board(0))
    rings = decode_rings(words.tolist())

    assert (view.operator, view.launch, view.rank, view.world_size, view.tiles) == ("gemm_rs", 7, 3, 4, 5)
    assert [(one.cta, one.state, one.tile) for one in view.roles] == [(0, "running", 4), (1, "running", 3)]
    assert [(ring.cta, ring.operator, ring.closed, ring.lost) for ring in rings] == [
        (0, "gemm_rs", False, 0),
        (1, "gemm_rs", False, 0),
    ]
    drawn = [(one.launch, one.tile, one.flaw) for one in slices_of(rings[1], 0)]
    assert drawn == [(6, 1, ""), (6, 3, ""), (7, 1, ""), (7, 3, "")]


def test_clocks_are_measured_through_shared_memory() -> None:
    """All ranks of the emulator live in one time, so the offset is nothing, within the bound."""
    world = World(layout(2, channels=8, data_bytes=4096), seed=3)
    times = [torch.zeros(4, 3, dtype=torch.int64) for _ in range(2)]

    world.launch(
        [
            Launch(rank, exchange_kernel, 1, (world.words[rank], world.peers[rank], times[rank], 1 - rank, 5, 4, 1000),
                   {"ASKS": rank == 0})
            for rank in range(2)
        ]
    )  # fmt: skip
    exchanges = [Exchange(*row) for row in times[0].tolist()]
    found = offset_of(exchanges)

    assert world.findings == ()
    assert all(one.asked_ns < one.answered_ns < one.received_ns for one in exchanges)
    assert abs(found.offset_ns) <= found.error_ns + 1


def test_a_rank_that_does_not_answer_is_given_up() -> None:
    """The wait is bounded, and zeros say that nothing came."""
    world = World(layout(2, channels=8, data_bytes=4096), seed=3)
    times = torch.zeros(4, 3, dtype=torch.int64)
    args = world.words[0], world.peers[0], times, 1, 5, 4, 10

    world.launch([Launch(0, exchange_kernel, 1, args, {"ASKS": True})])

    assert not times.any()
