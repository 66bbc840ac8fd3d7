# SPDX-License-Identifier: Apache-2.0
# ruff: noqa: ANN001, ANN201, ANN401
# (Triton has no types: what comes from it, or goes to it, is Any)
"""What the emulator has learned of two types is what Triton makes of them, whatever the numbers."""

import itertools
from collections.abc import Callable
from typing import Any

import pytest

pytest.importorskip("torch")
pytest.importorskip("triton", minversion="3.6")

import numpy as np
import triton.language as tl
from megascale_kernels.emulate import learned, semantic
from megascale_kernels.emulate.assembly import Assembly
from megascale_kernels.emulate.interpreter import Builder, narrowed
from megascale_kernels.emulate.quick import operation
from megascale_kernels.emulate.rewrite import interpreting
from triton.runtime import interpreter as stock

INTEGERS = (tl.int1, tl.int8, tl.int32, tl.uint32, tl.int64, tl.uint64)
FLOATS = (tl.float16, tl.bfloat16, tl.float32)
POINTER = tl.pointer_type(tl.float16)
NAMES = [name for name, (_, turned) in learned._OPERATORS.items() if not turned]
TURNED = [name for name, (_, turned) in learned._OPERATORS.items() if turned]
NUMBERS = (0, 1, 3, -1, 31, 64, 2**31, 2**40, True, 0.0, -0.0, 1.5, 1e300, float("nan"))
# Python's own operator and Triton's member, taken before a session patches it.
MEMBERS = {name: getattr(tl.tensor, name) for name in learned._OPERATORS if hasattr(tl.tensor, name)}


@pytest.fixture
def session(monkeypatch: pytest.MonkeyPatch):
    """An interpreter that has learned nothing yet."""
    monkeypatch.setattr(learned, "_learned", {name: {} for name in learned._FUNCTIONS})
    for table in ("_casts", "_selects", "_indexed"):
        monkeypatch.setattr(semantic, table, {})
    builder = Builder(None, Assembly())
    with interpreting(builder, {}, 4), np.errstate(all="ignore"):
        yield semantic.Semantic(builder), stock.TritonSemantic(builder)


def made(scalar: Any, shape: tuple[int, ...], numbers: Any) -> Any:
    """A tensor of some numbers."""
    data = np.resize(np.asarray(numbers, np.float64), shape or (1,))
    if scalar == tl.bfloat16:
        data = narrowed(data.astype(np.float32))
    elif scalar.is_int() or scalar.is_ptr():
        data = data.astype(np.int64).astype(stock._get_np_dtype(scalar))
    else:
        data = data.astype(stock._get_np_dtype(scalar))
    return tl.tensor(stock.TensorHandle(data, scalar), tl.block_type(scalar, list(shape)) if shape else scalar)


def told(act: Callable[[], Any]) -> tuple[Any, ...]:
    """What came out of an operation, to the bit, or why nothing did."""
    try:
        result = act()
    except Exception as error:  # noqa: BLE001 (the same refusal is what counts)
        return type(error), str(error)
    data = result.handle.data
    shape = [extent.value for extent in result.shape]
    return result.type.name, result.dtype.name, result.handle.dtype.name, shape, data.dtype, data.shape, data.tobytes()


def ours_and_tritons(name: str, rules: tuple[Any, Any]) -> tuple[Any, Any]:
    """An operator, as a kernel has it and as Triton has it."""
    ours, theirs = rules
    plain = operation(MEMBERS[name], theirs)
    return learned.operator(name, operation(MEMBERS[name], ours), ours), plain


# The first numbers tell as little as any: what was learned from them must hold for all others.
ROUNDS = ((0, 0), ([7, -9, 100, 0, 1], [1, 2, -3, 0, 60]), ([1e9, -1, 0.5], [3, 1e4, -2.5]))


