# SPDX-License-Identifier: Apache-2.0
"""What the operators promise on GPUs, for `tests/fixtures/kernel_group.py`.

Legend: M rows over all ranks, K summed over, N columns, W ranks.
"""

import os
import signal
import threading
import time
from collections.abc import Callable
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from megascale_kernels import (
    ColumnParallelLinear,
    Config,
    RankMismatch,
    RowParallelLinear,
    TileTimeout,
    Workspace,
    ag_gemm,
    autotune,
    gemm_ar,
    gemm_rs,
    reference,
)
from megascale_kernels.dispatch import dispatch
from megascale_kernels.gemm_rs import hopper_launch
from torch import Tensor, nn

from tests.fixtures.kernel_group import Place
from tests.gpu.kernel_cases import (
    ALIGNED,
    CUBLAS,
    GATHER_CONFIGS,
    HOPPER_SCATTERS,
    PLAIN,
    RAGGED,
    SCATTER_CONFIGS,
    TAILS,
    Shape,
    assert_no_worse,
    doubled,
    drawn,
    operands,
    shared_workspace,
)

SLEEP_CYCLES = 3_000_000  # a straggler comes 1 to 2 ms late
REPLAYS = 50

tuned_choice = autotune.choose
# The tuner would send small shapes down the serial path; here the kernels are needed.
autotune.choose = lambda *_: PLAIN


E = TypeVar("E", bound=Exception)


# --- results -------------------------------------------------------------------------------------------------------


def ag_gemm_is_no_worse_than_serial(_: Place) -> None:
    """Both layouts, both types, tails, every carrier; the gathered rows come back as they were."""
    for case in (ALIGNED, *TAILS, *RAGGED, *(ALIGNED._replace(config=config) for config in GATHER_CONFIGS)):
        x, w, bias = operands(case, case.rows)
        out, gathered = ag_gemm(x, w, shared_workspace(case.dtype), bias=bias, config=case.config, return_gathered=True)
        serial, rows = reference.ag_gemm(x, w, None, bias)
        exact = reference.matmul(*(tensor for tensor in doubled((rows, w, bias))))
        assert_no_worse(out, serial, exact)
        assert torch.equal(gathered, rows), case


def gemm_rs_is_no_worse_than_serial(place: Place) -> None:
    """Both layouts, both types, tails, every way to push; the bias is added once."""
    for case in (ALIGNED, *TAILS, *RAGGED, *(ALIGNED._replace(config=config) for config in SCATTER_CONFIGS)):
        x, w, bias = operands(case, case.rows * place.world_size)
        out = gemm_rs(x, w, shared_workspace(case.dtype), bias=bias, config=case.config)
        exact_x, exact_w, exact_bias = doubled((x, w, bias))
        assert_no_worse(out, reference.gemm_rs(x, w, None, bias), reference.gemm_rs(exact_x, exact_w, None, exact_bias))


def gemm_ar_is_no_worse_than_serial(place: Place) -> None:
    """Few rows, both layouts, both types; every rank has the same bits."""
    for case in (
        Shape(64, 1024, 768),
        Shape(9, 520, 264, is_nk=False, bias=True),
        Shape(1, 64, 72, dtype=torch.float16),
    ):
        x, w, bias = operands(case, case.rows)
        out = gemm_ar(x, w, shared_workspace(case.dtype), bias=bias, config=case.config)
        exact_x, exact_w, exact_bias = doubled((x, w, bias))
        assert_no_worse(out, reference.gemm_ar(x, w, None, bias), reference.gemm_ar(exact_x, exact_w, None, exact_bias))
        everywhere = reference.all_gather(out[None])
        assert all(torch.equal(everywhere[rank], out) for rank in range(place.world_size))


