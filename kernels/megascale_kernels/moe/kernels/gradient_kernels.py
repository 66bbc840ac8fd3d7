# SPDX-License-Identifier: Apache-2.0
"""What a backward needs beside the two products: rows in the order of experts, SwiGLU's gradient, the gates' home.

With u = w_out^T g for the output gradient g of a row's token, everything else is one pass over rows: the gradient of a
pair's gate is u . h, that of h is gate * u, and silu(a) b has the gradients

    da = dh b (s + a s (1 - s)),   db = dh a s,   s = 1 / (1 + exp(-a))

so neither h nor an expert's output is kept from the forward, and no row of length H is read for a gate. Gradients of
weights are products along the rows of an expert: A^T B, rows of padding being zero on both sides.
"""

import triton
import triton.language as tl

from megascale_kernels.device.layout import COMMUNICATE, COMPUTE, EPOCH, OPERATORS
from megascale_kernels.device.primitives import consumer_tile_wait, peer_tile_notify
from megascale_kernels.device.progress import head_board, show_done, show_tile
from megascale_kernels.device.signals import finish_launch, open_channel, peer_words, publish_launch
from megascale_kernels.moe import tables
from megascale_kernels.moe.kernels.dispatch_kernel import await_all_begun, say_begun
from megascale_kernels.moe.kernels.sending import send_wanted
from megascale_kernels.moe.kernels.walk import await_units
from megascale_kernels.planning.tile_order import blocks

MOE_GATHER = OPERATORS.index("moe_gather")
MOE_GATES = OPERATORS.index("moe_gates")
CHANNEL = ("slot", "rank", "signature", "deadline_us", "flags", "channels", "variant", "pitch")
ROW_TILES = tl.constexpr(tables.ROW_TILES)
TOKENS_OF = tl.constexpr(tables.TOKENS_OF)
SENT = tl.constexpr(1)  # and further: the first flag of a source rank's programs


