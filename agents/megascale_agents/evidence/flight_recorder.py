# SPDX-License-Identifier: Apache-2.0
"""Ask a rank's worker server: torch's own HTTP server on a unix socket beside the black box (``<rank>.sock``).

It answers from a C++ thread: in 0.2 ms while the main thread waits in a collective, and also while a thread holds the
GIL. A stopped process accepts the connection and never answers, hence the deadline. Its flight recorder knows every
collective of every process group, which distinguishes the rank that did not come from those that wait for it.

There are two of them: NCCL's (``dump_nccl_trace_json``, not in torch builds without CUDA) and that of all other
backends (``fr_trace_json``), each empty where its backend is not used.

On Gloo an entry's ``state`` is "scheduled" even when it is over, ``pg_config`` has one entry without a name for all
groups, ``last_completed_collective`` stays behind until the next one when several end at once (2 of 40 bursts of five),
and sends and receives are not recorded. ``retired`` is exact (torch 2.13).

How a dump is read: ``evidence/dump_format``; what its entries were called as: ``evidence/dump_calls``.
"""

import asyncio
import contextlib
import http.client
import os
import socket
import struct
import time
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple
from weakref import WeakValueDictionary

from megascale_agents import threads
from megascale_agents.evidence import collective_facts, dump_calls, dump_format
from megascale_agents.ownership.rights import Owner, myself, taken
from megascale_ops.blackbox.calls import group_of
from megascale_ops.schema.collectives import MOST_GROUPS, GroupMembers, members_of
from megascale_ops.schema.messages import CollectiveFact

# The oldest unfinished collectives show where a rank waits; what was queued behind them adds nothing.
_MOST_NAMED = 20
# NCCL's first: where both have something, a group that stands in both is NCCL's.
HANDLERS = ("dump_nccl_trace_json", "fr_trace_json")
# All that torch 2.4 has. Not called where another one responds: it resolves stacks, which needs the GIL.
PICKLED = "dump_nccl_trace_pickle"
# A full ring of 2,000 collectives is 1 MB; 16 MB holds the largest ring in use and bounds the read.
MOST_BYTES = 16 * 1024 * 1024
_PEER = struct.Struct("=iII")  # struct ucred: pid, uid, gid
_turns: WeakValueDictionary[str, asyncio.Lock] = WeakValueDictionary()  # by socket


class NoAnswerError(Exception):
    """The rank did not answer; the message gives the reason."""


class TooLateError(NoAnswerError):
    """It did not answer in time."""


class Summary(NamedTuple):
    """A dump's contents, for people and for a judge."""

    text: str
    collectives: tuple[CollectiveFact, ...]
    groups: tuple[GroupMembers, ...] = ()  # members of those in which the rank waits


def socket_path(box_dir: str, rank: int) -> Path:
    """Return where the worker server of a rank listens."""
    return Path(box_dir, f"{rank}.sock")


async def ask(socket_file: Path, handler: str, deadline_s: float, owner: Owner | None = None) -> bytes:
    """Call one handler of the worker server; one at a time, for two that dump stacks at once may crash the rank.

    Raises:
        NoAnswerError: no socket, no listener, an HTTP error, or (``TooLateError``) the deadline passed.
    """
    owner = owner or myself()
    with taken(owner):
        if not os.path.exists(socket_file):  # noqa: ASYNC240, PTH110  one stat on tmpfs: 2 us
            raise NoAnswerError("no answer: the rank has no worker server")
    turn = _turns.setdefault(str(socket_file), asyncio.Lock())
    connection = _UnixConnection(str(socket_file), deadline_s, owner)
    try:
        async with asyncio.timeout(deadline_s), turn:
            status, data = await threads.run(lambda: _post(connection, handler), f"ask {socket_file.name}")
    except TimeoutError as error:
        raise TooLateError(f"no answer: {handler} did not answer in {deadline_s:.2g} s") from error
    except (http.client.HTTPException, OSError) as error:
        raise NoAnswerError(f"no answer: worker server of the rank: {error}") from error
    finally:
        connection.cut()  # the thread of one that is late ends
    if status != 200:
        raise NoAnswerError(f"no answer: {handler} answered HTTP {status}: {data[:200]!r}")
    return data


