# SPDX-License-Identifier: Apache-2.0
"""The OpenAPI 3.1 description of the controller, made from its routes and from the types of ``operations``.

No field is written here: schemas come from msgspec, which decodes and encodes by the same types. OpenAPI 3.1 takes
JSON Schema 2020-12 as it is. Pure: routes in, a description out.
"""

import re
from collections.abc import Iterable
from typing import Any

import msgspec

from megascale_ops.controller.server.operations import JSON, OPERATIONS, TAGS, Operation, Parts
from megascale_ops.schema.messages import ErrorReply
from megascale_ops.schema.version import MESSAGE_VERSION

_ABOUT = (
    "JSON in, JSON out. Every error is one sentence. Times are wall clock seconds since 1970, durations seconds. "
    "Fields may be added in any release: a reader ignores those that it does not know, and takes a missing one for its "
    "default."
)
_REFUSALS = {
    400: "The request can't be taken as it is.",
    401: "No token, or a wrong one.",
    403: "The token is for something else, or a foreign web page sent the request.",
    404: "There is no such thing.",
    408: "The body came too slowly.",
    409: "Understood, and refused.",
    413: "The body is too large.",
    431: "The head of the request is too large: its address, say.",
    503: "Too many pages watch.",
}
# What stands beside a parameter's schema, and a default where there is nothing to leave out.
_ELSEWHERE = {"path": {"description", "default"}, "query": {"description"}}
_PART = re.compile(r"\{(\w+)\}")


class _Types:
    """The schemas of all types that are named, by the type; what stands in them once, as components."""

    def __init__(self, kinds: Iterable[Any]) -> None:
        self._kinds = list(kinds)
        self._schemas, self.components = msgspec.json.schema_components(
            self._kinds, ref_template="#/components/schemas/{name}"
        )

    def schema(self, kind: object) -> dict[str, Any]:
        """Return the schema of one of them, by identity: two aliases of one type may differ in their bounds only."""
        return next(schema for known, schema in zip(self._kinds, self._schemas, strict=True) if known is kind)


def describe(routes: Iterable[tuple[str, str]]) -> dict[str, Any]:
    """Return the description of the routes that have a row in ``OPERATIONS``, in the order of the table.

    Args:
        routes: method and address of each, as in ``GET`` and ``/v1/jobs/{job}/skew``.
    """
    found = {f"{method} {path}": (method.lower(), path) for method, path in routes}
    shown = {name: one for name, one in OPERATIONS.items() if name in found}
    types = _Types([ErrorReply, *(kind for one in shown.values() for kind in (one.takes, one.gives) if kind)])
    paths: dict[str, dict[str, Any]] = {}
    for name, one in shown.items():
        method, path = found[name]
        paths.setdefault(path, {})[method] = _operation(one, path, types)
    return {
        "openapi": "3.1.0",
        "info": {
            "title": "MegaScale Ops controller",
            "version": str(MESSAGE_VERSION),
            "description": _ABOUT,
            "license": {"name": "Apache License 2.0", "identifier": "Apache-2.0"},
        },
        "tags": [{"name": name, "description": text} for name, text in TAGS.items()],
        "security": [{"token": []}, {}],
        "paths": paths,
        "components": {
            "schemas": dict(sorted(types.components.items())),
            "securitySchemes": {
                "token": {"type": "http", "scheme": "bearer", "description": "Wanted where the controller has one."}
            },
        },
    }


def _fields(kind: type[msgspec.Struct]) -> dict[str, Any]:
    """Return the fields of a struct that an address has, in its path or its query."""
    return dict(msgspec.json.schema(kind)["$defs"][kind.__name__]["properties"])


def _operation(one: Operation, path: str, types: _Types) -> dict[str, Any]:
    parts = _fields(Parts)
    asked = _fields(one.query) if one.query is not None else {}
    described: dict[str, Any] = {
        "operationId": one.id,
        "tags": [one.tag],
        "summary": one.text,
        "parameters": [
            *(_parameter("path", name, parts[name]) for name in _PART.findall(path)),
            *(_parameter("query", name, schema) for name, schema in asked.items()),
        ],
        "responses": {"200": {"description": "Done.", "content": _content(one, types)}, **_refusals(one, types)},
    }
    if one.takes is not None:
        described["requestBody"] = {"required": True, "content": {JSON: {"schema": types.schema(one.takes)}}}
    if one.is_open:
        described["security"] = []
    return described


def _parameter(place: str, name: str, schema: dict[str, Any]) -> dict[str, Any]:
    """Return a parameter; what its type says about it stands beside the schema."""
    said = {"description": schema["description"]} if "description" in schema else {}
    rest = {key: value for key, value in schema.items() if key not in _ELSEWHERE[place]}
    return {"name": name, "in": place, "required": place == "path", **said, "schema": rest}


def _content(one: Operation, types: _Types) -> dict[str, Any]:
    return {media: {"schema": types.schema(one.gives) if media == JSON else {"type": "string"}} for media in one.media}


def _refusals(one: Operation, types: _Types) -> dict[str, Any]:
    statuses = {431, *one.refuses}  # whatever is asked: an address or a token may be longer than a head may be
    statuses |= set() if one.is_open else {401, 403}
    statuses |= {400, 408, 413} if one.takes is not None else {400} if one.query is not None else set()
    error = {JSON: {"schema": types.schema(ErrorReply)}}
    return {str(status): {"description": _REFUSALS[status], "content": error} for status in sorted(statuses)}
