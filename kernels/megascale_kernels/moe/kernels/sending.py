# SPDX-License-Identifier: Apache-2.0
"""Send each peer the tokens that it wants, and no others: by multiprocessors, where copy engines would send all.

A peer wants a token that has an expert there. With two ranks and many experts a token that is nearly every token; among
more ranks with few experts a token it is not: of Mixtral's tokens a rank of eight wants a quarter. A copy engine moves
what lies together, so rows are picked by the threads that load tiles, a *job* at a time: a block of tokens for a peer.
The last job of a unit announces it, with the flag that a copy would have raised, also where no token of it was wanted;
who waits, and for what, stays the same. Jobs wait for nothing.

Rows arrive where a copy would have brought them. What was not sent keeps what it was, and no table names it.
"""

import triton
import triton.language as tl
from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from megascale_kernels.device.primitives import peer_tile_notify
from megascale_kernels.device.signals import peer_data
from megascale_kernels.moe import tables
from megascale_kernels.moe.kernels.walk import UNITS
from megascale_kernels.planning.tile_order import blocks

SENT_JOBS = tl.constexpr(tables.SENT_JOBS)
JOB_TOKENS = tl.constexpr(16)  # of a job
SENDER_COLS = tl.constexpr(512)


@triton.jit
def send_job(rank, world_size, job, tokens, unit_tokens):
    """What a job sends: (peer, unit, first token, end). The nearest reader first, the first tokens first."""
    peers = world_size - 1
    peer = (rank + world_size - 1 - job % peers) % world_size
    of_unit = blocks(unit_tokens, JOB_TOKENS)
    unit = job // peers // of_unit
    first = unit * unit_tokens + job // peers % of_unit * JOB_TOKENS
    return peer, unit, first, tl.minimum(tl.minimum(first + JOB_TOKENS, (unit + 1) * unit_tokens), tokens)


@triton.jit
def finish_job(channel, head, peer, unit, unit_tokens, units):
    """Count a job; the last one of a unit announces it."""
    tl.debug_barrier()
    counter = head + SENT_JOBS + peer * units + unit
    done = tl.atomic_add(counter, 1, sem="acq_rel", scope="gpu")
    if done == blocks(unit_tokens, JOB_TOKENS) - 1:
        tl.atomic_xchg(counter, 0, sem="relaxed", scope="gpu")
        peer_tile_notify(channel, UNITS + unit, peer)


@triton.jit
def count_send_jobs(world_size, unit_tokens, units):
    """Jobs of all peers and units."""
    return (world_size - 1) * units * blocks(unit_tokens, JOB_TOKENS)


@triton.jit
def target_of(channel, x_ptr, peer, data_bytes, pitch, hidden):
    """Where our tokens lie on a peer."""
    base = peer_data(channel, peer, data_bytes, x_ptr)
    return base + channel.rank.to(tl.int64) * pitch * hidden


@triton.jit
def send_wanted(channel, x_ptr, ids_ptr, head, data_bytes, tokens, pitch, unit_tokens, units, hidden, experts, worker,
                workers, TOP_K: tl.constexpr, COLS: tl.constexpr):  # fmt: skip
    """Every `workers`-th job, by a program of a kernel in plain Triton."""
    for job in range(worker, count_send_jobs(channel.world_size, unit_tokens, units), workers):
        peer, unit, first, end = send_job(channel.rank, channel.world_size, job, tokens, unit_tokens)
        token = first + tl.arange(0, JOB_TOKENS)
        wanted = tl.zeros((JOB_TOKENS,), dtype=tl.int32)
        for place in tl.static_range(TOP_K):
            expert = tl.load(ids_ptr + token * TOP_K + place, mask=token < end, other=-1)
            wanted |= ((expert >= peer * experts) & (expert < (peer + 1) * experts)).to(tl.int32)
        target = target_of(channel, x_ptr, peer, data_bytes, pitch, hidden)
        for at in range(0, hidden, COLS):
            cols = at + tl.arange(0, COLS)
            offset = token.to(tl.int64)[:, None] * hidden + cols[None, :]
            mask = (wanted > 0)[:, None] & (cols < hidden)[None, :]
            tl.store(target + offset, tl.load(x_ptr + offset, mask=mask, other=0.0), mask=mask)
        finish_job(channel, head, peer, unit, unit_tokens, units)


@gluon.jit
def send_some(channel, x_ptr, ids_ptr, head, data_bytes, tokens, pitch, unit_tokens, units, hidden, experts, job,
              wants_all, TOP_K: gl.constexpr, WARPS: gl.constexpr):  # fmt: skip
    """The same by a role of `WARPS` warps of a warp-specialised kernel, a token a warp.

    Jobs of this program from `job` on, the next one or all that are left.

    Returns:
        the first job that is left.
    """
    layout: gl.constexpr = gl.BlockedLayout([1, 8], [1, 32], [WARPS, 1], [1, 0])
    step = gl.num_programs(0)
    count = count_send_jobs(channel.world_size, unit_tokens, units)
    end = gl.where(wants_all, count, gl.minimum(job + step, count))
    for number in range(job, end, step):
        peer, unit, first, last = send_job(channel.rank, channel.world_size, number, tokens, unit_tokens)
        target = target_of(channel, x_ptr, peer, data_bytes, pitch, hidden)
        for at_token in range(0, JOB_TOKENS, WARPS):
            token = first + at_token + gl.arange(0, WARPS, layout=gl.SliceLayout(1, layout))
            wanted = (token < last) & (token < 0)
            for place in gl.static_range(TOP_K):
                expert = gl.load(ids_ptr + token * TOP_K + place, mask=token < last, other=-1)
                wanted = wanted | ((expert >= peer * experts) & (expert < (peer + 1) * experts))
            for at in range(0, hidden, SENDER_COLS):
                cols = at + gl.arange(0, SENDER_COLS, layout=gl.SliceLayout(0, layout))
                offset = token.to(gl.int64)[:, None] * hidden + cols[None, :]
                mask = wanted[:, None] & (cols < hidden)[None, :]
                gl.store(target + offset, gl.load(x_ptr + offset, mask=mask, other=0.0), mask=mask)
        finish_job(channel, head, peer, unit, unit_tokens, units)
    return gl.where(job < end, gl.where(wants_all, count, job + step), job)
