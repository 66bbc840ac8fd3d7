# SPDX-License-Identifier: Apache-2.0
"""Which ranks ran on a host that was lost, as the lines of the start tell.

A batch system and a cloud name a host, and no rank. A script says at its start where it runs, a launcher lists its
tasks by host, and NCCL prints the host before each line. The host of a peer, of a master or of a store is named by
others, too: so a rank that names two hosts is at home on none of them, and one that all ranks name tells nothing.

Pure: texts in, ranks out.
"""

import re
from collections.abc import Iterable, Mapping
from typing import NamedTuple

from megascale_ops.diagnosis.exits.last_words import heard_in
from megascale_ops.postmortem.launched import ranks_of

_HOST = r"(?P<host>[A-Za-z][\w.-]{1,120}|\d{1,3}(?:\.\d{1,3}){3})(?![\w(])"
# "host=r3c3n02 local_rank=0", "hostname": "n7", "running on node n7", NCCL's "n7:600:700 [0] NCCL INFO".
_OWN = re.compile(
    r"(?:(?<![\w.-])(?<!master )(?<!peer )(?<!remote )(?<!head )(?<!store )(?<!to )(?<!from )(?<!for )"
    r"(?:SLURMD_NODENAME|HOSTNAME|[Hh]ost(?:[Nn]ame)?|[Nn]ode(?:[Nn]ame|_name)?|[Mm]achine)"
    r"(?:[\"']? ?[=:] ?[\"']?|(?<=name) )"
    r"|\b(?:[Rr]unning|[Ss]tart(?:ed|ing)|[Ii]nitiali[sz](?:ed|ing)|[Ll]aunch(?:ed|ing)|[Ww]orld size \d{1,6},?|\d) "
    r"(?:up )?(?:on|at) (?:(?:host|node|machine) )?(?=[\w.-]*\d))" + _HOST
)
_OF_NCCL = re.compile(r"^(?P<host>[A-Za-z][\w.-]{1,120}):\d{1,8}:\d{1,8} \[\d{1,3}\] NCCL ", re.MULTILINE)
# A launcher's or a script's table: "rank 8: r3c3n02", "task 8 on host r3c3n02", "r3c3n02: tasks 8-11".
_LISTED = re.compile(
    r"\b(?:[Rr]anks?|[Tt]asks?|[Pp]rocess(?:es)?)[ =:#]{1,2}(?P<who>\d{1,6}(?:[-,]\d{1,6}){0,64})"
    r"(?:[ :,]{1,3}(?:(?:is |runs |running )?(?:on|at) )?(?:(?:host|node|hostname)[ =:]{1,2})?| -> )(?=\S*\d)" + _HOST
)
_TASKS_OF = re.compile(
    r"^(?:\S{1,80}: (?:error: )?)?" + _HOST + r": tasks? (?P<who>\d{1,6}(?:[-,]\d{1,6}){0,64})(?=[: ,]|$)", re.MULTILINE
)

# EFA's table of errors has both ends; NCCL's sockets and connections have a peer's address or name before its port.
_OF_EFA = re.compile(r"\bMy host id: (?P<own>\S{1,80}) [^\n]{0,200}?\bPeer host id: (?P<host>[^\s),]{1,80})")
_OF_PEERS = re.compile(r"\b(?:from|to|by|with)(?: remote)?(?: peer)? (?P<host>[A-Za-z\d][\w.-]{1,120})<\d{1,5}>")
_ADDRESS = re.compile(r"ip[-_](\d{1,3})[-_](\d{1,3})[-_](\d{1,3})[-_](\d{1,3})")
# 2 other hosts: of two that lost each other each may be the one.
_FEWEST_HOSTS = 2
# A cloud's notice that it takes an instance away.
_NOTICE = re.compile(r"^.*(?:[Ii]nterruption|[Pp]reempt|[Rr]ebalance|terminat|[Ee]vict).*$", re.MULTILINE)
# As much of a log's begin as tells where its rank runs, and of a launcher's end as it lists tasks in.
_BEGIN = 64_000
# As much of a log's end as has the words of a lost peer.
_TAIL = 16_000


