# SPDX-License-Identifier: Apache-2.0
"""What sequence-parallel attention promises on GPUs, for `tests/fixtures/kernel_group.py`.

"No worse than serial": against float64 the root mean square of the errors is at most that of torch's attention in the
same type on K and V that NCCL gathered, times `ROOM`.
"""

import os
import signal
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TypeVar

import pytest
import torch
import torch.distributed as dist
from megascale_kernels import (
    AttentionConfig,
    RankMismatch,
    SequenceParallelAttention,
    TileTimeout,
    Workspace,
    reference,
    sp_attention,
)
from megascale_kernels.attention import sdpa
from megascale_kernels.attention.problem import read_problem
from torch import Tensor

from tests.fixtures.kernel_group import Place
from tests.gpu.kernel_cases import drawn

SLEEP_CYCLES = 3_000_000  # a straggler comes 1 to 2 ms late
ROOM = 1.25  # weights are rounded at other maxima than in torch's kernels: other roundings, as many of them
REPLAYS = 20
MOST_ROWS, MOST_COLS = 4096, 2048
SMALL_STEP = AttentionConfig(64, 64, 4, 3, 4, keys_step=32, queries_block=64)


class Case:
    """One attention: tokens of a rank, batch, heads, their elements, mask, cut, packed lengths over all ranks."""

    def __init__(
        self, tokens: int, q_heads: int = 4, kv_heads: int = 2, head_dim: int = 128, *, batch: int = 1,
        causal: bool = True, zigzag: bool = True, packed: tuple[float, ...] = (),
        dtype: torch.dtype = torch.bfloat16, config: AttentionConfig | None = None,
    ) -> None:  # fmt: skip
        self.tokens, self.batch, self.heads = tokens, batch, (q_heads, kv_heads, head_dim)
        self.causal, self.zigzag, self.packed, self.dtype, self.config = causal, zigzag, packed, dtype, config

    def by(self, config: AttentionConfig) -> "Case":
        """The same, run so."""
        q_heads, kv_heads, head_dim = self.heads
        return Case(
            self.tokens, q_heads, kv_heads, head_dim, batch=self.batch, causal=self.causal, zigzag=self.zigzag,
            packed=self.packed, dtype=self.dtype, config=config,
        )  # fmt: skip

    def __repr__(self) -> str:
        return (
            f"{self.batch} x {self.tokens} x {self.heads}, causal {self.causal}, zigzag {self.zigzag}, "
            f"packed {self.packed}, {self.dtype}, {self.config}"
        )


PLAIN, HOPPER = AttentionConfig(), AttentionConfig(kernel="hopper")
PACKED = AttentionConfig(block_n=64, stages=3)  # without a configuration packed sequences take the serial path
ALL_HOPPER = HOPPER._replace(backward="hopper")
# Chunks that blocks divide, that they do not, and less than one block: the same code, compiled once.
CASES = [
    Case(512),
    Case(332, 4, 2, 128, batch=2),
    Case(10, 2, 1, 128),
    Case(300, 8, 1, 64, causal=False, dtype=torch.float16),
    Case(200, zigzag=False),  # rank 0 sees none of the others' keys
]
# Each compiles code of its own: three kernels, 2 to 4 s each.
MORE_CASES = [
    *(case.by(PLAIN) for case in CASES[:3]),
    Case(256, 4, 4, 64, batch=2),
    Case(512, packed=(0.1, 0.11, 0.5, 0.93), config=PACKED),  # tokens behind the last belong to none
    Case(301, packed=(0.3, 1.0), causal=False, zigzag=False, head_dim=64, config=PACKED),
    Case(332, batch=2, config=SMALL_STEP),
]

E = TypeVar("E", bound=Exception)

_workspaces: dict[torch.dtype, Workspace] = {}


def shared_workspace(dtype: torch.dtype = torch.bfloat16) -> Workspace:
    """One workspace per type: making one takes longer than using it."""
    if dtype not in _workspaces:
        _workspaces[dtype] = Workspace(
            max_rows=MOST_ROWS, max_gather_cols=MOST_COLS, dtype=dtype, adaptive=False, deadline_s=20.0
        )
    return _workspaces[dtype]


def operands(case: Case, place: Place) -> tuple[list[Tensor], Tensor, Tensor | None]:
    """Random q, k, v as leaves, a gradient of the output, and where packed sequences end."""
    q_heads, kv_heads, head_dim = case.heads
    leaves = [
        drawn(case.batch, case.tokens, heads, head_dim, dtype=case.dtype).requires_grad_()
        for heads in (q_heads, kv_heads, kv_heads)
    ]
    ends = None
    if case.packed:
        total = case.tokens * place.world_size
        ends = torch.tensor([0, *(int(part * total) for part in case.packed)], dtype=torch.int32, device="cuda")
        leaves = [leaf.detach()[0].requires_grad_() for leaf in leaves]
    return leaves, torch.randn_like(leaves[0]), ends