@triton.jit
def copy_rows(x_ptr, gathered_ptr, out_ptr, rows, first, rank, pitch, columns, OURS: tl.constexpr, ROWS: tl.constexpr,
              COLS: tl.constexpr):  # fmt: skip
    """Copy what a block of rows has of our own tokens, with zeros for padding, or of the peers' tokens."""
    here = first + tl.arange(0, ROWS)
    token = tl.load(rows + here)
    mine = (token < 0) | (token // pitch == rank)
    if OURS:
        wanted = mine
        there = mine & (token >= 0)
        source = x_ptr + (token - rank * pitch).to(tl.int64) * columns
    else:
        wanted = mine == 0
        there = wanted
        source = gathered_ptr + token.to(tl.int64) * columns
    if tl.max(wanted.to(tl.int32), axis=0) > 0:
        for at in range(0, columns, COLS):
            cols = at + tl.arange(0, COLS)
            inside = (cols < columns)[None, :]
            value = tl.load(source[:, None] + cols[None, :], mask=there[:, None] & inside, other=0.0)
            tl.store(out_ptr + here.to(tl.int64)[:, None] * columns + cols[None, :], value,
                     mask=wanted[:, None] & inside)  # fmt: skip


@triton.jit(do_not_specialize=("rank", "pitch"))
def take_rows_kernel(x_ptr, gathered_ptr, out_ptr, head, rows, rank, pitch, columns, TILE_ROWS: tl.constexpr,
                     ROWS: tl.constexpr, COLS: tl.constexpr):  # fmt: skip
    """Rows of tokens in the order of experts; the peers' tokens have arrived in this launch's slot."""
    count = tl.load(head + ROW_TILES) * TILE_ROWS
    for first in range(tl.program_id(0) * ROWS, count, tl.num_programs(0) * ROWS):
        copy_rows(x_ptr, gathered_ptr, out_ptr, rows, first, rank, pitch, columns, OURS=True, ROWS=ROWS, COLS=COLS)
        copy_rows(x_ptr, gathered_ptr, out_ptr, rows, first, rank, pitch, columns, OURS=False, ROWS=ROWS, COLS=COLS)


@triton.jit(do_not_specialize=(*CHANNEL, "counted", "data_bytes", "tokens", "experts", "unit_tokens", "units"))
def gather_kernel(
    x_ptr, ids_ptr, gathered_ptr, out_ptr, head, rows,
    control, peers, status, board, trace,  # noqa: ARG001 - it has no trace, and what opens a channel has one
    flags, channels, slot, rank, world_size, signature, deadline_us, variant, counted,
    data_bytes, tokens, experts, pitch, unit_tokens, units, columns,
    TILE_ROWS: tl.constexpr, ROWS: tl.constexpr, COLS: tl.constexpr, TOP_K: tl.constexpr, SELECTIVE: tl.constexpr,
    OPERATOR: tl.constexpr, PROGRESS: tl.constexpr,
):  # fmt: skip
    """The same while the peers' tokens come: rows of our own tokens first, then the others."""
    cta = tl.program_id(0)
    ctas = tl.num_programs(0)
    channel = open_channel(
        tl.load(control + EPOCH) + 1, control, peers, status, board, flags, channels, slot, rank, world_size,
        signature, OPERATOR, deadline_us,
    )  # fmt: skip
    if cta == ctas - 1:
        head_board(channel, board, ctas, tl.load(head + ROW_TILES), pitch, columns, TILE_ROWS, PROGRESS)
        publish_launch(channel, pitch, columns, TILE_ROWS, variant)
        say_begun(channel)
    if SELECTIVE:
        send_wanted(channel, x_ptr, ids_ptr, head, data_bytes, tokens, pitch, unit_tokens, units, columns, experts, cta,
                    ctas, TOP_K, COLS)  # fmt: skip
    count = tl.load(head + ROW_TILES) * TILE_ROWS
    show_tile(channel, COMPUTE, 0, PROGRESS)
    for first in range(cta * ROWS, count, ctas * ROWS):
        copy_rows(x_ptr, gathered_ptr, out_ptr, rows, first, rank, pitch, columns, OURS=True, ROWS=ROWS, COLS=COLS)
    show_tile(channel, COMPUTE, 1, PROGRESS)
    code, _ = await_units(channel, 0, (world_size - 1) * units, units, COMPUTE, 1)
    if code == 0:
        for first in range(cta * ROWS, count, ctas * ROWS):
            copy_rows(x_ptr, gathered_ptr, out_ptr, rows, first, rank, pitch, columns, OURS=False, ROWS=ROWS, COLS=COLS)
    show_done(channel, COMPUTE, PROGRESS)
    if cta == ctas - 1:
        await_all_begun(channel)
        show_done(channel, COMMUNICATE, PROGRESS)
    finish_launch(channel, ctas, counted)


@triton.jit
def list_ends(head, begins, ends_ptr, EXPERTS: tl.constexpr, TILE_ROWS: tl.constexpr):
    """Where the rows of each expert end, padding included: where the next one's begin."""
    for expert in range(1, EXPERTS):
        tl.store(ends_ptr + expert - 1, tl.load(begins + expert))
    tl.store(ends_ptr + EXPERTS - 1, tl.load(head + ROW_TILES) * TILE_ROWS)


@triton.jit
def pair_of(token, here, pair_row, pair_gate, MOST_HERE: tl.constexpr):
    """The pairs that rows stand for, and their gates; 0 and 0 for padding."""
    pair = token * 0
    gate = pair.to(tl.float32)
    for place in tl.static_range(MOST_HERE):
        index = token * MOST_HERE + place
        found = tl.load(pair_row + index, mask=token >= 0, other=-1) == here
        gate += tl.load(pair_gate + index, mask=found, other=0.0)
        pair += tl.where(found, index, 0)
    return pair, gate


@triton.jit
def swiglu_backward_kernel(u_ptr, pre_ptr, dpre_ptr, dgates_ptr, ends_ptr, head, begins, rows, pair_row, pair_gate,
                           inner, EXPERTS: tl.constexpr, MOST_HERE: tl.constexpr, TILE_ROWS: tl.constexpr,
                           ROWS: tl.constexpr, COLS: tl.constexpr):  # fmt: skip
    """Gradients of gate and up, [rows, 2 I], and of each pair's weight; u becomes weight * h; padding becomes zero.

    `pre_ptr` may be `dpre_ptr`.
    """
    if tl.program_id(0) == 0:
        list_ends(head, begins, ends_ptr, EXPERTS, TILE_ROWS)
    count = tl.load(head + ROW_TILES) * TILE_ROWS
    for first in range(tl.program_id(0) * ROWS, count, tl.num_programs(0) * ROWS):
        here = first + tl.arange(0, ROWS)
        token = tl.load(rows + here)
        pair, weight = pair_of(token, here, pair_row, pair_gate, MOST_HERE)
        row = here.to(tl.int64)[:, None]
        dgate = tl.zeros((ROWS,), dtype=tl.float32)
        for at in range(0, inner, COLS):
            cols = at + tl.arange(0, COLS)
            inside = (cols < inner)[None, :]
            there = (token >= 0)[:, None] & inside
            u = tl.load(u_ptr + row * inner + cols[None, :], mask=there, other=0.0).to(tl.float32)
            gate = tl.load(pre_ptr + row * 2 * inner + cols[None, :], mask=there, other=0.0).to(tl.float32)
            up = tl.load(pre_ptr + row * 2 * inner + inner + cols[None, :], mask=there, other=0.0).to(tl.float32)
            sigmoid = 1.0 / (1.0 + tl.exp(-gate))
            silu = gate * sigmoid
            dh = weight[:, None] * u
            dgate += tl.sum(u * silu * up, axis=1)
            of_gate = dh * up * (sigmoid + silu * (1.0 - sigmoid))
            type_of = u_ptr.dtype.element_ty
            tl.store(dpre_ptr + row * 2 * inner + cols[None, :], of_gate.to(type_of), mask=inside)
            tl.store(dpre_ptr + row * 2 * inner + inner + cols[None, :], (dh * silu).to(type_of), mask=inside)
            tl.store(u_ptr + row * inner + cols[None, :], (weight[:, None] * silu * up).to(type_of), mask=inside)
        tl.store(dgates_ptr + pair, dgate, mask=token >= 0)


@triton.jit(do_not_specialize=(*CHANNEL, "tokens", "experts", "first_word"))
def gates_kernel(
    ids_ptr, dgates_ptr, out_ptr, head,
    control, peers, status, board, trace,  # noqa: ARG001 - it has no trace, and what opens a channel has one
    flags, channels, slot, rank, world_size, signature, deadline_us, variant, pitch, tokens, experts, first_word,
    TOP_K: tl.constexpr, MOST_HERE: tl.constexpr, TOKENS: tl.constexpr, PAIRS: tl.constexpr, OPERATOR: tl.constexpr,
    PROGRESS: tl.constexpr,
):  # fmt: skip
    """Gradients of gates from the ranks of the experts to the ranks of the tokens.

    `dgates_ptr` has them by rank and token, those of a token's pairs that are ours first, in the order of pairs. Each
    program sends blocks of tokens of every rank, and finds those of the same numbers at home.
    """
    cta = tl.program_id(0)
    ctas = tl.num_programs(0)
    channel = open_channel(
        tl.load(control + EPOCH) + 1, control, peers, status, board, flags, channels, slot, rank, world_size,
        signature, OPERATOR, deadline_us,
    )  # fmt: skip
    if cta == ctas - 1:
        head_board(channel, board, ctas, world_size, pitch, experts, TOP_K, PROGRESS)
        publish_launch(channel, pitch, experts, TOP_K, variant)
    show_tile(channel, COMMUNICATE, cta, PROGRESS)
    for step in range(1, world_size):
        peer = (rank + step) % world_size
        target = peer_words(channel, peer) + first_word + rank * pitch * MOST_HERE
        source = dgates_ptr + peer * pitch * MOST_HERE
        theirs = tl.load(head + TOKENS_OF + peer)
        for block in range(cta, blocks(theirs, TOKENS), ctas):
            end = min((block + 1) * TOKENS, theirs) * MOST_HERE
            for at in range(block * TOKENS * MOST_HERE, end, PAIRS):
                here = at + tl.arange(0, PAIRS)
                value = tl.load(source + here, mask=here < end, other=0.0)
                tl.store(target + here, value.to(tl.int32, bitcast=True), mask=here < end)
        peer_tile_notify(channel, SENT + cta, peer)
    show_done(channel, COMMUNICATE, PROGRESS)
    show_tile(channel, COMPUTE, cta, PROGRESS)
    code = 0
    for step in range(1, world_size):
        if code == 0:
            code = consumer_tile_wait(channel, SENT + cta, (rank + step) % world_size, COMPUTE, cta)
    if code == 0:
        for block in range(cta, blocks(tokens, TOKENS), ctas):
            bring_home(channel, ids_ptr, dgates_ptr, out_ptr, block * TOKENS * TOP_K,
                       min((block + 1) * TOKENS, tokens) * TOP_K, pitch, experts, first_word, TOP_K,
                       MOST_HERE, PAIRS)  # fmt: skip
    show_done(channel, COMPUTE, PROGRESS)
    finish_launch(channel, ctas, 0)


@triton.jit
def bring_home(channel, ids_ptr, dgates_ptr, out_ptr, first, end, pitch, experts, first_word, TOP_K: tl.constexpr,
               MOST_HERE: tl.constexpr, PAIRS: tl.constexpr):  # fmt: skip
    """Find the gradients of pairs [first, end) of our tokens; a dropped pair's is zero."""
    for at in range(first, end, PAIRS):
        here = at + tl.arange(0, PAIRS)
        inside = here < end
        expert = tl.load(ids_ptr + here, mask=inside, other=-1)
        exists = (expert >= 0) & (expert < experts * channel.world_size)
        owner = tl.where(exists, expert, 0) // experts
        place = here % TOP_K
        before = tl.zeros((PAIRS,), dtype=tl.int32)
        for other in tl.static_range(TOP_K):
            another = tl.load(ids_ptr + here - place + other, mask=inside, other=-1)
            same = (another >= owner * experts) & (another < (owner + 1) * experts)
            before += (same & (other < place)).to(tl.int32)
        of_token = here // TOP_K * MOST_HERE + before
        ours = owner == channel.rank
        own = tl.load(dgates_ptr + channel.rank * pitch * MOST_HERE + of_token, mask=exists & ours, other=0.0)
        sent = tl.load(
            channel.control + first_word + owner * pitch * MOST_HERE + of_token, mask=exists & (ours == 0), other=0
        )
        tl.store(out_ptr + here, tl.where(ours, own, sent.to(tl.float32, bitcast=True)), mask=inside)


@triton.jit
def weight_gradient_kernel(a_ptr, b_ptr, out_ptr, ends_ptr, a_columns, b_columns, BLOCK_M: tl.constexpr,
                           BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr):  # fmt: skip
    """out[e] = A^T B over the rows of expert e, in fp32; one program for each tile of each expert."""
    blocks_n = blocks(b_columns, BLOCK_N)
    of_expert = blocks(a_columns, BLOCK_M) * blocks_n
    expert = tl.program_id(0) // of_expert
    tile = tl.program_id(0) % of_expert
    end = tl.load(ends_ptr + expert)
    begin = tl.load(ends_ptr + expert - 1, mask=expert > 0, other=0)
    m = tile // blocks_n * BLOCK_M + tl.arange(0, BLOCK_M)
    n = tile % blocks_n * BLOCK_N + tl.arange(0, BLOCK_N)
    acc = tl.zeros((BLOCK_M, BLOCK_N), dtype=tl.float32)
    for first in range(begin, end, BLOCK_K):
        row = (first + tl.arange(0, BLOCK_K)).to(tl.int64)[:, None]
        there = (first + tl.arange(0, BLOCK_K) < end)[:, None]
        a = tl.load(a_ptr + row * a_columns + m[None, :], mask=there & (m < a_columns)[None, :], other=0.0)
        b = tl.load(b_ptr + row * b_columns + n[None, :], mask=there & (n < b_columns)[None, :], other=0.0)
        acc = tl.dot(a.T, b, acc)
    here = out_ptr + (expert.to(tl.int64) * a_columns + m)[:, None] * b_columns + n[None, :]
    tl.store(here, acc.to(out_ptr.dtype.element_ty), mask=(m < a_columns)[:, None] & (n < b_columns)[None, :])


@triton.jit(do_not_specialize=("elements",))
def clear_empty_kernel(out_ptr, ends_ptr, elements, PARTS: tl.constexpr, COLS: tl.constexpr):
    """Zeros for the gradient of a weight whose expert has no row: a grouped product may not write it."""
    expert = tl.program_id(0) // PARTS
    end = tl.load(ends_ptr + expert)
    if end == tl.load(ends_ptr + expert - 1, mask=expert > 0, other=0):
        base = out_ptr + expert.to(tl.int64) * elements
        for at in range(tl.program_id(0) % PARTS * COLS, elements, PARTS * COLS):
            here = at + tl.arange(0, COLS)
            tl.store(base + here, tl.zeros((COLS,), dtype=tl.float32).to(out_ptr.dtype.element_ty),
                     mask=here < elements)  # fmt: skip
