# SPDX-License-Identifier: Apache-2.0
"""What a mixture of experts promises on GPUs, for `tests/fixtures/kernel_group.py`.

Legend: T tokens of a rank, H, I; the exact layer is the serial path in float64.
"""

import os
import signal
import threading
import time
from collections.abc import Callable

import torch
import torch.distributed as dist
from megascale_kernels import MoeConfig, MoELayer, RankMismatch, TileTimeout, Workspace, moe_experts
from megascale_kernels.moe import all_to_all, sync_free
from megascale_kernels.moe.expert_shards import choose_shards
from megascale_kernels.moe.experts import sizes_of
from megascale_kernels.moe.gradient_launch import BackwardBuffers
from megascale_kernels.moe.launch import Buffers
from torch import Tensor

from tests.fakes.moe_cases import Layer, chosen
from tests.fixtures.kernel_group import Place
from tests.gpu.kernel_cases import assert_no_worse

SLEEP_CYCLES = 3_000_000  # a straggler comes 1 to 2 ms late
REPLAYS = 20
PLAIN = MoeConfig(kernel="triton")
CONFIGS = [
    PLAIN,
    PLAIN._replace(lead_rows=0, reducers=0),
    PLAIN._replace(lead_rows=1 << 20, chunks=2, splits=1, stages=4),
    PLAIN._replace(block_n=64, combine_n=128, reducers=20, splits=7, route_programs=5),
]
HOPPER = [
    MoeConfig(),
    MoeConfig(lead_rows=0, splits=1, chunks=1),
    MoeConfig(lead_rows=1 << 20, chunks=2, splits=7, route_programs=9),
]
ROUTINGS = ("drawn", "all to one", "ours alone", "dropped", "twice", "few")


def uneven(place: Place, most: int) -> tuple[int, ...]:
    """Tokens of each rank, no multiple of anything, the last rank without any where there are three or more."""
    counts = [most - 37 * rank for rank in range(place.world_size)]
    return tuple(0 if rank == 2 else max(0, count) for rank, count in enumerate(counts))


def operands(place: Place, layer: Layer, seed: int) -> tuple[Tensor, ...]:
    """This rank's operands."""
    generator = torch.Generator().manual_seed(1000 * seed + place.rank)
    ids = chosen(layer, place.rank, generator).cuda()
    torch.manual_seed(77 * seed + place.rank)

    def drawn(*shape: int, scale: float = 1.0) -> Tensor:
        return (torch.randn(shape, device="cuda") * scale).to(layer.dtype)

    count = layer.tokens[place.rank]
    return (
        drawn(count, layer.hidden), ids, torch.rand(count, layer.top_k, device="cuda"),
        drawn(layer.experts, 2, layer.inner, layer.hidden, scale=layer.hidden**-0.5),
        drawn(layer.experts, layer.hidden, layer.inner, scale=layer.inner**-0.5),
    )  # fmt: skip


def workspace_of(layer: Layer, **more: object) -> Workspace:
    """A workspace for a layer."""
    more.setdefault("deadline_s", 10.0)
    return Workspace(
        max_rows=len(layer.tokens) * max(layer.tokens), max_gather_cols=layer.hidden, dtype=layer.dtype,
        adaptive=False, **more,
    )  # fmt: skip


def hold(given: tuple[Tensor, ...], workspace: Workspace, config: MoeConfig) -> None:
    """Compare with the serial path and with float64."""
    x, ids, gates, w_in, w_out = given
    ours = moe_experts(*given, workspace, config=config, fused=True)
    workspace.check()
    plain = all_to_all.moe(*given, workspace)
    exact = all_to_all.moe(x.double(), ids, gates.double(), w_in.double(), w_out.double(), workspace)
    if x.shape[0]:
        assert_no_worse(ours, plain, exact)


def _routed(place: Place, config: MoeConfig) -> None:
    for seed, routing in enumerate(ROUTINGS):
        layer = Layer(uneven(place, 301), 2, 3, 272, 176, routing, dtype=torch.bfloat16)
        hold(operands(place, layer, seed), workspace_of(layer), config)


