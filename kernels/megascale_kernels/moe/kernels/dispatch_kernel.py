# SPDX-License-Identifier: Apache-2.0
"""MoE layer 0: dispatch + grouped GEMM + SwiGLU, h = silu(x w_gate) * (x w_up) for the rows of this rank's experts.

COMET (2502.19811, section 3.1) cuts the tokens that all experts share along M. Here every rank's tokens come once,
whatever number of our experts wants them, into one buffer, in units with a flag each; the rows of a tile are gathered
from there by index *while they are loaded*, our own from where they lie. So nothing is permuted and no copy is made for
an expert. Tiles of our own tokens come first for as many experts as cover the transfer (`tables.py`), then the others,
each as soon as its tokens are there.

Gate and up are two blocks of one weight [experts, 2, I, H] that are multiplied with the same rows, and SwiGLU is taken
in registers. h lies expert by expert, as layer 1 reads it; rows of padding repeat a token of their tile. For a backward
gate and up are stored as well.

In the backward the same kernel carries the gradients of outputs to the experts: rows of them times w_out, which is read
the other way round, [H, I] of each expert.
"""

import triton
import triton.language as tl

from megascale_kernels.device.layout import COMMUNICATE, COMPUTE, EPOCH, OPERATORS
from megascale_kernels.device.primitives import consumer_tile_wait, peer_tile_notify, peer_tile_wait
from megascale_kernels.device.progress import (
    TILE_BEGIN,
    TILE_END,
    WAIT_BEGIN,
    WAIT_END,
    close_ring,
    head_board,
    mark,
    open_ring,
    ring_of,
    show_done,
    show_tile,
)
from megascale_kernels.device.signals import finish_launch, follow_launch, open_channel, publish_launch
from megascale_kernels.moe import tables
from megascale_kernels.moe.kernels.sending import send_wanted
from megascale_kernels.moe.kernels.walk import (
    BEGUN,
    UNITS,
    await_units,
    dispatch_place,
    look_up,
    turns_of,
    unit_at,
    units_of,
)
from megascale_kernels.planning.tile_order import blocks

MOE_DISPATCH = OPERATORS.index("moe_dispatch")
MOE_DISPATCH_BACKWARD = OPERATORS.index("moe_dispatch_backward")
RUNTIME = (
    "slot", "rank", "signature", "deadline_us", "flags", "channels", "variant", "counted", "data_bytes", "tokens",
    "experts", "pitch", "unit_tokens", "units", "group_m", "shift",
)  # fmt: skip
ROW_TILES = tl.constexpr(tables.ROW_TILES)
# Of a launch, `counted`: its number is known to the host, to the device alone, or to the host whose copy stream tells
# this rank itself, by the flag `UNITS`, that its last copy is done.
BY_HOST, BY_DEVICE, TELLING = tl.constexpr(0), tl.constexpr(1), tl.constexpr(2)


