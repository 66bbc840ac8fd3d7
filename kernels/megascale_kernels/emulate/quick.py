# SPDX-License-Identifier: Apache-2.0
# ruff: noqa: ANN401, SLF001
# (Triton has no types: what comes from it, or goes to it, is Any; its interpreter has no public face)
"""What Triton's interpreter makes anew for every operation, and is the same each time: kept.

A kernel here is some ten thousand operations on small arrays, so its time is what stands around NumPy: the text of a
type that is never printed, a table of 18 types to look up one, a shape wrapped number by number. Nothing of it depends
on values, so what the interpreter made for a type or a shape once is given out again.
"""

from collections.abc import Callable
from typing import Any

import triton.language as tl
from triton.runtime import interpreter as stock

_PASSES_ON = tl.core.builtin(lambda: None).__code__
_stock_numbers = stock._get_np_dtype
_stock_tensor = tl.tensor.__init__
_stock_block = tl.block_type.__init__
_stock_same = tl.dtype.__eq__
_stock_fits = stock._validate_np_data_size
_numbers: dict[str, Any] = {}
_shapes: dict[str, tuple[Any, Any]] = {}
_blocks: dict[tuple[str, tuple[int, ...]], dict[str, Any]] = {}
_fits: dict[tuple[int, str], bool] = {}


def quicken(scope: Any) -> None:
    """Let the interpreter keep what it makes, until the scope of patches is restored."""
    scope.set_attr(stock, "_get_np_dtype", numbers_of)
    scope.set_attr(tl.tensor, "__init__", _begin_tensor)
    scope.set_attr(tl.block_type, "__init__", _begin_block)
    scope.set_attr(tl.dtype, "__eq__", _same)
    scope.set_attr(stock, "_validate_np_data_size", _fit)


def operation(member: Any, semantic: Any) -> Callable[..., Any]:
    """A function of the language, as a kernel calls it, with the semantic that it needs."""
    # Triton's decorator only looks whether there is one.
    plain = member.__wrapped__ if getattr(member, "__code__", None) is _PASSES_ON else member

    def called(*args: Any, **kwargs: Any) -> Any:
        kwargs["_semantic"] = semantic
        return plain(*args, **kwargs)

    return called


def numbers_of(kind: Any) -> Any:
    """NumPy's type for a type of Triton, whose name tells all of it."""
    known = _numbers.get(kind.name)
    if known is None:
        known = _numbers[kind.name] = _stock_numbers(kind)
    return known


def _begin_tensor(self: Any, handle: Any, type: Any) -> None:  # noqa: A002 (Triton's own name)
    # A shape of Triton's is slow to compare; the type's name holds it.
    name = type.name if type.is_block() else ""
    known = _shapes.get(name)
    if known is None:
        _stock_tensor(self, handle, type)
        _shapes[name] = (self.numel, self.shape)
        return
    self.handle, self.type, self.dtype = handle, type, type.scalar
    self.numel, self.shape = known


def _begin_block(self: Any, element_ty: Any, shape: Any) -> None:
    key = (element_ty.name, tuple(shape))
    if not all(type(extent) is int for extent in key[1]):
        # Constants of Triton, whose comparison is a constant of Triton, too.
        _stock_block(self, element_ty, shape)
        return
    known = _blocks.get(key)
    if known is None:
        _stock_block(self, element_ty, shape)
        _blocks[key] = dict(vars(self))
        return
    vars(self).update(known)
    self.element_ty = element_ty


def _same(self: Any, other: Any) -> bool:
    """Whether two types have one name; nearly always it is the same object."""
    return self is other or bool(_stock_same(self, other))


def _fit(array: Any, kind: Any) -> bool:
    """Whether NumPy's numbers are no wider than Triton's."""
    key = (array.itemsize, kind.name)
    known = _fits.get(key)
    if known is None:
        known = _fits[key] = _stock_fits(array, kind)
    return known
