# SPDX-License-Identifier: Apache-2.0
"""The reference of the controller's HTTP addresses: its table of operations, and what a token must allow for each.

The right is read from the line that adds the address; an operation without such a line ends the build.
"""

import ast
import inspect
import textwrap
from collections.abc import Iterator
from typing import NamedTuple, get_type_hints

import msgspec

from megascale_docs.markdown import code, page, prose, table
from megascale_ops.controller.server import api
from megascale_ops.controller.server.operations import OPERATIONS


class Address(NamedTuple):
    """One address: ``right`` is what a token must allow, "" where the body decides."""

    method: str
    path: str
    right: str


_RIGHTS = {
    "_may_read_all": "read, everything",
    "_may_operate_all": "operate, everything",
    "_may_read_job": "read that job",
    "_may_operate_job": "operate that job",
    "_may_read_asked": "read what is asked for",
}


def http_api() -> str:
    """Return the page.

    Raises:
        KeyError: an operation has no address.
    """
    rights = {f"{one.method} {one.path}": one for one in addresses()}
    rows = [
        (code(name), prose(one.text) + _query(one.query), _right(rights[name]), _named(one.takes), _named(one.gives))
        for name, one in OPERATIONS.items()
    ]
    types = [kind for one in OPERATIONS.values() for hint in (one.takes, one.gives) for kind in _structs(hint)]
    return page(
        "HTTP API",
        'JSON in, JSON out. With a token: `Authorization: Bearer TOKEN`. An error is `{"error": "one sentence"}` '
        "with its status. Fields may be added in any release; a reader ignores what it does not know. "
        "`/openapi.json` describes the same for programs.",
        table(("address", "", "a token must allow", "takes", "answers"), rows),
        "## Statuses",
        prose(" ".join((inspect.getdoc(api) or "").split("\n\n")[2].split())),
        "## Types",
        "A field with a default may be left out of what is sent.",
        *_types(types),
    )


def addresses() -> Iterator[Address]:
    """Yield what ``Api.application`` adds to its router, in that order, but for what answers everything else."""
    source = ast.parse(textwrap.dedent(inspect.getsource(api.Api.application)))
    for call in (node for node in ast.walk(source) if isinstance(node, ast.Call)):
        if isinstance(call.func, ast.Name) and call.func.id == "add":
            method, path, guard = call.args
            assert isinstance(method, ast.Constant)
            assert isinstance(path, ast.Constant)
            assert isinstance(guard, ast.Call)
            said = {str(word.arg): ast.unparse(word.value) for word in guard.keywords}
            right = "no token" if "open_to_all" in said else _RIGHTS.get(said.get("may", ""), "")
            if method.value != "*":
                yield Address(str(method.value), str(path.value), right + (" *" if "for_page" in said else ""))


def _right(one: Address) -> str:
    return prose(one.right.removesuffix(" *") or "what the body says") + (
        ", or none with `--open-page`" if one.right.endswith("*") else ""
    )


def _named(hint: object) -> str:
    """Return the types in what is taken or given, each with a link to its fields."""
    return " ".join(
        f"[{code(kind.__name__)}](#{kind.__name__.lower()})" for kind in _structs(hint) if _has_fields(kind)
    )


def _has_fields(kind: type) -> bool:
    return bool(getattr(kind, "__struct_fields__", ()))


def _query(kind: type[msgspec.Struct] | None) -> str:
    return "" if kind is None else f" Query: {', '.join(map(code, kind.__struct_fields__))}."


def _types(wanted: list[type]) -> Iterator[str]:
    """Yield each struct that is wanted and those in its fields, once."""
    seen: dict[str, type] = {}
    while wanted:
        kind = wanted.pop(0)
        if kind.__name__ not in seen and _has_fields(kind):
            seen[kind.__name__] = kind
            wanted += [inner for hint in get_type_hints(kind).values() for inner in _structs(hint)]
    for name, kind in sorted(seen.items()):
        yield f"### {name}"
        yield prose(" ".join((inspect.getdoc(kind) or "").split("\n\n")[0].split()))
        hints = get_type_hints(kind)
        rows = (
            (code(field.encode_name), code(_type(hints[field.name])), "" if field.required else code(_default(field)))
            for field in msgspec.structs.fields(kind)
        )
        yield table(("field", "type", "default"), rows)


def _structs(hint: object) -> Iterator[type]:
    if isinstance(hint, type) and issubclass(hint, msgspec.Struct):
        yield hint
    for inner in getattr(hint, "__args__", ()):
        yield from _structs(inner)


def _type(hint: object) -> str:
    """Return a type as a reader of Python says it."""
    text = hint.__name__ if isinstance(hint, type) and not getattr(hint, "__args__", ()) else str(hint)
    for module in ("megascale_ops.schema.", "typing.", "collections.abc."):
        text = text.replace(module, "")
    return ".".join(text.split(".")[-1:]) if "[" not in text else text


def _default(field: msgspec.structs.FieldInfo) -> str:
    if field.default is not msgspec.NODEFAULT:
        return repr(getattr(field.default, "value", field.default))
    return repr(field.default_factory()) if callable(field.default_factory) else ""