def serial(
    leaves: list[Tensor], dout: Tensor, ends: Tensor | None, case: Case, place: Place, dtype: torch.dtype
) -> list[Tensor]:
    """Output and gradients by torch's attention in a type, on K and V that NCCL gathered."""
    q, k, v = (leaf.detach().to(dtype) for leaf in leaves)
    problem = read_problem(q, k, v, place.world_size, ends, None, causal=case.causal, zigzag=case.zigzag)
    batched = [tensor if tensor.ndim == 4 else tensor[None] for tensor in (q, k, v, dout.to(dtype))]
    wholes = [
        sdpa.whole_sequence(reference.all_gather(tensor[None]), problem).requires_grad_() for tensor in batched[1:3]
    ]
    query = batched[0].requires_grad_()
    out = sdpa.attend(query, *wholes, problem, place.rank, ends)
    dq, *others = torch.autograd.grad(out, (query, *wholes), batched[3])
    shares = [reference.reduce_scatter(sdpa.by_ranks(one, problem).contiguous())[0] for one in others]
    return [one.view(leaf.shape) for one, leaf in zip((out, dq, *shares), (leaves[0], *leaves), strict=True)]


def run(leaves: list[Tensor], dout: Tensor, ends: Tensor | None, case: Case) -> list[Tensor]:
    """Output and gradients by ours."""
    out = sp_attention(
        *leaves, shared_workspace(case.dtype), causal=case.causal, zigzag=case.zigzag, cu_seqlens=ends,
        config=case.config,
    )  # fmt: skip
    return [out.detach(), *torch.autograd.grad(out, leaves, dout)]


def assert_no_worse(case: Case, place: Place) -> None:
    """Output and gradients of a case, and that the kernels made them."""
    workspace = shared_workspace(case.dtype)
    leaves, dout, ends = operands(case, place)
    launches = workspace.launches

    ours = run(leaves, dout, ends, case)

    workspace.check()
    assert workspace.launches >= launches + 2, "it fell back"
    theirs = serial(leaves, dout, ends, case, place, case.dtype)
    exact = serial(leaves, dout, ends, case, place, torch.float64)
    for name, one, other, wanted in zip(("out", "dq", "dk", "dv"), ours, theirs, exact, strict=True):
        assert bool(torch.isfinite(one).all()), f"{case}: {name} has elements that are not finite"
        rms, serial_rms = (float((tensor.double() - wanted).square().mean().sqrt()) for tensor in (one, other))
        assert rms <= ROOM * serial_rms + 1e-7, f"{case}: {name}: {rms} against {serial_rms}"


def attention_is_no_worse_than_serial(place: Place) -> None:
    """As the operator runs by itself, warp-specialised: chunks of any length, batches, groups, either mask and cut."""
    for case in CASES:
        assert_no_worse(case, place)


def other_ways_are_no_worse_than_serial(place: Place) -> None:
    """Plain Triton, packed sequences, other blocks and pieces."""
    for case in MORE_CASES:
        assert_no_worse(case, place)


def the_warp_specialised_backward_is_no_worse_than_serial(place: Place) -> None:
    """Both passes of the backward in Gluon; the same bits from call to call."""
    for case in CASES:
        assert_no_worse(case.by(ALL_HOPPER), place)
    assert_repeats(Case(512, config=ALL_HOPPER), place)


def assert_repeats(case: Case, place: Place) -> None:
    """Ten calls, forward and backward, with another rank late each time, give the same bits."""
    leaves, dout, _ = operands(case, place)
    first = run(leaves, dout, None, case)
    for turn in range(10):
        if turn % place.world_size == place.rank:
            torch.cuda._sleep(SLEEP_CYCLES)
        again = run(leaves, dout, None, case)
        assert all(torch.equal(one, other) for one, other in zip(first, again, strict=True)), (case, turn)


def attention_repeats_bit_by_bit(place: Place) -> None:
    """Whoever is late, and by either forward."""
    for config in (PLAIN, HOPPER):
        assert_repeats(Case(512, config=config), place)


def every_element_is_right_whoever_is_late(place: Place) -> None:
    """Fifty calls with new operands and lengths, a rank late each time: none holds what was there before."""
    lengths = [2 * (31 + 97 * turn % 300) for turn in range(50)]
    for turn, tokens in enumerate(lengths):
        case = Case(tokens, 2, 1, 64, causal=turn % 3 != 0)
        leaves, dout, _ = operands(case, place)
        if turn % place.world_size == place.rank:
            torch.cuda._sleep(SLEEP_CYCLES)
        ours = run(leaves, dout, None, case)
        theirs = serial(leaves, dout, None, case, place, case.dtype)
        for one, other in zip(ours, theirs, strict=True):
            torch.testing.assert_close(one, other, rtol=5e-2, atol=5e-2)


def compiled_attention_equals_eager(place: Place) -> None:
    """Under `torch.compile(fullgraph=True)` the same bits, forward and backward."""
    case = Case(256)
    module = SequenceParallelAttention(shared_workspace())
    leaves, dout, _ = operands(case, place)
    eager = run(leaves, dout, None, case)
    out = torch.compile(module, fullgraph=True)(*leaves)
    compiled = [out.detach(), *torch.autograd.grad(out, leaves, dout)]
    assert all(torch.equal(one, other) for one, other in zip(eager, compiled, strict=True))


