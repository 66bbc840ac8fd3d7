# SPDX-License-Identifier: Apache-2.0
"""What `swiglu_gemm_rs` and `gated_mlp` promise on GPUs: SwiGLU, and its gradient, inside the product."""

import torch
import torch.distributed as dist
from megascale_kernels import (
    ColumnParallelLinear,
    Config,
    GatedMLP,
    RowParallelLinear,
    TileTimeout,
    Workspace,
    autotune,
    gated_mlp,
    gemm_rs,
    reference,
    swiglu_gemm_rs,
)
from megascale_kernels import swiglu as swiglu_operator
from megascale_kernels.dispatch import dispatch, gated
from megascale_kernels.swiglu import gradient_of_wide, silu_times_value
from torch import Tensor
from torch.nn import functional

from tests.fixtures.kernel_group import Place
from tests.gpu.kernel_cases import ALIGNED, CUBLAS, PLAIN, Shape, assert_no_worse, drawn, operands, shared_workspace
from tests.gpu.kernel_gpu_promises import (
    REPLAYS,
    SLEEP_CYCLES,
    assert_context_lives,
    assert_near,
    tuned_choice,
    until_it_raises,
)

WIDE_TILES, NARROW_TILES = (Config(128, columns, kernel="hopper", planned=True) for columns in (256, 128))
# The last wave left whole, in parts, dealt out evenly; columns walked with all shards; rows announced in two parts.
FUSED = [
    WIDE_TILES, NARROW_TILES,
    *(Config(128, columns, kernel="hopper", tail_split=split) for columns in (256, 128) for split in (1, 3, 0)),
    Config(128, 128, kernel="hopper", planned=True, lead=2), Config(kernel="hopper", planned=True, splits=2, stages=3),
]  # fmt: skip
# Rows of dy on a rank, its columns, those of swiglu(wide): tails of all kinds, less than one tile.
CASES = [
    Shape(512, 1024, 768), Shape(201, 1000, 776, is_nk=False), Shape(64, 264, 520, dtype=torch.float16),
    Shape(1409, 520, 264), Shape(8, 64, 72, is_nk=False),
]  # fmt: skip


def chosen(config: Config | None, workspace: Workspace) -> None:
    """Let the model's answer be this."""
    workspace.forget_plans()
    autotune.choose = lambda *_: config


def drawn_case(place: Place, case: Shape) -> tuple[Tensor, Tensor, Tensor]:
    """Gates and values, a row-parallel weight and the gradient of the result: [M, 2 N], [N, K], [M / W, K]."""
    dout, transposed, _ = operands(case, case.rows)
    return drawn(case.rows * place.world_size, 2 * case.n, dtype=case.dtype), transposed.T, dout


def exact_gradient(wide: Tensor, product: Tensor) -> Tensor:
    """That of wide by autograd in float64, from that of swiglu's result."""
    leaf = wide.double().requires_grad_()
    gate, value = leaf.chunk(2, -1)
    (found,) = torch.autograd.grad(functional.silu(gate) * value, leaf, product)
    return found


def gradients_are_no_worse_than_apart(place: Place) -> None:
    """Any shape, layout, type and cut: as near to float64 as the product, rounded, and a kernel behind it."""
    others = [PLAIN, CUBLAS[2], None]
    for number, case in enumerate(CASES):  # configurations are dealt out: each compiles for some seconds
        workspace = shared_workspace(case.dtype)
        wide, w, dout = drawn_case(place, case)
        product, gathered = reference.ag_gemm(dout, w.T)
        apart = gradient_of_wide(wide, product)
        exact = exact_gradient(wide, gathered.double() @ w.T.double())
        for config in (*FUSED[number :: len(CASES)], *others[number :: len(CASES)]):
            chosen(config, workspace)
            launches = workspace.launches
            dwide, came = gated.gradient_in_place(dout, w.T, wide, workspace)
            assert torch.equal(came, gathered), (case, config)
            assert_no_worse(dwide, apart, exact)
            assert (workspace.launches > launches) == (config is not None)
            workspace.check()


