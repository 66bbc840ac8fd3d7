# SPDX-License-Identifier: Apache-2.0
# ruff: noqa: ANN401
# (Triton has no types: what comes from it, or goes to it, is Any)
"""Triton's rules for operands, with what they say of types kept, and the shortest way to what follows from them.

A load whose pointers, mask and value have one shape has nothing to be spread or converted, a cast is NumPy's own, and
so is a choice between two blocks of one type. Where that holds it is learned as `learned.py` learns it: Triton's
result of the first time against NumPy's, bit for bit.
"""

from collections.abc import Callable
from typing import Any

import numpy as np
import triton.language as tl
from triton.runtime import interpreter as stock

from megascale_kernels.emulate.learned import constant, held_against, is_operator, like, operator, tensor_of_kind
from megascale_kernels.emulate.quick import numbers_of, operation

_promoted: dict[tuple[str, bool, str, bool, bool], Any] = {}
_alike: dict[tuple[str, str], bool] = {}
# By types: a function of NumPy's, the type of its handle and what such tensors share; False where there is none.
_casts: dict[tuple[str, str, str, str], Any] = {}
_selects: dict[tuple[str, ...], Any] = {}
_indexed: dict[tuple[str, str, tuple[bool, ...]], Any] = {}
_loads: dict[tuple[str, str, str], dict[str, Any] | None] = {}
_stores: dict[tuple[str, str, str], dict[str, Any] | None] = {}
# What hints are where there are none; Triton has handed them on before, as they stand in its functions' heads.
_WHOLE = slice(None)
_PLAIN = ((), "", "", "")


class Semantic(stock.TritonSemantic):  # type: ignore[misc] # its base has no types
    """The rules of one launch.

    Args:
        builder: performs the operations.
    """

    def __init__(self, builder: Any) -> None:
        super().__init__(builder)
        self._constants: dict[tuple[type, int, str], Any] = {}
        self._numbers: dict[tuple[type, Any, str], Any] = {}
        self._rows: dict[tuple[int, int], Any] = {}
        self._beside: dict[tuple[str, str, str, bytes], Any] = {}

    def to_tensor(self, x: Any, check_type: bool = True) -> Any:
        """What is a tensor already, nearly always."""
        if type(x) is tl.constexpr and type(x.value) is tl.tensor:  # from Triton 3.7 on a constant plus a tensor
            return x.value
        return x if type(x) is tl.tensor else super().to_tensor(x, check_type)

    def cast(self, input: Any, dst_ty: Any, fp_downcast_rounding: Any = None) -> Any:  # noqa: A002 (Triton's own)
        """Numbers of another type."""
        source = input.type.scalar
        if source is dst_ty:
            return input
        if fp_downcast_rounding is not None or type(dst_ty) is not tl.dtype:
            return super().cast(input, dst_ty, fp_downcast_rounding)
        handle = input.handle
        key = (input.type.name, handle.dtype.name, handle.data.dtype.char, dst_ty.name)
        plan = _casts.get(key)
        if plan:
            return tensor_of_kind(plan[2], plan[0](handle.data), plan[1])
        result = super().cast(input, dst_ty)
        if plan is None:
            numbers = numbers_of(dst_ty)
            alike = source.is_ptr() or tl.bfloat16 in (source, dst_ty) or source == dst_ty
            plan = None if alike else held_against(lambda data: data.astype(numbers), result, input)
            _casts[key] = plan or False
        return result

    def where(self, condition: Any, x: Any, y: Any) -> Any:
        """The one or the other."""
        x, y = self._number(x, y), self._number(y, x)
        operands = (condition, x, y)
        if not all(type(one) is tl.tensor for one in operands) or condition.type.scalar is not tl.int1:
            return super().where(condition, x, y)
        handles = [one.handle for one in operands]
        names = [(one.type.name, one.handle.dtype.name, one.handle.data.dtype.char) for one in operands]
        key = (*names[0], *names[1], *names[2])
        plan = _selects.get(key)
        if plan:
            return tensor_of_kind(plan[2], plan[0](*(handle.data for handle in handles)), plan[1])
        result = super().where(condition, x, y)
        if plan is None:
            alike = x.type.scalar == y.type.scalar
            _selects[key] = (alike and held_against(np.where, result, *operands)) or False
        return result

    def _number(self, value: Any, beside: Any) -> Any:
        """A plain number as a tensor of the type of what stands beside it."""
        if type(value) not in (int, float) or type(beside) is not tl.tensor:
            return value
        scalar = beside.type.scalar
        key = (type(value), value if type(value) is int else value.hex(), scalar.name)
        if key not in self._numbers:
            made = constant(self, value, scalar)
            self._numbers[key] = value if made is None else made
        return self._numbers[key]

    def arange(self, start: int, end: int, **more: Any) -> Any:
        """A row of numbers, which no operation writes into."""
        if more:
            return super().arange(start, end, **more)
        known = self._rows.get((start, end))
        if known is None:
            known = self._rows[start, end] = super().arange(start, end)
            known.handle.data.flags.writeable = False
        return tensor_of_kind(like(known), known.handle.data, known.handle.dtype)

    def load(self, ptr: Any, mask: Any, other: Any, *more: Any) -> Any:
        """A load; where nothing has to be spread or converted, the builder's."""
        if more[:-1] != _PLAIN:
            return super().load(ptr, mask, other, *more)
        key = (ptr.type.name, "" if mask is None else mask.type.name, "" if other is None else other.type.name)
        plan = _loads.get(key)
        if not plan:
            result = super().load(ptr, mask, other, *more)
            if plan is None:
                # Triton takes a zero for none.
                number = other if other is None or other.type.is_block() else None
                fits = _is_plain(ptr, mask, number) and (mask is not None or other is None)
                _loads[key] = like(result) if fits else {}
            return result
        if mask is None:
            handle = self.builder.create_load(ptr.handle, None, None, more[-1])
        else:
            beside = self._outside(ptr, other).handle if other else None
            handle = self.builder.create_masked_load(ptr.handle, mask.handle, beside, None, None, more[-1])
        return tensor_of_kind(plan, handle.data, handle.dtype)

    def _outside(self, ptr: Any, other: Any) -> Any:
        """What stands outside of a load's mask: as it is, or a number spread over the pointers' shape."""
        if other.type.is_block():
            return other
        key = (ptr.type.name, other.type.name, other.handle.dtype.name, other.handle.data.tobytes())
        known = self._beside.get(key)
        if known is None:
            spread = self.broadcast_impl_value(ptr, other)[1]
            known = self._beside[key] = self.cast(spread, ptr.type.scalar.element_ty)
        return known

    def store(self, ptr: Any, val: Any, mask: Any, *more: Any) -> Any:
        """A store; where nothing has to be spread or converted, the builder's."""
        if more != _PLAIN[:-1]:
            return super().store(ptr, val, mask, *more)
        key = (ptr.type.name, val.type.name, "" if mask is None else mask.type.name)
        plan = _stores.get(key)
        if not plan:
            result = super().store(ptr, val, mask, *more)
            if plan is None:
                _stores[key] = like(result) if _is_plain(ptr, mask, val) else {}
            return result
        if mask is None:
            self.builder.create_store(ptr.handle, val.handle, None, None)
        else:
            self.builder.create_masked_store(ptr.handle, val.handle, mask.handle, None, None)
        return tensor_of_kind(plan, None, tl.void)

    def scalar_constant(self, value: Any, dtype: Any) -> Any:
        """A number as a tensor; whole numbers are kept, and are read-only."""
        kind = type(value)
        if (kind is not int and kind is not bool) or dtype is None:
            return super().scalar_constant(value, dtype)
        key = (kind, value, dtype.name)
        known = self._constants.get(key)
        if known is None:
            known = self._constants[key] = super().scalar_constant(value, dtype)
            known.handle.data.flags.writeable = False
        return known

    def computation_type_impl(
        self, a_ty: Any, a_is_scalar: bool, b_ty: Any, b_is_scalar: bool, div_or_mod: bool
    ) -> Any:
        """The type that an operation computes in."""
        key = (a_ty.name, a_is_scalar, b_ty.name, b_is_scalar, div_or_mod)
        known = _promoted.get(key)
        if known is None:
            known = super().computation_type_impl(a_ty, a_is_scalar, b_ty, b_is_scalar, div_or_mod)
            _promoted[key] = known
        return known

    def broadcast_impl_value(self, lhs: Any, rhs: Any) -> Any:
        """Two operands of one shape; most have it already."""
        key = (lhs.type.name, rhs.type.name)
        known = _alike.get(key)
        if known is None:
            known = _alike[key] = list(lhs.type.shape if lhs.type.is_block() else ()) == list(
                rhs.type.shape if rhs.type.is_block() else ()
            )
        return (lhs, rhs) if known else super().broadcast_impl_value(lhs, rhs)