def rows_that_tma_cannot_read_are_widened(place: Place) -> None:
    """An odd K, or an odd N of either layout, runs on copies of what ends badly; what begins badly is moved."""
    workspace = shared_workspace()
    hopper = Config(128, 128, kernel="hopper")
    for case in (
        Shape(64, 257, 264),
        Shape(201, 257, 263),
        Shape(64, 256, 263, is_nk=False),
        Shape(72, 257, 263, is_nk=False),
    ):
        for config in (PLAIN, hopper, *CUBLAS[:2]):
            launches = workspace.launches
            x, w, _ = operands(case, case.rows)
            serial, rows = reference.ag_gemm(x, w)
            out, gathered = ag_gemm(x, w, workspace, config=config, return_gathered=True)
            assert_no_worse(out, serial, rows.double() @ w.double())
            assert torch.equal(gathered, rows)
            whole, _, _ = operands(case, case.rows * place.world_size)
            exact = reference.gemm_rs(whole.double(), w.double())
            assert_no_worse(gemm_rs(whole, w, workspace, config=config), reference.gemm_rs(whole, w), exact)
            assert workspace.launches >= launches + 2  # and ranks meet before new code

    launches = workspace.launches
    w = drawn(264, 256).T
    shifted = drawn(64 * 256 + 1)[1:].view(64, 256)
    torch.testing.assert_close(ag_gemm(shifted, w, workspace), reference.ag_gemm(shifted, w)[0], rtol=2e-2, atol=0.3)
    assert workspace.launches > launches


def the_tuner_is_asked(_: Place) -> None:
    """Without a configuration the tuner decides, alike on all ranks, and the result is right."""
    autotune.choose = tuned_choice
    try:
        x, w, _ = operands(Shape(1024, 2048, 2048), 1024)
        serial, rows = reference.ag_gemm(x, w)
        assert_no_worse(ag_gemm(x, w, shared_workspace()), serial, rows.double() @ w.double())
    finally:
        autotune.choose = lambda *_: PLAIN


def a_contest_ends_alike_on_all_ranks(place: Place) -> None:
    """The first calls of a shape try each way, a rank late each time; all ranks keep the same one."""
    workspace = Workspace(max_rows=4096, max_gather_cols=4096, max_scatter_cols=4096)
    x, w, _ = operands(ALIGNED, ALIGNED.rows * place.world_size)
    exact, serial = reference.gemm_rs(x.double(), w.double()), reference.gemm_rs(x, w)
    calls = 0
    while calls == 0 or not all(held.decided for held in workspace.planned.contests.values()):
        if calls % place.world_size == place.rank:
            torch.cuda._sleep(SLEEP_CYCLES)
        assert_no_worse(gemm_rs(x, w, workspace), serial, exact)
        calls += 1
        assert calls < 100
    workspace.check()

    kept: list[Any] = [None] * place.world_size
    dist.all_gather_object(kept, [held.best for held in workspace.planned.contests.values()])
    assert kept[0]
    assert all(one == kept[0] for one in kept)


def empty_tensors_are_served(place: Place) -> None:
    """Nothing is launched for M, N or K = 0; the result is empty, or zeros plus bias."""
    workspace = shared_workspace()
    bias = drawn(16)
    assert ag_gemm(drawn(0, 64), drawn(64, 16), workspace, bias=bias).shape == (0, 16)
    assert gemm_rs(drawn(place.world_size, 64), drawn(64, 0), workspace).shape == (1, 0)
    assert torch.equal(gemm_ar(drawn(2, 0), drawn(0, 16), workspace, bias=bias), bias.expand(2, 16))


def results_repeat_bit_by_bit(place: Place) -> None:
    """Twenty calls with a straggler each time, another rank every time, give the same bits."""
    workspace = shared_workspace()
    x, w, _ = operands(ALIGNED, ALIGNED.rows * place.world_size)
    shard = x[: ALIGNED.rows].contiguous()
    calls: list[Callable[[], Tensor]] = [
        lambda: ag_gemm(shard, w, workspace),
        lambda: gemm_rs(x, w, workspace),
        lambda: gemm_ar(x[:64], w, workspace),
    ]
    first = [call() for call in calls]
    for turn in range(20):
        if turn % place.world_size == place.rank:
            torch.cuda._sleep(SLEEP_CYCLES)
        assert all(torch.equal(call(), wanted) for call, wanted in zip(calls, first, strict=True))


def two_quarters_in_a_slot_change_no_bit(place: Place) -> None:
    """Between two ranks two quarters of a partial share a slot of the ring; one a slot gives the same bits."""
    workspace, pairs = shared_workspace(), hopper_launch.pairs_quarters
    x, w, _ = operands(ALIGNED, ALIGNED.rows * place.world_size)
    for config in HOPPER_SCATTERS:
        paired = gemm_rs(x, w, workspace, config=config)
        hopper_launch.pairs_quarters = lambda _: False
        workspace.forget_plans()
        try:
            assert torch.equal(gemm_rs(x, w, workspace, config=config), paired), config
        finally:
            hopper_launch.pairs_quarters = pairs
            workspace.forget_plans()


