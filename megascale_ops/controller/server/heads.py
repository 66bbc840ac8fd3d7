# SPDX-License-Identifier: Apache-2.0
"""The first lines of a request, before any library sees them: what is no HTTP, or asks for no host there can be.

aiohttp answers such requests too, but some of them by an exception with its traceback in the log. Pure.
"""

import re

# 16 KiB: a browser's cookies for other services of the same host (8 KiB at most, as servers take them) and a token.
MOST_HEAD_BYTES = 16 * 1024
# A path alone: whole addresses and CONNECT are for proxies, and aiohttp would wait for a tunnel's end.
_REQUEST = re.compile(rb"(?!CONNECT)[A-Z]{1,16} /[\x21-\x7e]* HTTP/1\.[01]")
_LINE = re.compile(rb"[!#$%&'*+.^_`|~0-9A-Za-z-]+:[\t\x20-\x7e\x80-\xff]*")
_HOST = re.compile(rb"(?:\[[0-9A-Fa-f:.]+\]|[0-9A-Za-z._~%-]*)(?::[0-9]{0,5})?")
_BEGIN = re.compile(rb"[A-Z]{1,16}(?: |$)")


def why_no_request(head: bytes) -> str:
    """Return why a head (without its empty line) can't be read, one sentence; "" when it can."""
    first, *lines = head.split(b"\r\n")
    if not _REQUEST.fullmatch(first):
        return "this is no request: METHOD PATH HTTP/1.1 was expected"
    for line in lines:
        if not _LINE.fullmatch(line):
            return "a header of this request can't be read"
        name, _, value = line.partition(b":")
        if name.lower() == b"host" and not _HOST.fullmatch(value.strip()):
            return "the header Host names no host"
    return ""


def may_begin_a_request(data: bytes) -> bool:
    """Return whether what has come so far may still turn out to be one: the first bytes of TLS may not."""
    return _BEGIN.match(data) is not None
