# SPDX-License-Identifier: Apache-2.0
# ruff: noqa: ANN401
# (Triton has no types: what comes from it, or goes to it, is Any)
"""Operators between tensors, by what was learned of two types: NumPy's one function, without the way to it.

Triton asks at each operator which type to compute in, whether the operands have to be converted, which of them has to
be spread over the other's shape. All of that follows from the two types. So the first time that two types meet, Triton
does it, NumPy's function is held against what came out, bit for bit, and if it is the same it stands for the whole way
from then on. Types for which it is not the same go Triton's way each time: bf16, whose numbers are no numbers to NumPy,
unsigned beside signed integers, and whatever an operator does not take.
"""

from collections.abc import Callable
from typing import Any

import numpy as np
import triton.language as tl
from triton.runtime import interpreter as stock

Function = Callable[[Any, Any], Any]
# The types of tensor, handle and NumPy of either operand; a constant's are those that it is made of.
Key = tuple[str, str, str, str, str, str]


def _quotient(dividend: Any, divisor: Any) -> Any:
    """Integers divided as on a GPU: towards zero."""
    return (dividend - np.fmod(dividend, divisor)) // divisor


# By the name without underscores: what NumPy does, and whether a plain number takes the tensor's type.
_FUNCTIONS: dict[str, tuple[Function, bool]] = {
    "add": (np.add, True),
    "sub": (np.subtract, True),
    "mul": (np.multiply, True),
    "floordiv": (_quotient, True),
    "mod": (np.fmod, True),
    "and": (np.bitwise_and, True),
    "or": (np.bitwise_or, True),
    "xor": (np.bitwise_xor, True),
    "lshift": (np.left_shift, True),
    "rshift": (np.right_shift, True),
    "lt": (np.less, False),
    "le": (np.less_equal, False),
    "gt": (np.greater, False),
    "ge": (np.greater_equal, False),
    "eq": (np.equal, False),
    "ne": (np.not_equal, False),
}
_OF_BITS = frozenset({"and", "or", "xor", "eq", "ne"})
_OPERATORS = {f"__{name}__": (name, False) for name in _FUNCTIONS} | {
    f"__r{name}__": (name, True) for name in _FUNCTIONS
}
# What stands for Triton's way between two types: a function, the type of the handle, what tensors of the type share.
Plan = tuple[Function, Any, dict[str, Any]]
# What was learned outlives a launch: {operator: {types: plan, or None where Triton goes its own way}}.
_learned: dict[str, dict[Key, Plan | None]] = {name: {} for name in _FUNCTIONS}
_new_handle = stock.TensorHandle.__new__
_new_tensor = tl.tensor.__new__


def like(tensor: Any) -> dict[str, Any]:
    """What a tensor has in common with all others of its type."""
    return {name: value for name, value in vars(tensor).items() if name != "handle"}


def tensor_of_kind(tensor_like: dict[str, Any], data: Any, handle_type: Any) -> Any:
    """A tensor of numbers that are known to fit its type, which is that of `like`."""
    handle = _new_handle(stock.TensorHandle)
    handle.data, handle.dtype, handle.attr = data, handle_type, {}
    tensor = _new_tensor(tl.tensor)
    tensor.__dict__.update(tensor_like)
    tensor.handle = handle
    return tensor


def is_operator(owner: Any, name: str) -> bool:
    """Whether a member of the language is an operator that can be learned."""
    return owner is tl.tensor and name in _OPERATORS


