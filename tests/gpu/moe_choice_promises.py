# SPDX-License-Identifier: Apache-2.0
"""What choosing, compiling and schedules of a MoE layer promise on GPUs, for `tests/fixtures/kernel_group.py`."""

import torch
import torch.distributed as dist
from megascale_kernels import (
    MoELayer,
    ParmGroups,
    ParmRouting,
    ShortcutExperts,
    Workspace,
    moe_experts,
    moe_parm,
    moe_pipelined,
)
from megascale_kernels.autotune.contest import MOST_CALLS, MOST_WAYS, TIMED_TURNS, WARM_TURNS, is_settled
from megascale_kernels.autotune.moe_choosing import choose_moe
from megascale_kernels.moe import all_to_all
from megascale_kernels.moe.experts import sizes_of
from megascale_kernels.moe.tables import Sizes

from tests.fakes.moe_cases import Layer
from tests.fixtures.kernel_group import Place
from tests.gpu.moe_gpu_promises import operands, workspace_of

PADDED = Sizes(
    world_size=2, pitch=1040, top_k=2, experts=16, hidden=2048, inner=4096
)  # `test_moe_in_series` holds that
NEAR = {"rtol": 2e-2, "atol": 2e-2}  # bf16, sums in another order


def _layer(place: Place) -> Layer:
    return Layer((512,) * place.world_size, 2, 4, 512, 256, dtype=torch.bfloat16)


def _workspace(layer: Layer, *, adaptive: bool) -> Workspace:
    rows = len(layer.tokens) * max(layer.tokens)
    return Workspace(
        max_rows=rows, max_gather_cols=layer.hidden, dtype=layer.dtype, adaptive=adaptive, deadline_s=10.0
    )  # fmt: skip


def first_calls_find_one_way_on_all_ranks(place: Place) -> None:
    """Every call on the way is right; in the end all ranks run the same configuration, and results repeat."""
    layer = _layer(place)
    workspace = _workspace(layer, adaptive=True)
    given = operands(place, layer, 2)
    exact = all_to_all.moe(*given, workspace)
    for _ in range(MOST_CALLS):
        torch.testing.assert_close(moe_experts(*given, workspace), exact, **NEAR)
    workspace.check()

    assert is_settled(workspace)
    (held,) = workspace.planned.contests.values()
    assert len(held.ways) > 1
    found: list[object] = [None] * place.world_size
    dist.all_gather_object(found, held.best._asdict())
    assert all(one == found[0] for one in found), found
    first = moe_experts(*given, workspace)
    assert all(torch.equal(moe_experts(*given, workspace), first) for _ in range(5))


def _padded(place: Place) -> Layer:
    """A layer whose tiles hold so much padding that the serial path may be as fast."""
    experts = PADDED.experts * PADDED.world_size // place.world_size
    tokens = (PADDED.pitch,) * place.world_size
    return Layer(tokens, PADDED.top_k, experts, PADDED.hidden, PADDED.inner, dtype=torch.bfloat16)


def a_layer_of_padded_tiles_is_tried_in_series(place: Place) -> None:
    """The serial path has its turns, all right; captured while nothing is decided, a graph keeps our kernels.

    In the end all ranks go the same way, forward and backward, and a graph that is captured then gives the eager bits;
    who insists on our kernels has a contest without the serial path, and a layer whose tiles are full has none of it.
    """
    layer = _padded(place)
    workspace = _workspace(layer, adaptive=True)
    given = operands(place, layer, 2)
    exact = all_to_all.moe(*given, workspace)

    def captured() -> tuple[torch.cuda.CUDAGraph, torch.Tensor]:
        torch.cuda.synchronize()
        dist.barrier()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, capture_error_mode="thread_local"):
            out = moe_experts(*given, workspace)
        return graph, out

    for _ in range(2):
        torch.testing.assert_close(moe_experts(*given, workspace), exact, **NEAR)
    (held,) = workspace.planned.contests.values()
    assert held.ways[0] is not None, held.ways
    assert held.ways.count(None) == 1, held.ways
    assert len(held.ways) <= MOST_WAYS
    early, out = captured()
    early.replay()
    torch.testing.assert_close(out, exact, **NEAR)
    assert not held.decided
    for _ in range(MOST_CALLS):
        torch.testing.assert_close(moe_experts(*given, workspace), exact, **NEAR)
    workspace.check()
    assert is_settled(workspace)
    found: list[object] = [None] * place.world_size
    dist.all_gather_object(found, str(held.best))
    assert all(one == found[0] for one in found), found
    print(f"rank {place.rank}: {held.best} of {held.seconds}")

    late, out = captured()
    for graph in (early, late):
        graph.replay()
    assert torch.equal(out, moe_experts(*given, workspace))
    leaves = [given[index].requires_grad_() for index in (0, 2, 3, 4)]
    ours = torch.autograd.grad(moe_experts(*given, workspace).float().square().mean(), leaves)
    plain = torch.autograd.grad(all_to_all.moe(*given, workspace).float().square().mean(), leaves)
    for one, other in zip(ours, plain, strict=True):
        assert float((one - other).double().norm()) <= 0.02 * float(other.double().norm())
    with torch.no_grad():
        moe_experts(*given, workspace, fused=True)
    _, insisted = workspace.planned.contests.values()
    assert None not in insisted.ways, insisted.ways
    workspace.check()

    full = Layer((512,) * place.world_size, 2, 4, 512, 256, dtype=torch.bfloat16)
    workspace = _workspace(full, adaptive=True)
    moe_experts(*operands(place, full, 2), workspace)
    (held,) = workspace.planned.contests.values()
    assert None not in held.ways, held.ways


