# SPDX-License-Identifier: Apache-2.0
"""What numbers, texts and collections of a message may be: the types of its fields, and how to mend a value beyond.

A receiver decodes with these types, so a number beyond them is refused with the name of its field before anything
reckons with it; JSON has neither infinity nor NaN. They are wide: every value of a working machine is within, and
what is beyond would overflow a clock, a date, an array or a receiver's memory. They bound a number by itself;
whether it fits the rest (a rank to the size of its job) is for the receiver to look at.

A sender whose sources may have been written over (an agent reads the memory of other programs) brings its message into
them by :func:`fit`, which also returns what it had to change.
"""

import math
from collections.abc import Mapping
from functools import lru_cache
from typing import Annotated, Any, TypeVar

import msgspec
from msgspec import Meta

T = TypeVar("T")

_encode = msgspec.json.Encoder().encode

# 131,072: ten times the largest job that was published; an array by rank then has 1 MB.
MOST_RANKS = 131_072
# 30 years in seconds: no time on a machine's own clock is longer.
MOST_S = 1e9
# The year 2096: dates are made of it, and differences stay exact to the microsecond.
MOST_WALL_S = 4e9
# 2**53: beyond it a float has no room for a whole number.
MOST_COUNT = 2**53

Seconds = Annotated[float, Meta(ge=0.0, le=MOST_S)]  # a duration, or a point on a monotonic clock
WallSeconds = Annotated[float, Meta(ge=0.0, le=MOST_WALL_S)]
Microseconds = Annotated[float, Meta(ge=0.0, le=MOST_S * 1e6)]
# A share may exceed 1 (64 busy cores); -1: not known.
Share = Annotated[float, Meta(ge=-1.0, le=1e6)]
# What a script computes: the largest float32 there is, for a loss that goes astray passes through all of them.
Loss = Annotated[float, Meta(ge=-3.5e38, le=3.5e38)]

# A factor, a rate, a fraction.
Factor = Annotated[float, Meta(ge=0.0, le=1e9)]

Count = Annotated[int, Meta(ge=0, le=MOST_COUNT)]
Bytes = Annotated[int, Meta(ge=-1, le=2**62)]  # -1: not known
Step = Annotated[int, Meta(ge=-1, le=MOST_COUNT)]  # -1: none yet; also numbers of collectives
Rank = Annotated[int, Meta(ge=0, lt=MOST_RANKS)]
RankOrNone = Annotated[int, Meta(ge=-1, lt=MOST_RANKS)]
Ranks = Annotated[int, Meta(ge=0, le=MOST_RANKS)]  # how many
Axis = Annotated[int, Meta(ge=-1, lt=MOST_RANKS)]  # a coordinate in a mesh
Nodes = Annotated[int, Meta(ge=0, le=MOST_RANKS)]
Round = Annotated[int, Meta(ge=0, le=2**31)]
Pid = Annotated[int, Meta(ge=0, le=2**31)]
ExitCode = Annotated[int, Meta(ge=-(2**31), le=2**31)]
Port = Annotated[int, Meta(ge=0, le=65_535)]
Version = Annotated[int, Meta(ge=-(2**31), le=2**31)]
Bits = Annotated[int, Meta(ge=0, le=255)]  # an exponent of two

# 128: the product's names and ids have 100 at most, words of tables 30.
Word = Annotated[str, Meta(max_length=128)]
# 1,024: addresses, names of communicators and kernels, one line of a log.
Line = Annotated[str, Meta(max_length=1024)]
# 4,096: PATH_MAX; the longest sentences and the tails of outputs that are reported (4,000).
Text = Annotated[str, Meta(max_length=4096)]

# 1,024: orders, ranks and jobs of one node, with room; a node has 8 of them as a rule.
_FEW = Meta(max_length=1024)
Words = Annotated[tuple[Word, ...], _FEW]
Pids = Annotated[tuple[Pid, ...], _FEW]
RankList = Annotated[tuple[Rank, ...], Meta(max_length=MOST_RANKS)]
Lines = Annotated[tuple[Line, ...], _FEW]
# 256 KiB: as much as a whole message may have.
Packed = Annotated[bytes, Meta(max_length=256 * 1024)]


def encode(message: msgspec.Struct) -> tuple[bytes, tuple[str, ...]]:
    """Return a message as JSON that its receiver can read, and what had to be changed for that (nothing as a rule).

    Decoding it once is how a receiver would find out: 5 us for the heartbeat of 8 ranks.
    """
    raw = _encode(message)
    try:
        _decoder(type(message)).decode(raw)
    except msgspec.MsgspecError:
        fitted, changed = fit(message)
        return _encode(fitted), changed
    return raw, ()


