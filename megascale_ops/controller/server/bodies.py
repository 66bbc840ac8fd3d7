# SPDX-License-Identifier: Apache-2.0
"""What handlers make of a request and of an answer: bodies within their deadline, queries by their types, JSON."""

import asyncio
from collections.abc import Mapping
from typing import TypeVar

import msgspec
from aiohttp import web

from megascale_ops.errors import RefusedError, UsageError

T = TypeVar("T")

_encode = msgspec.json.Encoder().encode
# 20 s: 256 KiB at 13 KB a second.
BODY_S = 20.0


class SlowError(RefusedError):
    """The body did not come in time."""


async def body_of(request: web.Request) -> bytes:
    """Return a request's body, within its deadline."""
    if request.content.is_eof():  # it came with its head, as heartbeats do
        return await request.read()
    try:
        async with asyncio.timeout(BODY_S):
            return await request.read()
    except TimeoutError as error:
        raise SlowError(f"the body of this request did not come within {BODY_S:g} s") from error


def decode(decoder: msgspec.json.Decoder[T], body: bytes) -> T:
    """Return a body by its type.

    Raises:
        UsageError: it can't be read.
    """
    try:
        return decoder.decode(body)
    except (msgspec.MsgspecError, RecursionError, UnicodeDecodeError) as error:
        raise UsageError(f"the body can't be read: {error}") from error


def answer(reply: object) -> web.Response:
    """Return an answer as JSON."""
    return web.Response(body=_encode(reply), content_type="application/json")


def query_of(request: web.Request, kind: type[T]) -> T:
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
