# SPDX-License-Identifier: Apache-2.0
"""What operators promise on GPUs where they are taken apart into cuBLAS's products (`Config(kernel="cublas")`)."""

import time
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist
from megascale_kernels import Config, TileTimeout, Workspace, ag_gemm, gemm_rs, reference
from torch import Tensor

from tests.fixtures.kernel_group import Place
from tests.gpu.kernel_cases import (
    ALIGNED,
    CUBLAS,
    IN_PIECES,
    assert_no_worse,
    doubled,
    drawn,
    operands,
    shared_workspace,
)
from tests.gpu.kernel_gpu_promises import (
    REPLAYS,
    SLEEP_CYCLES,
    a_killed_peer_is_named,
    assert_context_lives,
    assert_near,
    until_it_raises,
)

if TYPE_CHECKING:
    from collections.abc import Callable


def pieces_are_no_worse_than_serial(place: Place) -> None:
    """Both operators, any number of pieces: as exact as NCCL and cuBLAS; the gathered rows come back unchanged."""
    for case in IN_PIECES:
        workspace = shared_workspace(case.dtype)
        x, w, bias = operands(case, case.rows)
        launches = workspace.launches
        out, gathered = ag_gemm(x, w, workspace, bias=bias, config=case.config, return_gathered=True)
        serial, rows = reference.ag_gemm(x, w, None, bias)
        assert_no_worse(out, serial, reference.matmul(*(tensor for tensor in doubled((rows, w, bias)))))
        assert torch.equal(gathered, rows), case

        whole, _, _ = operands(case, case.rows * place.world_size)
        out = gemm_rs(whole, w, workspace, bias=bias, config=case.config)
        exact_x, exact_w, exact_bias = doubled((whole, w, bias))
        exact = reference.gemm_rs(exact_x, exact_w, None, exact_bias)
        assert_no_worse(out, reference.gemm_rs(whole, w, None, bias), exact)
        assert workspace.launches >= launches + 2
        workspace.check()


def pieces_repeat_bit_by_bit(place: Place) -> None:
    """The same of cuBLAS's products with copies between them; calls of our kernels in between take the same slots."""
    workspace = shared_workspace()
    x, w, bias = operands(ALIGNED._replace(bias=True), ALIGNED.rows * place.world_size)
    shard = x[: ALIGNED.rows].contiguous()
    calls: list[Callable[[], Tensor]] = [
        lambda operator=operator, rows=rows, config=config: operator(rows, w, workspace, bias=bias, config=config)
        for config in CUBLAS
        for operator, rows in ((ag_gemm, shard), (gemm_rs, x))
    ]
    first = [call() for call in calls]
    for turn in range(20):
        if turn % place.world_size == place.rank:
            torch.cuda._sleep(SLEEP_CYCLES)
        assert all(torch.equal(call(), wanted) for call, wanted in zip(calls, first, strict=True))
        gemm_rs(x, w, workspace)
    workspace.check()


def pieces_replay_in_graphs(place: Place) -> None:
    """Captured once and replayed fifty times over new rows, with stragglers; then eager calls in the same workspace."""
    workspace = shared_workspace()
    x, w, _ = operands(ALIGNED, ALIGNED.rows)
    v = drawn(256, ALIGNED.n).T * ALIGNED.n**-0.5

    def both(config: Config) -> Tensor:
        return gemm_rs(torch.relu(ag_gemm(x, w, workspace, config=config)), v, workspace, config=config)

    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for config in CUBLAS:
            both(config)
    torch.cuda.current_stream().wait_stream(side)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, capture_error_mode="thread_local"):
        outs = [both(config) for config in CUBLAS]
    inputs = [drawn(*x.shape) for _ in range(REPLAYS)]
    results = []
    for turn, rows in enumerate(inputs):
        x.copy_(rows)
        if turn % place.world_size == place.rank:
            torch.cuda._sleep(SLEEP_CYCLES)
        graph.replay()
        results.append([out.clone() for out in outs])
    workspace.check()
    for rows, replayed in zip(inputs, results, strict=True):
        x.copy_(rows)
        for config, out in zip(CUBLAS, replayed, strict=True):
            # cuBLAS may choose otherwise in a graph.
            assert_near(out, both(config).double())
    x.copy_(inputs[0])
    graph.replay()
    assert all(torch.equal(out, first) for out, first in zip(outs, results[0], strict=True))
    workspace.check()


def compiled_pieces_equal_eager_ones(place: Place) -> None:
    """`torch.compile(fullgraph=True)` carries the configuration along, and gives the same bits."""
    workspace = shared_workspace()
    x, w, _ = operands(ALIGNED, ALIGNED.rows)
    whole, _, _ = operands(ALIGNED, ALIGNED.rows * place.world_size)

    def both(config: Config) -> tuple[Tensor, Tensor]:
        return ag_gemm(x, w, workspace, config=config), gemm_rs(whole, w, workspace, config=config)

    compiled = torch.compile(both, fullgraph=True)
    for config in CUBLAS[:2]:
        launches = workspace.launches
        assert all(torch.equal(one, other) for one, other in zip(compiled(config), both(config), strict=True))
        assert workspace.launches >= launches + 4


def a_rank_that_does_not_come_to_pieces_is_named(place: Place) -> None:
    """After the deadline the others raise `TileTimeout` and name it; their GPUs go on; after a reset all is well."""
    deadline_s = 1.0
    workspace = Workspace(
        max_rows=4096, max_gather_cols=1024, max_scatter_cols=1024, deadline_s=deadline_s, adaptive=False
    )
    absent = place.world_size - 1
    x, w, _ = operands(ALIGNED, ALIGNED.rows)
    whole = drawn(ALIGNED.rows * place.world_size, ALIGNED.k)
    calls: list[Callable[[], Tensor]] = [
        *(lambda config=config: ag_gemm(x, w, workspace, config=config) for config in CUBLAS[:2]),
        *(lambda config=config: gemm_rs(whole, w, workspace, config=config) for config in CUBLAS[:2]),
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


def a_peer_killed_in_pieces_is_named(place: Place) -> None:
    """SIGKILL between products and copies: named within deadline + 100 ms, and the survivors' GPUs go on."""
    a_killed_peer_is_named(place, CUBLAS[0])
