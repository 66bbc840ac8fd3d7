# SPDX-License-Identifier: Apache-2.0
"""Measure the clocks of a workspace's GPUs against each other, through the memory that they share.

Rank 0 asks each peer in turn, `rounds` times: it writes a number into the peer's memory and waits until the peer has
written its time and the same number into rank 0's. An exchange over NVLink takes some microseconds. Waits are bounded
by polls instead of by a clock: a count is the same in all threads of a warp, a clock is not.

What the numbers mean, in plain Python: `clock.offset_of`.
"""

from typing import TYPE_CHECKING, Any

import triton
import triton.language as tl

from megascale_kernels.device.layout import MAX_CTAS, VOTES
from megascale_kernels.device.signals import now_ns
from megascale_kernels.errors import TileTimeout
from megascale_kernels.tracing.clock import Exchange, Offset, align

if TYPE_CHECKING:
    from torch import Tensor

    from megascale_kernels.memory.workspace import Workspace

# The control words end with a line of their own behind the votes.
PING = tl.constexpr(VOTES.value + MAX_CTAS)
PONG = tl.constexpr(PING.value + 1)
ANSWER = tl.constexpr(PING.value + 2)  # low and high word
POLLS = 4_000_000  # about two seconds


@triton.jit(do_not_specialize=["other", "first", "rounds", "polls"])
def exchange_kernel(control, peers, out, other, first, rounds, polls, ASKS: tl.constexpr):
    """Ask (or answer) `rounds` times; out[round] = asked, answered, received, zeros where no answer came."""
    theirs = tl.load(peers + other).to(tl.pointer_type(tl.int32))
    going = 1
    for number in range(first, first + rounds):
        if going != 0:
            if ASKS:
                asked = now_ns()
                tl.atomic_xchg(theirs + PING, number, sem="release", scope="sys")
                going = _arrives(control + PONG, number, polls)
                received = now_ns()
                if going != 0:
                    tl.store(out + (number - first) * 3, asked)
                    tl.store(out + (number - first) * 3 + 1, _answer(control))
                    tl.store(out + (number - first) * 3 + 2, received)
            else:
                going = _arrives(control + PING, number, polls)
                if going != 0:
                    answered = now_ns()
                    tl.store(theirs + ANSWER, (answered & 0xFFFFFFFF).to(tl.int32))
                    tl.store(theirs + ANSWER + 1, (answered >> 32).to(tl.int32))
                    tl.atomic_xchg(theirs + PONG, number, sem="release", scope="sys")


@triton.jit
def _arrives(flag, number, polls):
    seen = tl.atomic_add(flag, 0, sem="acquire", scope="sys")
    while (seen != number) & (polls > 0):
        seen = tl.atomic_add(flag, 0, sem="acquire", scope="sys")
        polls -= 1
    return (seen == number).to(tl.int32)


@triton.jit
def _answer(control):
    low = tl.atomic_add(control + ANSWER, 0, sem="relaxed", scope="sys")
    high = tl.atomic_add(control + ANSWER + 1, 0, sem="relaxed", scope="sys")
    return (high.to(tl.int64) << 32) | (low.to(tl.int64) & 0xFFFFFFFF)


@triton.jit
def clock_kernel(out):
    """Write the time: launched behind a CUDA event, it ties the event to the GPU's clock (`dump.chunk_of`)."""
    tl.store(out, now_ns())


def measure_offsets(workspace: "Workspace", rounds: int = 64) -> dict[int, Offset]:
    """Every rank's clock against that of rank 0; all ranks of the group must call it, and nothing else may run.

    Raises:
        TileTimeout: a rank did not answer.
    """
    import torch
    import torch.distributed as dist

    times = torch.zeros(rounds, 3, dtype=torch.int64, device=workspace.device)
    for asks in (True, False):
        exchange_kernel.warmup(
            *_arguments(workspace, times, 0, rounds), ASKS=asks, num_warps=1, enable_fp_fusion=True, grid=(1,)
        )
    workspace.memory[PING.value : PING.value + 4].zero_()
    torch.cuda.synchronize(workspace.device)
    # The host's barrier: after it each rank finds the words cleared, and none compiles meanwhile.
    dist.barrier(workspace.group)
    torch.cuda.synchronize(workspace.device)
    found: list[Any] = [None]
    if workspace.rank == 0:
        found = [{rank: _ask(workspace, times, rank, rounds) for rank in range(1, workspace.world_size)}]
    else:
        _run(workspace, times, 0, workspace.rank, rounds, asks=False)
    dist.broadcast_object_list(found, src=dist.get_global_rank(workspace.group, 0), group=workspace.group)
    exchanges: dict[int, list[Exchange]] = found[0]
    for rank, answers in exchanges.items():
        if len(answers) < rounds:
            raise TileTimeout(
                f"rank {rank} answered {len(answers)} of {rounds} questions for its clock", rank=0, peer=rank
            )
    left = {rank: iter(answers) for rank, answers in exchanges.items()}
    return align(lambda rank: next(left[rank]), range(workspace.world_size), rounds)


def _ask(workspace: "Workspace", times: "Tensor", rank: int, rounds: int) -> list[Exchange]:
    times.zero_()
    _run(workspace, times, rank, rank, rounds, asks=True)
    return [Exchange(*row) for row in times.tolist() if row[2]]


def _run(workspace: "Workspace", times: "Tensor", other: int, asked: int, rounds: int, *, asks: bool) -> None:
    """Numbers differ between the ranks that are asked: an answer of the one before is not taken for this one's."""
    arguments = _arguments(workspace, times, other, rounds, first=1 + asked * rounds)
    exchange_kernel[(1,)](*arguments, ASKS=asks, num_warps=1, enable_fp_fusion=True)


def _arguments(workspace: "Workspace", times: "Tensor", other: int, rounds: int, first: int = 1) -> tuple[Any, ...]:
    # Rank 0 pings one after the other: the last one waits for all those before it.
    return workspace.memory, workspace.peers, times, other, first, rounds, POLLS * workspace.world_size