def training_equals_float64(place: Place) -> None:
    """Output, and gradients of wide, w and bias, eager and compiled, fused and on the serial path."""
    workspace = shared_workspace()
    wide, w, dout = drawn_case(place, Shape(201, 520, 264))
    bias = drawn(520)
    dist.broadcast(bias, 0)
    leaves = [tensor.detach().requires_grad_() for tensor in (wide, w, bias)]

    def call(wide: Tensor, w: Tensor, bias: Tensor) -> Tensor:
        return swiglu_gemm_rs(wide, w, workspace, bias=bias)

    doubles = [leaf.detach().double().requires_grad_() for leaf in leaves]
    gate, value = doubles[0].chunk(2, -1)
    act = functional.silu(gate) * value
    wanted = reference.gemm_rs(act.detach(), doubles[1].detach(), None, doubles[2].detach())
    gathered = reference.all_gather(dout).double()
    (dwide,) = torch.autograd.grad(act, doubles[0], gathered @ doubles[1].T)
    exact = [dwide.detach(), act.detach().T @ gathered, dout.double().sum(0)]
    for config in (WIDE_TILES, NARROW_TILES, None):
        chosen(config, workspace)
        for function in (call, torch.compile(call, fullgraph=True, dynamic=False)):
            out = function(*leaves)
            assert_near(out, wanted)
            for one, other in zip(torch.autograd.grad(out, leaves, dout), exact, strict=True):
                assert_near(one, other)
    workspace.check()


def gradients_repeat_bit_by_bit(place: Place) -> None:
    """Twenty calls with a straggler each time; the same bits, also from a captured graph over new rows."""
    workspace = shared_workspace()
    wide, w, dout = drawn_case(place, ALIGNED)
    for config in (WIDE_TILES, Config(128, 128, kernel="hopper", tail_split=0)):
        chosen(config, workspace)
        first = gated.gradient_in_place(dout, w.T, wide, workspace)[0]
        for turn in range(20):
            if turn % place.world_size == place.rank:
                torch.cuda._sleep(SLEEP_CYCLES)
            assert torch.equal(gated.gradient_in_place(dout, w.T, wide, workspace)[0], first)
        graph = torch.cuda.CUDAGraph()
        torch.cuda.synchronize()
        with torch.cuda.graph(graph, capture_error_mode="thread_local"):
            captured = gated.gradient_in_place(dout, w.T, wide, workspace)[0]
        inputs, results = [drawn(*dout.shape) for _ in range(REPLAYS)], []
        for turn, rows in enumerate(inputs):
            dout.copy_(rows)
            if turn % place.world_size == place.rank:
                torch.cuda._sleep(SLEEP_CYCLES)
            graph.replay()
            results.append(captured.clone())
        workspace.check()
        for rows, result in zip(inputs, results, strict=True):
            dout.copy_(rows)
            assert torch.equal(gated.gradient_in_place(dout, w.T, wide, workspace)[0], result)


def a_contest_finds_the_way(place: Place) -> None:
    """Fused and apart, ours and cuBLAS's: every turn is right, and all ranks keep the same way."""
    workspace = Workspace(max_rows=4096, max_gather_cols=4096, max_scatter_cols=4096)
    autotune.choose = tuned_choice
    wide, w, dout = drawn_case(place, Shape(1024, 2048, 2048))
    product, gathered = reference.ag_gemm(dout, w.T)
    apart, exact = gradient_of_wide(wide, product), exact_gradient(wide, gathered.double() @ w.T.double())
    calls = 0
    while calls == 0 or not all(held.decided for held in workspace.planned.contests.values()):
        if calls % place.world_size == place.rank:
            torch.cuda._sleep(SLEEP_CYCLES)
        assert_no_worse(gated.gradient_in_place(dout, w.T, wide, workspace)[0], apart, exact)
        calls += 1
        assert calls < 100
    workspace.check()
    (held,) = workspace.planned.contests.values()
    assert {way.is_fused for way in held.ways if way is not None} == {True, False}
    kept: list[object] = [None] * place.world_size
    dist.all_gather_object(kept, [held.best])
    assert all(one == kept[0] for one in kept)
    print(f"rank {place.rank}: {held.seconds}")


def a_rank_that_does_not_come_is_named(place: Place) -> None:
    """After the deadline the others raise `TileTimeout` and name it; their GPUs go on; after a reset all is well."""
    workspace = Workspace(max_rows=4096, max_gather_cols=1024, deadline_s=1.0, adaptive=False)
    absent = place.world_size - 1
    wide, w, dout = drawn_case(place, ALIGNED)
    chosen(WIDE_TILES, workspace)

    def call() -> Tensor:
        return gated.gradient_in_place(dout, w.T, wide, workspace)[0]

    wanted = call()
    workspace.check()
    dist.barrier()
    torch.cuda.synchronize()
    if place.rank != absent:
        error = until_it_raises(call, workspace, TileTimeout)
        assert error.peer == absent, error
        assert_context_lives()
    workspace.reset()
    assert torch.equal(call(), wanted)
    workspace.check()


