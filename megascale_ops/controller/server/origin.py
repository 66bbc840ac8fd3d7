# SPDX-License-Identifier: Apache-2.0
"""Refuse what a person's browser sends on behalf of another site's web page.

A controller on loopback without a token trusts every client on this machine. A browser is one, and the page it shows
may be any site's: it could post an order to 127.0.0.1, or point a name of its own at 127.0.0.1 and read the answers.
Browsers send the origin of a request; agents, runners and the command line are no browsers and send none.

Pure: headers in, a reason out.
"""

import re
from collections.abc import Mapping
from functools import lru_cache
from urllib.parse import urlsplit

from megascale_ops.controller.config import is_loopback
from megascale_ops.errors import UsageError

_HOST = re.compile(r"(?:\[[0-9A-Fa-f:.]+\]|[0-9A-Za-z._~%-]*)(?::[0-9]{0,5})?")


# 256: every request is checked, and nearly all name the same host.
@lru_cache(maxsize=256)
def check_host(host: str) -> None:
    """Refuse what can be no host: nothing below is to take it apart.

    Raises:
        UsageError: the header Host names none.
    """
    if not _HOST.fullmatch(host):
        raise UsageError("the header Host names no host")


def why_foreign(headers: Mapping[str, str], *, has_token: bool) -> str:
    """Return why a request is another site's, "" when it is not.

    Args:
        headers: of the request; names in any case.
        has_token: whether clients have to know a token: then a name that leads here gives nothing away.
    """
    host = headers.get("Host", "")
    if headers.get("Sec-Fetch-Site", "") == "cross-site" and headers.get("Sec-Fetch-Mode", "") != "navigate":
        return "the page of another site sent this request"
    origin = headers.get("Origin", "")
    if origin and urlsplit(origin).netloc != host:
        return f"a page of {origin} sent this request"
    if host and not has_token and not _leads_here(host):
        return f"a controller without a token answers to localhost and 127.0.0.1 only, not to {host!r}"
    return ""


# 256: every request is checked, and nearly all name the same host.
@lru_cache(maxsize=256)
def _leads_here(host: str) -> bool:
    return is_loopback(urlsplit(f"//{host}").hostname or "")
