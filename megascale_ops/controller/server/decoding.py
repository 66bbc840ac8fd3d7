# SPDX-License-Identifier: Apache-2.0
"""What a request brings, as the types that ``operations`` names: its body, its query, the parts of its address."""

from collections.abc import Mapping
from typing import TypeVar

import msgspec
from aiohttp import web

from megascale_ops.errors import UsageError

T = TypeVar("T")


def decode(decoder: msgspec.json.Decoder[T], body: bytes) -> T:
    """Return a body by its type.

    Raises:
        UsageError: it is none of that type.
    """
    try:
        return decoder.decode(body)
    except (msgspec.MsgspecError, RecursionError, UnicodeDecodeError) as error:
        raise UsageError(f"the body can't be read: {error}") from error


def query(request: web.Request, kind: type[T]) -> T:
    """Return a request's query by its type."""
    given = dict(request.query)
    if len(given) < len(request.query):
        raise UsageError(f"the query of {request.path} names something twice")
    return convert(given, kind)


def convert(given: Mapping[str, str], kind: type[T]) -> T:
    """Return texts out of an address as their type has them."""
    try:
        return msgspec.convert(dict(given), kind, strict=False)
    except msgspec.ValidationError as error:
        expected, _, where = str(error).partition(" - at `$.")
        name = where.removesuffix("`")
        # 60 characters: enough to recognise it.
        shown = f"{given.get(name, '')!r:.60}"
        raise UsageError(f"{name} {shown} can't be: {expected[:1].lower()}{expected[1:]}") from error