def in_training_calls_and_gradients_decide(place: Place) -> None:
    """Each turn's gradient is timed as well, of two layers whose backwards come last first; all of them are right."""
    layer = _padded(place)
    workspace = _workspace(layer, adaptive=True)
    given = operands(place, layer, 2)
    leaves = [given[index].requires_grad_() for index in (0, 2, 3, 4)]
    wanted = torch.autograd.grad(all_to_all.moe(*given, workspace).float().square().mean(), leaves)
    for _ in range(MOST_CALLS // 2 + 1):
        losses = [moe_experts(*given, workspace).float().square().mean() for _ in range(2)]
        for loss in reversed(losses):
            for one, other in zip(torch.autograd.grad(loss, leaves), wanted, strict=True):
                assert float((one - other).double().norm()) <= 0.02 * float(other.double().norm())
    workspace.check()

    (held,) = workspace.planned.contests.values()
    assert held.decided
    assert len(held._gradients) == len(held.ways) * (WARM_TURNS + TIMED_TURNS)
    found: list[object] = [None] * place.world_size
    dist.all_gather_object(found, str(held.best))
    assert all(one == found[0] for one in found), found
    print(f"rank {place.rank}: {held.best} of {held.seconds}")


def without_adaptation_nothing_is_tried(place: Place) -> None:
    """`adaptive=False`: no contest is held, all ranks take what is remembered or the model's."""
    layer = _layer(place)
    workspace = _workspace(layer, adaptive=False)
    given = operands(place, layer, 2)
    first = moe_experts(*given, workspace)
    workspace.check()

    assert not workspace.planned.contests
    chosen = choose_moe(sizes_of(given[1], given[3], workspace), workspace)
    assert torch.equal(moe_experts(*given, workspace, config=chosen), first)


def a_compiled_layer_is_the_eager_one(place: Place) -> None:
    """`torch.compile(fullgraph=True)` by inductor: output and gradients."""
    workspace = Workspace(max_rows=512 * place.world_size, max_gather_cols=512, adaptive=False)
    torch.manual_seed(3)
    layer = MoELayer(512, 256, 4 * place.world_size, 2, workspace, shared_inner=128)
    x = torch.randn(512, 512, device="cuda", dtype=torch.bfloat16)
    results = []
    for run in (torch.compile(layer, fullgraph=True), layer):
        layer.zero_grad()
        out = run(x)
        out.float().square().mean().backward()
        results.append([out.detach(), *(parameter.grad.clone() for parameter in layer.parameters())])
    workspace.check()
    for one, other in zip(*results, strict=True):
        torch.testing.assert_close(one, other, **NEAR)


def schedules_are_no_worse_than_serial(place: Place) -> None:
    """EPS-MoE's groups, ScMoE's moments and Parm's schedules over NCCL: the plain layer's output and gradients."""
    layer = _layer(place)
    workspace = workspace_of(layer)
    x, ids, gates, w_in, w_out = operands(place, layer, 4)
    leaves = [tensor.requires_grad_() for tensor in (x, gates, w_in, w_out)]
    exact = all_to_all.moe(x, ids, gates, w_in, w_out, workspace)
    wanted = torch.autograd.grad(exact.float().square().mean(), leaves)
    for groups in (1, 2, 4):
        out = moe_pipelined(x, ids, gates, w_in, w_out, workspace, groups=groups)
        torch.testing.assert_close(out, exact, **NEAR)
        for one, other in zip(torch.autograd.grad(out.float().square().mean(), leaves), wanted, strict=True):
            torch.testing.assert_close(one, other, **NEAR)
    moe = ShortcutExperts(512, 256, 4 * place.world_size, 2, workspace)
    with torch.no_grad():
        dist.broadcast(moe.router, 0)
    torch.testing.assert_close(moe(x), MoELayer.forward(moe, x), **NEAR)
    parm = ParmGroups(workspace, mp=place.world_size, esp=1)
    same = x.detach().clone()
    dist.broadcast(same, 0)
    plain = moe_parm(same, moe.router, w_in, w_out, parm, ParmRouting(2), schedule="plain")
    for schedule in ("S1", "S2"):
        out = moe_parm(same, moe.router, w_in, w_out, parm, ParmRouting(2), schedule=schedule)
        torch.testing.assert_close(out, plain, **NEAR)