class Gone(NamedTuple):
    """A host that those who lost a peer name and that none of them ran on, its ranks, and a notice that names it."""

    host: str
    ranks: tuple[int, ...]
    notice: str


def gone(logs: Mapping[int, str], rest: str) -> Gone | None:
    """Return the host whose ranks fell silent and that others lost; None where that is not certain.

    Its ranks are those that told that they run there, or else the silent ones where they are as many as each other
    host has. What others call by a name and itself by an address may be a host that has spoken: then none is.
    """
    ends = {rank: text[-_TAIL:] for rank, text in logs.items()}
    if not any("Peer host id" in text or _OF_PEERS.search(text) for text in (rest[-_BEGIN:], *ends.values())):
        return None
    homes = _homes(logs, rest)
    silent = tuple(sorted(rank for rank, text in ends.items() if not _has_lost(text)))
    efa = [found for text in (rest[-_BEGIN:], *ends.values()) for found in _OF_EFA.finditer(text)]
    if efa:
        own = {_short(found["own"]) for found in efa}
        blamed = {_short(found["host"]) for found in efa} - own
    else:
        own = {home for rank, home in homes.items() if rank not in silent}
        peers = (found for rank, text in ends.items() if rank not in silent for found in _OF_PEERS.finditer(text))
        blamed = {_short(found["host"]) for found in peers} - own
    if len(blamed) != 1 or not silent or len(own) < _FEWEST_HOSTS:
        return None
    (host,) = blamed
    there = tuple(rank for rank in silent if homes.get(rank) == host)
    is_even = len(logs) == len(silent) * (1 + len(own)) and silent[-1] - silent[0] == len(silent) - 1
    if any(_is_address(host) != _is_address(one) for one in own) or not (there or is_even):
        return None
    notices = (
        line for line in _NOTICE.findall(rest[-_BEGIN:]) if re.search(rf"(?<![\w-]){re.escape(host)}(?![\w-])", line)
    )
    return Gone(host, there or silent, next(notices, "").strip()[:300])


def _has_lost(text: str) -> bool:
    return any(one.row.consequence for one in heard_in(text))


def ranks_on(hosts: Iterable[str], logs: Mapping[int, str], rest: str) -> tuple[int, ...]:
    """Return the ranks that ran on hosts of some names, () where nothing tells them for certain.

    Args:
        hosts: as a batch system names them.
        logs: what each rank printed.
        rest: what was printed by no rank.
    """
    homes = _homes(logs, rest)
    lost = {_short(host) for host in hosts}
    there = tuple(sorted(rank for rank, home in homes.items() if home in lost))
    is_told_apart = len({*homes.values()}) > 1 and lost <= {*homes.values()}
    return there if is_told_apart else ()


def _homes(logs: Mapping[int, str], rest: str) -> dict[int, str]:
    """Return the host of each rank of which one is told."""
    told: dict[int, set[str]] = {}
    for rank, text in logs.items():
        hosts = (one["host"] for form in (_OWN, _OF_NCCL) for one in form.finditer(text[:_BEGIN]))
        told[rank] = {_short(host) for host in hosts}
    listed: dict[int, set[str]] = {}
    parts = (rest,) if len(rest) <= 2 * _BEGIN else (rest[:_BEGIN], rest[-_BEGIN:])
    for form in (_LISTED, _TASKS_OF):
        for found in (one for part in parts for one in form.finditer(part)):
            for rank in ranks_of(found["who"]):
                listed.setdefault(rank, set()).add(_short(found["host"]))
    # What a launcher lists counts before a rank's own words.
    every = {**told, **listed}
    return {rank: min(names) for rank, names in every.items() if len(names) == 1}


def _short(host: str) -> str:
    """Return a host's name without its domain; an address stays whole, and is taken out of a name that has it."""
    if (found := _ADDRESS.match(host)) is not None:
        return ".".join(found.groups())
    return (host if _is_address(host) else host.partition(".")[0]).lower()


def _is_address(host: str) -> bool:
    return re.fullmatch(r"\d{1,3}(?:\.\d{1,3}){3}", host) is not None
