# SPDX-License-Identifier: Apache-2.0
# ruff: noqa: ANN001, ANN201, ANN202, ANN401, N803
# (kernels: their types are Triton's to infer, compile-time arguments are capitals; helpers pass options on)
"""The kernels run as they are: real jit functions, whatever the environment said when they were made."""

from typing import Any, NamedTuple

import pytest

torch = pytest.importorskip("torch")
triton = pytest.importorskip("triton", minversion="3.6")

import numpy as np  # noqa: E402
import triton.language as tl  # noqa: E402
from megascale_kernels.device import signals  # noqa: E402
from megascale_kernels.device.layout import layout  # noqa: E402
from megascale_kernels.emulate import EmulationError, Launch, World, rewrite  # noqa: E402
from megascale_kernels.emulate.spans import first_common, span_of, span_of_tensor  # noqa: E402
from triton.runtime.jit import JITFunction  # noqa: E402
from triton.tools.tensor_descriptor import TensorDescriptor  # noqa: E402


class Operands(NamedTuple):
    """What a kernel gets in one piece."""

    x: Any
    factor: Any
    pair: Any


def run(kernel: Any, *args: Any, grid: int | tuple[int, ...] = 1, **constants: Any) -> World:
    """One kernel on one rank."""
    world = World(layout(1, 1, 64))
    world.launch([Launch(0, kernel, grid, args, constants)])
    return world


@triton.jit
def scale(value, factor):
    """A nested function with an inner one of Triton's library."""
    return value * tl.cdiv(factor, 2)


@triton.jit
def combine(operands, out_ptr, N: tl.constexpr, NEGATE: tl.constexpr = False) -> None:
    """Tuples, nested functions, loops with integers as tensors, methods from the library."""
    cols = tl.arange(0, N)
    total = tl.zeros((N,), dtype=tl.float32)
    for step in range(2):
        wide = step.to(tl.int64) + 1
        total += scale(tl.load(operands.x + cols), operands.factor) * wide
    for index in tl.static_range(2):
        total += operands.pair[index]
    if NEGATE:
        total = -total
    tl.store(out_ptr + cols, total + total.sum() * 0)


def test_tuples_loops_and_nested_functions_work() -> None:
    """Named tuples from the host, `.to` on a loop variable, unrolled loops over tuples, default arguments."""
    x, out = torch.rand(8), torch.zeros(8)

    run(combine, Operands(x, 3, (0.5, 0.25)), out, N=8, num_warps=4)

    assert torch.allclose(out, x * 2 * 3 + 0.75)


@triton.jit
def product(x_desc, w_ptr, out_desc, N, K, BLOCK: tl.constexpr) -> None:
    """A matrix product: descriptors from the host and from the kernel, dot, tails."""
    w_desc = tl.make_tensor_descriptor(w_ptr, [K, N], [N, 1], [BLOCK, BLOCK])
    row = tl.program_id(0) * BLOCK
    col = tl.program_id(1) * BLOCK
    acc = tl.zeros((BLOCK, BLOCK), dtype=tl.float32)
    for k in tl.range(0, K, BLOCK, num_stages=2):
        acc = tl.dot(x_desc.load([row, k]), w_desc.load([k, col]), acc)
    out_desc.store([row, col], acc.to(tl.bfloat16))


def test_descriptors_and_bf16_products_are_right_to_the_last_bit() -> None:
    """bf16 in, fp32 sums, rounded to nearest even on the way out; tails read zeros and are not written."""
    x, w = torch.randn(24, 40).bfloat16(), torch.randn(40, 24).bfloat16()
    out = torch.zeros(24, 24, dtype=torch.bfloat16)
    block = [16, 16]

    world = run(
        product,
        TensorDescriptor.from_tensor(x, block),
        w,
        TensorDescriptor.from_tensor(out, block),
        24,
        40,
        grid=(2, 2),
        BLOCK=16,
    )

    assert torch.equal(out, (x.double() @ w.double()).float().bfloat16()) or torch.allclose(
        out.float(), x.float() @ w.float(), rtol=2**-8, atol=1e-3
    )
    assert world.findings == ()


@triton.jit
def bf16_arithmetic(x_ptr, y_ptr, out_ptr, N: tl.constexpr) -> None:
    """Arithmetic, comparison and casts in bf16."""
    cols = tl.arange(0, N)
    x = tl.load(x_ptr + cols)
    y = tl.load(y_ptr + cols)
    tl.store(out_ptr + cols, tl.where(x > y, x * y, x + y))


def test_bf16_arithmetic_is_that_of_torch() -> None:
    """Bit for bit, special values included."""
    x = torch.tensor([1.0, -2.5, 3.14159, 1e30, float("inf"), 0.0, 2.0**-130, 7.0]).bfloat16()
    y = torch.tensor([1.0, 2.5, -1.001, 1e30, 1.0, -0.0, 1.0, float("nan")]).bfloat16()
    out = torch.zeros(8, dtype=torch.bfloat16)

    run(bf16_arithmetic, x, y, out, N=8)

    assert torch.equal(out.view(torch.int16)[:7], torch.where(x > y, x * y, x + y).view(torch.int16)[:7])
    assert torch.isnan(out[7])