def any_routing_is_no_worse_than_serial(place: Place) -> None:
    """All tokens to one expert, none to others, dropped, twice the same expert, a rank without tokens."""
    _routed(place, CONFIGS[0])


def any_configuration_is_no_worse_than_serial(place: Place) -> None:
    """Leads, chunks, units, reducing programs, tiles."""
    layer = Layer(uneven(place, 450), 3, 4, 528, 400, dtype=torch.bfloat16)
    workspace = workspace_of(layer)
    for seed, config in enumerate(CONFIGS):
        hold(operands(place, layer, seed), workspace, config)


def warp_specialised_layers_take_any_routing(place: Place) -> None:
    """The same for the warp-specialised kernels."""
    _routed(place, HOPPER[0])


def warp_specialised_layers_take_any_configuration(place: Place) -> None:
    """The same for the warp-specialised kernels."""
    layer = Layer(uneven(place, 450), 3, 4, 528, 400, dtype=torch.bfloat16)
    workspace = workspace_of(layer)
    for seed, config in enumerate(HOPPER):
        hold(operands(place, layer, seed), workspace, config)


def any_top_k_and_type_is_no_worse_than_serial(place: Place) -> None:
    """One to eight experts a token, many experts, both types, few tokens."""
    for top_k, experts, tokens, dtype in (
        (1, 2, 130, torch.float16), (4, 30, 64, torch.bfloat16), (8, 64, 700, torch.bfloat16), (6, 5, 3, torch.float16),
    ):  # fmt: skip
        layer = Layer(uneven(place, tokens), top_k, experts, 256, 192, dtype=dtype)
        workspace = workspace_of(layer)
        for config in (HOPPER[0],) if top_k > 1 else (HOPPER[0], PLAIN):
            hold(operands(place, layer, top_k), workspace, config)


def results_repeat_bit_by_bit(place: Place) -> None:
    """Whoever is late, the same operands give the same bits, also while many layers are queued."""
    layer = Layer(uneven(place, 900), 4, 8, 512, 384, dtype=torch.bfloat16)
    workspace = workspace_of(layer)
    for config in (PLAIN, *HOPPER):
        given = operands(place, layer, 5)
        first = moe_experts(*given, workspace, config=config, fused=True)
        for turn in range(20):
            if turn % place.world_size == place.rank:
                torch.cuda._sleep(SLEEP_CYCLES)
            again = moe_experts(*given, workspace, config=config, fused=True)
            assert torch.equal(again, first), turn
    workspace.check()


DEALINGS = ("", "staggered", "cut staggered", "shifted", "shifted cut staggered", "mixes")
WAYS = ("shifted", "cut", "staggered", "mixes")
DEALT = [MoeConfig(chunks=1 + ("mixes" in how), **{name: name in how for name in WAYS}) for how in DEALINGS]
# Pairs of an expert, experts of a rank, H, I: one tile, two K blocks; some waves; a last wave nearly empty, and full.
DEALT_SIZES = [(40, 2, 256, 128), (425, 12, 512, 1024), (300, 9, 1536, 640), (170, 16, 768, 1664), (130, 24, 1024, 896)]


