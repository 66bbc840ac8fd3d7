# SPDX-License-Identifier: Apache-2.0
"""Gradients on one rank, in eager code and compiled; several ranks: tests/processes/test_kernels_cpu.py."""

from collections.abc import Callable, Iterator
from itertools import product
from typing import Any

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("triton", minversion="3.6")

import torch.distributed as dist  # noqa: E402 - after the skips
from megascale_kernels.errors import KernelError, Unsupported  # noqa: E402
from megascale_kernels.memory.workspace import Workspace  # noqa: E402
from megascale_kernels.planning.config import Config  # noqa: E402
from megascale_kernels.torch_api import custom_ops  # noqa: E402
from megascale_kernels.torch_api.operators import ag_gemm, gated_mlp, gemm_ar, gemm_rs, swiglu_gemm_rs  # noqa: E402

from tests import matrix  # noqa: E402

OPERATORS = [ag_gemm, gemm_rs, gemm_ar]


@pytest.fixture(scope="module")
def workspace() -> Iterator[Workspace]:
    """A workspace of a group of one rank."""
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield Workspace(max_rows=64, max_gather_cols=32, max_scatter_cols=32, dtype=torch.float64, device="cpu")
    dist.destroy_process_group()


def leaves(*shapes: tuple[int, ...]) -> list[Any]:
    """Random leaves."""
    return [torch.randn(*shape, dtype=torch.float64, requires_grad=True) for shape in shapes]


@pytest.mark.parametrize("operator", OPERATORS)
@pytest.mark.parametrize("transposed", [False, True])
def test_gradients_are_right(workspace: Workspace, operator: Callable[..., Any], *, transposed: bool) -> None:
    """Numerical and analytical gradients of x, w and bias agree, for both layouts of w."""
    x, w, bias = leaves((4, 2, 3), (5, 3) if transposed else (3, 5), (5,))

    def call(x: torch.Tensor, w: torch.Tensor, bias: torch.Tensor) -> torch.Tensor:
        return operator(x, w.T if transposed else w, workspace, bias=bias)

    assert torch.autograd.gradcheck(call, (x, w, bias))


@pytest.mark.parametrize("transposed", matrix.wide([False, True], keep=[True]))
def test_gradients_behind_swiglu_are_right(workspace: Workspace, *, transposed: bool) -> None:
    """Numerical and analytical gradients of gates and values, w and bias agree, eager and as one node each way."""
    wide, w, bias = given = leaves((4, 2, 6), (5, 3) if transposed else (3, 5), (5,))

    def call(wide: torch.Tensor, w: torch.Tensor, bias: torch.Tensor) -> torch.Tensor:
        return swiglu_gemm_rs(wide, w.T if transposed else w, workspace, bias=bias)

    gate, value = wide.chunk(2, -1)
    expected = gemm_rs(torch.nn.functional.silu(gate) * value, w.T if transposed else w, workspace, bias=bias)
    out = call(*given)
    torch.testing.assert_close(out, expected)
    assert torch.autograd.gradcheck(call, given)
    compiled = torch.compile(call, backend="aot_eager", fullgraph=True)(*given)
    torch.testing.assert_close(compiled, expected)
    found, eager = (torch.autograd.grad(one.square().sum(), given) for one in (compiled, out))
    torch.testing.assert_close(found, eager)


def test_gradients_behind_swiglu_may_be_wanted_one_by_one(workspace: Workspace) -> None:
    """Only that of w, and only that of gates and values; none without gradients."""
    wide, w = leaves((4, 6), (3, 5))
    both = torch.autograd.grad(swiglu_gemm_rs(wide, w, workspace).square().sum(), (wide, w))

    (of_wide,) = torch.autograd.grad(swiglu_gemm_rs(wide, w.detach(), workspace).square().sum(), wide)
    (of_w,) = torch.autograd.grad(swiglu_gemm_rs(wide.detach(), w, workspace).square().sum(), w)

    torch.testing.assert_close((of_wide, of_w), both)
    with torch.no_grad():
        assert swiglu_gemm_rs(wide, w, workspace).grad_fn is None


