# SPDX-License-Identifier: Apache-2.0
"""Exceptions over a service outside of the job that does not answer: a data server, an object store, a name server.

What is refused, timed out or answered with "come back later" is no bug of the script that asked, and no restart mends
it: it has to be waited for. Judged by the exception's own type and by what it says of the network, so that a script's
own error that quotes such words stays the script's. Ranks that lost a peer are sorted out before this is asked, and so
is torch's own rendezvous.

Pure: an exception in, whether a service was away out.
"""

import re
from collections.abc import Sequence

from megascale_ops.schema.progress import RankError

# errno(3), as Python prints them: network down or unreachable, connection timed out, refused, host down, no route; of
# getaddrinfo(3): no such name, try again, failed, no address.
_NUMBERS = r"\[Errno (?:100|101|110|111|112|113|-2|-3|-4|-5)\]"
_LATER = r"(?:429|5\d\d)\b"
_TYPES = re.compile(
    r"^(?:[\w.]{1,80}\.)?(?:"
    # Types that nothing else raises: CPython, urllib3, requests, httpx, aiohttp, botocore, Google, Azure, pymongo, hub.
    r"ConnectionRefusedError|gaierror|herror|NewConnectionError|MaxRetryError|ConnectTimeoutError|NameResolutionError"
    r"|ReadTimeoutError|ConnectTimeout|ReadTimeout|ConnectError|ClientConnectorError|ClientConnectorDNSError"
    r"|ClientProxyConnectionError|ServerTimeoutError|ConnectionTimeoutError|SocketTimeoutError|EndpointConnectionError"
    r"|ServerSelectionTimeoutError|AutoReconnect|ServiceUnavailable|BadGateway|GatewayTimeout|TooManyRequests"
    r"|ServiceRequestError|ServiceResponseError|OfflineModeIsEnabled|NoBrokersAvailable"
    r"): "
    rf"|^(?:OSError|TimeoutError|socket\.error): {_NUMBERS}"
    r"|^requests\.exceptions\.(?:ConnectionError|Timeout|ProxyError): "
    rf"|^(?:[\w.]{{1,80}}\.)?URLError: <urlopen error (?:{_NUMBERS}|timed out|.{{0,40}}timed out)"
    rf"|^(?:[\w.]{{1,80}}\.)?HTTPError: (?:HTTP Error )?{_LATER}"
    rf"|^(?:[\w.]{{1,80}}\.)?(?:HfHubHTTPError|HTTPStatusError|ClientResponseError): (?:.{{0,60}}\D)?{_LATER}"
    r"|^(?:[\w.]{1,80}\.)?ClientError: An error occurred \((?:5\d\d|429|SlowDown|ServiceUnavailable|InternalError"
    r"|RequestTimeout|Throttling\w{0,20}|RequestLimitExceeded)\)"
    # Databases, queues and hubs name the network behind a type of many meanings.
    r"|^(?:[\w.]{1,80}\.)?(?:OperationalError|ConnectionError|TimeoutError|OSError|CommError|ApiException): .{0,400}"
    r"(?:Connection refused|Can't connect to|[Cc]ould not connect to|[Cc]ouldn't connect to|could not translate host"
    r"|Name or service not known|[Tt]emporary failure in name resolution|No route to host|Network is unreachable"
    r"|connection to server at .{1,200} failed|NETWORK_CONNECTION)"
)
# Flexera's clients, whatever they raise: a server that is not there, and one that does not answer.
_LICENCE = re.compile(
    r"(?:[Cc]annot|[Cc]an't|[Cc]ould not|[Uu]nable to|[Ff]ailed to) (?:connect to|reach|contact) (?:the )?"
    r"licen[sc]e server|\blicen[sc]e server (?:\S{1,80} )?(?:is )?(?:down|unreachable|not responding|does not respond)"
)
# Over these a person has to look, whatever was caught when they were raised.
_BUGS = frozenset(
    one.__name__
    for one in (
        *(NameError, UnboundLocalError, TypeError, AttributeError, KeyError, IndexError, ImportError),
        *(ModuleNotFoundError, SyntaxError, AssertionError, ZeroDivisionError, NotImplementedError, RecursionError),
    )
)


def is_of_a_service(error: RankError, before: Sequence[RankError] = ()) -> bool:
    """Return whether an exception, or one that it was raised from, tells of a service that does not answer.

    Args:
        error: the one that ended the rank.
        before: those of its chain, the first one first.
    """
    if _says_so(error):
        return True
    return error.type not in _BUGS and any(map(_says_so, before))


def says_so(line: str) -> bool:
    """Return whether a program's last line tells of a licence's server that does not answer."""
    return _LICENCE.search(line) is not None


def _says_so(error: RankError) -> bool:
    text = f"{error.type}: {error.message}"
    return _TYPES.search(text) is not None or _LICENCE.search(text) is not None