# --- training ------------------------------------------------------------------------------------------------------


def gradients_are_no_worse_than_serial(place: Place) -> None:
    """Gradients of x, w and bias, of both operators, with what was gathered kept or gathered again."""
    workspace = shared_workspace()
    for save in (False, True):
        x, w, bias = operands(ALIGNED._replace(bias=True), ALIGNED.rows)
        leaves = [tensor.detach().requires_grad_() for tensor in (x, w, bias) if tensor is not None]
        dout = drawn(ALIGNED.rows * place.world_size, ALIGNED.n)
        out = ag_gemm(leaves[0], leaves[1], workspace, bias=leaves[2], save_gathered=save)
        dx, dw, dbias = torch.autograd.grad(out, leaves, dout)
        gathered = reference.all_gather(x)
        exact = reference.gemm_rs(dout.double(), w.T.double())
        assert_no_worse(dx, reference.gemm_rs(dout, w.T), exact)
        assert_no_worse(dw, gathered.T @ dout, gathered.T.double() @ dout.double())
        assert_no_worse(dbias, dout.sum(0), dout.double().sum(0))

    x, w, bias = operands(ALIGNED._replace(bias=True), ALIGNED.rows * place.world_size)
    leaves = [tensor.detach().requires_grad_() for tensor in (x, w, bias) if tensor is not None]
    dout = drawn(ALIGNED.rows, ALIGNED.n)
    out = gemm_rs(leaves[0], leaves[1], workspace, bias=leaves[2])
    dx, dw, dbias = torch.autograd.grad(out, leaves, dout)
    serial, gathered = reference.ag_gemm(dout, w.T)
    assert_no_worse(dx, serial, gathered.double() @ w.T.double())
    assert_no_worse(dw, x.T @ gathered, x.T.double() @ gathered.double())
    assert_no_worse(dbias, dout.sum(0), dout.double().sum(0))


def whole_and_parallel(place: Place, dtype: torch.dtype) -> tuple[nn.Module, nn.Module, Tensor, Tensor]:
    """An MLP in float64, the same cut over ranks, and an input of either."""
    torch.manual_seed(11)
    whole = nn.Sequential(nn.Linear(256, 1024), nn.GELU(), nn.Linear(1024, 256)).cuda().double()
    x = torch.randn(64 * place.world_size, 2, 256, device="cuda", dtype=torch.float64).to(dtype).double()
    cut = [nn.Linear(256, 1024), nn.Linear(1024, 256)]
    for linear, source in zip(cut, (whole[0], whole[2]), strict=True):
        linear.load_state_dict(source.state_dict())
        linear.to("cuda", dtype)
    workspace = shared_workspace(dtype)
    parallel = nn.Sequential(
        ColumnParallelLinear.from_linear(cut[0], workspace), nn.GELU(), RowParallelLinear.from_linear(cut[1], workspace)
    )
    own = x.chunk(place.world_size)[place.rank].to(dtype).detach().requires_grad_()
    return whole, parallel, x.requires_grad_(), own


def assert_near(actual: Tensor, wanted: Tensor) -> None:
    """Within 2 % of the wanted tensor's size: three products and their roundings to bfloat16."""
    actual, wanted = actual.detach().double(), wanted.detach()
    assert float((actual - wanted).norm()) <= 0.02 * float(wanted.norm())


def assert_same_training(place: Place, whole: nn.Module, parallel: nn.Module, x: Tensor, own: Tensor) -> None:
    """Output and all gradients of the parallel model are the whole one's."""
    share = 1024 // place.world_size
    mine = slice(place.rank * share, (place.rank + 1) * share)
    dout = torch.randn(x.shape, device="cuda", dtype=torch.float64, generator=torch.Generator("cuda").manual_seed(1))
    out_whole = whole(x)
    out_whole.backward(dout)
    out = parallel(own)
    out.backward(dout.chunk(place.world_size)[place.rank].to(out.dtype))
    first, second, up, down = parallel[0], parallel[2], whole[0], whole[2]
    for actual, wanted in (
        (out, out_whole.chunk(place.world_size)[place.rank]),
        (own.grad, x.grad.chunk(place.world_size)[place.rank]),
        (first.weight.grad, up.weight.grad[mine]),
        (first.bias.grad, up.bias.grad[mine]),
        (second.weight.grad, down.weight.grad[:, mine]),
        (second.bias.grad, down.bias.grad),
    ):
        assert_near(actual, wanted)


