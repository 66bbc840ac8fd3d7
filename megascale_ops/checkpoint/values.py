# SPDX-License-Identifier: Apache-2.0
"""What of a state is not a tensor, as msgpack: data that says what it is and cannot run code.

None, booleans, floats, bytes, strings and integers of 64 bits are msgpack's own. Anything else is an array that begins
with a tag: ``["tuple", 1, 2]``, ``["dict", key, value, key, value]``. Each kind is one row of a table (here for
containers, in ``value_kinds`` for the rest): how it comes apart into simpler values, and how it is put together from
them. So every value comes back exactly, with its type, its order, its NaN and its sign of zero, and a reader makes
nothing that has no row.

What has no row is refused when it is saved, with its place in the state. Types of a user's own (named tuples,
dataclasses, enums) are stored as their fields once they were named, and rebuilt from the type that the reader names.
"""

import argparse
import dataclasses
import enum
import types
from collections import Counter, OrderedDict, defaultdict, deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import msgspec

from megascale_ops.checkpoint.allowed import Allowed, Path, dotted, is_rebuilt, quoted, spelled
from megascale_ops.checkpoint.value_kinds import KINDS, Kind, kind_of
from megascale_ops.errors import CheckpointError
from megascale_ops.foreign import UNREADABLE

# Deeper than any state that was seen (a dozen), and far from where Python's own recursion ends.
MOST_DEEP = 100

_NATIVE = (type(None), bool, int, float, str, bytes)
# Whatever a reader's row raises at parts that are not what its writer made.
_UNFIT = (
    *UNREADABLE,
    ValueError,
    TypeError,
    LookupError,
    AttributeError,
    OverflowError,
    MemoryError,
    RuntimeError,  # torch's, for names of devices
)
_FACTORIES: dict[str, type] = {kind.__name__: kind for kind in (list, dict, set, tuple, int, float, str, bool)}


def encode(value: object, allowed: Allowed, path: Path) -> bytes:
    """A nest of plain values as msgpack.

    Args:
        value: the nest.
        allowed: which types of the user's own are stored as their fields.
        path: where in the state it stands, for the sentence.

    Raises:
        CheckpointError: something in it cannot be stored as data; it names the place and what to do.
    """
    node = _node(value, allowed, path, 0)
    try:
        return msgspec.msgpack.encode(node)
    except (ValueError, OverflowError) as exc:  # msgpack counts up to 4 GiB
        raise CheckpointError(f"{spelled(path)} is too large to be stored as data: {exc}") from exc


def decode(raw: bytes, allowed: Allowed) -> Any:  # noqa: ANN401  a state holds whatever the user puts there
    """The nest that ``encode`` was given.

    Raises:
        CheckpointError: it is no such data, or holds a type that was not named.
    """
    try:
        return _value(msgspec.msgpack.decode(raw), allowed, 0)
    except _UNFIT as exc:
        said = "".join(character if character.isprintable() else "?" for character in str(exc))[:120]
        raise CheckpointError(f"it is not data as this program writes it ({type(exc).__name__}: {said})") from exc


def _node(value: object, allowed: Allowed, path: Path, depth: int) -> object:
    """A value as msgpack can hold it."""
    if depth > MOST_DEEP:
        raise CheckpointError(f"{spelled(path[:4])}... is nested deeper than {MOST_DEEP}, or holds itself")
    if (whole := _native(value)) is not _NOT_NATIVE:
        return whole
    kind = type(value)
    if allowed.has(kind):
        tag, places, parts = _taken_apart(value)
    elif (row := _CONTAINERS.get(kind)) is not None:
        try:
            tag, places, parts = row.tag, row.places(value), row.parts(value)
        except ValueError as exc:
            raise CheckpointError(f"{spelled(path)}: {exc}") from exc
    elif (found := kind_of(value)) is not None:
        tag, parts = found.tag, found.parts(value)
        places = [()] * len(parts)
    else:
        raise CheckpointError(_refusal(value, path))
    nodes = [_node(part, allowed, path + place, depth + 1) for place, part in zip(places, parts, strict=True)]
    if kind in {set, frozenset}:
        nodes.sort(key=msgspec.msgpack.encode)  # the same bytes for the same set
    return [tag, *nodes]