@triton.jit(do_not_specialize=RUNTIME)
def dispatch_kernel(
    x_ptr, ids_ptr, gathered_ptr, w_desc, h_desc, gate_desc, up_desc, head, rows, tiles,
    control, peers, status, board, trace,
    flags, channels, slot, rank, world_size, signature, deadline_us, variant, counted,
    data_bytes, tokens, experts, pitch, unit_tokens, units, hidden, inner, group_m, shift,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, SAVES: tl.constexpr, BACKWARD: tl.constexpr,
    TOP_K: tl.constexpr, SELECTIVE: tl.constexpr, OPERATOR: tl.constexpr, PROGRESS: tl.constexpr, TRACE: tl.constexpr,
    FOLLOWS: tl.constexpr,
):  # fmt: skip
    """One launch of persistent programs; copy engines carry the tokens, or, `SELECTIVE`, the programs do first."""
    cta = tl.program_id(0)
    ctas = tl.num_programs(0)
    if FOLLOWS:
        follow_launch()
    channel = open_channel(
        tl.load(control + EPOCH) + 1, control, peers, status, board, flags, channels, slot, rank, world_size,
        signature, OPERATOR, deadline_us,
    )  # fmt: skip
    if cta == ctas - 1:
        head_board(channel, board, ctas, tl.load(head + ROW_TILES) * blocks(inner, BLOCK_N), pitch, inner, hidden,
                   PROGRESS)  # fmt: skip
        publish_launch(channel, pitch, inner, hidden, variant)
        say_begun(channel)
    if SELECTIVE:
        send_wanted(channel, x_ptr, ids_ptr, head, data_bytes, tokens, pitch, unit_tokens, units, hidden, experts, cta,
                    ctas, TOP_K, COLS=BLOCK_K)  # fmt: skip
    multiply_tiles(channel, x_ptr, gathered_ptr, w_desc, h_desc, gate_desc, up_desc, head, rows, tiles, pitch,
                   unit_tokens, units, hidden, inner, group_m, shift, ring_of(trace, cta, COMPUTE), BLOCK_M, BLOCK_N,
                   BLOCK_K, SAVES, BACKWARD, PROGRESS, TRACE)  # fmt: skip
    if cta == ctas - 1:
        await_all_begun(channel)
        await_own_copies(channel, counted)
        show_done(channel, COMMUNICATE, PROGRESS)
    finish_launch(channel, ctas, (counted == BY_DEVICE).to(tl.int32))


@triton.jit
def say_begun(channel):
    """Notify every peer that this rank has begun the launch."""
    for step in range(1, channel.world_size):
        peer_tile_notify(channel, BEGUN, (channel.rank + step) % channel.world_size)


@triton.jit
def await_all_begun(channel):
    """End no launch that a peer has not begun, also where nothing of that peer was needed: its slots are reused."""
    code = 0
    for step in range(1, channel.world_size):
        peer = (channel.rank + step) % channel.world_size
        if code == 0:
            code = peer_tile_wait(channel, BEGUN, peer, COMMUNICATE, 0)


@triton.jit
def await_own_copies(channel, counted):
    """End no launch whose copies still read the caller's tokens, where no event tells the stream so."""
    if counted == TELLING:
        consumer_tile_wait(channel, UNITS, channel.rank, COMMUNICATE, 0)