def layers_equal_the_whole_model(place: Place) -> None:
    """An MLP of both layers trains as the whole one does."""
    whole, parallel, x, own = whole_and_parallel(place, torch.bfloat16)
    assert_same_training(place, whole, parallel, x, own)


def compiled_layers_equal_the_whole_model(place: Place) -> None:
    """The same under `torch.compile(fullgraph=True)`, code generated by inductor."""
    _, parallel, _, own = whole_and_parallel(place, torch.bfloat16)
    compiled = torch.compile(parallel, fullgraph=True)
    dout = torch.ones_like(own)
    compiled(own).backward(dout)
    actual = [own.grad, *(p.grad for p in parallel.parameters())]
    own.grad = None
    parallel.zero_grad()
    parallel(own).backward(dout)
    for one, other in zip(actual, (own.grad, *(p.grad for p in parallel.parameters())), strict=True):
        assert_near(one, other.double())


def graphs_replay_like_eager_calls(place: Place) -> None:
    """Forward and backward are captured and replayed fifty times, with stragglers; a second graph comes in between."""
    workspace = shared_workspace()
    x, w, _ = operands(ALIGNED, ALIGNED.rows)
    v = drawn(256, ALIGNED.n).T * ALIGNED.n**-0.5
    x, w, v = (tensor.detach().requires_grad_() for tensor in (x, w, v))
    dout = drawn(ALIGNED.rows, v.shape[1])

    def train() -> list[Tensor]:
        out = gemm_rs(torch.relu(ag_gemm(x, w, workspace)), v, workspace)
        return [out, *torch.autograd.grad(out, (x, w, v), dout)]

    def look() -> Tensor:
        with torch.no_grad():
            return ag_gemm(x, w, workspace)

    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for _ in range(2):
            train()
            look()
    torch.cuda.current_stream().wait_stream(side)
    torch.cuda.synchronize()
    graphs = [torch.cuda.CUDAGraph(), torch.cuda.CUDAGraph()]
    with torch.cuda.graph(graphs[0], capture_error_mode="thread_local"):
        trained = train()
    with torch.cuda.graph(graphs[1], capture_error_mode="thread_local"):
        looked = look()

    inputs = [drawn(*x.shape) for _ in range(REPLAYS)]
    results = []
    for turn, rows in enumerate(inputs):
        with torch.no_grad():
            x.copy_(rows)
        if turn % place.world_size == place.rank:
            torch.cuda._sleep(SLEEP_CYCLES)
        graphs[0].replay()
        if turn % 3 == 0:
            graphs[1].replay()
        results.append([*(tensor.clone() for tensor in trained), looked.clone() if turn % 3 == 0 else None])
    workspace.check()
    for rows, (*replayed, seen) in zip(inputs, results, strict=True):
        with torch.no_grad():
            x.copy_(rows)
        (out, dx, *dws), (eager_out, eager_dx, *eager_dws) = replayed, train()
        assert torch.equal(out, eager_out)
        assert torch.equal(dx, eager_dx)
        # cuBLAS, which multiplies these, may choose otherwise in a graph.
        for one, other in zip(dws, eager_dws, strict=True):
            assert_near(one, other.double())
        assert seen is None or torch.equal(seen, look())
    workspace.check()


# --- what goes wrong -----------------------------------------------------------------------------------------------


def until_it_raises(call: Callable[[], Any], workspace: Workspace, kind: type[E]) -> E:
    """Call and synchronize; give the error."""
    try:
        call()
        workspace.check()
    except kind as error:
        return error
    raise AssertionError(f"no {kind.__name__}")


def assert_context_lives() -> None:
    """A product on this GPU is right."""
    a, b = drawn(256, 256), drawn(256, 256)
    assert_near(a @ b, a.double() @ b.double())