def how_tiles_are_dealt_changes_no_bit(place: Place) -> None:
    """Waves dealt further on, the last cut, counts staggered, sums mixed: all bits stay those of tiles in turn."""
    programs = torch.cuda.get_device_properties("cuda").multi_processor_count
    last: list[int] = []  # tiles of last waves
    for seed, (pairs, experts, hidden, inner) in enumerate(DEALT_SIZES):
        tokens = uneven(place, max(80, pairs * experts // 2))
        for routing in ("drawn", "few"):
            layer = Layer(tokens, 2, experts, hidden, inner, routing, dtype=torch.bfloat16)
            workspace = workspace_of(layer)
            given = operands(place, layer, seed)
            grad = torch.randn_like(given[0])
            came = []
            for config in DEALT:
                came.append([moe_experts(*given, workspace, config=config, fused=True)])
                came[-1] += gradients(given, grad, workspace, config=config, fused=True)
                workspace.check()
                for name, one, other in zip(("out", *NAMES), came[0], came[-1], strict=True):
                    assert torch.equal(one, other), (seed, routing, config, name)
            buffers = next(plan for plan in workspace.planned.plans.values() if isinstance(plan, Buffers))
            row_tiles = int(buffers.routing.head[0])
            last += [row_tiles * columns % programs for columns in (-(-inner // 128), -(-hidden // 256))]
            workspace.close()
    assert any(0 < 2 * tiles <= programs for tiles in last)
    assert any(2 * tiles > programs for tiles in last)


def graphs_replay_with_any_routing(place: Place) -> None:
    """A captured layer is replayed with other tokens and other experts, a rank late each time."""
    layer = Layer(uneven(place, 260), 2, 4, 512, 256, dtype=torch.bfloat16)
    workspace = workspace_of(layer)
    given = operands(place, layer, 0)
    moe_experts(*given, workspace, fused=True)
    workspace.check()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, capture_error_mode="thread_local"):
        out = moe_experts(*given, workspace, fused=True)
    for turn in range(REPLAYS):
        routing = ROUTINGS[turn % len(ROUTINGS)]
        others = operands(place, layer._replace(routing=routing), turn)
        for mine, other in zip(given, others, strict=True):
            mine.copy_(other)
        if turn % place.world_size == place.rank:
            torch.cuda._sleep(SLEEP_CYCLES)
        graph.replay()
        replayed = out.clone()
        eager = moe_experts(*given, workspace, fused=True)
        assert torch.equal(replayed, eager), (turn, routing)
    workspace.check()


NAMES = ("x", "gates", "w_in", "w_out")


def gradients(given: tuple[Tensor, ...], grad: Tensor, workspace: Workspace, **how: object) -> list[Tensor]:
    """Of tokens, gates and both weights, by `moe_experts`; `plain=True` by all-to-alls, `exact=True` so in float64."""
    x, ids, gates, w_in, w_out = given
    exact = how.pop("exact", False)
    plain = how.pop("plain", exact)
    leaves = [(one.double() if exact else one).clone().requires_grad_() for one in (x, gates, w_in, w_out)]
    operands = (leaves[0], ids, *leaves[1:], workspace)
    out = all_to_all.moe(*operands) if plain else moe_experts(*operands, **how)
    return list(torch.autograd.grad(out, leaves, grad.to(out.dtype)))


def distance(one: Tensor, other: Tensor) -> float:
    """Relative, of two tensors as a whole."""
    return float((one.double() - other.double()).norm() / one.double().norm())


def roundings(workspace: Workspace) -> float:
    """How much larger than the plain path's an error in series may be: NCCL adds in bf16, so rounds once for each rank.

    The plain path rounds gate, up, h, an expert's output and the sum: five roundings of like size, their squares' sum.
    """
    return 1.1 * (1 + workspace.world_size / 5) ** 0.5


def hold_gradients(given: tuple[Tensor, ...], workspace: Workspace, config: MoeConfig | None, what: object) -> None:
    """Compare the overlapped backward, without a configuration that in series, with the plain one and with float64."""
    grad = torch.randn_like(given[0])
    ours = gradients(given, grad, workspace, config=config, fused=config is not None)
    workspace.check()
    plain = gradients(given, grad, workspace, plain=True)
    exact = gradients(given, grad, workspace, exact=True)
    most = 1.2 if config is not None else roundings(workspace)
    for name, one, other, right in zip(NAMES, ours, plain, exact, strict=True):
        if one.numel():
            error, plain_error = ((tensor.double() - right).norm() for tensor in (one, other))
            assert bool(one.isfinite().all()), (what, name)
            assert float(error) <= most * float(plain_error) + 1e-9, (what, name, float(error), float(plain_error))


def gradients_of_any_routing_are_no_worse_than_serial(place: Place) -> None:
    """Overlapped, with all tokens to one expert, none to others, dropped, twice the same expert, none on a rank."""
    for seed, routing in enumerate(ROUTINGS):
        layer = Layer(uneven(place, 301), 2, 3, 272, 176, routing, dtype=torch.bfloat16)
        hold_gradients(operands(place, layer, seed), workspace_of(layer), MoeConfig(), routing)


def gradients_of_any_configuration_are_no_worse_than_serial(place: Place) -> None:
    """Both kinds of kernels, gate and up kept or computed anew, leads, chunks, units; fp16 too."""
    layer = Layer(uneven(place, 450), 3, 4, 528, 400, dtype=torch.bfloat16)
    workspace = workspace_of(layer)
    for seed, config in enumerate((MoeConfig(keep=False), HOPPER[1], HOPPER[2], PLAIN, PLAIN._replace(keep=False))):
        hold_gradients(operands(place, layer, seed), workspace, config, config)
    layer = Layer(uneven(place, 130), 8, 24, 256, 192, "dropped", dtype=torch.float16)
    hold_gradients(operands(place, layer, 9), workspace_of(layer), MoeConfig(), "fp16")


def hold_in_series(given: tuple[Tensor, ...], workspace: Workspace, what: object) -> None:
    """Compare the serial path without waits of the host with the plain one and with float64, forward and backward."""
    x, ids, gates, w_in, w_out = given
    why = sync_free.why_not(sizes_of(ids, w_in, workspace), workspace)
    assert not why, (what, why)
    ours = moe_experts(*given, workspace, fused=False)
    plain = all_to_all.moe(*given, workspace)
    exact = all_to_all.moe(x.double(), ids, gates.double(), w_in.double(), w_out.double(), workspace)
    error, plain_error = ((one.double() - exact).norm() for one in (ours, plain))
    assert bool(ours.isfinite().all()), what
    assert float(error) <= roundings(workspace) * float(plain_error) + 1e-9, (what, float(error), float(plain_error))
    hold_gradients(given, workspace, None, what)


def in_series_any_routing_is_no_worse_than_plain(place: Place) -> None:
    """Without waits of the host: all tokens to one expert, none to others, dropped, twice, a rank without tokens."""
    for seed, routing in enumerate(ROUTINGS):
        layer = Layer(uneven(place, 301), 2, 3, 272, 176, routing, dtype=torch.bfloat16)
        hold_in_series(operands(place, layer, seed), workspace_of(layer), routing)
    nobody = Layer((0,) * place.world_size, 2, 3, 272, 176, dtype=torch.bfloat16)
    workspace = Workspace(max_rows=64 * place.world_size, max_gather_cols=272, dtype=torch.bfloat16, adaptive=False)
    hold_in_series(operands(place, nobody, 0), workspace, "nobody has a token")
    many = Layer(uneven(place, 700), 8, 64, 256, 192, dtype=torch.bfloat16)
    hold_in_series(operands(place, many, 8), workspace_of(many), "many experts")


def in_series_graphs_replay_with_any_routing(place: Place) -> None:
    """Forward and backward in series, captured, replayed with other tokens and experts: the eager bits, a rank late."""
    layer = Layer(uneven(place, 260), 2, 4, 512, 256, dtype=torch.bfloat16)
    workspace = workspace_of(layer)
    given = operands(place, layer, 0)
    grad = torch.randn_like(given[0])
    leaves = [given[index].requires_grad_() for index in (0, 2, 3, 4)]

    def call() -> list[Tensor]:
        out = moe_experts(*given, workspace, fused=False)
        return [out.detach(), *torch.autograd.grad(out, leaves, grad)]

    for _ in range(3):
        call()
    torch.cuda.synchronize()
    dist.barrier()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, capture_error_mode="thread_local"):
        captured = call()
    for turn in range(REPLAYS):
        routing = ROUTINGS[turn % len(ROUTINGS)]
        with torch.no_grad():
            for mine, other in zip(given, operands(place, layer._replace(routing=routing), turn), strict=True):
                mine.copy_(other)
        if turn % place.world_size == place.rank:
            torch.cuda._sleep(SLEEP_CYCLES)
        graph.replay()
        replayed = [one.clone() for one in captured]
        for name, one, eager in zip(("out", *NAMES), replayed, call(), strict=True):
            assert torch.equal(one, eager), (turn, routing, name)
    workspace.check()


def experts_cut_among_ranks_are_no_worse_than_serial(place: Place) -> None:
    """Tensor parallelism, alone and with experts divided as well: outputs and gradients, against the serial path."""
    for shards in (place.world_size, 2):
        layer = Layer(uneven(place, 301), 3, 6, 272, 176, "dropped", dtype=torch.bfloat16, shards=shards)
        given = operands(place, layer, shards)
        workspace = workspace_of(layer)
        ours = moe_experts(*given, workspace, fused=True, tensor_parallel=shards)
        plain = moe_experts(*given, workspace, fused=False, tensor_parallel=shards)
        ids, gates = choose_shards(given[1], given[2], layer.experts, shards)
        x, w_in, w_out = (given[index].double() for index in (0, 3, 4))
        if x.shape[0]:
            assert_no_worse(ours, plain, all_to_all.moe(x, ids, gates.double(), w_in, w_out, workspace))
        cut = (given[0], ids, gates.contiguous(), *given[3:])
        hold_gradients(cut, workspace, MoeConfig(), shards)
        grad = torch.randn_like(given[0])
        some = [
            gradients(given, grad, workspace, fused=fused, tensor_parallel=shards) for fused in (True, False)
        ]  # fmt: skip
        for name, one, other in zip(NAMES, *some, strict=True):
            assert float((one.double() - other.double()).norm()) <= 0.02 * float(other.double().norm()), name


def only_what_is_wanted_is_enough(place: Place) -> None:
    """Tokens that a peer doesn't want are not sent: the same bits as where all are, forward and backward."""
    for routing, top_k in (("drawn", 1), ("all to one", 2), ("ours alone", 2), ("dropped", 3), ("few", 2)):
        layer = Layer(uneven(place, 901), top_k, 4, 528, 400, routing, dtype=torch.bfloat16)
        given = operands(place, layer, top_k)
        workspace = workspace_of(layer)
        grad = torch.randn_like(given[0])
        for base in (MoeConfig(), PLAIN, MoeConfig(keep=False, splits=7)):
            config, chosen_alone = base._replace(selective=False), base._replace(selective=True)
            hold(given, workspace, chosen_alone)
            both = [gradients(given, grad, workspace, config=how, fused=True) for how in (config, chosen_alone)]
            for name, one, other in zip(NAMES, *both, strict=True):
                assert torch.equal(one, other), (routing, name)
        workspace.check()


def factors_of_w_in(workspace: Workspace) -> tuple[Tensor, ...]:
    """What the last backward left of w_in's gradient: [rows, 2 I], [rows, H], and where each expert's rows end."""
    plans = workspace.planned.plans.values()
    extra = next(plan for plan in plans if isinstance(plan, BackwardBuffers))
    y = next(plan for plan in plans if isinstance(plan, Buffers)).y
    end = int(extra.ends[-1])
    return extra.dpre[:end].clone(), y[:end].clone(), extra.ends.clone()


def where_w_in_parts(
    workspace: Workspace, eager: tuple[Tensor, ...], first: Tensor, replayed: Tensor
) -> tuple[str, ...]:  # fmt: skip
    """Which of an eager backward's and a replayed one's factors are equal, and whose product the gradient is."""
    now = factors_of_w_in(workspace)
    names = ("gradients of gate and up", "tokens in the order of experts", "ends")
    told = [f"{name} equal: {torch.equal(one, other)}" for name, one, other in zip(names, eager, now, strict=True)]
    again = torch._grouped_mm(now[0].t(), now[1], offs=now[2]).view_as(first)
    told.append(
        f"their product is the replayed: {torch.equal(again, replayed)}, the eager: {torch.equal(again, first)}"
    )
    if now[1].shape == eager[1].shape:
        rows = (now[1] != eager[1]).any(dim=1).nonzero().flatten().tolist()
        told.append(f"rows of tokens that differ: {len(rows)}, {rows[:8]}")
    return tuple(told)


def gradients_repeat_bit_by_bit(place: Place) -> None:
    """Whoever is late, the same operands give the same bits, kept or not, and in a captured graph; a layer trains."""
    layer = Layer(uneven(place, 900), 4, 8, 512, 384, dtype=torch.bfloat16)
    workspace = workspace_of(layer)
    given = operands(place, layer, 5)
    grad = torch.randn_like(given[0])
    first = gradients(given, grad, workspace, config=MoeConfig(keep=False), fused=True)
    for turn in range(10):
        if turn % place.world_size == place.rank:
            torch.cuda._sleep(SLEEP_CYCLES)
        for name, one, again in zip(NAMES, first, gradients(given, grad, workspace, fused=True), strict=True):
            assert torch.equal(one, again), (turn, name)
    workspace.check()
    eager = factors_of_w_in(workspace)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, capture_error_mode="thread_local"):
        replayed = gradients(given, grad, workspace, fused=True)
    for turn in range(6):
        if turn % place.world_size == place.rank:
            torch.cuda._sleep(SLEEP_CYCLES)
        graph.replay()
        torch.cuda.synchronize()
        workspace.check()
        for name, one, again in zip(NAMES, first, replayed, strict=True):
            if not torch.equal(one, again):
                told = ("graph", turn, name, distance(one, again), int(again.isnan().sum()))
                raise AssertionError((*told, *where_w_in_parts(workspace, eager, first[2], replayed[2])))
    model = MoELayer(272, 176, 3 * place.world_size, 2, workspace, shared_inner=64)
    tokens = torch.randn(100, 272, device="cuda", dtype=torch.bfloat16)
    model(tokens).square().mean().backward()
    assert all(bool(parameter.grad.isfinite().all()) for parameter in model.parameters())
    assert model.load_statistics()["pairs"] == 200
    workspace.check()


def until_it_raises(call: Callable[[], object], workspace: Workspace, kind: type[Exception]) -> Exception:
    """Call and check until an error of a kind comes."""
    end = time.monotonic() + 20
    while time.monotonic() < end:
        try:
            call()
            workspace.check()
        except kind as error:
            return error
    raise AssertionError(f"no {kind.__name__}")


def _small(place: Place) -> Layer:
    return Layer((256,) * place.world_size, 2, 4, 512, 256, dtype=torch.bfloat16)


def layers_that_differ_are_named(place: Place) -> None:
    """Another top k on one rank is a mismatch on all, long before the deadline; after a reset all is well."""
    layer = _small(place)
    workspace = workspace_of(layer, deadline_s=30.0)
    given = operands(place, layer, 1)
    moe_experts(*given, workspace, fused=True)
    other = operands(place, layer._replace(top_k=3), 1)
    moe_experts(*other, workspace, fused=True)
    workspace.check()
    dist.barrier()
    mine = other if place.rank == 1 else given
    began = time.monotonic()
    until_it_raises(lambda: moe_experts(*mine, workspace, fused=True), workspace, RankMismatch)
    assert time.monotonic() - began < 10
    workspace.reset()
    hold(given, workspace, MoeConfig())


def a_rank_that_does_not_come_is_named(place: Place) -> None:
    """After the deadline the others raise `TileTimeout` with the rank that is missing; after a reset all is well."""
    layer = _small(place)
    workspace = workspace_of(layer, deadline_s=1.0)
    given = operands(place, layer, 1)
    moe_experts(*given, workspace, fused=True)
    workspace.check()
    dist.barrier()
    torch.cuda.synchronize()
    absent = place.world_size - 1
    if place.rank != absent:
        began = time.monotonic()
        error = until_it_raises(lambda: moe_experts(*given, workspace, fused=True), workspace, TileTimeout)
        assert time.monotonic() - began <= 1.2
        assert error.peer == absent, error
    dist.barrier()
    workspace.reset()
    hold(given, workspace, MoeConfig())


def a_killed_peer_is_named(place: Place) -> None:
    """A rank is killed in mid-layer: within deadline + 200 ms the others name it, and their GPUs go on."""
    layer = Layer((2048,) * place.world_size, 4, 8, 2048, 1408, dtype=torch.bfloat16)
    workspace = workspace_of(layer, deadline_s=2.0)
    given = operands(place, layer, 1)
    victim = place.world_size - 1
    for _ in range(3):
        moe_experts(*given, workspace, fused=True)
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
            moe_experts(*given, workspace, fused=True)
            workspace.check()
        except TileTimeout as timeout:
            error = timeout
    took_s = time.monotonic() - began
    assert took_s <= 2.2, took_s
    assert error.peer == victim, error
    assert float((torch.ones(64, device="cuda") * 2).sum()) == 128
    print(f"rank {place.rank}: {took_s:.3f} s: {error}")
