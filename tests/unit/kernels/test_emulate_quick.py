# SPDX-License-Identifier: Apache-2.0
# ruff: noqa: ANN001, N803
# (kernels: their types are Triton's to infer, compile-time arguments are capitals)
"""What the emulator keeps of Triton's interpreter is what Triton makes, and is given back at the end."""

import itertools

import pytest

torch = pytest.importorskip("torch")
triton = pytest.importorskip("triton", minversion="3.6")

import numpy as np  # noqa: E402
import triton.language as tl  # noqa: E402
from megascale_kernels.device.layout import layout  # noqa: E402
from megascale_kernels.emulate import Launch, World  # noqa: E402
from megascale_kernels.emulate.interpreter import Builder  # noqa: E402
from megascale_kernels.emulate.quick import numbers_of, quicken  # noqa: E402
from megascale_kernels.emulate.semantic import Semantic  # noqa: E402
from triton.runtime import interpreter as stock  # noqa: E402

SCALARS = (tl.int1, tl.int8, tl.uint8, tl.int32, tl.uint32, tl.int64, tl.float16, tl.bfloat16, tl.float32, tl.float64)


@triton.jit
def touch(out_ptr, N: tl.constexpr) -> None:
    """Blocks, a constant and a sum."""
    tl.store(out_ptr + tl.arange(0, N), tl.arange(0, N) * 3 + 1)


@pytest.fixture
def scope():  # noqa: ANN201 (Triton has no types)
    """Patches, taken back at the end."""
    patches = stock._LangPatchScope()
    quicken(patches)
    yield patches
    patches.restore()


@pytest.mark.usefixtures("scope")
@pytest.mark.parametrize("shape", [(16,), (4, 8)])
def test_a_type_that_is_kept_is_what_triton_makes(shape: tuple[int, ...]) -> None:
    """Blocks of all scalars and pointers, made twice: name, shape, size, element and NumPy's type."""
    scalars = (*SCALARS, tl.pointer_type(tl.float16))
    for scalar, _ in itertools.product(scalars, range(2)):
        block = tl.block_type(scalar, list(shape))
        tensor = tl.tensor(None, block)

        assert list(block.shape) == list(shape)
        assert block.numel == np.prod(shape)
        assert block.element_ty is scalar
        assert [extent.value for extent in tensor.shape] == list(shape)
        assert tensor.numel.value == np.prod(shape)
        assert tensor.dtype == scalar
        assert numbers_of(block) == numbers_of(scalar)
    assert tl.block_type(tl.int32, list(shape)) != tl.block_type(tl.float32, list(shape))
    assert tl.int32 != tl.uint32


def test_operands_follow_tritons_rules() -> None:
    """Of any two types, asked twice: the type to compute in, or the same refusal."""
    ours, theirs = Semantic(None), stock.TritonSemantic(None)
    flags = itertools.product((False, True), repeat=3)
    for one, other, (a_scalar, b_scalar, divides) in itertools.product(SCALARS, SCALARS, flags):
        asked = (one, a_scalar, other, b_scalar, divides)
        try:
            wanted = theirs.computation_type_impl(*asked)
        except TypeError:
            with pytest.raises(TypeError):
                ours.computation_type_impl(*asked)
            continue
        assert [ours.computation_type_impl(*asked) for _ in range(2)] == [wanted, wanted]


def test_a_constant_is_kept_by_kind_and_nobody_writes_into_it() -> None:
    """One and True are equal to Python and not to a kernel; a float is made anew, for 0.0 equals -0.0."""
    semantic = Semantic(Builder(None, None))
    one, again = (semantic.scalar_constant(1, tl.int32) for _ in range(2))

    assert one is again
    assert semantic.scalar_constant(1, tl.int64).dtype == tl.int64
    assert semantic.scalar_constant(True, tl.int1).handle.data.dtype == bool  # noqa: FBT003 (a value)
    assert semantic.scalar_constant(1.0, tl.float32) is not semantic.scalar_constant(1.0, tl.float32)
    with pytest.raises(ValueError, match="read-only"):
        one.handle.data[0] = 2


def test_triton_has_its_own_again_after_a_launch() -> None:
    """Nothing of ours is left in Triton's classes."""
    owners = (tl.tensor, "__init__"), (tl.block_type, "__init__"), (tl.dtype, "__eq__"), (stock, "_get_np_dtype")
    before = [getattr(owner, name) for owner, name in owners]
    out = torch.zeros(16, dtype=torch.int32)

    World(layout(1, 1, 64)).launch([Launch(0, touch, 1, (out, 16))])

    assert out.tolist() == [3 * index + 1 for index in range(16)]
    assert [getattr(owner, name) for owner, name in owners] == before