def shapes_that_differ_are_named(place: Place) -> None:
    """Every rank raises `RankMismatch` long before the deadline, naming both sizes; after a reset all is well."""
    workspace = Workspace(max_rows=4096, max_gather_cols=1024, max_scatter_cols=1024, adaptive=False)
    x, w, _ = operands(ALIGNED, ALIGNED.rows)
    for operator, rows in ((ag_gemm, x), (gemm_rs, drawn(ALIGNED.rows * place.world_size, ALIGNED.k))):
        operator(rows, w, workspace)
        workspace.check()
        columns = 512 if place.rank == 1 else ALIGNED.n
        mine = w[:, :columns]
        began = time.monotonic()
        error = until_it_raises(lambda o=operator, r=rows, m=mine: o(r, m, workspace), workspace, RankMismatch)
        assert time.monotonic() - began < 5
        assert "N 512" in str(error)
        assert f"N {ALIGNED.n}" in str(error)
        assert_context_lives()
        workspace.reset()
        out = operator(rows, w, workspace)
        workspace.check()
        serial = reference.ag_gemm(rows, w)[0] if operator is ag_gemm else reference.gemm_rs(rows, w)
        assert_near(out, serial.double())


def shapes_that_differ_are_named_on_the_serial_path(place: Place) -> None:
    """Where no kernel runs, ranks compare before the collective."""
    workspace = Workspace(max_rows=4096, max_gather_cols=1024, adaptive=False)
    x, w = drawn(64, 257), drawn(257, 16 if place.rank == 1 else 24)
    error = until_it_raises(lambda: ag_gemm(x, w, workspace), workspace, RankMismatch)
    assert "N 16" in str(error)
    assert "N 24" in str(error)


def a_rank_that_does_not_come_is_named(place: Place) -> None:
    """After the deadline the others raise `TileTimeout` and name it; their GPUs go on; after a reset all is well."""
    deadline_s = 1.0
    workspace = Workspace(
        max_rows=4096, max_gather_cols=1024, max_scatter_cols=1024, deadline_s=deadline_s, adaptive=False
    )
    absent = place.world_size - 1
    x, w, _ = operands(ALIGNED, ALIGNED.rows)
    whole = drawn(ALIGNED.rows * place.world_size, ALIGNED.k)
    calls: list[Callable[[], Tensor]] = [
        lambda: ag_gemm(x, w, workspace),
        lambda: gemm_rs(whole, w, workspace),
        lambda: gemm_ar(whole[:64], w, workspace),
    ]
    for call in calls:
        wanted = call()
        workspace.check()
        dist.barrier()
        torch.cuda.synchronize()
        if place.rank != absent:
            began = time.monotonic()
            error = until_it_raises(call, workspace, TileTimeout)
            assert deadline_s <= time.monotonic() - began <= deadline_s + 0.1
            assert error.peer == absent, error
            assert f"rank {absent}" in str(error)
            assert_context_lives()
        workspace.reset()
        assert torch.equal(call(), wanted)
        workspace.check()


def a_killed_peer_is_named(place: Place, config: Config | None = None) -> None:
    """A rank is killed in mid-kernel: within deadline + 100 ms the others name it, and their GPUs go on."""
    deadline_s = 2.0
    workspace = Workspace(
        max_rows=4096, max_gather_cols=2048, max_scatter_cols=2048, deadline_s=deadline_s, adaptive=False
    )
    victim = place.world_size - 1
    x, w, _ = operands(Shape(0, 2048, 2048), 4096)
    for _ in range(3):
        gemm_rs(x, w, workspace, config=config)
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
            gemm_rs(x, w, workspace, config=config)
            workspace.check()
        except TileTimeout as timeout:
            error = timeout
    took_s = time.monotonic() - began
    assert took_s <= deadline_s + 0.1, took_s
    assert error.peer == victim, error
    assert_context_lives()
    print(f"rank {place.rank}: {took_s:.3f} s: {error}")


def nothing_fell_back(place: Place) -> None:
    """A guard for this file: with a kernel's shape no reason for the serial path is found."""
    x, w, _ = operands(ALIGNED, ALIGNED.rows)
    weight = dispatch.operands.read_weight(w, x, "")
    call = dispatch.Call("ag_gemm", ALIGNED.rows * place.world_size, ALIGNED.n, ALIGNED.k)
    assert dispatch._why_serial(call, weight, shared_workspace()) is None