@pytest.mark.parametrize("shape", [(4, 5), (4, 3), (4, 12), (6,)])
def test_gates_and_values_that_do_not_fit_w_are_refused(workspace: Workspace, shape: tuple[int, ...]) -> None:
    """The message says how wide they have to be."""
    with pytest.raises(Unsupported, match=r"wide must be \[..., 6\], gates and values|must be \[rows, K\]"):
        swiglu_gemm_rs(torch.ones(shape, dtype=torch.float64), torch.ones(3, 5, dtype=torch.float64), workspace)


@pytest.mark.parametrize("save", [False, True])
@pytest.mark.parametrize("transposed", [False, True])
def test_gradients_of_a_gated_mlp_are_right(workspace: Workspace, *, transposed: bool, save: bool) -> None:
    """Numerical and analytical gradients of all five agree, eager and compiled; it is the two operators in turn."""
    x, up, bias_up, down, bias_down = given = leaves(
        (4, 2, 5), (6, 5) if transposed else (5, 6), (6,), (4, 3) if transposed else (3, 4), (4,)
    )

    def call(
        x: torch.Tensor, up: torch.Tensor, bias_up: torch.Tensor, down: torch.Tensor, bias_down: torch.Tensor
    ) -> torch.Tensor:
        up, down = (up.T, down.T) if transposed else (up, down)
        return gated_mlp(x, up, down, workspace, bias_up=bias_up, bias_down=bias_down, save_gathered=save)

    wide = ag_gemm(x, up.T if transposed else up, workspace, bias=bias_up)
    expected = swiglu_gemm_rs(wide, down.T if transposed else down, workspace, bias=bias_down)
    out = call(*given)
    torch.testing.assert_close(out, expected)
    assert torch.autograd.gradcheck(call, given)
    compiled = torch.compile(call, backend="aot_eager", fullgraph=True)(*given)
    torch.testing.assert_close(compiled, expected)
    found, eager = (torch.autograd.grad(one.square().sum(), given) for one in (compiled, out))
    torch.testing.assert_close(found, eager)


def test_gradients_of_a_gated_mlp_may_be_wanted_one_by_one(workspace: Workspace) -> None:
    """Each alone is what it is among all, eager and compiled; without gradients nothing is kept."""

    def call(x: torch.Tensor, up: torch.Tensor, down: torch.Tensor, bias_up: torch.Tensor) -> torch.Tensor:
        return gated_mlp(x, up, down, workspace, bias_up=bias_up, save_gathered=True)

    given = leaves((4, 5), (5, 6), (3, 4), (6,))
    all_of_them = torch.autograd.grad(call(*given).square().sum(), given)
    for function in (call, torch.compile(call, backend="aot_eager", fullgraph=True)):
        for number, leaf in enumerate(given):
            others = [one if one is leaf else one.detach() for one in given]
            (alone,) = torch.autograd.grad(function(*others).square().sum(), leaf)
            torch.testing.assert_close(alone, all_of_them[number])
        with torch.no_grad():
            out = function(*given)
        assert out.grad_fn is None
        torch.testing.assert_close(out, call(*given))


def test_weights_of_a_gated_mlp_that_do_not_fit_are_refused(workspace: Workspace) -> None:
    """The message has both shapes."""
    x, up, down = torch.ones(4, 5), torch.ones(5, 6), torch.ones(4, 4)
    with pytest.raises(Unsupported, match=r"w_up must be \[K, 2 F\].* got \(5, 6\) and \(4, 4\)"):
        gated_mlp(x, up, down, workspace)


def test_gathered_rows_are_differentiable(workspace: Workspace) -> None:
    """Both results of `ag_gemm` flow back, alone and together, with and without keeping what was gathered."""
    x, w = leaves((4, 3), (3, 5))
    for save in (False, True):
        for wanted in (slice(0, 2), slice(0, 1), slice(1, 2)):

            def call(
                x: torch.Tensor, w: torch.Tensor, save: bool = save, wanted: slice = wanted
            ) -> tuple[torch.Tensor, ...]:
                return ag_gemm(x, w, workspace, return_gathered=True, save_gathered=save)[wanted]

            assert torch.autograd.gradcheck(call, (x, w), raise_exception=True)