def indexed(stock_way: Callable[[Any, Any], Any]) -> Callable[[Any, Any], Any]:
    """A tensor with axes added, which is all that its brackets can do."""

    def index(self: Any, slices: Any) -> Any:
        if type(slices) is not tuple or not all(one is None or one == _WHOLE for one in slices):
            return stock_way(self, slices)
        handle = self.handle
        key = (self.type.name, handle.dtype.name, tuple(one is None for one in slices))
        plan = _indexed.get(key)
        if plan is None:
            result = stock_way(self, slices)
            _indexed[key] = held_against(lambda data: data[slices], result, self) or False
            return result
        return tensor_of_kind(plan[2], plan[0](handle.data), plan[1]) if plan else stock_way(self, slices)

    return index


def converted(stock_way: Callable[..., Any], semantic: Any) -> Callable[..., Any]:
    """A tensor's `to`."""

    def to(self: Any, dtype: Any, *more: Any, **options: Any) -> Any:
        plain = type(dtype) is tl.dtype and not more and not options
        return semantic.cast(self, dtype) if plain else stock_way(self, dtype, *more, **options)

    return to


def _is_plain(ptr: Any, mask: Any, value: Any) -> bool:
    """Whether pointers, mask and value have one shape, and the value is of the type that is pointed at."""
    pointer = ptr.type.scalar
    if not pointer.is_ptr() or pointer.is_const() or pointer.element_ty == tl.int1 or pointer.element_ty.is_block():
        return False
    shape = _shape_of(ptr)
    if mask is not None and (_shape_of(mask) != shape or mask.type.scalar != tl.int1):
        return False
    return value is None or (_shape_of(value) == shape and value.type.scalar == pointer.element_ty)


def _shape_of(tensor: Any) -> list[int]:
    return list(tensor.type.shape) if tensor.type.is_block() else []


def member_of(owner: Any, name: str, member: Any, semantic: Any) -> Callable[..., Any]:
    """A member of the language for kernels; those of tensors that are learned by types are ours."""
    called = operation(member, semantic)
    if is_operator(owner, name):
        return operator(name, called, semantic)
    if owner is tl.tensor and name == "__getitem__":
        return indexed(called)
    return converted(called, semantic) if owner is tl.tensor and name == "to" else called