@triton.jit
def multiply_tiles(channel, x_ptr, gathered_ptr, w_desc, h_desc, gate_desc, up_desc, head, rows, tiles, pitch,
                   unit_tokens, units, hidden, inner, group_m, shift, ring, BLOCK_M: tl.constexpr,
                   BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, SAVES: tl.constexpr, BACKWARD: tl.constexpr,
                   PROGRESS: tl.constexpr, TRACE: tl.constexpr):  # fmt: skip
    """One tile of every wave of the walk, each as soon as its tokens are there."""
    cursor = open_ring(channel, ring, TRACE)
    blocks_n = blocks(inner, BLOCK_N)
    count = tl.load(head + ROW_TILES) * blocks_n
    known = 0  # of the peers' units
    cta = tl.program_id(0)
    ctas = tl.num_programs(0)
    turns = turns_of(cta, ctas, count, shift)
    turn = 0
    while turn < turns:
        tile = unit_at(turn, cta, ctas, shift)
        expert, row, end, first, height = look_up(tiles, tile // blocks_n)
        row, valid, block_n = dispatch_place(tile, blocks_n, group_m, row, end, first, height, BLOCK_M)
        show_tile(channel, COMPUTE, tile, PROGRESS)
        cursor = mark(ring, cursor, TILE_BEGIN, tile, channel.rank, TRACE)
        cursor = mark(ring, cursor, WAIT_BEGIN, tile, channel.rank, TRACE)
        last = tl.load(rows + row + valid - 1)
        needed = units_of(last, channel.rank, channel.world_size, pitch, unit_tokens, units)
        code, known = await_units(channel, known, needed, units, COMPUTE, tile)
        cursor = mark(ring, cursor, WAIT_END, tile, channel.rank, TRACE)
        if code == 0:
            from_ptr = token_rows(x_ptr, gathered_ptr, rows, row, channel.rank, pitch, hidden, BLOCK_M)
            col = block_n * BLOCK_N
            if BACKWARD:
                product = multiply_turned(from_ptr, w_desc, expert * hidden, col, hidden, BLOCK_M, BLOCK_N, BLOCK_K)
                h_desc.store([row, col], product.to(x_ptr.dtype.element_ty))
            else:
                gate, up = multiply_gathered(from_ptr, w_desc, expert * 2 * inner + col, inner, hidden, BLOCK_M,
                                             BLOCK_N, BLOCK_K)  # fmt: skip
                if SAVES:
                    gate_desc.store([row, col], gate.to(x_ptr.dtype.element_ty))
                    up_desc.store([row, col], up.to(x_ptr.dtype.element_ty))
                h_desc.store([row, col], swiglu(gate, up).to(x_ptr.dtype.element_ty))
        cursor = mark(ring, cursor, TILE_END, tile, channel.rank, TRACE)
        turn = tl.where(code == 0, turn + 1, turns)
    show_done(channel, COMPUTE, PROGRESS)
    close_ring(ring, cursor, COMPUTE, channel.operator, TRACE)


@triton.jit
def token_rows(x_ptr, gathered_ptr, rows, row, rank, pitch, hidden, BLOCK_M: tl.constexpr):
    """Where the rows of a tile lie: our own tokens where the caller has them, the peers' where they arrived."""
    token = tl.load(rows + row + tl.arange(0, BLOCK_M))
    token = tl.where(token < 0, tl.load(rows + row), token)
    mine = token // pitch == rank
    own_ptr = x_ptr + (token - rank * pitch).to(tl.int64) * hidden
    return tl.where(mine, own_ptr, gathered_ptr + token.to(tl.int64) * hidden)


@triton.jit
def multiply_gathered(from_ptr, w_desc, gate_row, inner, hidden, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
                      BLOCK_K: tl.constexpr):  # fmt: skip
    """The rows at `from_ptr` times a block of the gate's columns and the same of up's, in fp32."""
    gate = tl.zeros((BLOCK_M, BLOCK_N), dtype=tl.float32)
    up = tl.zeros((BLOCK_M, BLOCK_N), dtype=tl.float32)
    for k in range(0, hidden, BLOCK_K):
        columns = k + tl.arange(0, BLOCK_K)
        x = tl.load(from_ptr[:, None] + columns[None, :], mask=(columns < hidden)[None, :], other=0.0)
        gate = tl.dot(x, w_desc.load([gate_row, k]).T, gate)
        up = tl.dot(x, w_desc.load([gate_row + inner, k]).T, up)
    return gate, up


@triton.jit
def multiply_turned(from_ptr, w_desc, first, col, hidden, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
                    BLOCK_K: tl.constexpr):  # fmt: skip
    """The rows at `from_ptr` times columns of an expert's weight [H, I], which begins at row `first`, in fp32."""
    acc = tl.zeros((BLOCK_M, BLOCK_N), dtype=tl.float32)
    for k in range(0, hidden, BLOCK_K):
        inside = k + tl.arange(0, BLOCK_K)
        x = tl.load(from_ptr[:, None] + inside[None, :], mask=(inside < hidden)[None, :], other=0.0)
        acc = tl.dot(x, expert_block(w_desc, first, k, col, hidden, BLOCK_K), acc)
    return acc


@triton.jit
def expert_block(w_desc, first, k, col, k_size, BLOCK_K: tl.constexpr):
    """A block of an expert's weight [K, N] that begins at row `first`; zeros where the next expert's begins."""
    block = w_desc.load([first + k, col])
    return tl.where((k + tl.arange(0, BLOCK_K) < k_size)[:, None], block, 0.0)


@triton.jit
def swiglu(gate, up):
    """silu(gate) * up."""
    return gate / (1.0 + tl.exp(-gate)) * up
