# SPDX-License-Identifier: Apache-2.0
"""The table of plain values that hold no others: numbers, texts and times, and what NumPy and torch have of them.

Each row says how a value comes apart into what msgpack has (or into values of other rows) and how it is made from that
again. Adding a kind is adding a row. Whatever ``whole`` raises at parts that it never made is told as unreadable data.
"""

import datetime as dt
import pathlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
import torch


@dataclass(frozen=True)
class Slot:
    """Stands in a structure where a tensor was; ``key`` is the tensor's name in the checkpoint."""

    key: str


@dataclass(frozen=True)
class Pickled:
    """Stands in a structure where a value was that the user asked to pickle; ``key`` is its name in the checkpoint."""

    key: str


@dataclass(frozen=True)
class Kind:
    """One row: a tag, the types it is for, and the two ways between a value and its parts."""

    tag: str
    types: tuple[type, ...]
    parts: Callable[[Any], list[object]]
    whole: Callable[[Sequence[Any]], object]


# What torch has by name and not by value.
_OF_TORCH = {
    str(each): each
    for each in vars(torch).values()
    if isinstance(each, torch.dtype | torch.layout | torch.memory_format)
}


def dtype_named(name: str) -> torch.dtype:
    """The type of tensor elements that torch prints so.

    Raises:
        KeyError: there is none.
    """
    found = _OF_TORCH[name]
    if not isinstance(found, torch.dtype):
        raise KeyError(name)
    return found


def kind_of(value: object) -> Kind | None:
    """The row for a value; None where there is none. By exact type: a subclass may hold more than we would store."""
    if isinstance(value, np.generic):
        return None if _describes(value.dtype) is None else _SCALAR
    if type(value) is np.ndarray and _describes(value.dtype) is None:
        return None
    return _BY_TYPE.get(type(value))


def _describes(dtype: "np.dtype[Any]") -> object | None:
    """What NumPy's own file format calls a dtype; None where that brings back another one, or it holds objects."""
    try:
        described = np.lib.format.dtype_to_descr(dtype)  # type: ignore[no-untyped-call]  # of NumPy
        again = np.lib.format.descr_to_dtype(described)  # type: ignore[no-untyped-call]  # of NumPy
    except (ValueError, TypeError):
        return None
    return described if again == dtype and not dtype.hasobject else None


def _array_parts(value: "np.ndarray[Any, Any]") -> list[object]:
    order: Literal["C", "F"] = "F" if value.flags.f_contiguous and not value.flags.c_contiguous else "C"
    return [_describes(value.dtype), tuple(value.shape), order, value.tobytes(order)]


def _array(parts: Sequence[Any]) -> "np.ndarray[Any, Any]":
    described, shape, order, raw = parts
    dtype = np.lib.format.descr_to_dtype(described)  # type: ignore[no-untyped-call]  # of NumPy
    if dtype.hasobject:
        raise ValueError("an array of objects is no data")
    if dtype.itemsize == 0:
        if raw:
            raise ValueError("an array of nothing has bytes")
        return np.empty(shape, dtype)
    return np.frombuffer(bytearray(raw), dtype).reshape(shape, order=order)


def _scalar_parts(value: "np.generic") -> list[object]:
    return [_describes(value.dtype), value.tobytes()]


def _scalar(parts: Sequence[Any]) -> object:
    return _array([parts[0], (1,), "C", parts[1]])[0]


def _datetime_parts(value: dt.datetime) -> list[object]:
    whole = [value.year, value.month, value.day, value.hour, value.minute, value.second, value.microsecond]
    return [*whole, value.tzinfo, value.fold]


def _time_parts(value: dt.time) -> list[object]:
    return [value.hour, value.minute, value.second, value.microsecond, value.tzinfo, value.fold]


def _zone_parts(value: dt.timezone) -> list[object]:
    offset, name = value.utcoffset(None), value.tzname(None)
    return [offset] if name == dt.timezone(offset).tzname(None) else [offset, name]


def _slot(parts: Sequence[Any]) -> Slot:
    (key,) = parts
    if not isinstance(key, str):
        raise TypeError("a slot without a name")
    return Slot(key)


def _pickled(parts: Sequence[Any]) -> Pickled:
    return Pickled(_slot(parts).key)


def _datetime(parts: Sequence[Any]) -> dt.datetime:
    year, month, day, hour, minute, second, microsecond, zone, fold = parts
    return dt.datetime(year, month, day, hour, minute, second, microsecond, tzinfo=zone, fold=fold)


def _device(parts: Sequence[Any]) -> torch.device:
    (name,) = parts
    if not isinstance(name, str):  # torch asks what accelerators there are for a mere number
        raise TypeError("a device without a name")
    return torch.device(name)


_HALVES = "surrogatepass"
_SCALAR = Kind("numpy scalar", (), _scalar_parts, _scalar)

KINDS = (
    Kind("tensor", (Slot,), lambda v: [v.key], _slot),
    Kind("pickled", (Pickled,), lambda v: [v.key], _pickled),
    Kind(
        "int",
        (int,),
        lambda v: [v.to_bytes(v.bit_length() // 8 + 1, "little", signed=True)],
        lambda p: int.from_bytes(p[0], "little", signed=True),
    ),
    # With halves of surrogate pairs, which UTF-8 has not: names of files that are no text.
    Kind("str", (str,), lambda v: [v.encode("utf-8", _HALVES)], lambda p: p[0].decode("utf-8", _HALVES)),
    Kind("complex", (complex,), lambda v: [v.real, v.imag], lambda p: complex(*p)),
    Kind("bytearray", (bytearray,), lambda v: [bytes(v)], lambda p: bytearray(memoryview(p[0]))),
    Kind("range", (range,), lambda v: [v.start, v.stop, v.step], lambda p: range(*p)),
    Kind("slice", (slice,), lambda v: [v.start, v.stop, v.step], lambda p: slice(*p)),
    Kind("path", (type(pathlib.Path()),), lambda v: [str(v)], lambda p: pathlib.Path(*p)),
    Kind("date", (dt.date,), lambda v: [v.year, v.month, v.day], lambda p: dt.date(*p)),
    Kind("time", (dt.time,), _time_parts, lambda p: dt.time(*p[:-1], fold=p[-1])),
    Kind("datetime", (dt.datetime,), _datetime_parts, _datetime),
    Kind(
        "timedelta",
        (dt.timedelta,),
        lambda v: [v.days, v.seconds, v.microseconds],
        lambda p: dt.timedelta(*p),
    ),
    Kind("timezone", (dt.timezone,), _zone_parts, lambda p: dt.timezone(*p)),
    Kind("numpy array", (np.ndarray,), _array_parts, _array),
    _SCALAR,
    Kind("torch", (torch.dtype, torch.layout, torch.memory_format), lambda v: [str(v)], lambda p: _OF_TORCH[p[0]]),
    Kind("size", (torch.Size,), list, torch.Size),
    Kind("device", (torch.device,), lambda v: [str(v)], _device),
)
_BY_TYPE = {each: row for row in KINDS for each in row.types}
