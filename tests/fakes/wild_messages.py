# SPDX-License-Identifier: Apache-2.0
"""Messages that no correct program sends: whole ones of which a few fields are at, or beyond, what they can be.

What a field can be is read from its type, so a field that is added tomorrow is drawn tomorrow.
"""

import json
from pathlib import Path
from random import Random
from typing import Any

import msgspec
from msgspec import inspect

FROZEN = Path(__file__).parents[1] / "golden" / "messages" / "1"
# Texts that JSON has no value for; a writer that means harm sends them all the same.
INFINITE, NOT_A_NUMBER, HUGE = "\0infinite", "\0nan", "\0huge"
_RAW = {INFINITE: "1e999", NOT_A_NUMBER: "NaN", HUGE: "9" * 400}
_BEYOND: tuple[Any, ...] = (
    *(INFINITE, NOT_A_NUMBER, HUGE, 1e300, -1e300, -1.0, -2, 2**31 + 1, 2**53 + 1, 2**63, -(2**63)),
    *("", "x" * 1_000_000, "\x1b[31m\n\r evil", "\ud800", None, True, [], {}, [[]], {"": 1}),
)


def frozen(kind: str) -> dict[str, Any]:
    """Return a message with every field set."""
    found: dict[str, Any] = json.loads((FROZEN / f"{kind}.json").read_text())
    return found


def written(message: Any) -> bytes:  # noqa: ANN401  any JSON
    """Return a message as JSON, with what JSON has no value for."""
    text = json.dumps(message)
    for stands_for, raw in _RAW.items():
        text = text.replace(json.dumps(stands_for), raw)
    return text.encode("utf-8", "surrogatepass")


def leaves(kind: Any, value: Any, at: tuple[Any, ...] = ()) -> list[tuple[tuple[Any, ...], Any]]:  # noqa: ANN401  any JSON
    """Return where something stands in a message that may be changed, with the type that it has."""
    if isinstance(kind, inspect.UnionType):
        kind = next(one for one in kind.types if not isinstance(one, inspect.NoneType))
    found = [(at, kind)] if at else []
    if isinstance(kind, inspect.StructType):
        for place, field in enumerate(kind.fields):
            key = place if isinstance(value, list) else field.encode_name
            if isinstance(value, list) or key in value:
                found += leaves(field.type, value[key], (*at, key))
    elif isinstance(value, list):
        for place, item in enumerate(value):
            found += leaves(getattr(kind, "item_type", None), item, (*at, place))
    elif isinstance(value, dict):
        for key, item in value.items():
            found += leaves(getattr(kind, "value_type", None), item, (*at, key))
    return found


def edges(kind: Any) -> list[Any]:  # noqa: ANN401  msgspec's description
    """Return the values at the edges of what a type can be; nothing where it has none."""
    if isinstance(kind, (inspect.IntType, inspect.FloatType)):
        most = kind.lt - 1 if kind.lt is not None else kind.le
        return [one for one in (kind.ge, most, 0, 1) if one is not None]
    if isinstance(kind, inspect.StrType):
        return ["", "\x1b]0;evil\x07\n", "é" * min(kind.max_length or 64, 4096)]
    return []


def change(message: dict[str, Any], at: tuple[Any, ...], value: Any) -> None:  # noqa: ANN401  any JSON
    """Put a value where a leaf is."""
    holder: Any = message
    for key in at[:-1]:
        holder = holder[key]
    holder[at[-1]] = value


def wild(kind: type[msgspec.Struct], message: dict[str, Any], draw: Random) -> tuple[dict[str, Any], bool]:
    """Change one to six fields of a message, and say whether all of them stayed within what they can be."""
    described = inspect.type_info(kind)
    is_within = draw.random() < 0.7
    for _ in range(draw.randint(1, 6)):
        at, type_ = draw.choice(leaves(described, message))
        values = edges(type_) if is_within else _BEYOND
        if values:
            change(message, at, draw.choice(values))
        if not is_within:
            break
    return message, is_within