def drawn_product(case: Shape) -> tuple[Tensor, Tensor, Tensor | None]:
    """Rows of x, a column-parallel weight of gates and values, and a bias: [M / W, K], [K, 2 F], [2 F]."""
    x, w, bias = operands(case._replace(n=2 * case.n), case.rows)
    return x, w, bias


def swiglu_is_that_of_what_is_stored(_place: Place) -> None:
    """Any shape, layout, type and cut: act is bit for bit the kernel's of gates and values, kept or not.

    Where no tile is cut, gates and values too are those of the product apart, bit for bit; else no worse than serial.
    """
    # The last has columns that TMA cannot store by halves, so nothing is fused there.
    for number, case in enumerate([*CASES, Shape(40, 72, 36)]):  # configurations are dealt out: each compiles a while
        workspace = shared_workspace(case.dtype)
        x, w, bias = drawn_product(case._replace(bias=number % 2 == 1))
        serial, gathered = reference.ag_gemm(x, w, bias=bias)
        exact = reference.matmul(gathered.double(), w.double(), None if bias is None else bias.double())
        whole_tiles = [Config(128, columns, kernel="hopper", tail_split=1) for columns in (256, 128)]
        for config in (whole_tiles[number % 2], FUSED[(3 * number + 1) % len(FUSED)], CUBLAS[number % 3], None):
            chosen(config, workspace)
            launches = workspace.launches
            found = gated.product_and_swiglu(x, w, bias, workspace, keeps_wide=True, gathered=True)
            assert (workspace.launches > launches) == (config is not None)
            assert found.wide is not None, config
            assert found.rows is not None, config
            assert torch.equal(found.rows, gathered), (case, config)
            assert torch.equal(found.act, silu_times_value(found.wide)), (case, config)
            assert_no_worse(found.wide, serial, exact)
            if config not in whole_tiles:
                continue
            apart = dispatch.ag_gemm(x, w, workspace, bias, config, gathered=False)[0]
            assert torch.equal(found.wide, apart), (case, config)
            alone = gated.product_and_swiglu(x, w, bias, workspace, keeps_wide=False, gathered=False)
            assert torch.equal(alone.act, found.act), (case, config)
            assert (alone.wide, alone.rows) == (None, None)
        workspace.check()


def a_gated_mlp_trains_as_float64_does(_place: Place) -> None:
    """Output and all gradients, eager and compiled, rows saved and gathered again, fused and on the serial path."""
    workspace = shared_workspace()
    x, w_up, bias_up = drawn_product(Shape(201, 520, 264, bias=True))
    w_down, bias_down = drawn(520, 264).T * 264**-0.5, drawn(520)
    dist.broadcast(bias_down, 0)
    dout = drawn(201, 520)
    assert bias_up is not None
    leaves = [tensor.detach().requires_grad_() for tensor in (x, w_up, bias_up, w_down, bias_down)]

    doubles = [leaf.detach().double() for leaf in leaves]
    rows = reference.all_gather(doubles[0])
    wide = (rows @ doubles[1] + doubles[2]).requires_grad_()
    gate, value = wide.chunk(2, -1)
    act = functional.silu(gate) * value
    wanted = reference.gemm_rs(act.detach(), doubles[3], None, doubles[4])
    gathered = reference.all_gather(dout).double()
    (dwide,) = torch.autograd.grad(act, wide, gathered @ doubles[3].T)
    dx = reference.gemm_rs(dwide, doubles[1].T.contiguous())
    exact = [dx, rows.T @ dwide, dwide.sum(0), act.detach().T @ gathered, dout.double().sum(0)]
    for save in (True, False):

        def call(x: Tensor, up: Tensor, bias_up: Tensor, down: Tensor, bias_down: Tensor, save: bool = save) -> Tensor:
            return gated_mlp(x, up, down, workspace, bias_up=bias_up, bias_down=bias_down, save_gathered=save)

        compiled = torch.compile(call, fullgraph=True, dynamic=False)
        for config in (WIDE_TILES, NARROW_TILES, None):
            chosen(config, workspace)
            for function in (call, compiled):
                out = function(*leaves)
                assert_near(out, wanted)
                for one, other in zip(torch.autograd.grad(out, leaves, dout), exact, strict=True):
                    assert_near(one, other)
                with torch.no_grad():
                    assert torch.equal(function(*leaves), out)
    workspace.check()