def _value(node: object, allowed: Allowed, depth: int) -> Any:  # noqa: ANN401  same
    """The value that a node stands for."""
    if type(node) in _NATIVE:
        return node
    if type(node) is not list or not node or depth > MOST_DEEP + 1:
        raise ValueError(f"a {type(node).__name__} stands where a value should")
    tag = node[0]
    parts = [_value(part, allowed, depth + 1) for part in node[1:]]
    if isinstance(tag, str) and tag in _REBUILT:
        return _REBUILT[tag](_named(parts[0], allowed), parts[1:])
    row = _BY_TAG.get(tag) if isinstance(tag, str) else None
    if row is None:
        raise ValueError(f"no kind of value is called {tag!r}")
    return row.whole(parts)


def _named(name: object, allowed: Allowed) -> type:
    """The user's type of that name."""
    kind = allowed.types.get(name) if isinstance(name, str) else None
    if kind is None:
        named = ascii(name)[1:81].rstrip("'")
        raise CheckpointError(f"it holds a {named}: name that type in CheckpointManager(types=({named},))")
    return kind


_NOT_NATIVE = object()


def _native(value: object) -> object:
    """The value if msgpack has it; integers and strings only as far as it has them."""
    kind = type(value)
    if kind is int:
        assert isinstance(value, int)
        return value if -(2**63) <= value < 2**64 else _NOT_NATIVE
    if kind is str:
        assert isinstance(value, str)
        return value if value.isascii() or not any("\ud800" <= c <= "\udfff" for c in value) else _NOT_NATIVE
    return value if kind in _NATIVE else _NOT_NATIVE


def _refusal(value: object, path: Path) -> str:
    kind = type(value)
    if is_rebuilt(kind):
        name = kind.__qualname__
        return (
            f"{spelled(path)}: a {name} can't be stored as data by itself: name the type in "
            f"CheckpointManager(types=({name},)), or store its values"
        )
    return (
        f"{spelled(path)}: an object of type {kind.__qualname__} can't be stored as data: store its values, "
        f"or name it in CheckpointManager(pickled=({quoted(dotted(path))},))"
    )


# -- types of the user's own ----------------------------------------------------------------------------------------


def _taken_apart(value: object) -> tuple[str, list[Path], list[object]]:
    """Tag, places and parts of a value whose type the user has named."""
    name = type(value).__qualname__
    if isinstance(value, enum.Enum):
        return "enum", [(), ()], [name, value.value]
    if isinstance(value, tuple):
        return "named tuple", [(), *((index,) for index in range(len(value)))], [name, *value]
    assert dataclasses.is_dataclass(value), "the user has named it, so it is one of the three"
    fields = [each.name for each in dataclasses.fields(value)]
    places = [place for each in fields for place in ((), (each,))]
    return "dataclass", [(), *places], [name, *_flat((each, getattr(value, each)) for each in fields)]


def _dataclass(kind: type, parts: Sequence[object]) -> object:
    """Made without ``__init__``: what was saved is what stands there, frozen or not."""
    if not dataclasses.is_dataclass(kind):
        raise ValueError(f"{kind.__qualname__} is no dataclass")
    saved = dict(_pairs(parts))
    fields = {each.name: each for each in dataclasses.fields(kind)}
    if unknown := sorted(str(name) for name in saved.keys() - fields.keys()):
        raise ValueError(f"{kind.__qualname__} has no field {', '.join(unknown)}")
    made = object.__new__(kind)
    for name, each in fields.items():
        if name in saved:
            value = saved[name]
        elif each.default is not dataclasses.MISSING:
            value = each.default
        elif each.default_factory is not dataclasses.MISSING:
            value = each.default_factory()
        else:
            raise ValueError(f"the checkpoint does not hold field {name} of {kind.__qualname__}")
        object.__setattr__(made, name, value)
    return made


def _named_tuple(kind: type, parts: Sequence[object]) -> object:
    if not (issubclass(kind, tuple) and hasattr(kind, "_make")):
        raise ValueError(f"{kind.__qualname__} is no named tuple")
    return kind._make(parts)