@pytest.mark.parametrize("name", NAMES)
def test_an_operator_between_tensors_does_what_tritons_does(name: str, session) -> None:
    """All pairs of types, of one shape and of others; the second time from what was learned."""
    quick, plain = ours_and_tritons(name, session)
    types = (*INTEGERS, *FLOATS, POINTER)
    for one, two in itertools.product(types, types):
        for left, right in (((4, 8), (4, 8)), ((4, 1), (1, 8)), ((), (4,)), ((4,), ()), ((), ())):
            for first, second in ROUNDS:
                a, b = made(one, left, first), made(two, right, second)
                assert told(lambda: quick(a, b)) == told(lambda: plain(a, b)), (one, two, left, right, first, second)  # noqa: B023 (called at once)
    plans = list(learned._learned[name.strip("_")].values())
    assert sum(plan is not None for plan in plans) > len(plans) // 20
    assert None in plans


@pytest.mark.parametrize("name", [*NAMES, *(name for name in TURNED if name in MEMBERS)])
@pytest.mark.filterwarnings("ignore:Value .* exceeds the maximum bitwidth")
def test_an_operator_beside_a_plain_number_does_what_tritons_does(name: str, session) -> None:
    """Numbers that fit the tensor's type, that don't, that are negative beside unsigned ones, wrapped or not."""
    quick, plain = ours_and_tritons(name, session)
    for scalar, number in itertools.product((*INTEGERS, *FLOATS, POINTER), NUMBERS):
        for numbers, value in ((0, number), ([7, -9, 100, 1], tl.constexpr(number))):
            tensor = made(scalar, (4,), numbers)
            wanted = told(lambda: plain(tensor, value))  # noqa: B023 (called at once)
            assert told(lambda: quick(tensor, value)) == wanted, (scalar, number)  # noqa: B023


def test_casts_and_choices_are_tritons(session) -> None:
    """Between all types, of blocks and of scalars, and with plain numbers on either side."""
    ours, theirs = session
    types = (*INTEGERS, *FLOATS)
    for one, two, shape in itertools.product(types, types, ((), (4,), (4, 8))):
        for numbers in (0, [7, 0, 100, 1, 0.5]):
            a, b = made(one, shape, numbers), made(two, shape, [1, 2, 3])
            chosen = made(tl.int1, shape, [1, 0, 0])
            assert told(lambda: ours.cast(a, two)) == told(lambda: theirs.cast(a, two))  # noqa: B023 (called at once)
            assert told(lambda: ours.where(chosen, a, b)) == told(lambda: theirs.where(chosen, a, b))  # noqa: B023
            for number in (0, 2, 0.0, -0.0, 1.5, 2**40):
                for pair in ((a, number), (number, a)):
                    assert told(lambda: ours.where(chosen, *pair)) == told(lambda: theirs.where(chosen, *pair))  # noqa: B023


@pytest.mark.usefixtures("session")
def test_axes_are_added_where_they_should_be() -> None:
    """Before and behind; a tensor can be indexed by nothing else."""
    block = made(tl.int32, (4,), [1, 2, 3, 4])

    for _ in range(2):
        assert block[None, :].handle.data.tolist() == [[1, 2, 3, 4]]
        assert block[:, None].handle.data.tolist() == [[1], [2], [3], [4]]
        assert [extent.value for extent in block[:, None].shape] == [4, 1]
        with pytest.raises(ValueError, match="unsupported tensor index"):
            block[0:2]


def test_what_differs_is_never_taken_for_learned(session, monkeypatch: pytest.MonkeyPatch) -> None:
    """Control: a function that is right for the first numbers only by its kind, and wrong to the bit, is not kept."""
    monkeypatch.setitem(learned._FUNCTIONS, "add", (lambda one, two: one + two + 1, True))
    quick, plain = ours_and_tritons("__add__", session)
    one, two = made(tl.int32, (4,), 5), made(tl.int32, (4,), 3)

    assert [told(lambda: quick(one, two)) for _ in range(2)] == [told(lambda: plain(one, two))] * 2
    assert list(learned._learned["add"].values()) == [None]