@lru_cache(maxsize=256)
def _decoder(kind: type[msgspec.Struct]) -> msgspec.json.Decoder[Any]:
    return msgspec.json.Decoder(kind)


def fit(value: T) -> tuple[T, tuple[str, ...]]:
    """Return a struct with every field in its range, and where that changed something ("jobs[0].ranks[1].pid").

    Numbers go to the nearest bound, those that are none (NaN) to the lower; what is too long is cut, collections at the
    front: the newest is kept. A look at one number takes 1 us, so this is for messages that were found to need it.
    """
    changed: list[str] = []
    fitted: T = _fit(value, type(value), "", changed)
    return fitted, tuple(changed)


@lru_cache(maxsize=256)
def _fields(struct: type[msgspec.Struct]) -> tuple[tuple[str, msgspec.inspect.Type], ...]:
    found = msgspec.inspect.type_info(struct)
    assert isinstance(found, msgspec.inspect.StructType)
    return tuple((field.name, field.type) for field in found.fields)


def _fit(value: Any, kind: Any, where: str, changed: list[str]) -> Any:  # noqa: ANN401  any field of any struct
    """Return ``value`` as its type wants it; ``kind`` is msgspec's description of that, or the struct's class."""
    if isinstance(value, msgspec.Struct):
        kept = {
            name: _fit(getattr(value, name), type_, f"{where}.{name}" if where else name, changed)
            for name, type_ in _fields(type(value))
        }
        different = {name: new for name, new in kept.items() if new is not getattr(value, name)}
        return msgspec.structs.replace(value, **different) if different else value
    if isinstance(kind, msgspec.inspect.UnionType):
        kind = next((one for one in kind.types if _is_of(value, one)), None)
    if isinstance(value, bool) or value is None or kind is None:
        return value
    if isinstance(value, tuple):
        return _fit_items(value, kind, where, changed)
    if isinstance(value, Mapping):
        return _fit_mapping(value, kind, where, changed)
    fitted = value
    if isinstance(value, (int, float)):
        fitted = _fit_number(value, kind)
    elif isinstance(value, (str, bytes)):
        fitted = _cut(value, kind)
    if fitted is not value:
        changed.append(where)
    return fitted


def _is_of(value: object, kind: msgspec.inspect.Type) -> bool:
    if isinstance(value, bool):
        return isinstance(kind, msgspec.inspect.BoolType)
    if isinstance(value, (int, float)):
        return isinstance(kind, (msgspec.inspect.FloatType, msgspec.inspect.IntType))
    return value is not None and not isinstance(kind, msgspec.inspect.NoneType)


def _fit_number(value: float, kind: Any) -> Any:  # noqa: ANN401  msgspec's description; its bounds are of the field's type
    least = getattr(kind, "ge", None)
    most = kind.le if getattr(kind, "le", None) is not None else None
    if most is None and getattr(kind, "lt", None) is not None:
        most = kind.lt - 1
    if isinstance(value, float) and math.isnan(value):
        return least if least is not None else 0.0
    if least is not None and value < least:
        return least
    if most is not None and value > most:
        return most
    return value


def _cut(value: str | bytes, kind: Any) -> str | bytes:  # noqa: ANN401  msgspec's description
    most = getattr(kind, "max_length", None)
    return value if most is None or len(value) <= most else value[:most]


def _fit_items(value: tuple[Any, ...], kind: Any, where: str, changed: list[str]) -> tuple[Any, ...]:  # noqa: ANN401  msgspec's description
    kept, most = value, getattr(kind, "max_length", None)
    if most is not None and len(kept) > most:
        kept = kept[-most:]
        changed.append(where)
    item = getattr(kind, "item_type", None)
    if item is None:
        return kept
    fitted = tuple(_fit(one, item, f"{where}[{at}]", changed) for at, one in enumerate(kept))
    return fitted if any(new is not old for new, old in zip(fitted, kept, strict=True)) else kept


def _fit_mapping(value: Mapping[Any, Any], kind: Any, where: str, changed: list[str]) -> Mapping[Any, Any]:  # noqa: ANN401  msgspec's description
    fitted = {
        _fit(key, kind.key_type, where, changed): _fit(one, kind.value_type, f"{where}[{key!r:.40}]", changed)
        for key, one in value.items()
    }
    most = getattr(kind, "max_length", None)
    if most is not None and len(fitted) > most:
        changed.append(where)
        fitted = dict(list(fitted.items())[-most:])
    return value if fitted == value else fitted
