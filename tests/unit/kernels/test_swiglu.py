# SPDX-License-Identifier: Apache-2.0
"""`swiglu` is what chunk, silu and mul are, forward and backward, eager and compiled, and its kernels are too."""

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("triton", minversion="3.6")

from megascale_kernels import Unsupported, swiglu  # noqa: E402 - after the skips
from megascale_kernels.device.layout import layout  # noqa: E402
from megascale_kernels.emulate import Launch, World  # noqa: E402
from megascale_kernels.swiglu import swiglu_gradient_kernel, swiglu_kernel  # noqa: E402
from torch.nn import functional  # noqa: E402

from tests.fixtures.codegen import compile_for_hopper  # noqa: E402


def plain(wide: torch.Tensor) -> torch.Tensor:
    """The same in torch's own functions."""
    gate, value = wide.chunk(2, -1)
    return functional.silu(gate) * value


def test_it_is_what_torch_computes() -> None:
    """The result equals torch's, and numerical and analytical gradients agree, for any leading dimensions."""
    for shape in ((6,), (3, 8), (2, 3, 10), (0, 4)):
        wide = torch.randn(*shape, dtype=torch.float64, requires_grad=True)
        assert torch.equal(swiglu(wide), plain(wide))
        assert torch.autograd.gradcheck(swiglu, (wide,))


def test_it_is_one_node_of_a_compiled_graph() -> None:
    """No break in the graph; the gradient is that of eager code."""
    wide = torch.randn(4, 6, requires_grad=True)
    compiled = torch.compile(lambda wide: swiglu(wide) * 2, backend="aot_eager", fullgraph=True)

    (found,) = torch.autograd.grad(compiled(wide).square().sum(), wide)

    (expected,) = torch.autograd.grad((plain(wide) * 2).square().sum(), wide)
    torch.testing.assert_close(found, expected)


@pytest.mark.parametrize("shape", [(), (4, 5)])
def test_columns_that_are_no_pairs_are_refused(shape: tuple[int, ...]) -> None:
    """The message says what is expected."""
    with pytest.raises(Unsupported, match=r"wide must be \[..., 2 F\], gates and values side by side"):
        swiglu(torch.ones(shape))


@pytest.mark.parametrize(("rows", "columns"), [(3, 16), (2, 40), (5, 7)])
def test_the_kernels_round_once(rows: int, columns: int) -> None:
    """Blocks that divide the columns and those that do not: nothing is left out, and bf16 is rounded to the nearest."""
    torch.manual_seed(rows)
    wide = torch.randn(rows, 2 * columns).bfloat16()
    dout = torch.randn(rows, columns).bfloat16()
    out, dwide = torch.full_like(dout, float("nan")), torch.full_like(wide, float("nan"))
    grid = rows * -(-columns // 16)

    World(layout(1, 1, 64)).launch([Launch(0, swiglu_kernel, grid, (wide, out, columns), {"BLOCK": 16})])
    given = (wide, dout, dwide, columns)
    World(layout(1, 1, 64)).launch([Launch(0, swiglu_gradient_kernel, grid, given, {"BLOCK": 16})])

    exact = wide.double().requires_grad_()
    expected = plain(exact)
    (gradient,) = torch.autograd.grad(expected, exact, dout.double())
    half = torch.finfo(torch.bfloat16).eps / 2
    torch.testing.assert_close(out.double(), expected.detach(), rtol=1.02 * half, atol=1e-7)
    torch.testing.assert_close(dwide.double(), gradient, rtol=1.02 * half, atol=1e-6)


@pytest.mark.parametrize("kernel", [swiglu_kernel, swiglu_gradient_kernel])
def test_the_kernels_read_wide_words_and_spill_nothing(kernel: object) -> None:
    """16 bytes a thread where columns are a multiple of sixteen."""
    pointers = ("wide_ptr", "out_ptr") if kernel is swiglu_kernel else ("wide_ptr", "dout_ptr", "dwide_ptr")

    made = compile_for_hopper(
        kernel, {**dict.fromkeys(pointers, "*bf16"), "columns": "i32"}, {"BLOCK": 1024}, warps=4,
        sixteens=(*pointers, "columns"),
    )  # fmt: skip

    assert made.spilled_bytes == 0
    assert "ld.global.v4.b32" in made.ptx
    assert "st.global.v4.b32" in made.ptx