@pytest.mark.parametrize("operator", OPERATORS)
def test_a_second_derivative_is_refused(workspace: Workspace, operator: Callable[..., Any]) -> None:
    """Differentiating a gradient raises instead of giving a wrong number."""
    x, w = leaves((4, 3), (3, 5))
    (dx,) = torch.autograd.grad(operator(x, w, workspace).square().sum(), x, create_graph=True)

    with pytest.raises(RuntimeError, match="once_differentiable"):
        dx.sum().backward()


def test_without_gradients_no_graph_is_built(workspace: Workspace) -> None:
    """Under `no_grad` the result remembers nothing."""
    x, w = leaves((4, 3), (3, 5))

    with torch.no_grad():
        out = ag_gemm(x, w, workspace)

    assert out.grad_fn is None


# --- compiled ------------------------------------------------------------------------------------------------------


def test_the_operators_are_nodes_of_one_graph(workspace: Workspace) -> None:
    """`fullgraph=True` compiles, and values and gradients are those of eager code."""
    x, w, v, bias = leaves((4, 2, 8), (8, 6), (6, 8), (6,))
    config = Config(block_m=64, carrier="sm", comm_ctas=8)

    def chain(x: torch.Tensor) -> torch.Tensor:
        hidden, gathered = ag_gemm(x, w, workspace, bias=bias, config=config, return_gathered=True)
        out = gemm_rs(torch.relu(hidden), v, workspace)
        return gemm_ar(out, w, workspace).sum() + gathered.square().sum()

    inputs = (x, w, v, bias)
    expected_value = chain(x)
    expected = torch.autograd.grad(expected_value, inputs)
    compiled = torch.compile(chain, backend="aot_eager", fullgraph=True)
    value = compiled(x)
    actual = torch.autograd.grad(value, inputs)

    torch.testing.assert_close(value, expected_value)
    for one, other in zip(actual, expected, strict=True):
        torch.testing.assert_close(one, other)


@pytest.mark.parametrize(
    ("transposed", "shape"),
    matrix.wide(product((False, True), [(3, 5), (3, 1), (0, 5)]), keep=[(False, (3, 5)), (True, (0, 5))]),
)
def test_the_operators_keep_torchs_contracts(workspace: Workspace, shape: tuple[int, int], *, transposed: bool) -> None:
    """Schemas, fake results and registrations agree with what really happens (`opcheck`); gradients are functions'."""
    k_size, n_size = shape
    x, bias = (leaf.detach() for leaf in leaves((4, k_size), (n_size,)))
    (w,) = (leaf.detach() for leaf in leaves((n_size, k_size) if transposed else (k_size, n_size)))
    w = w.T if transposed else w
    name, check = workspace.name, torch.library.opcheck

    for flags in ((False, False), (True, False), (False, True)):
        check(custom_ops._ag_gemm, (x, w, bias, name, 1, "", *flags))
    check(custom_ops._ag_gemm, (x, w, None, name, 1, "", False, True))
    check(custom_ops._gemm_rs, (x, w, bias, name, 1, ""))
    check(custom_ops._gemm_ar, (x, w, bias, name, ""))
    dout, *operands = [tensor.detach() for tensor in (torch.randn(4, n_size, dtype=torch.float64), x, w)]
    check(custom_ops._summed, (dout, name))
    for needs in ((True, True), (True, False), (False, True)):
        check(custom_ops._ag_gemm_backward, (dout, None, *operands, None, name, *needs))
        check(custom_ops._gemm_rs_backward, (dout, *operands, name, *needs))


@pytest.mark.parametrize("config", [None, Config(), Config(block_m=64, carrier="sm", comm_ctas=8, push_tma=False)])
def test_a_configuration_travels_as_a_text(config: Config | None) -> None:
    """What was packed is what comes out."""
    assert custom_ops.unpack(custom_ops.pack(config)) == config


def test_a_workspace_that_is_gone_is_named() -> None:
    """A compiled function that outlives its workspace says so."""
    with pytest.raises(KernelError, match="workspace-x no longer exists: keep the Workspace"):
        custom_ops.workspace_named("workspace-x")