class _UnixConnection(http.client.HTTPConnection):
    """A connection to a server on a unix socket that the owner may reach; ``timeout_s`` is from byte to byte."""

    def __init__(self, path: str, timeout_s: float, owner: Owner) -> None:
        super().__init__("rank", timeout=max(timeout_s, 0.001))
        self._path = path
        self._owner = owner
        self._wire: socket.socket | None = None
        self._is_cut = False

    def connect(self) -> None:
        """Connect, unless the request was given up."""
        self.sock = self._wire = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self._wire.settimeout(self.timeout)
        if self._is_cut:
            raise ConnectionAbortedError("nobody waits for the answer any more")
        with taken(self._owner):
            self._wire.connect(self._path)
        uid = _PEER.unpack(self._wire.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _PEER.size))[1]
        if self._owner.uid not in (0, uid):  # a link to another user's server
            raise ConnectionRefusedError(f"the socket is user {uid}'s, the job user {self._owner.uid}'s")

    def cut(self) -> None:
        """Let a thread that waits for it wait no more; that thread closes it.

        Not by ``sock``: the base class lets go of that as soon as an answer has begun after which the server closes.
        """
        self._is_cut = True
        if self._wire is not None:
            with contextlib.suppress(OSError):
                self._wire.shutdown(socket.SHUT_RDWR)


def _post(connection: _UnixConnection, handler: str) -> tuple[int, bytes]:
    """Call a handler, in a thread; return status and body.

    Raises:
        NoAnswerError: the body is too long, or not whole.
        HTTPException, OSError: no listener, time is up, or what came was no response.
    """
    with contextlib.closing(connection):
        connection.request("POST", f"/handler/{handler}", headers={"Connection": "close"})
        with connection.getresponse() as response:
            data = response.read(MOST_BYTES + 1)
            missing = response.length or 0  # of the length in its header
        if len(data) > MOST_BYTES:
            raise NoAnswerError(f"answer of {handler} is larger than {MOST_BYTES} bytes")
        if missing:
            raise NoAnswerError(f"no answer: {handler} ended {missing} bytes early")
        return response.status, data


async def fetch_dump(socket_file: Path, deadline_s: float, owner: Owner | None = None) -> tuple[bytes, Summary]:
    """Get the flight recorder that has something in it, NCCL's if both have; else the one that answers.

    Raises:
        NoAnswerError: neither answered, ``TooLateError`` if in time.
        ValueError: what came is not a flight recorder's dump.
    """
    found: tuple[bytes, Summary] | None = None
    why: NoAnswerError | None = None
    end_s = time.monotonic() + deadline_s
    for handler in (*HANDLERS, PICKLED):
        if handler == PICKLED and found is not None:
            break
        try:
            dump = await ask(socket_file, handler, end_s - time.monotonic(), owner)
        except TooLateError:
            raise  # the other one would not respond either
        except NoAnswerError as error:
            why = error
            continue
        found = dump, parse(dump)
        if found[1].collectives:
            break
    if found is None:
        raise why or NoAnswerError("no answer")
    return found


def parse(dump: bytes) -> Summary:
    """Return how far the rank is in each process group, and which collectives it has not finished.

    An entry that can't be read (another version, a broken one) is left out and counted in the text.

    Raises:
        ValueError: when it is not a flight recorder's dump.
    """
    found = dump_format.read(dump)
    lines = [f"{found.recorded} collectives recorded"]
    if found.unread:
        lines.append(f"{found.unread} of them can't be read: {found.broken}")
    for group, status in sorted(found.reached.items()):
        lines.append(f"group {group}: entered {_number(status.get('last_enqueued_collective', -1))}")
    calls = dump_calls.calls_of(found.entries)
    waiting = [call for call in calls if not call.is_over]
    lines += [f"not finished: {call.shown}" for call in waiting[:_MOST_NAMED]]
    if len(waiting) > _MOST_NAMED:
        lines.append(f"and {len(waiting) - _MOST_NAMED} more")
    facts = collective_facts.choose([dump_calls.fact_of(call, found) for call in calls])
    return Summary("\n".join(lines), facts, _members(found, [call.entry.group for call in waiting]))


def _members(dump: dump_format.Dump, groups: Sequence[str]) -> tuple[GroupMembers, ...]:
    """Return who belongs to these groups, where the dump tells."""
    known = [group for group in dict.fromkeys(groups) if group in dump.ranks]
    told = [members_of(group_of(group), dump.ranks[group]) for group in known[:MOST_GROUPS]]
    return tuple(one for one in told if one is not None)


def _number(value: object) -> int:
    """Numbers come as text from the JSON dump."""
    try:
        return int(str(value))
    except ValueError:
        return -1
