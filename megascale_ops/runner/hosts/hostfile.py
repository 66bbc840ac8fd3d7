# SPDX-License-Identifier: Apache-2.0
"""A file that names hosts, one a line, as mpirun and deepspeed read it: ``host``, ``user@host``, ``host slots=8``.

Pure.

``slots`` are ranks; ``max-slots``, which mpirun takes too, is read and counts for nothing here: no host gets more ranks
than its slots. ``#`` begins a comment.
"""

import re
from typing import NamedTuple

from megascale_ops.errors import UsageError

_HOST = re.compile(r"(?:[\w.-]+@)?[\w][\w.-]*|(?:[\w.-]+@)?[0-9A-Fa-f]*:[0-9A-Fa-f:.]+", re.ASCII)
_SETTING = re.compile(r"(slots|max[-_]slots)=([0-9]{1,6})", re.ASCII)


class Host(NamedTuple):
    """``target`` is what ssh takes, ``slots`` its ranks (0: the file does not say), ``line`` where it stands."""

    target: str
    slots: int
    line: int

    @property
    def name(self) -> str:
        """Its name as a node of the job: without the user, and colons as a name can't have them."""
        return self.target.rpartition("@")[2].replace(":", "-").strip("-")


def read_hosts(text: str, path: str) -> tuple[Host, ...]:
    """Return the hosts of a file in its order.

    Args:
        text: What is in it.
        path: Its name, for sentences.

    Raises:
        UsageError: a line can't be read, a host stands there twice, or there is none; file, line and what is wrong.
    """
    found: dict[str, Host] = {}
    for number, raw in enumerate(text.splitlines(), 1):
        words = raw.partition("#")[0].split()
        if not words:
            continue
        host = _read_line(words, f"{path}, line {number}", number)
        if host.name in found:
            raise UsageError(
                f"{path}, line {number}: {host.name} stands in line {found[host.name].line} already; a host is one "
                "node: give it all its ranks there, as slots=N"
            )
        found[host.name] = host
    if not found:
        raise UsageError(f"{path} names no host: write one a line, as in `node1 slots=8`")
    return tuple(found.values())


def _read_line(words: list[str], where: str, number: int) -> Host:
    target, *settings = words
    if not _HOST.fullmatch(target):
        raise UsageError(f"{where}: {target!r} is no name or address of a host: write HOST or HOST slots=N")
    slots = 0
    for one in settings:
        match = _SETTING.fullmatch(one)
        if match is None:
            raise UsageError(f"{where}: {one!r} can't be read behind {target}: write slots=N, or nothing")
        if match[1] == "slots":
            slots = int(match[2])
            if slots == 0:
                raise UsageError(f"{where}: {target} has slots=0, so nothing could run there: take the line out")
    return Host(target, slots, number)


def choose(hosts: tuple[Host, ...], path: str, *, most_nodes: int, nproc: str) -> tuple[Host, ...]:
    """Return the hosts with the slots that each is to fill; those beyond ``most_nodes`` are spares.

    Args:
        hosts: Those of the file.
        path: Its name, for sentences.
        most_nodes: Nodes that the job takes at most; 0: all of the file.
        nproc: Ranks a node as `--nproc-per-node` says, "" where it does not; a word (`gpu`) is each host's to count.

    Raises:
        UsageError: there are fewer hosts, or a host has fewer slots, than are asked for.
    """
    if len(hosts) < most_nodes:
        raise UsageError(f"--nnodes asks for {most_nodes} nodes, and {path} names {len(hosts)}")
    asked = int(nproc) if nproc.isdecimal() else 0
    for host in hosts:
        if host.slots and asked > host.slots:
            raise UsageError(
                f"{path}, line {host.line}: {host.target} has {host.slots} slots, and --nproc-per-node asks for {asked}"
            )
    return tuple(host._replace(slots=asked if nproc else host.slots) for host in hosts)
