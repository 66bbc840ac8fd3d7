# SPDX-License-Identifier: Apache-2.0
"""GEMM + all-reduce for small M: out = sum over ranks of x @ w on every rank, in one launch.

With few rows the product is short and latency decides, so every rank sends each finished tile to every peer at once
(one shot: (world_size - 1) * M * N elements leave each rank) and every rank adds all partials itself. All terms, our
own too, are taken from the rounded partials and added in fp32 in the order of ranks: the result is the same, bit for
bit, on every rank and from run to run. For large M, reduce-scatter and gather cost fewer bytes; `operators.gemm_ar`
decides.

A tile is announced while the next is multiplied. What it means, in plain torch: `reference.gemm_ar`.
"""

from typing import Any

import triton
import triton.language as tl
from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor

from megascale_kernels.device.gemm import add_bias, multiply, quarters, store_rows
from megascale_kernels.device.layout import COMPUTE, EPOCH, OPERATORS, SLOTS, signature
from megascale_kernels.device.primitives import await_partials, peer_tile_notify
from megascale_kernels.device.progress import (
    NOTIFY,
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
from megascale_kernels.device.signals import (
    finish_launch,
    open_channel,
    peer_data,
    publish_launch,
)
from megascale_kernels.memory.operands import Weight, compiled_apart, processors
from megascale_kernels.memory.workspace import Workspace
from megascale_kernels.planning.config import Config
from megascale_kernels.planning.tile_order import blocks, channel_of_tile, grouped

GEMM_AR = OPERATORS.index("gemm_ar")
RUNTIME = ("slot", "rank", "signature", "deadline_us", "flags", "channels", "variant")


@triton.jit(do_not_specialize=RUNTIME)
def gemm_ar_kernel(
    x_desc, w_desc, out_ptr, bias_ptr,
    control, peers, status, board, trace,
    flags, channels, slot, rank, world_size, signature, deadline_us, staging_bytes, variant,
    m_size, n_size, k_size,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, GROUP_M: tl.constexpr,
    W_IS_NK: tl.constexpr, HAS_BIAS: tl.constexpr, OPERATOR: tl.constexpr, PROGRESS: tl.constexpr,
    TRACE: tl.constexpr,
):  # fmt: skip
    """One launch: every tile is multiplied and sent to all, then every tile is added up."""
    cta = tl.program_id(0)
    ctas = tl.num_programs(0)
    channel = open_channel(
        tl.load(control + EPOCH) + 1, control, peers, status, board, flags, channels, slot, rank, world_size,
        signature, OPERATOR, deadline_us,
    )  # fmt: skip
    tiles = blocks(m_size, BLOCK_M) * blocks(n_size, BLOCK_N)
    if cta == ctas - 1:
        head_board(channel, board, ctas, tiles, m_size, n_size, k_size, PROGRESS)
        publish_launch(channel, m_size, n_size, k_size, variant)
    ring = ring_of(trace, cta, COMPUTE)
    cursor = open_ring(channel, ring, TRACE)
    cursor = multiply_tiles(channel, x_desc, w_desc, out_ptr, staging_bytes, m_size, n_size, k_size, ring, cursor,
                            BLOCK_M, BLOCK_N, BLOCK_K, GROUP_M, W_IS_NK, PROGRESS, TRACE)  # fmt: skip
    cursor = add_tiles(channel, out_ptr, bias_ptr, staging_bytes, m_size, n_size, ring, cursor,
                       BLOCK_M, BLOCK_N, GROUP_M, HAS_BIAS, PROGRESS, TRACE)  # fmt: skip
    show_done(channel, COMPUTE, PROGRESS)
    close_ring(ring, cursor, COMPUTE, OPERATOR, TRACE)
    finish_launch(channel, ctas, 0)


@triton.jit
def multiply_tiles(channel, x_desc, w_desc, out_ptr, staging_bytes, m_size, n_size, k_size, ring, cursor,
                   BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, GROUP_M: tl.constexpr,
                   W_IS_NK: tl.constexpr, PROGRESS: tl.constexpr, TRACE: tl.constexpr):  # fmt: skip
    """First half: multiply every tile of this CTA and send it to all, announced one tile later."""
    blocks_m = blocks(m_size, BLOCK_M)
    blocks_n = blocks(n_size, BLOCK_N)
    pending_notify = -1
    tile = tl.program_id(0)
    while tile < blocks_m * blocks_n:
        block_m, block_n = grouped(tile, blocks_m, blocks_n, GROUP_M)
        row = block_m * BLOCK_M
        col = block_n * BLOCK_N
        show_tile(channel, COMPUTE, tile, PROGRESS)
        cursor = mark(ring, cursor, TILE_BEGIN, tile, channel.rank, TRACE)
        acc = multiply(x_desc, row, w_desc, col, k_size, BLOCK_M, BLOCK_N, BLOCK_K, W_IS_NK)
        if pending_notify >= 0:
            announce_tile(channel, pending_notify)
        send_to_all(channel, acc, row, col, out_ptr, staging_bytes, m_size, n_size, BLOCK_M, BLOCK_N)
        pending_notify = channel_of_tile(block_m, block_n, blocks_n)
        cursor = mark(ring, cursor, NOTIFY, tile, channel.rank, TRACE)
        cursor = mark(ring, cursor, TILE_END, tile, channel.rank, TRACE)
        tile += tl.num_programs(0)
    if pending_notify >= 0:
        announce_tile(channel, pending_notify)
    return cursor


@triton.jit
def add_tiles(channel, out_ptr, bias_ptr, staging_bytes, m_size, n_size, ring, cursor, BLOCK_M: tl.constexpr,
              BLOCK_N: tl.constexpr, GROUP_M: tl.constexpr, HAS_BIAS: tl.constexpr, PROGRESS: tl.constexpr,
              TRACE: tl.constexpr):  # fmt: skip
    """Second half: add all ranks' partials of the same tiles."""
    blocks_m = blocks(m_size, BLOCK_M)
    blocks_n = blocks(n_size, BLOCK_N)
    tiles = blocks_m * blocks_n
    tile = tl.program_id(0)
    while tile < tiles:
        block_m, block_n = grouped(tile, blocks_m, blocks_n, GROUP_M)
        index = channel_of_tile(block_m, block_n, blocks_n)
        show_tile(channel, COMPUTE, tile, PROGRESS)
        cursor = mark(ring, cursor, WAIT_BEGIN, tile, channel.rank, TRACE)
        code = await_partials(channel, index, tile)
        cursor = mark(ring, cursor, WAIT_END, tile, channel.rank, TRACE)
        if code == 0:
            add_all(channel, block_m * BLOCK_M, block_n * BLOCK_N, out_ptr, bias_ptr, staging_bytes, m_size, n_size,
                    BLOCK_M, BLOCK_N, HAS_BIAS)  # fmt: skip
        tile = tl.where(code == 0, tile + tl.num_programs(0), tiles)
    return cursor


@triton.jit
def partial_of(channel, target, source, out_ptr, staging_bytes, m_size, n_size):
    """Where on rank `target` the partial product of `source` lies."""
    base = peer_data(channel, target, staging_bytes, out_ptr)
    return base + tl.cast(source, tl.int64) * m_size * n_size


@triton.jit
def announce_tile(channel, index):
    """Notify every peer that a tile has been sent."""
    for step in range(1, channel.world_size):
        peer = (channel.rank + step) % channel.world_size
        peer_tile_notify(channel, index, peer)


@triton.jit
def send_to_all(channel, acc, row, col, out_ptr, staging_bytes, m_size, n_size, BLOCK_M: tl.constexpr,
                BLOCK_N: tl.constexpr):  # fmt: skip
    """Store a partial tile on every rank, our own among them."""
    parts = quarters(acc, BLOCK_M, BLOCK_N)
    for index in tl.static_range(4):
        for target in range(channel.world_size):
            staging = partial_of(channel, target, channel.rank, out_ptr, staging_bytes, m_size, n_size)
            store_rows(staging, parts[index], row, m_size, col + index * (BLOCK_N // 4), n_size, BLOCK_M, BLOCK_N // 4)


@triton.jit
def add_all(channel, row, col, out_ptr, bias_ptr, staging_bytes, m_size, n_size, BLOCK_M: tl.constexpr,
            BLOCK_N: tl.constexpr, HAS_BIAS: tl.constexpr):  # fmt: skip
    """Add the rounded partials of a tile in the order of ranks, a quarter of the columns at a time, and store."""
    rows = row + tl.arange(0, BLOCK_M)
    for index in tl.static_range(4):
        at = col + index * (BLOCK_N // 4)
        cols = at + tl.arange(0, BLOCK_N // 4)
        mask = (rows < m_size)[:, None] & (cols < n_size)[None, :]
        offset = rows.to(tl.int64)[:, None] * n_size + cols[None, :]
        total = tl.zeros((BLOCK_M, BLOCK_N // 4), dtype=tl.float32)
        for source in range(channel.world_size):
            staging = partial_of(channel, channel.rank, source, out_ptr, staging_bytes, m_size, n_size)
            total += tl.load(staging + offset, mask=mask, other=0.0).to(tl.float32)
        if HAS_BIAS:
            total = add_bias(total, bias_ptr, at, n_size, BLOCK_N // 4)
        store_rows(out_ptr, total, row, m_size, at, n_size, BLOCK_M, BLOCK_N // 4)


def launch(x: Tensor, weight: Weight, out: Tensor, bias: Tensor | None, workspace: Workspace, config: Config) -> None:
    """Launch on the current stream: x [M, K], w [K, N], out [M, N] on every rank.

    Raises:
        WorkspaceTooSmall: the partial results of all ranks do not fit.
        TileTimeout, RankMismatch: an earlier launch failed.
    """
    m_size, n_size = out.shape
    tiles = -(-m_size // config.block_m) * -(-n_size // config.block_n)
    workspace.need(
        workspace.world_size * m_size * n_size * x.element_size(), tiles, f"gemm_ar of {tuple(x.shape)} x {n_size}"
    )
    weight_block = [config.block_n, config.block_k] if weight.is_nk else [config.block_k, config.block_n]
    constants = {
        "BLOCK_M": config.block_m, "BLOCK_N": config.block_n, "BLOCK_K": config.block_k, "GROUP_M": config.group_m,
        "W_IS_NK": weight.is_nk, "HAS_BIAS": bias is not None, "OPERATOR": GEMM_AR, "PROGRESS": workspace.progress,
        "TRACE": workspace.trace, "enable_fp_fusion": True, "num_warps": config.warps, "num_stages": config.stages,
    }  # fmt: skip
    grid = (min(processors(x.device), tiles),)

    def arguments(slot: int) -> tuple[Any, ...]:
        return (
            TensorDescriptor.from_tensor(x, [config.block_m, config.block_k]),
            TensorDescriptor.from_tensor(weight.matrix, weight_block),
            out, bias if bias is not None else out,
            workspace.memory, workspace.peers, workspace.status, workspace.board, workspace.trace_words,
            workspace.layout.flags(slot), workspace.layout.channels, slot, workspace.rank, workspace.world_size,
            signature(GEMM_AR, m_size, n_size, x.shape[1], config.code), int(workspace.deadline_s * 1e6),
            workspace.layout.data(slot), config.code, m_size, n_size, x.shape[1],
        )  # fmt: skip

    def warm() -> None:
        for slot in range(SLOTS):
            gemm_ar_kernel.warmup(*arguments(slot), grid=grid, **constants)

    slot = workspace.begin(("gemm_ar", config, *constants.items(), compiled_apart(m_size, n_size, x.shape[1])), warm)
    gemm_ar_kernel[grid](*arguments(slot), **constants)
