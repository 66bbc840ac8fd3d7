# SPDX-License-Identifier: Apache-2.0
# ruff: noqa: ANN401, SLF001
# (Triton has no types: what comes from it, or goes to it, is Any; its interpreter has no public face)
"""Triton's interpreter, with every operation on memory handed to the machine first.

Besides, bf16 is made right: Triton's interpreter keeps it as 16-bit integers, cuts where a GPU rounds to nearest even,
and does arithmetic on the integers.
"""

import inspect
from collections.abc import Callable
from functools import cache
from typing import TYPE_CHECKING, Any, NoReturn

import numpy as np
import triton.language as tl
from numpy.typing import NDArray
from triton.runtime import interpreter as stock

from megascale_kernels.emulate.clocks import CTA, GPU, SYS
from megascale_kernels.emulate.errors import EmulationError
from megascale_kernels.emulate.machine import as_large
from megascale_kernels.emulate.quick import numbers_of
from megascale_kernels.emulate.races import TMA, WRITE
from megascale_kernels.emulate.rewrite import check_versions

if TYPE_CHECKING:
    from megascale_kernels.emulate.assembly import Assembly
    from megascale_kernels.emulate.machine import Machine

check_versions()
_ir = stock._ir
_numbers_of = numbers_of
_SCOPES = {_ir.MEM_SYNC_SCOPE.CTA: CTA, _ir.MEM_SYNC_SCOPE.GPU: GPU, _ir.MEM_SYNC_SCOPE.SYSTEM: SYS}
_ACQUIRES = (_ir.MEM_SEMANTIC.ACQUIRE, _ir.MEM_SEMANTIC.ACQUIRE_RELEASE)
_RELEASES = (_ir.MEM_SEMANTIC.RELEASE, _ir.MEM_SEMANTIC.ACQUIRE_RELEASE)
# A store's hints behind pointers, value and mask: how to cache and what to evict, which triton 3.9 made one.
_NO_HINTS = (None,) * (len(inspect.signature(stock.InterpreterBuilder.create_masked_store).parameters) - 4)
# Adding, or-ing or xor-ing zero is how kernels read a flag: it compiles to a load.
_READS_WITH_ZERO = (_ir.ATOMIC_OP.ADD, _ir.ATOMIC_OP.FADD, _ir.ATOMIC_OP.OR, _ir.ATOMIC_OP.XOR)


def widened(bits: NDArray[Any]) -> NDArray[np.float32]:
    """The fp32 values of bf16 bits."""
    return (np.ascontiguousarray(bits).astype(np.uint32) << 16).view(np.float32)


def narrowed(values: NDArray[Any]) -> NDArray[np.uint16]:
    """The bf16 bits of fp32 values, rounded to nearest even."""
    bits = np.ascontiguousarray(values, dtype=np.float32).view(np.uint32)
    rounded = ((bits.astype(np.uint64) + 0x7FFF + ((bits >> 16) & 1)) >> 16).astype(np.uint16)
    nan: NDArray[np.uint16] = ((bits >> 16) | 0x40).astype(np.uint16)
    return np.where(np.isnan(values), nan, rounded)


class _Result:
    """What inline assembly returns: one handle per output."""

    def __init__(self, handles: list[Any]) -> None:
        self._handles = handles

    def get_result(self, index: int) -> Any:
        return self._handles[index]