def swiglu_repeats_bit_by_bit(place: Place) -> None:
    """Twenty calls with a straggler each time; the same bits, also from a captured graph over new rows."""
    workspace = shared_workspace()
    x, w, _ = drawn_product(ALIGNED)

    def call() -> tuple[Tensor, Tensor]:
        found = gated.product_and_swiglu(x, w, None, workspace, keeps_wide=True, gathered=False)
        assert found.wide is not None
        return found.act, found.wide

    for config in (WIDE_TILES, Config(128, 128, kernel="hopper", tail_split=0)):
        chosen(config, workspace)
        first = call()
        for turn in range(20):
            if turn % place.world_size == place.rank:
                torch.cuda._sleep(SLEEP_CYCLES)
            assert all(map(torch.equal, call(), first))
        graph = torch.cuda.CUDAGraph()
        torch.cuda.synchronize()
        with torch.cuda.graph(graph, capture_error_mode="thread_local"):
            captured = call()
        inputs, results = [drawn(*x.shape) for _ in range(REPLAYS)], []
        for turn, rows in enumerate(inputs):
            x.copy_(rows)
            if turn % place.world_size == place.rank:
                torch.cuda._sleep(SLEEP_CYCLES)
            graph.replay()
            results.append([one.clone() for one in captured])
        workspace.check()
        for rows, result in zip(inputs, results, strict=True):
            x.copy_(rows)
            assert all(map(torch.equal, call(), result))


def a_contest_finds_the_way_to_swiglu(place: Place) -> None:
    """Fused and apart, ours and cuBLAS's: every turn is right, and all ranks keep the same way."""
    workspace = Workspace(max_rows=4096, max_gather_cols=4096, max_scatter_cols=4096)
    autotune.choose = tuned_choice
    x, w, _ = drawn_product(Shape(1024, 2048, 2048))
    serial, gathered = reference.ag_gemm(x, w)
    exact = gathered.double() @ w.double()
    calls = 0
    while calls == 0 or not all(held.decided for held in workspace.planned.contests.values()):
        if calls % place.world_size == place.rank:
            torch.cuda._sleep(SLEEP_CYCLES)
        found = gated.product_and_swiglu(x, w, None, workspace, keeps_wide=True, gathered=True)
        assert found.wide is not None
        assert_no_worse(found.wide, serial, exact)
        assert torch.equal(found.act, silu_times_value(found.wide))
        calls += 1
        assert calls < 100
    workspace.check()
    (held,) = workspace.planned.contests.values()
    assert {way.is_fused for way in held.ways if way is not None} == {True, False}
    kept: list[object] = [None] * place.world_size
    dist.all_gather_object(kept, [held.best])
    assert all(one == kept[0] for one in kept)
    print(f"rank {place.rank}: {held.seconds}")


def a_rank_that_does_not_come_to_swiglu_is_named(place: Place) -> None:
    """After the deadline the others raise `TileTimeout` and name it; their GPUs go on; after a reset all is well."""
    workspace = Workspace(max_rows=4096, max_gather_cols=1024, deadline_s=1.0, adaptive=False)
    absent = place.world_size - 1
    x, w, _ = drawn_product(ALIGNED)
    chosen(WIDE_TILES, workspace)

    def call() -> Tensor:
        return gated.product_and_swiglu(x, w, None, workspace, keeps_wide=True, gathered=False).act

    wanted = call()
    workspace.check()
    dist.barrier()
    torch.cuda.synchronize()
    if place.rank != absent:
        error = until_it_raises(call, workspace, TileTimeout)
        assert error.peer == absent, error
        assert_context_lives()
    workspace.reset()
    assert torch.equal(call(), wanted)
    workspace.check()


def one_module_equals_two_layers(place: Place) -> None:
    """`GatedMLP` gives what its own two layers give one after the other, bit for bit, on either path; gradients too."""
    workspace = shared_workspace()
    mlp = GatedMLP(1024, 768 * place.world_size, workspace, save_gathered=True)
    assert isinstance(mlp.up, ColumnParallelLinear)
    assert isinstance(mlp.down, RowParallelLinear)
    x, dout = drawn(512, 1024).requires_grad_(), drawn(512, 1024)
    leaves = (x, *mlp.parameters())
    for config in (Config(kernel="hopper", tail_split=1), None):
        chosen(config, workspace)
        both = [(out, *torch.autograd.grad(out, leaves, dout)) for out in (mlp(x), mlp.down(mlp.up(x)))]
        assert all(map(torch.equal, *both)), config
    workspace.check()


def layers_by_parts_equal_one(place: Place) -> None:
    """`swiglu` and then `gemm_rs` give what `swiglu_gemm_rs` gives."""
    workspace = shared_workspace()
    wide, w, _ = drawn_case(place, ALIGNED)
    chosen(None, workspace)
    assert torch.equal(swiglu_gemm_rs(wide, w, workspace), gemm_rs(swiglu_operator(wide), w, workspace))
