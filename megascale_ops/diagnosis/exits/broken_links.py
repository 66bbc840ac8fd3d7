# SPDX-License-Identifier: Apache-2.0
"""The link that NCCL's or UCX's words name: completions with an error, ports that went down, peers without a way.

A queue pair whose other end does not answer ends with status 12 (retries exceeded) or 13 (receiver not ready); status
5 is the flush of what was queued behind. A dead peer's queue pair does not answer either, so these words count where no
rank died of its own. The line names the address of the peer and, since NCCL 2.18, the port (hca) of its writer.

A socket that finds no route, and UCX's sends that were repeated too often, name the peer or the port alone.

Source: NCCL's transport/net_ib.cc and misc/socket.cc, UCX's ib_mlx5_log.c; ibv_poll_cq(3) for the numbers.

Pure: a text in, links out.
"""

import re
from typing import NamedTuple

_COMPLETION = re.compile(
    r"[Gg]ot completion (?:from peer (?P<peer>\S{1,80}) )?with (?:status=|error )(?:\w{1,60}\()?(?P<status>\d{1,3})\)?"
    r"(?P<rest>[^\n]{0,600})"
)
_EVENT = re.compile(r"NET/IB ?: (?P<port>[\w./-]{1,40}(?::\d{1,3})?) ?[^\n]{0,40}async event ?: (?P<event>port error)")
_NO_ROUTE = re.compile(
    r"Connect to (?P<peer>\S{1,80}) (?:failed : |returned \d{1,3}\()(?:No route to host|Network is unreachable)"
)
_REPEATED = re.compile(r"Transport retry count exceeded on (?P<port>[\w./-]{1,40}:\d{1,3})")
_VENDOR = re.compile(r"vendor[ _]err[ =](\w{1,12})")
_PORT = re.compile(r"\bhca (\S{1,40})")
_LOCAL = re.compile(r"local ?[Gg]id[= ](\S{1,60})")
_MEANING = {
    4: "local protection error", 5: "flushed", 10: "remote access error", 11: "remote operation error",
    12: "the other end did not answer", 13: "the receiver was not ready",
}  # fmt: skip
_FLUSHED = 5


class Link(NamedTuple):
    """One end of a link in its rank's words; "" for what its words do not name."""

    port: str
    peer: str
    text: str
    is_own: bool = False  # its own port's fault, and not a peer that does not answer


def links_in(text: str) -> list[Link]:
    """Return the links that a text reports as failed; flushes only where it reports nothing else."""
    found = [(int(one["status"]), _link(one)) for one in _COMPLETION.finditer(text)]
    told = [link for status, link in found if status != _FLUSHED] or [link for _, link in found]
    ports = [Link(one["port"], "", f"{one['port']}: {one['event']}", is_own=True) for one in _EVENT.finditer(text)]
    return list(dict.fromkeys([*ports, *told]))


def roads_in(text: str) -> list[Link]:
    """Return the peers to which a text reports no way, and the ports whose other end has not answered."""
    roads = [Link("", one["peer"], f"no way to {one['peer']}") for one in _NO_ROUTE.finditer(text)]
    ports = [Link(one["port"], "", f"{one['port']}: the other end did not answer") for one in _REPEATED.finditer(text)]
    return list(dict.fromkeys([*roads, *ports]))


def _link(found: re.Match[str]) -> Link:
    status, rest = int(found["status"]), found["rest"]
    port, local, vendor = _PORT.search(rest), _LOCAL.search(rest), _VENDOR.search(rest)
    name = port[1] if port is not None else f"gid {local[1]}" if local is not None else ""
    peer = found["peer"] or ""
    means = f", {_MEANING[status]}" if status in _MEANING else ""
    error = f" (vendor error {vendor[1]})" if vendor is not None else ""
    return Link(name, peer, f"{name or 'a port'} to {peer or 'its peer'}: status {status}{means}{error}")