def _bytes_of_type(element: Any) -> int:
    return max(1, int(element.primitive_bitwidth) // 8)


def _bytes_of(handle: Any) -> int:
    return _bytes_of_type(handle.get_element_ty())


@cache
def _all_of(shape: tuple[int, ...]) -> NDArray[np.bool_]:
    """A mask of everything, into which no operation writes."""
    mask = np.ones(shape, dtype=bool)
    mask.flags.writeable = False
    return mask


@cache
def _all_handle(shape: tuple[int, ...]) -> Any:
    return stock.TensorHandle(_all_of(shape), tl.int1)


@cache
def _nothing_of(shape: tuple[int, ...], numbers: Any) -> NDArray[Any]:
    """Zeros, to stand outside of a mask that is everything."""
    zeros = np.zeros(shape, dtype=numbers)
    zeros.flags.writeable = False
    return zeros


@cache
def _pattern(shape: tuple[int, ...], strides: tuple[int, ...]) -> NDArray[np.uint64]:
    """The bytes from a block's first element to each of them, where strides are in bytes."""
    steps = [
        np.arange(extent, dtype=np.uint64) * np.uint64(stride) for extent, stride in zip(shape, strides, strict=True)
    ]
    return np.asarray(sum(np.ix_(*steps)), dtype=np.uint64)


def _block_of(desc: Any, indices: Any) -> tuple[Any, NDArray[np.bool_]]:
    """Pointers to a descriptor's block, and which of them lie inside the tensor; from 3.9 on Triton wraps these too.

    Most blocks lie inside with all they have, as the last one did.
    """
    shape, width = tuple(desc.block_shape), _bytes_of(desc.base)
    first = [int(index.data.item()) for index in indices]
    strides = tuple(width * int(stride.data.item()) for stride in desc.strides)
    extents = [int(extent.data.item()) for extent in desc.shape]
    inside = all(0 <= at <= extent - size for at, size, extent in zip(first, shape, extents, strict=True))
    if inside and min(strides) > 0 and not first[-1] * width % 16:
        base = int(desc.base.data.item()) + sum(at * stride for at, stride in zip(first, strides, strict=True))
        return stock.TensorHandle(_pattern(shape, strides) + np.uint64(base), desc.base.dtype.scalar), _all_of(shape)
    pointers, inside = desc.materialize_pointers(indices)
    return pointers, inside.data if isinstance(inside, stock.TensorHandle) else inside


class Builder(stock.InterpreterBuilder):  # type: ignore[misc] # its base has no types
    """Performs the operations of whichever program holds the baton."""

    def __init__(self, machine: "Machine", assembly: "Assembly") -> None:
        super().__init__()
        # Assertions against overflow triple the work of every sum; on a GPU they exist in debug builds only.
        self.options = stock.InterpreterOptions(sanitize_overflow=False)
        self._machine = machine
        self._assembly = assembly

    @property
    def grid_idx(self) -> tuple[int, int, int]:
        """Place of the running program in its grid."""
        return self._machine.current.place

    @property
    def grid_dim(self) -> tuple[int, int, int]:
        """The running program's grid."""
        return self._machine.current.grid

    # --- memory ------------------------------------------------------------------------------------------------

    def create_load(self, ptr: Any, *hints: Any) -> Any:
        """`tl.load` of all there is to it: the mask and what stands outside of it are those of its shape."""
        addresses = ptr.data
        element = ptr.get_element_ty()
        self._machine.touch(addresses, None, _bytes_of_type(element), 0, "load", volatile=bool(hints[-1]))
        numbers = _numbers_of(element)
        read = stock._interpreter.load(
            addresses, _all_of(addresses.shape), _nothing_of(addresses.shape, numbers), numbers
        )
        if addresses.size == 1:
            self._machine.saw(int(addresses.item()), read.item())
        return stock.TensorHandle(read, element)

    def create_store(self, ptr: Any, value: Any, *_hints: Any) -> Any:
        """`tl.store` of all there is to it."""
        self._machine.touch(ptr.data, None, _bytes_of(ptr), WRITE, "store")
        return super().create_masked_store(ptr, value, _all_handle(ptr.data.shape), *_NO_HINTS)

    def create_masked_load(self, ptrs: Any, mask: Any, other: Any, *hints: Any) -> Any:
        """`tl.load`."""
        volatile = bool(hints[-1])
        self._machine.touch(ptrs.data, mask.data, _bytes_of(ptrs), 0, "load", volatile=volatile)
        result = super().create_masked_load(ptrs, mask, other, *hints)
        if ptrs.data.size == 1 and np.count_nonzero(mask.data):
            self._machine.saw(int(ptrs.data.item()), result.data.item())
        return result

    def create_masked_store(self, ptrs: Any, value: Any, mask: Any, *hints: Any) -> Any:
        """`tl.store`."""
        self._machine.touch(ptrs.data, mask.data, _bytes_of(ptrs), WRITE, "store")
        return super().create_masked_store(ptrs, value, mask, *hints)

    def create_descriptor_load(self, desc: Any, indices: Any, *_hints: Any) -> Any:
        """`descriptor.load`: reads by the TMA unit; outside of the shape are zeros (or NaN)."""
        pointers, inside = _block_of(desc, indices)
        self._machine.touch(pointers.data, inside, _bytes_of(pointers), TMA, "TMA load")
        kind = pointers.get_element_ty()
        shape, numbers = pointers.data.shape, _numbers_of(kind)
        outside = _nothing_of(shape, numbers)
        if desc.padding == _ir.PADDING_OPTION.PAD_NAN:
            outside = narrowed(np.full(shape, np.nan)) if kind == tl.bfloat16 else np.full(shape, np.nan, numbers)
        mask, other = stock.TensorHandle(inside, tl.int1), stock.TensorHandle(outside, kind)
        return super().create_masked_load(pointers, mask, other, *_NO_HINTS, is_volatile=False)

    def create_descriptor_store(self, desc: Any, value: Any, indices: Any) -> Any:
        """`descriptor.store`: written by the TMA unit, sometime before the next `cp.async.bulk.wait_group`."""
        pointers, inside = _block_of(desc, indices)
        self._machine.touch(pointers.data, inside, _bytes_of(pointers), TMA | WRITE, "TMA store")
        return super().create_masked_store(pointers, value, stock.TensorHandle(inside, tl.int1), *_NO_HINTS)

    def create_atomic_rmw(self, rmwOp: Any, ptr: Any, val: Any, mask: Any, sem: Any, scope: Any) -> Any:
        """`tl.atomic_add` and its kind."""
        reads = rmwOp in _READS_WITH_ZERO and not val.data.any()

        def perform() -> Any:
            return super(Builder, self).create_atomic_rmw(rmwOp, ptr, val, mask, sem, scope)

        return self._atomic(
            f"atomic {rmwOp.name.lower()}", ptr, val, mask.data, (sem, scope), perform, lambda _: not reads
        )

    def create_atomic_cas(self, ptr: Any, cmp: Any, val: Any, sem: Any, scope: Any) -> Any:
        """`tl.atomic_cas`: one that fails is a read."""

        def perform() -> Any:
            return super(Builder, self).create_atomic_cas(ptr, cmp, val, sem, scope)

        everywhere = np.ones(ptr.data.shape, dtype=bool)
        wrote = lambda old: bool((old == cmp.data).any())  # noqa: E731 (two words beside its use)
        return self._atomic("atomic cas", ptr, val, everywhere, (sem, scope), perform, wrote)

    def create_atomic_load(self, *_operands: Any) -> NoReturn:
        """`tl.atomic_load`, `atomic_store` and `atomic_poll` came with triton 3.9: plain accesses to its interpreter.

        Raises:
            EmulationError: always; the detector would take them for races, and a poll would never let a peer run.
        """
        raise EmulationError(
            "the emulator knows no tl.atomic_load, atomic_store and atomic_poll: use tl.atomic_add(p, 0)"
        )

    create_atomic_store = create_atomic_poll = create_atomic_load

    def _atomic(
        self,
        operation: str,
        ptr: Any,
        val: Any,
        mask: NDArray[np.bool_],
        order: tuple[Any, Any],
        perform: Callable[[], Any],
        wrote: Callable[[Any], bool],
    ) -> Any:
        sem, scope = order
        result = self._machine.atomic(
            operation,
            ptr.data[as_large(mask, ptr.data)],
            _bytes_of(ptr),
            value=int(val.data.flat[0]),
            acquires=sem in _ACQUIRES,
            releases=sem in _RELEASES,
            scope=_SCOPES[scope],
            perform=perform,
            wrote=lambda done: wrote(done.data),
        )
        if result is None:
            return stock.TensorHandle(np.zeros_like(val.data), val.dtype.scalar)
        if ptr.data.size == 1 and not wrote(result.data):
            self._machine.saw(int(ptr.data.item()), result.data.item())
        return result

    # --- order -------------------------------------------------------------------------------------------------

    def create_barrier(self) -> None:
        """`tl.debug_barrier`: all threads of the CTA have come this far."""
        self._machine.current.strand.barrier()

    def create_inline_asm(self, text: str, _constraints: str, values: Any, types: Any, _pure: bool, _pack: int) -> Any:
        """Apply the meaning that the table of `assembly.py` gives."""
        result = self._assembly.meaning_of(text)(self._machine, *(value.data for value in values))
        results = result if isinstance(result, tuple) else (result,)
        shape = values[0].data.shape if values else (1,)
        handles = []
        for one, kind in zip(results, types, strict=True):
            numbers = _numbers_of(kind)
            array = np.broadcast_to(np.asarray(one), shape).astype(numbers)
            handles.append(stock.TensorHandle(array, kind.scalar))
        return _Result(handles)

    # --- bf16 --------------------------------------------------------------------------------------------------

    def cast_impl(self, src: Any, dst_type: Any) -> Any:
        """Casts; those from and to bf16 round to nearest even."""
        source, target = src.dtype.scalar, dst_type.scalar
        if source == target or tl.bfloat16 not in (source, target):
            return super().cast_impl(src, dst_type)
        values = widened(src.data) if source == tl.bfloat16 else src.data
        bits = narrowed(values) if target == tl.bfloat16 else values.astype(_numbers_of(target))
        return stock.TensorHandle(bits, target)

    def binary_op(self, lhs: Any, rhs: Any, op: Any) -> Any:
        """Arithmetic; bf16 is computed in fp32 and rounded, as a GPU does."""
        if lhs.dtype.scalar != tl.bfloat16 or rhs.dtype.scalar != tl.bfloat16:
            return super().binary_op(lhs, rhs, op)
        output = op(widened(lhs.data), widened(rhs.data))
        return stock.TensorHandle(output if output.dtype == bool else narrowed(output), tl.bfloat16)

    def create_dot(self, a: Any, b: Any, d: Any, *options: Any) -> Any:
        """`tl.dot`; bf16 operands are exact in fp32."""
        if tl.bfloat16 in (a.dtype.scalar, b.dtype.scalar):
            product = np.matmul(widened(a.data), widened(b.data), dtype=np.float32)
            return stock.TensorHandle((product + d.data).astype(d.data.dtype), d.dtype.scalar)
        return super().create_dot(a, b, d, *options)
