# SPDX-License-Identifier: Apache-2.0
"""Who has answered where a controller should be: pure, by what came.

An address with a typing error, a port that another program took, a proxy or a login page before the controller: all of
them answer. A person then needs to know what answered, and not at which byte its page ceased to be JSON.
"""

import re
from collections.abc import Mapping
from typing import NamedTuple

import msgspec

from megascale_ops.foreign import UNREADABLE
from megascale_ops.schema.version import MARK_HEADER
from megascale_ops.schema.wording import printable

TAKEN = "the connection was taken, and nothing came"
"""The message of a deadline that passed while connected."""

_REDIRECTS = range(300, 400)
_LOGINS = (401, 403, 407)
# 60 characters of a title or a header's value show whose it is.
_MOST_CHARACTERS = 60
# 4 KiB: a page's title stands at its top.
_HEAD_BYTES = 4096
_TITLE = re.compile(rb"<title[^>]*>([^<]{1,200})", re.IGNORECASE)
# nginx, Go, Apache, aiohttp and Jetty, asked without TLS at a port that wants it.
_WANTS_TLS = re.compile(rb"to (?:an )?HTTPS (?:port|server)|speaking plain HTTP to an SSL|requires TLS", re.IGNORECASE)
# What a program says first, or to what it does not understand.
_BANNERS = (
    (rb"SSH-", "an SSH server"),
    (rb"[\x14-\x17]\x03[\x00-\x04]", "a server that speaks TLS"),
    (rb"HTTP/", "a server that speaks plain HTTP"),
    (rb"\x00\x00.\x04\x00{5}", "a server that speaks HTTP/2 alone (gRPC, say)"),
    (rb"-(?:ERR|NOAUTH|DENIED)\b", "a Redis server"),
    (rb".{3}\x00\x0a[0-9]", "a MySQL server"),
    (rb"220[ -]", "a mail or FTP server"),
    (rb"RFB [0-9]", "a VNC server"),
)


class Reply(NamedTuple):
    """What came back: the status, the body, the headers by their names in small letters."""

    status: int
    body: bytes
    headers: Mapping[str, str] = {}


def is_marked(reply: Reply) -> bool:
    """Return whether a controller says of itself that it is one."""
    return MARK_HEADER.lower() in reply.headers


def is_strange(reply: Reply, known: tuple[str, ...]) -> bool:
    """Return whether an object is another program's: no field of it is one of ``known``, and no controller signs it."""
    if is_marked(reply):
        return False
    try:
        found = msgspec.json.decode(reply.body, type=dict[str, msgspec.Raw])
    except UNREADABLE:
        return True
    return bool(found) and not found.keys() & set(known)


def stranger(url: str, path: str, reply: Reply, why: str = "") -> str:
    """Return the sentence about an answer that no controller gives.

    Args:
        url: the address as it was given.
        path: what was asked for.
        reply: what came.
        why: what is wrong with it, where it is JSON.
    """
    status = f"HTTP {reply.status}" + (f", server {_short(reply.headers['server'])}" if _server(reply) else "")
    if reply.status in _REDIRECTS:
        where = _short(reply.headers.get("location", "") or "nowhere")
        return (
            f"{url} sends on to {where} ({status}), and a redirect is not followed: it would get the token. Give the "
            "address of the controller itself"
        )
    if _WANTS_TLS.search(reply.body[:_HEAD_BYTES]):
        return wants_tls(url)
    if reply.status in _LOGINS and not _is_json(reply):
        return (
            f"what answers at {url} lets nobody in to {path} ({status}), and not in a controller's words: a proxy or "
            "another program. Give the address of the controller itself"
        )
    return (
        f"no controller, but another program answers at {url}: {_body(reply, why)} at {path} ({status}). {_WHAT_TO_DO}"
    )


_WHAT_TO_DO = "Give the address that `megascale-ops controller` tells as it starts"


def proxy_alone(reply: Reply) -> str:
    """Return who answers for a controller that is not there."""
    server = f" ({_short(reply.headers['server'])})" if _server(reply) else ""
    return f"HTTP {reply.status}, of a proxy{server} that does not reach it"


def wants_tls(url: str) -> str:
    """Return the sentence about an address with the wrong scheme."""
    return f"what listens at {url} speaks TLS: is it https://{url.partition('://')[2]}?"


def speaks_otherwise(url: str, first: bytes) -> str:
    """Return the sentence about what speaks no HTTP, by its first bytes."""
    for pattern, what in _BANNERS:
        if re.match(pattern, first, re.DOTALL):
            if "TLS" in what and url.startswith("http:"):
                return wants_tls(url)
            if "plain HTTP" in what and url.startswith("https:"):
                return f"what listens at {url} speaks no TLS: is it http://{url.partition('://')[2]}?"
            return f"no controller, but {what} listens at {url}. {_WHAT_TO_DO}"
    said = _short(repr(first[:_MOST_CHARACTERS])[1:])
    return f"no controller, but a program that speaks no HTTP listens at {url}: it says {said}. {_WHAT_TO_DO}"


def _server(reply: Reply) -> str:
    return reply.headers.get("server", "")


def _is_json(reply: Reply) -> bool:
    return reply.body.lstrip()[:1] in (b"{", b"[")


def _body(reply: Reply, why: str) -> str:
    """Return what stands in an answer, in a few words."""
    head = reply.body[:_HEAD_BYTES]
    if not head.strip():
        return "it says nothing"
    if title := _TITLE.search(head):
        return f"a web page, {_short(title[1].decode(errors='replace'))!r},"
    if head.lstrip()[:1] == b"<":
        return "a web page or XML"
    if _is_json(reply):
        return f"JSON of another kind ({printable(why)})" if why else "JSON of another kind"
    line = head.strip().splitlines()[0]
    return f"it says {_short(repr(line)[1:])}"


def _short(text: str) -> str:
    """Return text of another program on one line, without what a terminal would obey."""
    text = printable(" ".join(text.split()))
    return text if len(text) <= _MOST_CHARACTERS else f"{text[: _MOST_CHARACTERS - 3]}..."