def _enum(kind: type, parts: Sequence[object]) -> object:
    if not issubclass(kind, enum.Enum):
        raise TypeError(f"{kind.__qualname__} is no enum")
    (value,) = parts
    return kind(value)


_REBUILT: dict[str, Callable[[type, Sequence[object]], object]] = {
    "dataclass": _dataclass,
    "named tuple": _named_tuple,
    "enum": _enum,
}


# -- containers -----------------------------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class _Container:
    """A row for a type that holds other values; ``places`` says, for each part, where below the value it stands."""

    tag: str
    type: type
    parts: Callable[[Any], list[object]]
    whole: Callable[[Sequence[Any]], object]
    places: Callable[[Any], list[Path]]


def _flat(pairs: Iterable[tuple[object, object]]) -> list[object]:
    return [each for pair in pairs for each in pair]


def _pairs(parts: Sequence[Any]) -> Iterator[tuple[Any, Any]]:
    return zip(parts[::2], parts[1::2], strict=True)


def _indices(value: Sequence[object]) -> list[Path]:
    return [(index,) for index in range(len(value))]


def _here(value: Any) -> list[Path]:  # noqa: ANN401  whatever has a length
    return [()] * len(value)


def _by_key(value: dict[object, object]) -> list[Path]:
    return [place for key in value for place in ((), (key,))]


def _ordered_parts(value: OrderedDict[object, object]) -> list[object]:
    """With the versions that a module's state dict carries as an attribute, which ``load_state_dict`` goes by."""
    attributes = dict(vars(value))
    versions = attributes.pop("_metadata", None)
    if attributes:
        raise ValueError(f"an OrderedDict with attribute {next(iter(attributes))} can't be stored as data")
    return [versions, *_flat(value.items())]


def _ordered(parts: Sequence[Any]) -> OrderedDict[Any, Any]:
    made: OrderedDict[Any, Any] = OrderedDict(_pairs(parts[1:]))
    if parts[0] is not None:
        vars(made)["_metadata"] = parts[0]  # torch's own attribute of state dicts
    return made


def _default_parts(value: defaultdict[object, object]) -> list[object]:
    factory = value.default_factory
    name = None if factory is None else getattr(factory, "__name__", "")
    if name is not None and _FACTORIES.get(name) is not factory:
        raise ValueError("a defaultdict of something else than a plain type can't be stored as data: make it a dict")
    return [name, *_flat(value.items())]


def _default(parts: Sequence[Any]) -> defaultdict[Any, Any]:
    return defaultdict(None if parts[0] is None else _FACTORIES[parts[0]], _pairs(parts[1:]))


def _attributes(kind: type) -> Callable[[Sequence[Any]], object]:
    return lambda parts: kind(**dict(_pairs(parts)))


_ROWS = (
    _Container("list", list, list, list, _indices),
    _Container("tuple", tuple, list, tuple, _indices),
    _Container("set", set, list, set, _here),
    _Container("frozenset", frozenset, list, frozenset, _here),
    _Container("dict", dict, lambda v: _flat(v.items()), lambda p: dict(_pairs(p)), _by_key),
    _Container("ordered dict", OrderedDict, _ordered_parts, _ordered, lambda v: [(), *_by_key(v)]),
    _Container("default dict", defaultdict, _default_parts, _default, lambda v: [(), *_by_key(v)]),
    _Container("counter", Counter, lambda v: _flat(v.items()), lambda p: Counter(dict(_pairs(p))), _by_key),
    _Container("deque", deque, lambda v: [v.maxlen, *v], lambda p: deque(p[1:], p[0]), lambda v: [(), *_indices(v)]),
    *(
        _Container(tag, kind, lambda v: _flat(vars(v).items()), _attributes(kind), lambda v: _by_key(vars(v)))
        for tag, kind in (("namespace", argparse.Namespace), ("simple namespace", types.SimpleNamespace))
    ),
)
_CONTAINERS: dict[type, _Container] = {row.type: row for row in _ROWS}
_BY_TAG: dict[str, _Container | Kind] = {**{row.tag: row for row in _ROWS}, **{row.tag: row for row in KINDS}}