def attention_replays_like_eager_calls(place: Place) -> None:
    """Forward and backward are captured and replayed with new operands and a late rank each time."""
    case = Case(256)
    leaves, dout, _ = operands(case, place)
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for _ in range(2):
            run(leaves, dout, None, case)
    torch.cuda.current_stream().wait_stream(side)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, capture_error_mode="thread_local"):
        captured = run(leaves, dout, None, case)
    for turn in range(REPLAYS):
        with torch.no_grad():
            for leaf in leaves:
                leaf.copy_(torch.randn_like(leaf))
        if turn % place.world_size == place.rank:
            torch.cuda._sleep(SLEEP_CYCLES)
        graph.replay()
        replayed = [tensor.clone() for tensor in captured]
        eager = run(leaves, dout, None, case)
        assert all(torch.equal(one, other) for one, other in zip(replayed, eager, strict=True)), turn
    shared_workspace().check()


# --- what goes wrong -----------------------------------------------------------------------------------------------


@contextmanager
def its_own(deadline_s: float) -> Iterator[Workspace]:
    """A workspace that a promise may break."""
    workspace = Workspace(max_rows=MOST_ROWS, max_gather_cols=MOST_COLS, adaptive=False, deadline_s=deadline_s)
    yield workspace
    workspace.close()


def until_it_raises(call: Callable[[], object], workspace: Workspace, kind: type[E]) -> E:
    """Call once and wait; the error, which must come."""

    def both() -> None:
        call()
        workspace.check()

    with pytest.raises(kind) as caught:
        both()
    return caught.value


def heads_that_differ_are_named(place: Place) -> None:
    """A rank with other heads ends in `RankMismatch` on every rank, long before the deadline."""
    with its_own(20.0) as workspace:
        q = drawn(1, 256, 4 + 4 * (place.rank == 1), 128)
        k = drawn(1, 256, 2, 128)
        sp_attention(drawn(1, 256, 4, 128), k, k, workspace, causal=True)  # compiled
        workspace.check()
        dist.barrier()
        began = time.monotonic()
        error = until_it_raises(lambda: sp_attention(q, k, k, workspace, causal=True), workspace, RankMismatch)
        assert "attention" in str(error)
        assert time.monotonic() - began < 15.0


def a_rank_that_does_not_come_is_named(place: Place) -> None:
    """`TileTimeout` names the missing rank, the tile and the operator, in time, each way; all go on after."""
    deadline_s = 1.0
    with its_own(deadline_s) as workspace:
        q, k, v = (drawn(1, 512, heads, 128).requires_grad_() for heads in (4, 2, 2))
        dout = drawn(1, 512, 4, 128)

        def forward() -> Tensor:
            return sp_attention(q, k, v, workspace, causal=True)

        wanted = torch.autograd.grad(forward(), (q, k, v), dout)
        absent = place.world_size - 1
        calls: list[tuple[str, Callable[[], object]]] = [("attention", forward)]
        out = forward()
        workspace.check()
        calls.append(("attention_backward", lambda: torch.autograd.grad(out, (q, k, v), dout)))
        for operator, call in calls:
            dist.barrier()
            torch.cuda.synchronize()
            if place.rank != absent:
                began = time.monotonic()
                error = until_it_raises(call, workspace, TileTimeout)
                assert error.peer == absent, error
                assert error.operator == operator, error
                assert error.tile >= 0
                assert time.monotonic() - began <= deadline_s + 0.3
                assert float(torch.ones(8, device="cuda").sum()) == 8
            workspace.reset()
        again = torch.autograd.grad(forward(), (q, k, v), dout)
        assert all(torch.equal(one, other) for one, other in zip(again, wanted, strict=True))
        workspace.check()


def a_killed_peer_is_named(place: Place) -> None:
    """A rank is killed in mid-kernel: within deadline + 100 ms the others name it, and their GPUs go on."""
    deadline_s = 2.0
    with its_own(deadline_s) as workspace:
        victim = place.world_size - 1
        q, k, v = (drawn(1, MOST_ROWS // place.world_size, heads, 128) for heads in (16, 4, 4))
        for _ in range(3):
            sp_attention(q, k, v, workspace, causal=True)
        workspace.check()
        dist.barrier()
        torch.cuda.synchronize()
        if place.rank == victim:
            threading.Timer(0.5, os.kill, (os.getpid(), signal.SIGKILL)).start()
        end = time.monotonic() + 20
        error = None
        while error is None:
            began = time.monotonic()
            assert began < end
            try:
                sp_attention(q, k, v, workspace, causal=True)
                workspace.check()
            except TileTimeout as timeout:
                error = timeout
        took_s = time.monotonic() - began
        assert took_s <= deadline_s + 0.1, took_s
        assert error.peer == victim, error
        assert float(torch.ones(8, device="cuda").sum()) == 8
        print(f"rank {place.rank}: {took_s:.3f} s: {error}")
