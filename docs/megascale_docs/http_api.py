# SPDX-License-Identifier: Apache-2.0
"""The reference of the controller's HTTP addresses, read from the lines that add them, and of what they take and give.

What an address is for stands in ``_ABOUT``; one that is added, or goes, without its line there ends the build.
"""

import ast
import inspect
import textwrap
from collections.abc import Iterator
from typing import NamedTuple, get_type_hints

import msgspec

from megascale_docs.markdown import code, page, prose, table
from megascale_ops.controller.server import api
from megascale_ops.schema import collectives, events, history, kernels, live, messages, targets


class Address(NamedTuple):
    """One address: ``right`` is what a token must allow, "" where the body decides."""

    method: str
    path: str
    right: str


class About(NamedTuple):
    """What an address is for, and which types its body and its answer have."""

    text: str
    takes: type | None = None
    gives: type | None = None


_RIGHTS = {
    "_may_read_all": "read, everything",
    "_may_operate_all": "operate, everything",
    "_may_read_job": "read that job",
    "_may_operate_job": "operate that job",
    "_may_read_asked": "read what is asked for",
}
_ABOUT = {
    "POST /v1/heartbeat": About("An agent's report, once a second.", messages.Heartbeat, messages.HeartbeatReply),
    "POST /v1/evidence": About("What an agent gathered because it was asked to.", messages.Evidence),
    "POST /v1/jobs/{job}/join": About(
        "A runner joins; answered when its round is formed.", messages.Join, messages.JoinReply
    ),
    "GET /v1/jobs/{job}/orders": About(
        "A runner waits for orders. Query: `node`, `runner_id`, `round`, `after`, `incidents`, `wait_s`.",
        None,
        messages.OrdersReply,
    ),
    "POST /v1/jobs/{job}/leave": About("A runner leaves, and says how its ranks ended.", messages.Leave),
    "GET /v1/jobs/{job}/policy": About("The policy that the job lives under.", None, messages.PolicyView),
    "POST /v1/jobs/{job}/policy": About("Change it while the job lives.", messages.PolicyChange, messages.PolicyView),
    "GET /v1/jobs/{job}/history": About(
        "Step times of every rank since the job began, packed; `megascale_ops.client` unpacks them.",
        None,
        history.HistoryReply,
    ),
    "GET /v1/jobs/{job}/skew": About("Who waits for whom in collectives.", None, collectives.SkewView),
    "POST /v1/jobs/{job}/profile": About("Time the kernels of some ranks.", kernels.ProfileAsk, kernels.ProfileView),
    "GET /v1/jobs/{job}/profile/{id}": About("What that found.", None, kernels.ProfileView),
    "GET /v1/status": About("Every job with its nodes and ranks. Query: `job`.", None, events.Status),
    "GET /v1/incidents": About("Incidents, newest last. Query: `job`, `limit`, `before`.", None, events.Incidents),
    "GET /v1/incidents/{id}": About("One incident with its evidence and events.", None, events.Incident),
    "GET /v1/hardware": About("GPUs that failed before.", None, events.BadHardwareList),
    "DELETE /v1/hardware/{uuid}": About("Forget one of them: it was mended."),
    "GET /v1/live": About("The page's frames as server-sent events. Query: `job`.", None, live.Frame),
    "GET /v1/live/snapshot": About("One such frame. Query: `job`.", None, live.Frame),
    "GET /metrics": About("[Metrics](metrics.md) for Prometheus."),
    "GET /v1/sd/agents": About(
        "All agents' addresses, a list of groups, for Prometheus' `http_sd_configs`.", None, targets.TargetGroup
    ),
    "GET /healthz": About("Whether the controller and its journal are well."),
    "GET /": About("The live page."),
    "GET /static/{name}": About("Its files."),
    "GET /runbooks/": About("All runbooks, as pages for people."),
    "GET /runbooks/{name}": About("The runbook of one alert."),
}


def http_api() -> str:
    """Return the page.

    Raises:
        ValueError: an address has no line in ``_ABOUT``, or a line there no address.
    """
    found = {f"{one.method} {one.path}": one for one in addresses()}
    if found.keys() != _ABOUT.keys():
        raise ValueError(f"http_api.py tells of other addresses than there are: {sorted(found.keys() ^ _ABOUT.keys())}")
    rows = [
        (
            code(name),
            prose(_ABOUT[name].text),
            _right(found[name]),
            _named(_ABOUT[name].takes),
            _named(_ABOUT[name].gives),
        )
        for name in _ABOUT
    ]
    types = [kind for about in _ABOUT.values() for kind in (about.takes, about.gives) if kind is not None]
    return page(
        "HTTP API",
        'JSON in, JSON out. With a token: `Authorization: Bearer TOKEN`. An error is `{"error": "one sentence"}` '
        "with its status. "
        "Fields may be added in any release; a reader ignores what it does not know.",
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


def _named(kind: type | None) -> str:
    return "" if kind is None else f"[{code(kind.__name__)}](#{kind.__name__.lower()})"


def _types(wanted: list[type]) -> Iterator[str]:
    """Yield each struct that is wanted and those in its fields, once."""
    seen: dict[str, type] = {}
    while wanted:
        kind = wanted.pop(0)
        if kind.__name__ not in seen and issubclass(kind, msgspec.Struct):
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