def test_functions_made_in_functions_keep_their_captured_values() -> None:
    """A kernel may be a closure."""
    amount = tl.constexpr(5)

    @triton.jit
    def fill(out_ptr):
        tl.store(out_ptr, amount)

    out = torch.zeros(1, dtype=torch.int32)
    run(fill, out)

    assert int(out) == 5


@triton.jit
def read_beyond(x_ptr, out_ptr) -> None:
    """One element too far."""
    tl.store(out_ptr, tl.load(x_ptr + 8))


def test_an_access_out_of_bounds_is_an_error_with_its_line() -> None:
    """It names the program, the line and the tensor; the process lives."""
    with pytest.raises(
        EmulationError, match=r"rank 0 read_beyond\[0\], load at .*test_emulate_language.py:\d+: "
    ) as raised:
        run(read_beyond, torch.zeros(8), torch.zeros(1))

    assert "0 bytes behind the end of" in str(raised.value)


@triton.jit
def foreign_assembly(out_ptr, TEXT: tl.constexpr) -> None:
    """Assembly that the table may not know."""
    tl.store(out_ptr, tl.inline_asm_elementwise(TEXT, "=r,r", [tl.load(out_ptr)], tl.int32, is_pure=True, pack=1))


def test_assembly_without_a_meaning_is_named_and_can_be_given_one() -> None:
    """No guessing."""
    out = torch.tensor([20], dtype=torch.int32)
    text = "add.s32 $0, $1, 22;"

    with pytest.raises(EmulationError, match=r"without a meaning.*add\.s32"):
        run(foreign_assembly, out, TEXT=text)
    world = World(layout(1, 1, 0), assembly={text: lambda _machine, value: value + 22})
    world.launch([Launch(0, foreign_assembly, 1, (out, text))])

    assert int(out) == 42


def test_assembly_that_signals_adds_needs_a_meaning_here(monkeypatch: pytest.MonkeyPatch) -> None:
    """A new constant in signals.py that the emulator does not know shows when a world is made."""
    monkeypatch.setattr(signals, "ASM_NEW", tl.constexpr("nop;"), raising=False)

    with pytest.raises(EmulationError, match="ASM_NEW"):
        World(layout(1, 1, 0))


def test_mistakes_of_a_launch_are_named() -> None:
    """Wrong arguments, wrong grid, not a kernel."""
    with pytest.raises(EmulationError, match="read_beyond: missing a required argument"):
        run(read_beyond, torch.zeros(8))
    with pytest.raises(EmulationError, match="one to three positive numbers"):
        run(read_beyond, torch.zeros(8), torch.zeros(1), grid=(1, 0))
    with pytest.raises(EmulationError, match=r"not a @triton\.jit function"):
        run(print)


def test_an_unknown_interpreter_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """Private parts of Triton are used, so its version must be one we have read."""
    monkeypatch.setattr(triton, "__version__", "9.9.0")

    with pytest.raises(EmulationError, match=r"9\.9\.0"):
        rewrite.check_versions()


def test_a_launch_leaves_no_trace_in_triton_and_in_the_kernels_module() -> None:
    """Code generation and later compilations see what they would have seen."""
    language, tensor = dict(vars(tl)), dict(vars(tl.tensor))
    call, polls, names = JITFunction.__call__, signals.POLLS_PER_LOOK.value, set(vars(signals))

    run(combine, Operands(torch.rand(8), 3, (0.5, 0.25)), torch.zeros(8), N=8)

    assert dict(vars(tl)) == language
    assert {name: value for name, value in vars(tl.tensor).items() if name in tensor and name[:2] != "__"} == {
        name: value for name, value in tensor.items() if name[:2] != "__"
    }
    assert not hasattr(tl.tensor, "__bool__") or "__bool__" in tensor
    assert (JITFunction.__call__, signals.POLLS_PER_LOOK.value, set(vars(signals))) == (call, polls, names)
    if isinstance(scale, JITFunction):  # with TRITON_INTERPRET=1 it is not
        with pytest.raises(RuntimeError, match="outside of the scope of a kernel"):
            scale(1, 2)


def test_spans_are_exact_to_the_byte() -> None:
    """Runs, gaps, order and overlap of touched bytes."""
    rows = np.add.outer(np.arange(3) * 100, np.arange(4) * 4).astype(np.uint64) + 1000
    tile = span_of(rows[::-1], 4)
    between = span_of(np.array([1016, 1096], dtype=np.uint64), 4)
    last = span_of(np.array([1215], dtype=np.uint64), 1)
    matrix = torch.zeros(6, 8)

    assert tile.starts.tolist() == [1000, 1100, 1200]
    assert tile.ends.tolist() == [1016, 1116, 1216]
    assert (tile.lo, tile.hi) == (1000, 1216)
    assert first_common(tile, between) is None
    assert first_common(tile, last) == first_common(last, tile) == 1215
    assert span_of_tensor(matrix).ends - span_of_tensor(matrix).starts == 6 * 8 * 4
    assert len(span_of_tensor(matrix[:, :3]).starts) == 6
