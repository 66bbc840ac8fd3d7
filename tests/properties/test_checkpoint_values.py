# SPDX-License-Identifier: Apache-2.0
"""Whatever plain values a state holds, they come back exactly; whatever bytes stand in their place, no code runs."""

import datetime as dt
import math
import struct
from collections import Counter, OrderedDict, defaultdict, deque
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as arrays

from megascale_ops.checkpoint import values
from megascale_ops.checkpoint.allowed import Allowed
from megascale_ops.errors import CheckpointError
from tests.matrix import some

NOTHING = Allowed()

ZONES = st.none() | st.builds(dt.timezone, st.timedeltas(dt.timedelta(hours=-23), dt.timedelta(hours=23)))
KEYS = (
    st.none()
    | st.booleans()
    | st.integers()
    | st.integers(-(2**200), 2**200)
    | st.floats(allow_nan=False)
    | st.text(st.characters(), max_size=5)  # halves of surrogate pairs too
    | st.binary(max_size=5)
    | st.complex_numbers(allow_nan=False)
    | st.datetimes(timezones=ZONES)
    | st.dates()
    | st.timedeltas()
    | st.tuples(st.integers(), st.text(max_size=3))
)
DTYPES = (
    arrays.scalar_dtypes()
    | arrays.array_dtypes(max_size=3)
    | st.sampled_from([np.dtype({"names": ["a", "b"], "formats": ["i1", "<f8"]}, align=True), np.dtype("<U0")])
)
LEAVES = (
    KEYS
    | st.floats()
    | st.sampled_from([math.nan, -math.nan, math.inf, -math.inf, -0.0, struct.unpack("<d", b"\1\0\0\0\0\0\xf8\x7f")[0]])
    | DTYPES.flatmap(lambda dtype: arrays.arrays(dtype, arrays.array_shapes(min_dims=0, min_side=0, max_side=3)))
    | st.sampled_from([np.asfortranarray(np.arange(6).reshape(2, 3)), np.float64(2.5), np.int8(3), np.str_("x")])
    | st.sampled_from([torch.float8_e4m3fn, torch.bfloat16, torch.device("cuda", 1), torch.Size([2, 0]), torch.strided])
    | st.sampled_from([range(1, 9, 3), slice(None, 3), Path("a/b"), bytearray(b"ab"), dt.time(1, 2, 3, 4, dt.UTC)])
    | st.sets(KEYS, max_size=4)
    | st.frozensets(st.integers(), max_size=4)
)


def nested(children: "st.SearchStrategy[Any]") -> "st.SearchStrategy[Any]":
    """Every container of every leaf."""
    items, pairs = st.lists(children, max_size=4), st.dictionaries(KEYS, children, max_size=4)
    return (
        items
        | items.map(tuple)
        | items.map(lambda each: deque(each, 7))
        | pairs
        | pairs.map(OrderedDict)
        | pairs.map(lambda each: defaultdict(list, each))
        | st.dictionaries(KEYS, st.integers(), max_size=3).map(Counter)
    )


def same(left: Any, right: Any) -> bool:  # noqa: ANN401, PLR0911  any value at all, by its kind
    """Equal in type, order and every bit."""
    if type(left) is not type(right):
        return False
    if isinstance(left, dict):
        factories = getattr(left, "default_factory", 0) == getattr(right, "default_factory", 0)
        return factories and same(list(left.items()), list(right.items()))
    if isinstance(left, list | tuple | deque):
        bounds = getattr(left, "maxlen", 0) == getattr(right, "maxlen", 0)
        return bounds and len(left) == len(right) and all(map(same, left, right))
    if isinstance(left, float) and not isinstance(left, np.generic):
        return struct.pack("d", left) == struct.pack("d", right)
    if isinstance(left, complex) and not isinstance(left, np.generic):
        return same([left.real, left.imag], [right.real, right.imag])
    if isinstance(left, np.ndarray):
        laid = left.flags.c_contiguous == right.flags.c_contiguous and right.flags.writeable
        return laid and (left.dtype, left.shape, left.tobytes()) == (right.dtype, right.shape, right.tobytes())
    if isinstance(left, np.generic):
        return left.dtype == right.dtype and left.tobytes() == right.tobytes()
    if isinstance(left, dt.datetime | dt.time):
        return bool(left == right) and left.fold == right.fold and repr(left.tzinfo) == repr(right.tzinfo)
    return bool(left == right)


@given(st.recursive(LEAVES, nested, max_leaves=12))
@settings(max_examples=some(500))
def test_any_plain_value_comes_back_exactly(value: object) -> None:
    """Types, order of keys, NaN with its bits, the sign of zero, integers of any size, arrays of any layout."""
    back = values.decode(values.encode(value, NOTHING, ("state",)), NOTHING)

    assert same(value, back), f"{value!r} came back as {back!r}"


NODES = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-(2**63), 2**64 - 1)
    | st.floats()
    | st.text(max_size=4)
    | st.binary(max_size=9),
    lambda children: (
        st.lists(children, max_size=4)
        | st.dictionaries(st.text(max_size=2), children, max_size=2)
        | st.tuples(st.sampled_from(sorted(values._BY_TAG)), st.lists(children, max_size=4)).map(
            lambda n: [n[0], *n[1]]
        )
    ),
    max_leaves=15,
)


@given(NODES.map(msgspec.msgpack.encode) | st.binary(max_size=60))
@settings(max_examples=some(1000))
def test_any_bytes_are_a_plain_value_or_refused_in_one_sentence(raw: bytes) -> None:
    """Every tag with parts that its writer never made: nothing but a value or one kind of error."""
    try:
        values.decode(raw, NOTHING)
    except CheckpointError as exc:
        refusal = str(exc)
    else:
        refusal = ""
    assert refusal.isprintable()
    assert len(refusal) < 300