def operator(name: str, stock_way: Callable[[Any, Any], Any], semantic: Any) -> Callable[[Any, Any], Any]:
    """A tensor's operator.

    Args:
        name: as Python calls it.
        stock_way: what Triton does.
        semantic: its rules, for constants.
    """
    kind, reflected = _OPERATORS[name]
    function, takes_type = _FUNCTIONS[kind]
    learned = _learned[kind]
    constants: dict[tuple[int | str, str], Any] = {}
    is_shift = kind in ("lshift", "rshift")

    def tensor_of(value: Any, beside: Any) -> Any:
        """A plain number as a tensor of the type in which Triton would take it; None: whatever Triton does."""
        value = value.value if type(value) is tl.constexpr else value
        number = type(value)
        if number is not int and number is not float:
            return value if number is tl.tensor else None
        scalar = beside.type.scalar
        # 0.0 equals -0.0, and 1 equals 1.0.
        key = (value if number is int else value.hex(), scalar.name)
        known = constants.get(key)
        if known is None:
            fits = not is_shift or (number is int and scalar.is_int() and 0 <= value < scalar.int_bitwidth)
            known = constants[key] = constant(semantic, value, scalar, takes_type=takes_type) if fits else None
        return known

    def operate(self: Any, other: Any) -> Any:
        beside = other if type(other) is tl.tensor else tensor_of(other, self)
        if beside is None:
            return stock_way(self, other)
        lhs, rhs = (beside, self) if reflected else (self, beside)
        one, two = lhs.handle, rhs.handle
        a, b = one.data, two.data
        key = (lhs.type.name, one.dtype.name, a.dtype.char, rhs.type.name, two.dtype.name, b.dtype.char)
        try:
            plan = learned[key]
        except KeyError:
            result = stock_way(self, other)
            learned[key] = _learn(kind, function, lhs, rhs, result)
            return result
        if plan is None:
            return stock_way(self, other)
        perform, handle_type, tensor_like = plan
        return tensor_of_kind(tensor_like, perform(a, b), handle_type)

    return operate


def constant(semantic: Any, number: float, scalar: Any, *, takes_type: bool = True) -> Any:
    """A plain number beside a tensor, of the tensor's type or of its own; None where Triton would convert either."""
    plain = semantic.to_tensor(number)
    if not takes_type or scalar.is_ptr():
        return plain
    if scalar.is_int1() or scalar == tl.bfloat16 or (plain.type.is_floating() and not scalar.is_floating()):
        return None
    if scalar.is_int() and not scalar.get_int_min_value() <= number <= scalar.get_int_max_value():
        return None
    return semantic.scalar_constant(number, scalar)


def _learn(
    kind: str, function: Function, lhs: Any, rhs: Any, result: Any
) -> tuple[Function, Any, dict[str, Any]] | None:
    """What stands for Triton's way between two types, or None where nothing does."""
    perform = _candidate(kind, function, lhs.type.scalar, rhs.type.scalar)
    if perform is None:
        return None
    return held_against(perform, result, lhs, rhs)


def held_against(perform: Any, result: Any, *operands: Any) -> tuple[Any, Any, dict[str, Any]] | None:
    """A function of NumPy's, the type of its result's handle and what such tensors share.

    None where it does not make of these operands what Triton has made of them, to the bit.
    """
    with np.errstate(all="ignore"):
        tried = perform(*(operand.handle.data for operand in operands))
    known = result.handle.data
    if tried.dtype != known.dtype or tried.shape != known.shape or tried.tobytes() != known.tobytes():
        return None
    return perform, result.handle.dtype, like(result)


def _candidate(kind: str, function: Function, one: Any, two: Any) -> Function | None:
    if one.is_ptr() or two.is_ptr():
        return _moved(one) if kind == "add" and one.is_ptr() and two.is_int() else None
    if tl.bfloat16 in (one, two):
        return None
    if tl.int1 in (one, two) and kind not in _OF_BITS:  # what they add up to differs between releases of Triton
        return None
    # Signed integers of two widths meet in the wider one, NumPy's as Triton's.
    alike = one == two or (one.is_int_signed() and two.is_int_signed())
    return function if alike else None


def _moved(pointer: Any) -> Function:
    """Pointers and offsets in elements."""
    width = np.uint64(max(1, pointer.element_ty.primitive_bitwidth // 8))
    return lambda pointers, offsets: pointers + width * offsets.astype(np.uint64)
