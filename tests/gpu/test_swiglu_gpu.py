# SPDX-License-Identifier: Apache-2.0
"""`swiglu` on a GPU: as near to the exact result as its type can be, for any shape, eager and compiled."""

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("triton", minversion="3.6")

from megascale_kernels import swiglu  # noqa: E402 - after the skips
from torch.nn import functional  # noqa: E402

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize("shape", [(8, 64), (3, 5, 2 * 1027), (1000, 2 * 7168), (0, 16)], ids=str)
@pytest.mark.parametrize("compiled", [False, True])
def test_it_rounds_once(dtype: torch.dtype, shape: tuple[int, ...], *, compiled: bool) -> None:
    """Result and gradient are within a rounding of float64's; both halves of the columns are written."""
    torch._dynamo.reset()  # each shape and type compiles anew, and eight are the most
    torch.manual_seed(1)
    wide = torch.randn(shape, dtype=dtype, device="cuda", requires_grad=True)
    dout = torch.randn(*shape[:-1], shape[-1] // 2, dtype=dtype, device="cuda")
    exact = wide.detach().double().requires_grad_()
    gate, value = exact.chunk(2, -1)
    expected = functional.silu(gate) * value
    (gradient,) = torch.autograd.grad(expected, exact, dout.double())

    out = (torch.compile(swiglu, fullgraph=True, dynamic=False) if compiled else swiglu)(wide)
    (found,) = torch.autograd.grad(out, wide, dout)

    near = {"rtol": max(0.52 * torch.finfo(dtype).eps, 1e-5), "atol": 1e-5}
    torch.testing.assert_close(out.double(), expected.detach(), **near)
    torch.testing.assert_close(found.double(), gradient, **near)
